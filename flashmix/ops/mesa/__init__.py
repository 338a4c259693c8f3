"""The least squares solution of MesaNet at each token, by conjugate gradients, and what the memory holds under it."""
