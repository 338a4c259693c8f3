"""The losses in plain PyTorch: the logits of a chunk of tokens at a time, computed again in the backward."""
