"""Which probabilities dropout keeps: a function of (seed, head, row, key), so that backward finds the same again."""

from __future__ import annotations

from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def dropout_factor(seed: Tensor, heads: Tensor, rows: Tensor, keys: Tensor, probability: float) -> Tensor:
    """What each probability is multiplied with: 0 for a dropped one, else `1 / (1 - probability)`.

    The int64 tensors broadcast against each other: `seed` (one number from torch's generator), the query head, the row
    of `q` counted over the whole batch, and the key counted from the start of its own sequence.
    """
    bits = _mix(_mix(_mix((seed & _LOW_32) ^ heads) + (seed >> 32 & _LOW_32) + rows) + keys)
    return (bits >= int(probability * 2**32)).double().div_(1 - probability)


def _mix(x: Tensor) -> Tensor:
    """Every bit of the result depends on every one of the low 32 bits of `x` (finaliser of MurmurHash3, A. Appleby)."""
    x = x & _LOW_32
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _LOW_32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _LOW_32
    return x ^ (x >> 16)
