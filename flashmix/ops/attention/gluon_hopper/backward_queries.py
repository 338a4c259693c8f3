"""dQ of softmax attention on Hopper: a program has 128 queries of a head, 64 a group of four warps, and walks over their keys.

    P = 2^(S - level);  dS = P (dO V^T - delta);  dQ = scale dS K

`S_{i+1} = q k_{i+1}^T` and `dQ += dS_i k_i` are issued together; dS comes to the second as a left operand from registers, so a program
shares nothing with others and the same call gives the same bits. `q k^T` and `dO V^T` are computed a second time, as the pass over the
keys does: for head dims whose dK and dV leave no registers for dQ, and for gates and slopes, whose gradients are sums of dS over rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import accumulator, await_readers, ex2, gl, gluon, leave, products_done, row_pieces, wait_full
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.forward import tiles_of_keys
from flashmix.ops.attention.gluon_hopper.scores import (
    bias_of_tile,
    gates_at_end,
    keys_seen,
    row_sums,
    scaled,
    way_of_tile,
)
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    fill_tile,
    held,
    in_registers,
    ring,
    scores,
    tile_of,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.forward import query_rows
from flashmix.ops.attention.triton_gpu.scores import biased, expanded
from flashmix.ops.attention.triton_gpu.tiles import find_queries, load_decay, padded_tokens, result_rows

# Named barriers of the readers of k and v, a number for each tile
K_READ, V_READ = gl.constexpr(5), gl.constexpr(8)
GROUPS_AND_COPIES = gl.constexpr(256 + 32)  # threads
COPIES = gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_TWO = gl.constexpr(REGISTERS[2][1])


class QueryWork(NamedTuple):
    """What a program reads of its rows and of what is added to their scores, and what it writes."""

    table: Any  # of packed queries
    alibi_slopes: Any
    decay: Any  # the gates' running sums, and what is left of them to the end of each tile of keys, see `decay.running_sums`
    decay_tiles: Any
    level: Any  # [B, HQ, Tq], padded to 16 bytes, as delta
    delta: Any
    d_q: Any  # [B, Tq, HQ, K]
    d_slopes: Any  # with ALiBi the sums over keys of `-dS |way|`, [B, HQ, Tq]
    at_rows: Any  # with a decay those of dS
    n: Any  # `AttentionNumbers`


class QueryRings(NamedTuple):
    """Rings of q `[64, K]` and dO `[64, V]`, one a group, of k `[BN, K]` and v `[BN, V]`."""

    q: Any
    d_o: Any
    k: Any
    v: Any


@gluon.jit
def query_copies(at, keys, descriptors, rings, S: gl.constexpr):
    """The warp that copies: q, dO, then k and v in turns."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    q_d, d_o_d, k_d, v_d = descriptors
    of_q = (at.batch, at.head, at.start_q, at.tokens_q)
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    for group in gl.static_range(2):
        fill_tile(q_d, of_q, at.first + group * 64, rings.q, group, QK, S)
    for i in range(keys.count):
        start = keys.low + i * S.BN
        await_readers(K_READ, i, GROUPS_AND_COPIES, S.STAGES)
        fill_tile(k_d, of_k, start, rings.k, i, QK, S)
        if i == 0:
            for group in gl.static_range(2):
                fill_tile(d_o_d, of_q, at.first + group * 64, rings.d_o, group, V, S)
        await_readers(V_READ, i, GROUPS_AND_COPIES, S.V_STAGES)
        fill_tile(v_d, of_k, start, rings.v, i, V, S)


@gluon.jit
def row_probabilities(s, level, rows, keys, i, n, S: gl.constexpr):
    """P of `q k^T` of tile `i` of the keys, `[64, BN]`, and tanh(scores / softcap)."""
    BY_TILE: gl.constexpr = S.CAUSAL and (S.DECAY or S.ALIBI)
    L: gl.constexpr = gl.SliceLayout(0, accumulator(S.BN))
    start = keys.low + i * S.BN
    edge = (i < keys.begin) | (i >= keys.end)
    at = start + gl.arange(0, S.BN, L)
    y, squashed = scaled(s, n, S)
    if BY_TILE:
        if edge:
            decay_k = (0.0, 0.0)
            if S.DECAY:
                decay_k = expanded(load_decay(rows.gates, at, keys.tokens, True), 0)  # [1, BN]
            y = biased(y, rows.position, at[None, :], rows.slope, rows.decay, decay_k, S) - level[:, None]
        else:
            way = way_of_tile(rows, start, gates_at_end(rows, start, keys.tokens, S), S)
            y = y + bias_of_tile(rows, start, S) - (level - rows.bias - way)[:, None]
    elif S.ALIBI:
        y = biased(y, rows.position, at[None, :], rows.slope, rows.decay, (0.0, 0.0), S) - level[:, None]
    else:
        y = y - level[:, None]
    if edge:
        y = keys_seen(y, rows.position, start, keys.tokens, n, S)
    return ex2(y), squashed


