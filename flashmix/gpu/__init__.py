"""The GPU at hand and the launch of kernels on it. Importing this package imports no triton."""
