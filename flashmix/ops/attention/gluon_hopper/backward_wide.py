"""dK and dV of softmax attention on Hopper without dQ: a program has 64 keys, one group of four warps makes dV, the other dK.

    P = 2^(S - level);  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q

The first group computes `k q^T`, P and `dV += P^T dO`, the second `v dO^T`, dS and `dK += dS^T q`: each has registers for one of the two
results, above 128 channels too, and for what gates and slopes take. P goes from the first to the second in float32 through shared memory,
two tiles in turns. dQ is `backward_queries`'.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import (
    accumulator,
    gl,
    gluon,
    leave,
    plain,
    products_done,
    row_pieces,
    sync_group,
    take_turn,
    wait_full,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward_walk import (
    BOTH_GROUPS,
    D_O_READ,
    GROUPS_AND_COPIES,
    Q_READ,
    backward_copies,
    bias_to_last,
    find_keys,
    key_probabilities,
    next_step,
    store_sums,
)
from flashmix.ops.attention.gluon_hopper.scores import EITHER, row_sums
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    held,
    in_registers,
    ring,
    scores,
    tile_of,
    waited,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.tiles import result_rows

P_THERE, P_TAKEN = gl.constexpr(5), gl.constexpr(7)  # named barriers, for two tiles each
COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])


class WideRings(NamedTuple):
    """k `[64, K]` and v `[64, V]`; rings of q `[BM, K]` and dO `[BM, V]`, level and delta `[BM]`, which come with them; P `[64, BM]`."""

    k: Any
    v: Any
    q: Any
    d_o: Any
    level: Any
    delta: Any
    p: Any
    squash: Any  # with a softcap its derivative, as P


@gluon.jit
def value_group(work, at, steps, rings, n, S: gl.constexpr):
    """Four warps that make P and dV."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    L: gl.constexpr = accumulator(S.BM)
    dtype: gl.constexpr = work.d_v.dtype.element_ty
    key = at.first + gl.arange(0, 64, gl.SliceLayout(1, L))
    k = tile_of(rings.k.tiles, 0)
    d_v = zero_sums(V)
    bias = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, L))
    wait_full(rings.k.full, 0)
    if held(QK.ALL, V.ALL):
        k = in_registers(k, S.BM, QK)
    head, block = at.head, steps.first
    for i in range(steps.all):
        stage = i % S.STAGES
        if S.CAUSAL and (S.DECAY or S.ALIBI):
            if block == steps.first:
                bias = bias_to_last(work, at, head, key, n, S)
        # S^T = k q^T;  P = 2^(S - level)
        wait_full(rings.q.full, i)
        s = scores(k, tile_of(rings.q.tiles, stage), QK)  # [64, BM]
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        s = products_done(0, [s])
        leave(Q_READ, i, GROUPS_AND_COPIES)
        p, squashed = key_probabilities(s, level, key, (at, head, block * S.BM), steps, (work, bias), n, EITHER, S)
        if i > 1:
            take_turn(P_TAKEN, i, 256, True)
        rings.p.index(i % 2).store(p)
        if S.SOFTCAP:
            rings.squash.index(i % 2).store(1.0 - squashed * squashed)
        take_turn(P_THERE, i, 256, False)
        # dV += P^T dO
        p_t = as_operand(p, dtype, V)
        wait_full(rings.d_o.full, i)
        d_v = waited(accumulate(d_v, p_t, tile_of(rings.d_o.tiles, stage), V), V)
        leave(D_O_READ, i, GROUPS_AND_COPIES)
        head, block = next_step(head, block, steps, S)
    sync_group(BOTH_GROUPS, 256)  # the other group has read v
    to = result_rows(work.d_v, at, n.heads, at.head_k, n.tokens_k, at.start_k, V)
    write_rows(to, d_v, tile_of(rings.v.tiles, 0), at.first, at.tokens_k, V)


@gluon.jit
def key_group(work, at, steps, rings, n, S: gl.constexpr):
    """Four warps that make dS and dK."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    L: gl.constexpr = accumulator(S.BM)
    dtype: gl.constexpr = work.d_k.dtype.element_ty
    key = at.first + gl.arange(0, 64, gl.SliceLayout(1, L))
    v = tile_of(rings.v.tiles, 0)
    d_k = zero_sums(QK)
    sums = gl.full([64, 4], 0.0, gl.float32, row_pieces())
    if steps.all > 0:
        wait_full(rings.v.full, 0)
    if held(QK.ALL, V.ALL):
        v = in_registers(v, S.BM, V)
    head, block = at.head, steps.first
    for i in range(steps.all):
        stage = i % S.STAGES
        # dS = P (v dO^T - delta)
        wait_full(rings.d_o.full, i)
        d_p = scores(v, tile_of(rings.d_o.tiles, stage), V)  # [64, BM]
        delta = rings.delta.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        take_turn(P_THERE, i, 256, True)
        p = rings.p.index(i % 2).load(L)  # [64, BM]
        squash = p
        if S.SOFTCAP:
            squash = rings.squash.index(i % 2).load(L)  # [64, BM]
        take_turn(P_TAKEN, i, 256, False)
        d_p = products_done(0, [d_p])
        leave(D_O_READ, i, GROUPS_AND_COPIES)
        d_s = p * (d_p - delta[None, :])
        if S.DECAY:
            sums += row_sums(d_s)
        if S.SOFTCAP:
            d_s = d_s * squash
        # dK += dS^T q
        d_s_t = as_operand(d_s, dtype, QK)
        wait_full(rings.q.full, i)
        d_k = waited(accumulate(d_k, d_s_t, tile_of(rings.q.tiles, stage), QK), QK)
        leave(Q_READ, i, GROUPS_AND_COPIES)
        if S.DECAY:
            if block == steps.first + steps.each - 1:
                store_sums(sums, work, at, head, key, n, S)
                sums = sums * 0.0
        head, block = next_step(head, block, steps, S)
    sync_group(BOTH_GROUPS, 256)  # the other group has read k
    d_1, d_2 = d_k
    if QK.SECOND > 0:
        d_k = (d_1 * n.d_scale, d_2 * n.d_scale)
    else:
        d_1 = d_1 * n.d_scale
        d_k = (d_1, d_1)
    to = result_rows(work.d_k, at, n.heads, at.head_k, n.tokens_k, at.start_k, QK)
    write_rows(to, d_k, tile_of(rings.k.tiles, 0), at.first, at.tokens_k, QK)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_wide_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, S: gl.constexpr):
    """dK and dV of 64 keys; `q_t` to `v_r` are both parts of q, dO, k and v."""
    n = work.n
    at, steps = find_keys(gl.program_id(0), work, n, S)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    p = gl.allocate_shared_memory(gl.float32, [2, 64, S.BM], LAYOUT)
    squash = p
    if S.SOFTCAP:
        squash = gl.allocate_shared_memory(gl.float32, [2, 64, S.BM], LAYOUT)
    rings = WideRings(
        ring(1, (k_t, k_r), 0),
        ring(1, (v_t, v_r), 0),
        ring(S.STAGES, (q_t, q_r), 0, 2),
        ring(S.STAGES, (o_t, o_r), 0, 2),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
        p,
        squash,
    )
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    if at.first >= 0:
        gl.warp_specialize(
            [
                (value_group, (work, at, steps, rings, n, S)),
                (key_group, (work, at, steps, rings, n, S)),
                (backward_copies, (work, at, steps, 0, 0, descriptors, rings, n, S)),
            ],
            [4, 1],
            [REGISTERS_OF_TWO, COPIES],
        )
