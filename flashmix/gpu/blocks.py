"""Sizes of blocks and grids, computed on the host: `triton.cdiv` and `triton.next_power_of_2` take 1.5 us a call there."""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """How many blocks cover `size`."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least power of two from `size` on."""
    return 1 << (max(size, 1) - 1).bit_length()


def even_groups(count: int, most: int) -> int:
    """The size, at most `most`, of groups of `count` things, all of one size but the last, which has as many as it can."""
    if most >= count:
        return count
    return max(range(cdiv(most, 2), most + 1), key=lambda size: (count % size or size, size))
