"""Backward of softmax attention on Hopper: one pass over the keys gives dK, dV and, in a fixed order, dQ.

    P = 2^(S - level);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dQ = scale dS K

A program has 128 keys of a head and walks over the blocks of BM queries that see them, through the query heads that share them. Tiles of
scores lie `[keys, queries]`, so P^T and dS^T are left operands from registers. dS goes through shared memory besides: half of the warps
make half of dQ's block from all 128 keys, and a warp adds the block to dQ in float32 by TMA, in a fixed order (`backward_sums`).

At 128 channels a role of eight warps has all keys: one code, without spills. Up to 96 two roles of four warps have 64 keys each, and hold
v or both k and v in registers where those have room.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.hopper import (
    accumulator,
    fence_async_shared,
    gl,
    gluon,
    plain,
    products_done,
    reinterpret,
    release,
    shared_rows,
    sync_group,
    take_turn,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward_sums import (
    allocate_pieces,
    backward_sums,
    piece_of,
    pieces_in,
    put_piece,
    roles_of,
)
from flashmix.ops.attention.gluon_hopper.backward_walk import (
    BOTH_GROUPS,
    D_O_READ,
    GROUPS_AND_COPIES,
    Q_READ,
    backward_copies,
    find_keys,
    key_probabilities,
    way_of,
    whole_steps,
)
from flashmix.ops.attention.gluon_hopper.scores import EDGE, EITHER, WHOLE
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    awaited,
    awaited_with,
    by_halves,
    half_in_registers,
    in_halves,
    in_registers,
    result_layout,
    ring,
    scores,
    tile_of,
    times,
    write_float32,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.tiles import result_rows

COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])


class BackwardRings(NamedTuple):
    """Rings of k and v, a tile for each role's keys, of q and dO `[BM, K]`; tiles of level and delta `[BM]`, which come with q and dO; dS
    `[keys, BM]`, two a role; the ring of dQ's pieces."""

    k: Any
    v: Any
    q: Any
    d_o: Any
    level: Any
    delta: Any
    d_s: Any
    d_q: Any


@gluon.jit
def piece_of_d_q(piece: gl.constexpr, d_s, k, i, S: gl.constexpr):
    """Issues a piece of dQ's block from all keys' dS^T: 64 of 128 queries, a part of its channels, or all."""
    ROLES: gl.constexpr = roles_of(S.QK.FIRST)
    WIDTH: gl.constexpr = S.QK.SECOND if piece == 1 and S.QK.SECOND > 0 else S.QK.FIRST
    L: gl.constexpr = shared_rows(WIDTH) if ROLES == 1 else accumulator(WIDTH)
    d_q = gl.full([64, WIDTH], 0.0, gl.float32, L)
    for role in gl.static_range(ROLES):
        rows = d_s.index(i % 2 * ROLES + role).permute((1, 0))  # [BM, keys]
        if S.BM == 128:
            rows = rows.slice(piece * 64, 64, dim=0)
        keys = piece_of(tile_of(k, role), piece)  # [keys, WIDTH]
        d_q = warpgroup_mma(rows, keys, d_q, use_acc=role > 0, is_async=True)
    return d_q


@gluon.constexpr_function
def apart(first, second, masked):
    """Whether steps whose queries see all keys have a loop of their own, without masks: with 128 channels, and causal calls of 64 or those
    with a softcap (`masked`).

    One loop for both spills what masks need. Other calls of 64 channels and heads in two parts spill more in two loops.
    """
    return first == 128 or (masked and second == 0)


@gluon.constexpr_function
def holds_k(second, causal):
    """Whether roles hold k in registers: full calls of 65 to 96 channels."""
    return second > 0 and not causal


@gluon.constexpr_function
def holds_v(first, second, causal, capped):
    """Whether roles hold v in registers: causal calls of up to 80 channels, full ones of 65 to 96. Others have no room for it, nor have
    those of up to 64 that are `capped`."""
    return first == 64 and (second < 32 if causal else second > 0) and not (capped and second == 0)


@gluon.constexpr_function
def holds_half_v(first, featured):
    """Whether roles hold half of v's channels in registers: 97 to 128 channels, without masks, packed sequences or a softcap."""
    return first == 128 and not featured


