"""Which probabilities dropout keeps: a function of (seed, head, row, key), so that backward finds the same again."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_factor(
    seed: Tensor, heads: Tensor, rows: Tensor, keys: Tensor, probability: float, dtype: torch.dtype
) -> Tensor:
    """What each probability is multiplied with: 0 for a dropped one, else `1 / (1 - probability)`.

    The int64 tensors broadcast against each other: `seed` (one number below 2^62 from torch's generator), the query
    head, the row of `q` counted over the whole batch, and the key counted from the start of its own sequence.
    """
    low, high, heads, rows, keys = (x.to(torch.int32) for x in (seed & 0x7FFFFFFF, seed >> 31, heads, rows, keys))
    of_row = _mixed(_mixed(_mixed(low + _mixed(heads)) + high) + _mixed(rows))
    bits = _mixed(of_row + _mixed(keys))
    return (bits >= int(probability * 2**32) - 2**31).to(dtype).div_(1 - probability)


def _mixed(x: Tensor) -> Tensor:
    """An invertible scrambling of int32 numbers: a change of any bit changes about half of the others.

    Multiplications by odd numbers (they wrap) carry a bit upwards, the shift carries it back down.
    """
    x = x * 0x2C1B3C6D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)  # without the copies of the sign
    x *= 0x297A2D39
    x ^= (x >> 14).bitwise_and_(0x3FFFF)
    return x