@gluon.jit
def query_group(group: gl.constexpr, work, at, keys, rings, n, S: gl.constexpr):
    """Four warps with 64 of the queries."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    R: gl.constexpr = gl.SliceLayout(1, accumulator(S.BN))
    dtype: gl.constexpr = work.d_q.dtype.element_ty
    index = at.first + group * 64 + gl.arange(0, 64, R)
    rows = query_rows(work, at, index, n, S)
    numbers = at.bh.to(gl.int64) * padded_tokens(n.tokens_q) + at.start_q + index
    inside = index < at.tokens_q
    level = gl.load(work.level + numbers, mask=inside, other=float("inf"))  # [64]
    delta = gl.load(work.delta + numbers, mask=inside, other=0.0)  # [64]
    d_q = zero_sums(QK)
    d_slope = gl.full([64, 4], 0.0, gl.float32, row_pieces())
    sums = gl.full([64, 4], 0.0, gl.float32, row_pieces())
    q = tile_of(rings.q.tiles, group)
    d_o = tile_of(rings.d_o.tiles, group)
    wait_full(rings.q.full, group)
    own = q
    if held(QK.ALL, V.ALL):
        own = in_registers(q, S.BN, QK)
    wait_full(rings.k.full, 0)
    s = products_done(0, [scores(own, tile_of(rings.k.tiles, 0), QK)])  # [64, BN]
    wait_full(rings.d_o.full, group)
    for i in range(keys.count):
        wait_full(rings.v.full, i)
        d_p = scores(d_o, tile_of(rings.v.tiles, i % S.V_STAGES), V)  # [64, BN]
        p, squashed = row_probabilities(s, level, rows, keys, i, n, S)
        d_p = products_done(0, [d_p])
        leave(V_READ, i, GROUPS_AND_COPIES, S.V_STAGES)
        # dS = P (dO v^T - delta)
        d_s = p * (d_p - delta[:, None])
        if S.DECAY:
            sums += row_sums(d_s)
        if S.ALIBI:
            key = keys.low + i * S.BN + gl.arange(0, S.BN, gl.SliceLayout(0, accumulator(S.BN)))
            d_slope -= row_sums(d_s * gl.abs((rows.position - key[None, :]).to(gl.float32)))
        if S.SOFTCAP:
            d_s = d_s * (1.0 - squashed * squashed)
        a_1, a_2 = as_operand(d_s, dtype, QK)
        # s = q k^T of the next tile;  dQ += dS k
        wait_full(rings.k.full, i + 1, i + 1 < keys.count)
        s = scores(own, tile_of(rings.k.tiles, (i + 1) % S.STAGES), QK)
        d_1, d_2 = accumulate(d_q, (a_1, a_2), tile_of(rings.k.tiles, i % S.STAGES), QK)
        if QK.SECOND > 0:
            s, d_1, d_2, a_1, a_2 = products_done(0, [s, d_1, d_2, a_1, a_2])
            d_q = (d_1, d_2)
        else:
            s, d_1, a_1 = products_done(0, [s, d_1, a_1])
            d_q = (d_1, d_1)
        leave(K_READ, i, GROUPS_AND_COPIES, S.STAGES)
    d_1, d_2 = d_q
    if QK.SECOND > 0:
        d_q = (d_1 * n.d_scale, d_2 * n.d_scale)
    else:
        d_1 = d_1 * n.d_scale
        d_q = (d_1, d_1)
    to = result_rows(work.d_q, at, n.heads_q, at.head, n.tokens_q, at.start_q, QK)
    write_rows(to, d_q, q, at.first + group * 64, at.tokens_q, QK)
    row = at.bh.to(gl.int64) * n.tokens_q + at.start_q
    if S.ALIBI:
        gl.store(work.d_slopes + row + index, gl.convert_layout(gl.sum(d_slope, 1), R), mask=inside)
    if S.DECAY:
        gl.store(work.at_rows + row + index, gl.convert_layout(gl.sum(sums, 1), R), mask=inside)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["work"])
def hopper_backward_queries_kernel(work, q_t, q_r, o_t, o_r, k_t, k_r, v_t, v_r, S: gl.constexpr):
    """dQ of 128 queries; `q_t` to `v_r` are both parts of q, dO, k and v."""
    n = work.n
    at = find_queries(gl.program_id(0), work.table, n, S)
    rings = QueryRings(
        ring(2, (q_t, q_r), 0), ring(2, (o_t, o_r), 0), ring(S.STAGES, (k_t, k_r), 0), ring(S.V_STAGES, (v_t, v_r), 0)
    )
    descriptors = ((q_t, q_r), (o_t, o_r), (k_t, k_r), (v_t, v_r))
    if (at.first >= 0) & (at.first < at.tokens_q):
        keys = tiles_of_keys(at, 0, n, S)
        gl.warp_specialize(
            [
                (query_group, (0, work, at, keys, rings, n, S)),
                (query_group, (1, work, at, keys, rings, n, S)),
                (query_copies, (at, keys, descriptors, rings, S)),
            ],
            [4, 1],
            [REGISTERS_OF_TWO, COPIES],
        )