@gluon.jit
def walk_steps(group: gl.constexpr, state, span, walk, rings, n, KIND: gl.constexpr, S: gl.constexpr):
    """Takes the `span` of steps into `state`: `(dK, dV, number of the next block)`.

    `walk`: place of the keys, steps, the use of their rings that the first step is, k and v as left operands.
    """
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    Q_PARTS: gl.constexpr = 2 if S.QK.SECOND > 0 else 1  # products of one over both parts
    HALF_V: gl.constexpr = holds_half_v(QK.FIRST, S.CAUSAL or S.PACKED or S.SOFTCAP)
    V_PARTS: gl.constexpr = 2 if S.V.SECOND > 0 or HALF_V else 1
    ROLES: gl.constexpr = roles_of(QK.FIRST)
    KEYS: gl.constexpr = 128 // ROLES
    L: gl.constexpr = accumulator(S.BM, KEYS)
    at, steps, base, k, v = walk
    key = at.first + group * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
    dtype: gl.constexpr = rings.d_s.dtype
    d_k, d_v, block = state
    begin, end = span
    for i in range(begin, end):
        use = base + i
        stage = use % S.STAGES
        q = tile_of(rings.q.tiles, stage)
        d_o = tile_of(rings.d_o.tiles, stage)
        # S^T = k q^T;  dP^T = v dO^T
        wait_full(rings.q.full, use)
        s = scores(k, q, QK)  # [keys, BM]
        wait_full(rings.d_o.full, use)
        if HALF_V:
            HALVES: gl.constexpr = by_halves(V.ALL, V.FIRST)
            d_p = scores(v, in_halves(d_o), HALVES)  # [keys, BM]
        else:
            d_p = scores(v, d_o, V)
        s = products_done(V_PARTS, [s])
        # P = 2^(S - level)
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        p, squashed = key_probabilities(s, level, key, (at, at.head, block * S.BM), steps, None, n, KIND, S)
        p_t = as_operand(p, dtype, V)
        if S.SOFTCAP:
            p = p * (1.0 - squashed * squashed)
        d_p = products_done(0, [d_p])
        # dS = P (dP - delta), with a softcap P (1 - tanh^2) (dP - delta)
        delta = rings.delta.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        d_s = (p * (d_p - delta[None, :])).to(dtype)
        d_s_t = as_operand(d_s, dtype, QK)
        rings.d_s.index(use % 2 * ROLES + group).store(d_s)
        # dV += P^T dO: now, so that ptxas lays the exponentials beside dS
        d_v = accumulate(d_v, p_t, d_o, V)
        fence_async_shared()
        sync_group(BOTH_GROUPS, 256)
        # dQ = dS K;  dK += dS^T Q
        d_q = piece_of_d_q(group, rings.d_s, rings.k.tiles, use, S)
        d_k = accumulate(d_k, d_s_t, q, QK)
        d_q, d_v, p_t = awaited_with(Q_PARTS, d_q, d_v, p_t, V)
        take_turn(D_O_READ, use, GROUPS_AND_COPIES, False)
        put_piece(group, d_q, use, rings, S)
        # a product in flight over the loop's end would make ptxas run all of them one by one
        d_k, d_s_t = awaited(0, d_k, d_s_t, QK)
        take_turn(Q_READ, use, GROUPS_AND_COPIES, False)
        block += way_of(at.head, S)
    return d_k, d_v, block


@gluon.jit
def write_gradient(to, sums, buffers, at, first_key, n, C: gl.constexpr, S: gl.constexpr):
    """Writes the rows of dK or dV from `first_key` on, through `buffers`, or by query head and in float32."""
    if S.BY_HEAD:
        row = (at.batch * n.heads_q + at.head).to(gl.int64) * n.tokens_k + at.start_k
        rows = (to + row * C.ALL, C.ALL)
        write_float32(rows, sums, first_key, at.tokens_k, C)
    else:
        rows = result_rows(to, at, n.heads, at.head_k, n.tokens_k, at.start_k, C)
        write_rows(rows, sums, buffers, first_key, at.tokens_k, C)


