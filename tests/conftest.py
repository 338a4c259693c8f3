"""Shared by all tests: two threads, as on the smallest supported machine; fresh memory is NaN, so that nothing unwritten is read."""

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """`torch.empty` gives NaN, in every test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
