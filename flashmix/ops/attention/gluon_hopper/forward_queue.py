"""The blocks that a program of attention's forward on Hopper takes one after another: their numbers, drawn from a counter in memory.

A ring tells the groups of each; the programs of the backward that stay use it too.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import (
    allocate_barriers,
    begin_count,
    counted,
    gl,
    gluon,
    plain,
    release,
    signal,
    wait_empty,
    wait_full,
)
from flashmix.ops.attention.triton_gpu.tiles import AttentionBlock, find_queries


class Queue(NamedTuple):
    """The blocks that a program works on, one after another: the counter of their numbers in memory, and a ring that tells of each some
    numbers, which lie one after another."""

    counter: Any
    numbers: Any
    full: Any
    empty: Any


class JudgedQueue(NamedTuple):
    """A `Queue`, and what each group says of a block: whether its sums are `within_range`."""

    counter: Any
    numbers: Any
    full: Any
    empty: Any
    verdicts: Any
    judged: Any


@gluon.jit
def block_queue(counter, S: gl.constexpr):
    """The `Queue` of a program, with verdicts if there are any."""
    GROUPS: gl.constexpr = S.BM // 64
    PLACE: gl.constexpr = place_of_queries(S.PACKED)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * PLACE, 1], plain())
    full, empty = allocate_barriers(2, 1), allocate_barriers(2, GROUPS)
    if S.FIRST_MAX:
        verdicts = gl.allocate_shared_memory(gl.int32, [2 * GROUPS, 1], plain())
        return JudgedQueue(counter, numbers, full, empty, verdicts, allocate_barriers(2, GROUPS))
    else:
        return Queue(counter, numbers, full, empty)


@gluon.jit
def blocks_of_call(n):
    """How many blocks of queries a call has, and slots of a packed table that have none."""
    return n.blocks * n.batches * n.heads_q


@gluon.jit
def begin_draw(queue, wanted, n):
    """Begins to draw the number of a block that no program has, if it is `wanted`, which `end_draw` gives. Where every program has the
    only one, nothing is counted."""
    return begin_count(queue.counter, wanted & (blocks_of_call(n) > gl.num_programs(0)))


@gluon.jit
def end_draw(begun, n):
    """The number that was drawn; at least `blocks_of_call` if there is none."""
    return gl.num_programs(0) + counted(begun)


@gluon.jit
def next_block(number, x, queue, n, S: gl.constexpr):
    """Block `number`, or the first drawn after it that has queries: its number, and where it lies; `first` is -1 past the last one."""
    blocks = blocks_of_call(n)
    at = find_queries(gl.minimum(number, blocks - 1), x.table, n, S)
    if S.PACKED:  # slots of the table may be free
        while (number < blocks) & (not has_queries(at)):
            number = end_draw(begin_draw(queue, number >= 0, n), n)
            at = find_queries(gl.minimum(number, blocks - 1), x.table, n, S)
    first = gl.where(number < blocks, at.first, -1)
    return number, AttentionBlock(
        at.batch, at.head, at.head_k, at.bh, first, at.start_q, at.tokens_q, at.start_k, at.tokens_k
    )


@gluon.jit
def has_queries(at):
    """Whether a block has queries; a free slot of a packed table has none."""
    return (at.first >= 0) & (at.first < at.tokens_q)


@gluon.constexpr_function
def place_of_queries(packed):
    """How many numbers tell a block's place."""
    return 9 if packed else 5


@gluon.jit
def tell_block(queue, turn, at, again, S: gl.constexpr):
    """Tells of a program's `turn`-th block, as `told_block` reads it, and whether it comes again."""
    if S.PACKED:
        lengths = (at.start_q, at.tokens_q, at.start_k, at.tokens_k)
        tell(queue, turn, (at.first, at.batch, at.head, at.head_k, again) + lengths)
    else:
        tell(queue, turn, (at.first, at.batch, at.head, at.head_k, again))


@gluon.jit
def told_block(queue, turn, n, S: gl.constexpr):
    """The `AttentionBlock` of a program's `turn`-th block, `first` is -1 past the last one; and whether it comes again, 0 or 1."""
    COUNT: gl.constexpr = place_of_queries(S.PACKED)
    wait_full(queue.full, turn)
    first = told_number(queue, turn, 0, COUNT)
    batch = told_number(queue, turn, 1, COUNT)
    head = told_number(queue, turn, 2, COUNT)
    head_k = told_number(queue, turn, 3, COUNT)
    again = told_number(queue, turn, 4, COUNT)
    start_q, tokens_q, start_k, tokens_k = first * 0, n.tokens_q, first * 0, n.tokens_k
    if S.PACKED:
        start_q = told_number(queue, turn, 5, COUNT)
        tokens_q = told_number(queue, turn, 6, COUNT)
        start_k = told_number(queue, turn, 7, COUNT)
        tokens_k = told_number(queue, turn, 8, COUNT)
    release(queue.empty, turn)
    bh = batch * n.heads_q + head
    return AttentionBlock(batch, head, head_k, bh, first, start_q, tokens_q, start_k, tokens_k), again


@gluon.jit
def judge(group: gl.constexpr, verdict, turn, queue, S: gl.constexpr):
    """A group says whether its sums of a program's `turn`-th block are `within_range`."""
    to = queue.verdicts.index(turn % 2 * (S.BM // 64) + group)
    to.store(gl.full([1], verdict, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    signal(queue.judged, turn)


@gluon.jit
def sent_back(block, queue, turn, S: gl.constexpr):
    """1 if a group's sums of the `turn`-th block are not `within_range`, and `block` is its number, not -1; else 0."""
    GROUPS: gl.constexpr = S.BM // 64
    wait_full(queue.judged, turn, turn >= 0)
    good = gl.to_tensor(1)
    for group in gl.static_range(GROUPS):
        at = gl.maximum(turn, 0) % 2 * GROUPS + group
        verdict = queue.verdicts.index(at).load(gl.BlockedLayout([1], [32], [1], [0]))  # [1]
        good = good & gl.max(verdict, 0)
    return ((block >= 0) & (turn >= 0) & (good == 0)).to(gl.int32)


@gluon.jit
def tell(queue, use, numbers):
    """The copying warp tells other roles some numbers of a block; `use` counts how often."""
    COUNT: gl.constexpr = len(numbers)
    wait_empty(queue.empty, use)
    slot = use % queue.full.shape[0]
    for i in gl.static_range(COUNT):
        to = queue.numbers.index(slot * COUNT + i)
        to.store(gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    signal(queue.full, use)


@gluon.jit
def told_number(queue, use, i, COUNT: gl.constexpr, WARPS: gl.constexpr = 4):
    """Number `i` of COUNT that `tell` told and that have come, to a role of so many warps."""
    at = use % queue.full.shape[0] * COUNT + i
    number = queue.numbers.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0]))  # [1]
    return gl.max(number, 0)


@gluon.jit
def told(queue, use, WARPS: gl.constexpr):
    """The one number that `tell` told, to a role of so many warps."""
    wait_full(queue.full, use)
    number = told_number(queue, use, 0, 1, WARPS)
    release(queue.empty, use)
    return number