@gluon.jit
def walk_keys(group: gl.constexpr, work, at, steps, turn, base, rings, n, S: gl.constexpr):
    """A role's keys of the program's `turn`-th block, whose queries are the uses of their rings from `base` on."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    ROLES: gl.constexpr = roles_of(QK.FIRST)
    KEYS: gl.constexpr = 128 // ROLES
    first_key = at.first + group * KEYS
    k = tile_of(rings.k.tiles, group)
    v = tile_of(rings.v.tiles, group)
    d_k = zero_sums(QK, KEYS)
    d_v = zero_sums(V, KEYS)
    for tile in gl.static_range(ROLES):  # a piece of dQ takes all keys
        wait_full(rings.k.full, turn * ROLES + tile)
        if S.STAYS:
            wait_full(rings.v.full, turn * ROLES + tile)
        elif steps.all > 0:
            wait_full(rings.v.full, tile)
    left_k, left_v = k, v
    if holds_k(QK.SECOND, S.CAUSAL):
        left_k = in_registers(k, S.BM, QK)
    if holds_half_v(QK.FIRST, S.CAUSAL or S.PACKED or S.SOFTCAP):
        left_v = half_in_registers(v, S.BM)
    if holds_v(QK.FIRST, QK.SECOND, S.CAUSAL, S.SOFTCAP):
        left_v = in_registers(v, S.BM, V)
    state, walk = (d_k, d_v, steps.first), (at, steps, base, left_k, left_v)
    if apart(QK.FIRST, QK.SECOND, S.CAUSAL or S.SOFTCAP):
        MASKED: gl.constexpr = EDGE if S.SOFTCAP else EITHER
        begin, whole, end = whole_steps(at.head, steps, S)
        while begin < steps.all:  # masked ones, whole ones, and once more masked ones
            state = walk_steps(group, state, (begin, whole), walk, rings, n, MASKED, S)
            state = walk_steps(group, state, (whole, end), walk, rings, n, WHOLE, S)
            begin, whole, end = end, steps.all, steps.all
    else:
        state = walk_steps(group, state, (0, steps.all), walk, rings, n, EITHER, S)
    d_k, d_v, _ = state
    sync_group(BOTH_GROUPS, 256)  # all products with these keys are done
    if S.STAYS and ROLES == 1:  # dK and dV leave through the memory of dS, and the next keys come meanwhile
        release(rings.k.empty, turn)
        release(rings.v.empty, turn)
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        dtype: gl.constexpr = rings.d_s.dtype
        x = reinterpret(rings.d_s, dtype, [S.BN, QK.FIRST], LAYOUT)
        y = reinterpret(rings.d_s, dtype, [S.BN, V.FIRST], LAYOUT)
        k, v = (x, x), (y, y)
    d_k = times(d_k, n.d_scale, QK)
    write_gradient(work.d_k, d_k, k, at, first_key, n, QK, S)
    write_gradient(work.d_v, d_v, v, at, first_key, n, V, S)


@gluon.jit
def backward_rings(descriptors, pieces, S: gl.constexpr):
    """The `BackwardRings`; tiles of k and v are left by each role where a program takes several blocks of keys.

    Without dV roles hold v in registers, and dQ's pieces lie where it came.
    """
    q, d_o, k, v = descriptors
    dtype: gl.constexpr = q[0].dtype
    ROLES: gl.constexpr = roles_of(S.QK.FIRST)
    LEFT_BY: gl.constexpr = 1 if S.STAYS else 0
    of_k, of_v = ring(ROLES, k, LEFT_BY), ring(ROLES, v, LEFT_BY)
    of_q, of_d_o = ring(S.STAGES, q, 0, 2), ring(S.STAGES, d_o, 0, 2)
    level = gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain())
    delta = gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain())
    d_s = gl.allocate_shared_memory(dtype, [2 * ROLES, S.BN // ROLES, S.BM], result_layout(q[0].layout))
    if S.WITH_V:
        d_q = allocate_pieces(pieces, S)
    else:
        d_q = pieces_in(of_v.tiles, pieces, S)
    return BackwardRings(of_k, of_v, of_q, of_d_o, level, delta, d_s, d_q)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, first_d, second_d, S: gl.constexpr):
    """dK, dV and what 128 keys add to dQ."""
    n = work.n
    number = gl.atomic_add(work.counters, 1)
    at, steps = find_keys(number, work, n, S)
    ROLES: gl.constexpr = roles_of(S.QK.FIRST)
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    rings = backward_rings(descriptors, (first_d, second_d), S)
    if at.first >= 0:
        if ROLES == 1:
            gl.warp_specialize(
                [
                    (walk_keys, (0, work, at, steps, 0, 0, rings, n, S)),
                    (backward_copies, (work, at, steps, 0, 0, descriptors, rings, n, S)),
                    (backward_sums, (0, work, at, steps, 0, (first_d, second_d), rings, n, S)),
                    (backward_sums, (1, work, at, steps, 0, (first_d, second_d), rings, n, S)),
                ],
                [1, 1, 1],
                [COPIES, COPIES, COPIES],
            )
        else:
            gl.warp_specialize(
                [
                    (walk_keys, (0, work, at, steps, 0, 0, rings, n, S)),
                    (walk_keys, (1, work, at, steps, 0, 0, rings, n, S)),
                    (backward_copies, (work, at, steps, 0, 0, descriptors, rings, n, S)),
                    (backward_sums, (0, work, at, steps, 0, (first_d, second_d), rings, n, S)),
                    (backward_sums, (1, work, at, steps, 0, (first_d, second_d), rings, n, S)),
                ],
                [4, 1, 1, 1],
                [REGISTERS_OF_TWO, COPIES, COPIES, COPIES],
            )


class GroupNumbers(NamedTuple):
    tokens: Any
    heads: Any  # of the result
    group: Any


class GroupSpec(NamedTuple):
    ALL: int  # channels
    WIDTH: int  # of a tile
    ROWS: int


@triton.jit(do_not_specialize=["n"])
def group_sums_kernel(x, out, n, S: tl.constexpr):
    """`out [B, T, H, ALL]`: sums over each group of x `[B, H group, T, ALL]`, in float32 and in order; ROWS tokens of a head a program."""
    blocks = tl.cdiv(n.tokens, S.ROWS)
    bh, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row = block * S.ROWS + tl.arange(0, S.ROWS)
    column = tl.arange(0, S.WIDTH)
    inside = (row < n.tokens)[:, None] & (column < S.ALL)[None, :]
    step = n.tokens.to(tl.int64) * S.ALL  # from a head to the next
    at = x + bh * n.group * step + row.to(tl.int64)[:, None] * S.ALL + column[None, :]
    total = tl.full([S.ROWS, S.WIDTH], 0.0, tl.float32)
    for turn in range(n.group):
        total += tl.load(at + turn * step, mask=inside, other=0.0)  # [ROWS, WIDTH]
    token = (bh // n.heads).to(tl.int64) * n.tokens + row
    to = out + (token[:, None] * n.heads + bh % n.heads) * S.ALL + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
