"""The step in plain PyTorch."""
