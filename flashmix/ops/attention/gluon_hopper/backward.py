"""Backward of softmax attention on Hopper: one pass over the keys gives dK, dV and, in a fixed order, dQ.

    P = 2^(S - level);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dQ = scale dS K

A program has 128 keys of a head, 64 a group of four warps, and walks over the blocks of BM queries that see them, through the query heads
that share them. Tiles of scores lie `[keys, queries]`, so P^T and dS^T are left operands from registers. dS goes through shared memory
besides: each group multiplies half of dQ's block by all 128 keys, and one warp adds it to dQ in float32 by TMA.

Those additions run in a fixed order: a counter a block of queries says how many programs have added to it, and a program waits for those of
the later keys. Programs take the numbers by which they find their keys in the order in which they start, later keys first, so each waits
for started programs only.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.hopper import (
    accumulator,
    add_to_global,
    allocate_barriers,
    arrive_at_group,
    await_count,
    copy_to_global,
    count_up,
    ex2,
    fence_async_shared,
    gl,
    gluon,
    operand,
    plain,
    products_done,
    release,
    signal,
    stores_done,
    sync_group,
    take_turn,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.launch import bound
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.scores import EITHER, masked, scaled
from flashmix.ops.attention.gluon_hopper.spec import hopper_spec, tiles
from flashmix.ops.attention.gluon_hopper.table import REGISTERS, ROWS
from flashmix.ops.attention.gluon_hopper.tiles import copy_tile, fill_tile, first_of, result_layout, ring, write_part
from flashmix.ops.attention.triton_gpu.backward import RowInputs, row_statistics, summed_over_rows
from flashmix.ops.attention.triton_gpu.packed import blocks_of, find_sequence
from flashmix.ops.attention.triton_gpu.spec import aligned, numbers_of
from flashmix.ops.attention.triton_gpu.tiles import (
    AttentionBlock,
    find_head,
    padded_tokens,
    result_rows,
    rows_of_keys,
    store_rows,
)

# Named barriers, which ask no group to wait for its own warps first; those of two tiles have two numbers.
BOTH_GROUPS, Q_READ, D_O_READ, D_Q_FULL = gl.constexpr(4), gl.constexpr(5), gl.constexpr(7), gl.constexpr(9)
GROUPS_AND_COPIES, GROUP_AND_SUMS = gl.constexpr(256 + 32), gl.constexpr(128 + 32)  # threads
COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])
PIECE = 256  # columns of dQ's sums in memory; half a block, `[64, 64]`, has 16 rows of them, in the order in which threads hold it


class BackwardWork(NamedTuple):
    """Pointers; the first counter hands out numbers to programs, the others belong to dQ's blocks."""

    table: Any  # of packed keys
    level: Any  # [B, HQ, Tq], rows padded to 16 bytes, as delta
    delta: Any
    d_k: Any  # [B, Tk, H, K]
    d_v: Any  # [B, Tk, H, V]
    counters: Any


class QuerySteps(NamedTuple):
    """The walk of a program: `each` blocks of queries from number `first`, for each of its query heads."""

    first: Any
    each: Any
    all: Any
    inner: Any  # queries `inner` to `outer` see all its keys
    outer: Any
    sums: Any  # number of the sequence's first block of dQ


class BackwardRings(NamedTuple):
    """Rings of k and v `[64, K]`, one a group, of q and dO `[BM, K]`; tiles of level and delta `[BM]`, which come with q and dO; dS
    `[64, BM]`, two a group; the ring of dQ's halves."""

    k: Any
    v: Any
    q: Any
    d_o: Any
    level: Any
    delta: Any
    d_s: Any
    d_q: Any


class HalfRing(NamedTuple):
    """A buffer for each half of a block of dQ, and the barriers that say that it has left."""

    tiles: Any
    empty: Any


@triton.jit
def first_sums(sequence, start_q, S: tl.constexpr):
    """The number of a packed sequence's first block of dQ: no two sequences share one."""
    if S.PACKED:
        return start_q // S.BM + sequence
    else:
        return start_q * 0


