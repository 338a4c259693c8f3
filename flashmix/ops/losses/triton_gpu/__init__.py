"""The losses on a GPU: kernels over rows of logits; a head's gradients of a sum or mean are ready when the loss is."""
