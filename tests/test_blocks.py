"""Sizes of blocks and groups."""

from __future__ import annotations

import pytest

from flashmix.gpu.blocks import even_groups
from flashmix.ops.attention.gluon_hopper.table import REGISTERS


@pytest.mark.parametrize("count", [1, 2, 7, 16, 28, 31, 32, 33, 40, 112])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 10, 200])
def test_even_groups_leave_as_few_places_free_as_they_can(count: int, most: int) -> None:
    size = even_groups(count, most)
    assert 1 <= size <= min(most, count) and 2 * size >= min(most, count)
    last = count - (-(-count // size) - 1) * size
    others = range(-(-most // 2), most + 1)
    assert last == size or last >= max(count - (-(-count // other) - 1) * other for other in others)


def test_even_groups_by_hand() -> None:
    assert [even_groups(32, most) for most in (5, 10, 32)] == [4, 8, 32]
    assert [even_groups(33, 10), even_groups(7, 3), even_groups(28, 3)] == [9, 3, 2]


@pytest.mark.parametrize("groups", REGISTERS)
def test_the_first_group_has_as_many_registers_as_the_others(groups: int) -> None:
    """It has what the other groups and the warps that copy leave of what the kernel starts with."""
    start, registers, copies = REGISTERS[groups]
    assert (groups + 1) * start - (groups - 1) * registers - copies == registers
