"""dV of softmax attention on Hopper at head dims whose dV leaves the pass over the keys no registers: 128 keys a program, 64 a group.

    P = 2^(S - level);  dV = P^T dO

Each group of four warps holds its keys in registers. `S_{i+1}^T = k q_{i+1}^T` and `dV += P_i^T dO_i` are issued together, and the
exponentials of block i + 1 run under the second. `k q^T` is computed a second time for it, as the pass that makes dK and dQ does.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import accumulator, gl, gluon, leave, plain, products_done, wait_full
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.backward_walk import (
    D_O_READ,
    GROUPS_AND_COPIES,
    Q_READ,
    backward_copies,
    find_keys,
    key_probabilities,
    next_step,
)
from flashmix.ops.attention.gluon_hopper.scores import EITHER
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_words,
    awaited,
    in_registers,
    operand_of_words,
    ring,
    scores,
    tile_of,
    waited,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.tiles import result_rows

COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])


class ValueRings(NamedTuple):
    """Tiles of k `[64, K]`, one a group; rings of q `[BM, K]` with its level `[BM]`, and of dO `[BM, V]`."""

    k: Any
    q: Any
    d_o: Any
    level: Any


@gluon.jit
def value_words(s, level, key, block, steps, n, dtype: gl.constexpr, S: gl.constexpr):
    """P of `k q^T`, `as_words`."""
    p, _ = key_probabilities(s, level, key, block, steps, None, n, EITHER, S)
    return as_words(p, dtype)


@gluon.jit
def value_sums(group: gl.constexpr, work, at, steps, rings, n, S: gl.constexpr):
    """Four warps with 64 of the keys."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    V_PARTS: gl.constexpr = 2 if V.SECOND > 0 else 1  # products of one over both parts
    L: gl.constexpr = accumulator(S.BM)
    dtype: gl.constexpr = work.d_v.dtype.element_ty
    first_key = at.first + group * 64
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, L))
    tile = tile_of(rings.k.tiles, group)
    d_v = zero_sums(V)
    wait_full(rings.k.full, group)
    k = in_registers(tile, S.BM, QK)
    head, block = at.head, steps.first
    wait_full(rings.q.full, 0, steps.all > 0)
    s = products_done(0, [scores(k, tile_of(rings.q.tiles, 0), QK)])  # [64, BM]
    level = rings.level.index(0).load(gl.SliceLayout(0, L))  # [BM]
    if steps.all > 0:
        leave(Q_READ, 0, GROUPS_AND_COPIES, S.STAGES)
    words = value_words(s, level, key, (at, head, block * S.BM), steps, n, dtype, S)
    for i in range(1, steps.all):
        stage = i % S.STAGES
        before = (i - 1) % S.STAGES
        # S^T = k q^T;  dV += P^T dO of the block before
        wait_full(rings.q.full, i)
        s = scores(k, tile_of(rings.q.tiles, stage), QK)
        level = rings.level.index(stage).load(gl.SliceLayout(0, L))  # [BM]
        p_t = operand_of_words(words, dtype, V)
        wait_full(rings.d_o.full, i - 1)
        d_v = accumulate(d_v, p_t, tile_of(rings.d_o.tiles, before), V)
        s = products_done(V_PARTS, [s])
        leave(Q_READ, i, GROUPS_AND_COPIES, S.STAGES)
        head, block = next_step(head, block, steps, S)
        words = value_words(s, level, key, (at, head, block * S.BM), steps, n, dtype, S)
        d_v, _ = awaited(0, d_v, p_t, V)
        leave(D_O_READ, i - 1, GROUPS_AND_COPIES, S.STAGES)
    if steps.all > 0:
        last = steps.all - 1
        wait_full(rings.d_o.full, last)
        d_o = tile_of(rings.d_o.tiles, last % S.STAGES)
        d_v = waited(accumulate(d_v, operand_of_words(words, dtype, V), d_o, V), V)
    to = result_rows(work.d_v, at, n.heads, at.head_k, n.tokens_k, at.start_k, V)
    write_rows(to, d_v, tile, first_key, at.tokens_k, V)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_values_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, S: gl.constexpr):
    """dV of 128 keys; `q_t` to `v_r` are both parts of q, dO, k and v."""
    n = work.n
    at, steps = find_keys(gl.program_id(0), work, n, S)
    rings = ValueRings(
        ring(2, (k_t, k_r), 0),
        ring(S.STAGES, (q_t, q_r), 0, 2),
        ring(S.STAGES, (o_t, o_r), 0),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, S.BM], plain()),
    )
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    if at.first >= 0:
        gl.warp_specialize(
            [
                (value_sums, (0, work, at, steps, rings, n, S)),
                (value_sums, (1, work, at, steps, rings, n, S)),
                (backward_copies, (work, at, steps, 0, 0, descriptors, rings, n, S)),
            ],
            [4, 1],
            [REGISTERS_OF_TWO, COPIES],
        )