@gluon.jit
def find_keys_from_the_last(number, table, n, S: gl.constexpr):
    """The 128 keys of a program, and its `QuerySteps`."""
    bh, block = find_head(number, n.blocks, n.batches * n.heads, n.at_once)
    batch, head_k = bh // n.heads, bh % n.heads
    sequence, start_q, start_k, tokens_q, tokens_k = bh * 0, n.tokens_q * 0, n.tokens_k * 0, n.tokens_q, n.tokens_k
    if S.PACKED:
        sequence, start_k, tokens_k, start_q, tokens_q, block = find_sequence(block, table)
    block = gl.cdiv(tokens_k, S.BN) - 1 - block
    at = AttentionBlock(batch, head_k * n.group, head_k, bh, block * S.BN, start_q, tokens_q, start_k, tokens_k)
    low, inner, outer, high = rows_of_keys(at.first, tokens_k - tokens_q, tokens_q, n, S)
    each = gl.maximum((high + S.BM - 1) // S.BM - low // S.BM, 0)
    if at.first + S.BN > tokens_k:  # some keys are past the last
        outer = inner
    return at, QuerySteps(low // S.BM, each, each * n.group, inner, outer, first_sums(sequence, start_q, S))


@gluon.jit
def next_step(head, block, steps):
    """The head and the block of queries after these."""
    more = block + 1 < steps.first + steps.each
    return gl.where(more, head, head + 1), gl.where(more, block + 1, steps.first)


@gluon.jit
def turn_of(at, block, n, S: gl.constexpr):
    """How many programs add to a block of queries before the one `at`: those of later keys that it sees."""
    last = gl.cdiv(at.tokens_k, S.BN) - 1
    ahead = (block + 1) * S.BM + at.tokens_k - at.tokens_q
    if S.CAUSAL:
        last = gl.minimum(last, (ahead + S.BN - 1) // S.BN - 1)
    elif S.RIGHT:
        last = gl.minimum(last, (ahead + n.right + S.BN - 1) // S.BN - 1)
    return last - at.first // S.BN


@gluon.jit
def put_numbers(numbers, full, tiles, use):
    """Stores numbers of BM rows as tile `use` of a ring. (TMA would want those of each packed sequence to begin at 16 bytes.)"""
    tiles.index(use % full.shape[0]).store(numbers)
    signal(full, use)


@gluon.jit
def await_readers(barrier: gl.constexpr, i):
    """Until both groups have left the tile, one of two, that use `i` fills."""
    if i > 1:
        take_turn(barrier, i, GROUPS_AND_COPIES, True)


@gluon.jit
def backward_copies(work, at, steps, descriptors, rings, n, S: gl.constexpr):
    """The warp that copies: k, v, and in turns q with its level and dO with its delta."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    q_d, d_o_d, k_d, v_d = descriptors
    lanes = gl.arange(0, S.BM, gl.BlockedLayout([S.BM // 32], [32], [1], [0]))
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    for group in gl.static_range(2):
        copy_tile((k_d, None), of_k, at.first + group * 64, rings.k, group, QK, S)
    head, block = at.head, steps.first
    for i in range(steps.all):
        row = block * S.BM
        of_q = (at.batch, head, at.start_q, at.tokens_q)
        numbers = (at.batch * n.heads_q + head).to(gl.int64) * padded_tokens(n.tokens_q) + at.start_q + row + lanes
        inside = row + lanes < at.tokens_q
        level = gl.load(work.level + numbers, mask=inside, other=float("inf"))  # [BM]
        delta = gl.load(work.delta + numbers, mask=inside, other=0.0)  # [BM]
        await_readers(Q_READ, i)
        fill_tile((q_d, None), of_q, row, rings.q, i, QK, S)
        put_numbers(level, rings.q.full, rings.level, i)
        if i == 0:
            for group in gl.static_range(2):
                copy_tile((v_d, None), of_k, at.first + group * 64, rings.v, group, V, S)
        await_readers(D_O_READ, i)
        fill_tile((d_o_d, None), of_q, row, rings.d_o, i, V, S)
        put_numbers(delta, rings.d_o.full, rings.delta, i)
        head, block = next_step(head, block, steps)


@gluon.jit
def backward_sums(at, steps, d_q_d, counters, rings, n, S: gl.constexpr):
    """The warp that adds to dQ, block by block, each in its turn; the first stores."""
    before = counters
    head, block = at.batch * n.heads_q + at.head, steps.first
    for i in range(steps.all):
        place = (steps.sums + block) * (n.batches * n.heads_q) + head
        counter = counters + 1 + place
        turn = turn_of(at, block, n, S)
        await_count(counter, turn)
        for half in gl.static_range(2):
            sync_group(D_Q_FULL + half, GROUP_AND_SUMS)
            if turn == 0:
                copy_to_global(d_q_d, [(place * 2 + half) * 16, 0], rings.d_q.tiles.index(half))
            else:
                add_to_global(d_q_d, [(place * 2 + half) * 16, 0], rings.d_q.tiles.index(half))
        if i > 0:  # the block before this one has come to memory: pass it on
            count_up(before, 2)
        before = counter
        stores_done(0)
        for half in gl.static_range(2):
            release(rings.d_q.empty, 2 * i + half)
        head, block = next_step(head, block, steps)
    if steps.all > 0:
        count_up(before, 0)


@gluon.jit
def transposed_scores(a, b):
    """Issues `a b^T`, 64 keys by BM queries."""
    BM: gl.constexpr = b.shape[0]
    s = gl.full([64, BM], 0.0, gl.float32, accumulator(BM))
    return warpgroup_mma(a, b.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def half_of_d_q(half: gl.constexpr, d_s, k, i, S: gl.constexpr):
    """Issues half of dQ's block from both groups' dS^T: 64 of its channels, or 64 of its queries where there are 128."""
    d_q = gl.full([64, 64], 0.0, gl.float32, accumulator(64))
    for group in gl.static_range(2):
        d_s_t = d_s.index(i % 2 * 2 + group)  # [64, BM]
        keys = first_of(k, group)  # [64, K]
        if S.BM == 128:
            rows = d_s_t.slice(half * 64, 64, dim=1).permute((1, 0))
            d_q = warpgroup_mma(rows, keys, d_q, use_acc=group > 0, is_async=True)
        else:
            columns = keys.slice(half * 64, 64, dim=1)
            d_q = warpgroup_mma(d_s_t.permute((1, 0)), columns, d_q, use_acc=group > 0, is_async=True)
    return d_q


@gluon.jit
def backward_group(group: gl.constexpr, work, at, steps, rings, n, S: gl.constexpr):
    """Four warps with 64 of the keys."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    L: gl.constexpr = accumulator(S.BM)
    dtype: gl.constexpr = work.d_k.dtype.element_ty
    first_key = at.first + group * 64
    key = (first_key + gl.arange(0, 64, gl.SliceLayout(1, L)))[:, None]
    shift = at.tokens_k - at.tokens_q
    k = first_of(rings.k.tiles, group)
    v = first_of(rings.v.tiles, group)
    d_k = gl.full([64, QK.FIRST], 0.0, gl.float32, accumulator(QK.FIRST))
    d_v = gl.full([64, V.FIRST], 0.0, gl.float32, accumulator(V.FIRST))
    for both in gl.static_range(2):  # a group's dQ takes the keys of both
        wait_full(rings.k.full, both)
        if steps.all > 0:
            wait_full(rings.v.full, both)
    head, block = at.head, steps.first
    for i in range(steps.all):
        stage = i % S.STAGES
        start = block * S.BM
        q = first_of(rings.q.tiles, stage)
        d_o = first_of(rings.d_o.tiles, stage)
        # S^T = k q^T;  dP^T = v dO^T
        wait_full(rings.q.full, i)
        s = transposed_scores(k, q)  # [64, BM]
        wait_full(rings.d_o.full, i)
        d_p = transposed_scores(v, d_o)  # [64, BM]
        s = products_done(1, [s])
        # P = 2^(S - level)
        edge = (start < steps.inner) | (start >= steps.outer)
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        y, squashed = scaled(s, n, S)
        position = (shift + start + gl.arange(0, S.BM, gl.SliceLayout(0, L)))[None, :]
        y = masked(y - level[None, :], position, key, at.tokens_k, edge, n, EITHER, S)
        p = ex2(y)
        rounded = p.to(dtype)
        if S.BM == 128:  # twice the registers: float32 would be spilled
            p = rounded.to(gl.float32)
        p_t = gl.convert_layout(rounded, operand(V.FIRST))
        # dV += P^T dO
        d_v = warpgroup_mma(p_t, d_o, d_v, is_async=True)
        d_p = products_done(1, [d_p])
        # dS = P (dP - delta)
        delta = rings.delta.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        d_s = p * (d_p - delta[None, :])
        if S.SOFTCAP:
            d_s = d_s * (1.0 - squashed * squashed)
        d_s = d_s.to(dtype)
        rings.d_s.index(i % 2 * 2 + group).store(d_s)
        fence_async_shared()
        d_s_t = gl.convert_layout(d_s, operand(QK.FIRST))
        sync_group(BOTH_GROUPS, 256)
        # dQ = dS K, half of it;  dK += dS^T Q
        d_q = half_of_d_q(group, rings.d_s, rings.k.tiles, i, S)
        d_k = warpgroup_mma(d_s_t, q, d_k, is_async=True)
        d_q, d_v, p_t = products_done(1, [d_q, d_v, p_t])
        take_turn(D_O_READ, i, GROUPS_AND_COPIES, False)
        wait_empty(rings.d_q.empty, 2 * i + group)
        # in the order in which threads hold it: eight stores of 16 bytes each
        d_q = d_q.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256])
        rings.d_q.tiles.index(group).store(d_q)
        fence_async_shared()
        arrive_at_group(D_Q_FULL + group, GROUP_AND_SUMS)
        # a product in flight over the loop's end would make ptxas run all of them one by one
        d_k, d_s_t = products_done(0, [d_k, d_s_t])
        take_turn(Q_READ, i, GROUPS_AND_COPIES, False)
        head, block = next_step(head, block, steps)
    sync_group(BOTH_GROUPS, 256)  # the other group has read these keys
    to_k = result_rows(work.d_k, at, n.heads, at.head_k, n.tokens_k, at.start_k, QK)
    to_v = result_rows(work.d_v, at, n.heads, at.head_k, n.tokens_k, at.start_k, V)
    write_part(to_k, d_k * n.d_scale, k, first_key, at.tokens_k, 0, QK.ALL)
    write_part(to_v, d_v, v, first_key, at.tokens_k, 0, V.ALL)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def hopper_backward_kernel(work, q_t, d_o_t, k_t, v_t, d_q_t, n, S: gl.constexpr):
    """dK, dV and what 128 keys add to dQ."""
    number = gl.atomic_add(work.counters, 1)
    at, steps = find_keys_from_the_last(number, work.table, n, S)
    rings = BackwardRings(
        ring(2, (k_t, None), 1),
        ring(2, (v_t, None), 1),
        ring(S.STAGES, (q_t, None), 2, 2),
        ring(S.STAGES, (d_o_t, None), 2, 2),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        gl.allocate_shared_memory(q_t.dtype, [4, 64, S.BM], result_layout(q_t.layout)),
        HalfRing(gl.allocate_shared_memory(gl.float32, [2, 16, 256], d_q_t.layout), allocate_barriers(2, 1)),
    )
    descriptors = (q_t, d_o_t, k_t, v_t)
    if at.first >= 0:
        gl.warp_specialize(
            [
                (backward_group, (0, work, at, steps, rings, n, S)),
                (backward_group, (1, work, at, steps, rings, n, S)),
                (backward_copies, (work, at, steps, descriptors, rings, n, S)),
                (backward_sums, (at, steps, d_q_t, work.counters, rings, n, S)),
            ],
            [4, 1, 1],
            [REGISTERS_OF_TWO, COPIES, COPIES],
        )


@triton.jit(do_not_specialize=["n"])
def query_gradient_kernel(d_q, sums, counters, table, n, S: tl.constexpr):
    """dQ of BM queries of a head from its sums, see `backward_group`; 0 where no program has added any."""
    QK: tl.constexpr = S.QK
    bh, block = find_head(tl.program_id(0), n.blocks, n.batches * n.heads_q, n.at_once)
    batch, head = bh // n.heads_q, bh % n.heads_q
    sequence, start_q, tokens_q = bh * 0, n.tokens_q * 0, n.tokens_q
    if S.PACKED:
        sequence, start_q, tokens_q, _, _, block = find_sequence(block, table)
    if block * S.BM >= tokens_q:
        return
    place = (first_sums(sequence, start_q, S) + block) * (n.batches * n.heads_q) + bh
    # element (row, column) of half a block, `[64, 64]`, where the thread that held it put it
    row = tl.arange(0, S.BM)[:, None]
    column = tl.arange(0, QK.FIRST)[None, :]
    half = row // 64 + column // 64
    r, c = row % 64, column % 64
    at = c // 8 * 512 + (r // 16 * 32 + r % 8 * 4 + c % 8 // 2) * 4 + r // 8 % 2 * 2 + c % 2
    any_keys = (tl.load(counters + 1 + place) > 0) & (half >= 0)
    tile = tl.load(sums + (place.to(tl.int64) * 2 + half) * 4096 + at, mask=any_keys, other=0.0)  # [BM, K]
    here = AttentionBlock(batch, head, head, bh, block * S.BM, start_q, tokens_q, start_q, tokens_q)
    to = result_rows(d_q, here, n.heads_q, head, n.tokens_q, start_q, QK)
    store_rows(to, tile * n.d_scale, block * S.BM, tokens_q, 0, QK.FIRST, QK, S.BM)


def attention_backward(call: AttentionCall, kept: Outputs, d_o: Tensor | None, d_lse: Tensor | None) -> Gradients:
    """The gradients of q, k, v, and of a sink, of a call as `laid_out` makes it."""
    o, top, total = kept
    q, k, v = call.q, call.k, call.v
    rows = row_statistics(call, RowInputs(o, d_o, d_lse, top, total, call.sink), False)
    d_o = aligned(torch.zeros_like(o) if d_o is None else d_o)
    spec, options = hopper_spec(call, "backward")
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    count = 0 if call.packing is None else call.packing.count + 1
    blocks_q, table_q = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
    blocks = (call.tokens_q // spec.BM + count if call.packed else blocks_q) * call.batch * call.heads_q
    sums = torch.empty(blocks * 2 * 4096, dtype=torch.float32, device=q.device)
    counters = torch.zeros(blocks + 1, dtype=torch.int32, device=q.device)
    blocks_k, table_k = blocks_of(call.packing_k, call.tokens_k, spec.BN, call.packing)
    of_rows = [tiles(x, spec, spec.BM, width)[0] for x, width in ((q, spec.QK), (d_o, spec.V))]
    of_keys = [tiles(x, spec, ROWS, width)[0] for x, width in ((k, spec.QK), (v, spec.V))]
    bound(hopper_backward_kernel, spec, **options)(
        blocks_k * call.batch * call.heads,
        BackwardWork(table_k, rows.level, rows.delta, d_k, d_v, counters),
        *of_rows,
        *of_keys,
        Tiles(sums, (sums.numel() // PIECE, PIECE), (PIECE, 1), (16, PIECE), swizzle=0),
        numbers_of(call, spec, blocks_k),
    )
    bound(query_gradient_kernel, spec, num_warps=4)(
        blocks_q * call.batch * call.heads_q, d_q, sums, counters, table_q, numbers_of(call, spec, blocks_q)
    )
    found = {"q": d_q, "k": d_k, "v": d_v}
    if call.sink is not None and rows.d_sink is not None:
        found["sink"] = summed_over_rows(rows.d_sink, call.sink)
    return found
