"""dK and dQ of softmax attention on Hopper at 129 to 192 channels: one pass over the keys, 128 a program, of one role of eight warps.

    P = 2^(S - level);  dS = P (dO V^T - delta);  dK = scale dS^T Q;  dQ = scale dS K

The walk is that of `backward` without dV, whose sums registers have no room for: `backward_values` makes it. Roles hold v in registers,
and dQ's pieces lie in shared memory where v came.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import accumulator, fence_async_shared, gl, gluon, leave, products_done, sync_group, wait_full
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward import COPIES, backward_rings, piece_of_d_q, write_gradient
from flashmix.ops.attention.gluon_hopper.backward_sums import backward_sums, put_piece
from flashmix.ops.attention.gluon_hopper.backward_walk import (
    BOTH_GROUPS,
    D_O_READ,
    GROUPS_AND_COPIES,
    Q_READ,
    backward_copies,
    find_keys,
    key_probabilities,
    way_of,
)
from flashmix.ops.attention.gluon_hopper.scores import EITHER
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    awaited,
    in_registers,
    scores,
    tile_of,
    times,
    zero_sums,
)


@gluon.jit
def walk_keys(work, at, steps, rings, n, S: gl.constexpr):
    """Eight warps with all keys of a program."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    L: gl.constexpr = accumulator(S.BM, S.BN)
    Q_PARTS: gl.constexpr = 2  # products of one over both parts
    V_PARTS: gl.constexpr = 2 if V.SECOND > 0 else 1
    dtype: gl.constexpr = rings.d_s.dtype
    key = at.first + gl.arange(0, S.BN, gl.SliceLayout(1, L))
    k = tile_of(rings.k.tiles, 0)
    d_k = zero_sums(QK, S.BN)
    wait_full(rings.k.full, 0)
    wait_full(rings.v.full, 0, steps.all > 0)
    v = in_registers(tile_of(rings.v.tiles, 0), S.BM, V)
    block = steps.first
    for i in range(steps.all):
        stage = i % S.STAGES
        q = tile_of(rings.q.tiles, stage)
        # S^T = k q^T;  dP^T = v dO^T
        wait_full(rings.q.full, i)
        s = scores(k, q, QK)  # [BN, BM]
        wait_full(rings.d_o.full, i)
        d_p = scores(v, tile_of(rings.d_o.tiles, stage), V)  # [BN, BM]
        s = products_done(V_PARTS, [s])
        # P = 2^(S - level)
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        delta = rings.delta.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        p, squashed = key_probabilities(s, level, key, (at, at.head, block * S.BM), steps, None, n, EITHER, S)
        d_p = products_done(0, [d_p])
        leave(D_O_READ, i, GROUPS_AND_COPIES)
        # dS = P (dP - delta)
        d_s = p * (d_p - delta[None, :])
        if S.SOFTCAP:
            d_s = d_s * (1.0 - squashed * squashed)
        d_s = d_s.to(dtype)
        d_s_t = as_operand(d_s, dtype, QK)
        rings.d_s.index(i % 2).store(d_s)
        fence_async_shared()  # the compiler puts a barrier behind it
        # dQ = dS K;  dK += dS^T Q
        d_q = piece_of_d_q(0, rings.d_s, rings.k.tiles, i, S)
        rest = piece_of_d_q(1, rings.d_s, rings.k.tiles, i, S)
        d_k = accumulate(d_k, d_s_t, q, QK)
        d_q, rest = products_done(Q_PARTS, [d_q, rest])
        put_piece(0, d_q, i, rings, S)
        put_piece(1, rest, i, rings, S)
        d_k, d_s_t = awaited(0, d_k, d_s_t, QK)
        leave(Q_READ, i, GROUPS_AND_COPIES)
        block += way_of(at.head, S)
    sync_group(BOTH_GROUPS, 256)  # all products with these keys are done
    d_k = times(d_k, n.d_scale, QK)
    write_gradient(work.d_k, d_k, k, at, at.first, n, QK, S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_keys_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, first_d, second_d, S: gl.constexpr):
    """dK and what 128 keys add to dQ; `q_t` to `v_r` are both parts of q, dO, k and v."""
    n = work.n
    number = gl.atomic_add(work.counters, 1)
    at, steps = find_keys(number, work, n, S)
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    pieces = (first_d, second_d)
    rings = backward_rings(descriptors, pieces, S)
    if at.first >= 0:
        gl.warp_specialize(
            [
                (walk_keys, (work, at, steps, rings, n, S)),
                (backward_copies, (work, at, steps, 0, 0, descriptors, rings, n, S)),
                (backward_sums, (0, work, at, steps, 0, pieces, rings, n, S)),
                (backward_sums, (1, work, at, steps, 0, pieces, rings, n, S)),
            ],
            [1, 1, 1],
            [COPIES, COPIES, COPIES],
        )
