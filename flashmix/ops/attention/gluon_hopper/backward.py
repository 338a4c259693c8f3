"""Backward of softmax attention on Hopper: one pass over the keys gives dK, dV and, in a fixed order, dQ.

    P = 2^(S - level);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dQ = scale dS K

A program has 128 keys of a head, 64 a group of four warps, and walks over the blocks of BM queries that see them, through the query heads
that share them. Tiles of scores lie `[keys, queries]`, so P^T and dS^T are left operands from registers. dS goes through shared memory
besides: each group multiplies half of dQ's block by all 128 keys, and one warp adds it to dQ in float32 by TMA. A half is half of the
queries up to 64 channels, else one part of the channels, or half of them where there is one part.

Those additions run in a fixed order: a counter a block of queries says how many programs have added to it, and a program waits for those of
the later keys. Programs take the numbers by which they find their keys in the order in which they start, later keys first, so each waits
for started programs only.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.hopper import (
    accumulator,
    add_to_global,
    allocate_barriers,
    arrive_at_group,
    await_count,
    copy_to_global,
    count_up,
    fence_async_shared,
    gl,
    gluon,
    leave,
    plain,
    products_done,
    release,
    stores_done,
    sync_group,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward_walk import (
    BOTH_GROUPS,
    D_O_READ,
    GROUPS_AND_COPIES,
    Q_READ,
    backward_copies,
    find_keys,
    first_sums,
    key_probabilities,
    next_step,
)
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    awaited,
    awaited_with,
    first_of,
    result_layout,
    ring,
    scores,
    tile_of,
    times,
    write_float32,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.packed import find_sequence
from flashmix.ops.attention.triton_gpu.tiles import AttentionBlock, find_head, result_rows, store_rows

D_Q_FULL, GROUP_AND_SUMS = gl.constexpr(9), gl.constexpr(128 + 32)  # a named barrier for each half, and its threads
COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])


@gluon.constexpr_function
def half_shape(half, second):
    """The shape of half a block of dQ in memory, in the order in which threads hold it. `second`: channels of a second part, half 1."""
    return [8, 8 * second] if half == 1 and second > 0 else [16, 256]


@gluon.constexpr_function
def half_begin(half, second):
    """The elements of a block of dQ before a half; of half 2, all."""
    sizes = [half_shape(i, second) for i in range(half)]
    return sum(rows * columns for rows, columns in sizes)


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


class QuerySums(NamedTuple):
    """What dQ is made of: the sums of its blocks, and how many programs have added to each."""

    d_q: Any  # [B, Tq, HQ, K]
    sums: Any
    counters: Any
    table: Any  # of packed queries


class HalfRing(NamedTuple):
    """A buffer for each half of a block of dQ (a pair), and the barriers that say that it has left."""

    tiles: Any
    empty: Any


@gluon.jit
def half_of(pair, half: gl.constexpr):
    first, second = pair
    if half == 0:
        return first
    else:
        return second


@gluon.jit
def half_row(place, half: gl.constexpr, SECOND: gl.constexpr):
    """The first row of a half of block number `place`, in rows as long as its own."""
    COLUMNS: gl.constexpr = half_shape(half, SECOND)[1]
    return place * (half_begin(2, SECOND) // COLUMNS) + half_begin(half, SECOND) // COLUMNS


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
            row = half_row(place, half, S.QK.SECOND)
            if turn == 0:
                copy_to_global(half_of(d_q_d, half), [row, 0], half_of(rings.d_q.tiles, half))
            else:
                add_to_global(half_of(d_q_d, half), [row, 0], half_of(rings.d_q.tiles, half))
        if i > 0:  # the block before this one has come to memory: pass it on
            count_up(before, 2)
        before = counter
        stores_done(0)
        for half in gl.static_range(2):
            release(rings.d_q.empty, 2 * i + half)
        head, block = next_step(head, block, steps, S)
    if steps.all > 0:
        count_up(before, 0)


@gluon.jit
def half_of_d_q(half: gl.constexpr, d_s, k, i, S: gl.constexpr):
    """Issues half of dQ's block from both groups' dS^T: 64 of its channels or a part of them, or 64 of its queries where there are 128."""
    WIDTH: gl.constexpr = S.QK.SECOND if half == 1 and S.QK.SECOND > 0 else 64
    d_q = gl.full([64, WIDTH], 0.0, gl.float32, accumulator(WIDTH))
    for group in gl.static_range(2):
        d_s_t = d_s.index(i % 2 * 2 + group)  # [64, BM]
        if S.BM == 128:
            rows = d_s_t.slice(half * 64, 64, dim=1).permute((1, 0))
            d_q = warpgroup_mma(rows, first_of(k, group), d_q, use_acc=group > 0, is_async=True)
        elif S.QK.SECOND > 0:
            keys = half_of(tile_of(k, group), half)  # [64, WIDTH]
            d_q = warpgroup_mma(d_s_t.permute((1, 0)), keys, d_q, use_acc=group > 0, is_async=True)
        else:
            columns = first_of(k, group).slice(half * 64, 64, dim=1)
            d_q = warpgroup_mma(d_s_t.permute((1, 0)), columns, d_q, use_acc=group > 0, is_async=True)
    return d_q


@gluon.jit
def put_half(group: gl.constexpr, d_q, i, rings):
    """Hands half of dQ's block to the warp that adds it, in the order in which threads hold it: stores of 16 bytes each."""
    wait_empty(rings.d_q.empty, 2 * i + group)
    to = half_of(rings.d_q.tiles, group)
    d_q = d_q.reshape([4, 2, 8, d_q.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape(to.shape)
    to.store(d_q)
    fence_async_shared()
    arrive_at_group(D_Q_FULL + group, GROUP_AND_SUMS)


@gluon.jit
def backward_group(group: gl.constexpr, work, at, steps, rings, n, S: gl.constexpr):
    """Four warps with 64 of the keys."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    Q_PARTS: gl.constexpr = 2 if S.QK.SECOND > 0 else 1  # products of one over both parts
    V_PARTS: gl.constexpr = 2 if S.V.SECOND > 0 else 1
    L: gl.constexpr = accumulator(S.BM)
    first_key = at.first + group * 64
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, L))
    k = tile_of(rings.k.tiles, group)
    v = tile_of(rings.v.tiles, group)
    dtype: gl.constexpr = rings.d_s.dtype
    d_k = zero_sums(QK)
    d_v = zero_sums(V)
    for both in gl.static_range(2):  # a group's dQ takes the keys of both
        wait_full(rings.k.full, both)
        if steps.all > 0:
            wait_full(rings.v.full, both)
    head, block = at.head, steps.first
    for i in range(steps.all):
        stage = i % S.STAGES
        q = tile_of(rings.q.tiles, stage)
        d_o = tile_of(rings.d_o.tiles, stage)
        # S^T = k q^T;  dP^T = v dO^T
        wait_full(rings.q.full, i)
        s = scores(k, q, QK)  # [64, BM]
        wait_full(rings.d_o.full, i)
        d_p = scores(v, d_o, V)  # [64, BM]
        s = products_done(V_PARTS, [s])
        # P = 2^(S - level)
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        p, squashed = key_probabilities(s, level, key, (at, head, block * S.BM), steps, None, n, S)
        p_t = as_operand(p, dtype, V)
        # dV += P^T dO
        d_v = accumulate(d_v, p_t, d_o, V)
        d_p = products_done(V_PARTS, [d_p])
        # dS = P (dP - delta)
        delta = rings.delta.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        d_s = p * (d_p - delta[None, :])
        if S.SOFTCAP:
            d_s = d_s * (1.0 - squashed * squashed)
        d_s = d_s.to(dtype)
        d_s_t = as_operand(d_s, dtype, QK)
        rings.d_s.index(i % 2 * 2 + group).store(d_s)
        fence_async_shared()
        sync_group(BOTH_GROUPS, 256)
        # dQ = dS K, half of it;  dK += dS^T Q
        d_q = half_of_d_q(group, rings.d_s, rings.k.tiles, i, S)
        d_k = accumulate(d_k, d_s_t, q, QK)
        d_q, d_v, p_t = awaited_with(Q_PARTS, d_q, d_v, p_t, V)
        leave(D_O_READ, i, GROUPS_AND_COPIES)
        put_half(group, d_q, i, rings)
        # a product in flight over the loop's end would make ptxas run all of them one by one
        d_k, d_s_t = awaited(0, d_k, d_s_t, QK)
        leave(Q_READ, i, GROUPS_AND_COPIES)
        head, block = next_step(head, block, steps, S)
    sync_group(BOTH_GROUPS, 256)  # the other group has read these keys
    d_k = times(d_k, n.d_scale, QK)
    if S.BY_HEAD:
        to_k = result_rows(work.d_k, at, n.heads_q, at.head, n.tokens_k, at.start_k, QK)
        to_v = result_rows(work.d_v, at, n.heads_q, at.head, n.tokens_k, at.start_k, V)
        write_float32(to_k, d_k, first_key, at.tokens_k, QK)
        write_float32(to_v, d_v, first_key, at.tokens_k, V)
    else:
        to_k = result_rows(work.d_k, at, n.heads, at.head_k, n.tokens_k, at.start_k, QK)
        to_v = result_rows(work.d_v, at, n.heads, at.head_k, n.tokens_k, at.start_k, V)
        write_rows(to_k, d_k, k, first_key, at.tokens_k, QK)
        write_rows(to_v, d_v, v, first_key, at.tokens_k, V)


@gluon.jit
def allocate_halves(descriptors):
    """A buffer for each half of a block of dQ."""
    first, second = descriptors
    a = gl.allocate_shared_memory(gl.float32, first.block_type.shape, first.layout)
    return a, gl.allocate_shared_memory(gl.float32, second.block_type.shape, second.layout)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, first_d, second_d, S: gl.constexpr):
    """dK, dV and what 128 keys add to dQ."""
    n = work.n
    number = gl.atomic_add(work.counters, 1)
    at, steps = find_keys(number, work.table, n, S)
    rings = BackwardRings(
        ring(2, (k_t, k_r), 0),
        ring(2, (v_t, v_r), 0),
        ring(S.STAGES, (q_t, q_r), 0, 2),
        ring(S.STAGES, (o_t, o_r), 0, 2),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        gl.allocate_shared_memory(q_t.dtype, [4, 64, S.BM], result_layout(q_t.layout)),
        HalfRing(allocate_halves((first_d, second_d)), allocate_barriers(2, 1)),
    )
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    if at.first >= 0:
        gl.warp_specialize(
            [
                (backward_group, (0, work, at, steps, rings, n, S)),
                (backward_group, (1, work, at, steps, rings, n, S)),
                (backward_copies, (work, at, steps, descriptors, rings, n, S)),
                (backward_sums, (at, steps, (first_d, second_d), work.counters, rings, n, S)),
            ],
            [4, 1, 1],
            [REGISTERS_OF_TWO, COPIES, COPIES],
        )


class GroupNumbers(NamedTuple):
    size: Any  # of the result
    group: Any


class GroupSpec(NamedTuple):
    WIDTH: int  # of a row
    BLOCK: int


@triton.jit(do_not_specialize=["n"])
def group_sums_kernel(x, out, n, S: tl.constexpr):
    """Each row of `out` is the sum of `group` rows of x, in float32 and in order."""
    at = tl.program_id(0).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)
    row, column = at // S.WIDTH, at % S.WIDTH
    total = tl.full([S.BLOCK], 0.0, tl.float32)
    for turn in range(n.group):
        total += tl.load(x + (row * n.group + turn) * S.WIDTH + column, mask=at < n.size, other=0.0)  # [BLOCK]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n.size)


@triton.jit
def load_sums(sums, any_keys, WIDTH: tl.constexpr, S: tl.constexpr):
    """Sums of dQ, `[BM, WIDTH]`, of a part or of both halves of it, 64 rows or 64 channels each."""
    # element (row, column) of a half, `[64, .]`, where the thread that held it put it
    row = tl.arange(0, S.BM)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    half = row // 64 + column // 64
    r, c = row % 64, column % 64
    at = c // 8 * 512 + (r // 16 * 32 + r % 8 * 4 + c % 8 // 2) * 4 + r // 8 % 2 * 2 + c % 2
    return tl.load(sums + half * 4096 + at, mask=any_keys & (half >= 0), other=0.0)


@triton.jit(do_not_specialize=["n"])
def query_gradient_kernel(x, n, S: tl.constexpr):
    """dQ of BM queries of a head from its sums, see `put_half`; 0 where no program has added any."""
    QK: tl.constexpr = S.QK
    bh, block = find_head(tl.program_id(0), n.blocks, n.batches * n.heads_q, n.at_once)
    batch, head = bh // n.heads_q, bh % n.heads_q
    sequence, start_q, tokens_q = bh * 0, n.tokens_q * 0, n.tokens_q
    if S.PACKED:
        sequence, start_q, tokens_q, _, _, block = find_sequence(block, x.table)
    if block * S.BM >= tokens_q:
        return
    place = (first_sums(sequence, start_q, S) + block) * (n.batches * n.heads_q) + bh
    any_keys = tl.load(x.counters + 1 + place) > 0
    here = AttentionBlock(batch, head, head, bh, block * S.BM, start_q, tokens_q, start_q, tokens_q)
    to = result_rows(x.d_q, here, n.heads_q, head, n.tokens_q, start_q, QK)
    sums = x.sums + place.to(tl.int64) * half_begin(2, QK.SECOND)
    tile = load_sums(sums, any_keys, QK.FIRST, S)  # [BM, FIRST]
    store_rows(to, tile * n.d_scale, block * S.BM, tokens_q, 0, QK.FIRST, QK, S.BM)
    if QK.SECOND > 0:
        rest = load_sums(sums + half_begin(1, QK.SECOND), any_keys, QK.SECOND, S)  # [BM, SECOND]
        store_rows(to, rest * n.d_scale, block * S.BM, tokens_q, QK.FIRST, QK.SECOND, QK, S.BM)
