"""Forward of softmax attention on Hopper: warps that copy, and groups of four warps, 64 queries each, that compute.

One warp copies the tiles of q, then k and v in turns through rings in shared memory. Each group walks over the keys from the first:

    S_i = q k_i^T and a += P_{i-1} v_{i-1} are issued together; the softmax of S_i runs under the second product
    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m')
    o = a / l;  lse = (m + log2 l) / log2 e;  a sink comes last, as a score whose value is 0

Scores, masks and what is kept for backward are those of `triton_gpu`. A block of queries that see nothing takes one tile of which
nothing is visible.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import (
    accumulator,
    arrive_at_group,
    ex2,
    gl,
    gluon,
    pin,
    products_done,
    release,
    row_pieces,
    sync_group,
    wait_full,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.forward_choices import (
    holds_half,
    holds_queries,
    in_words,
    late,
    quarter_first,
    take_turns,
)
from flashmix.ops.attention.gluon_hopper.forward_copies import (
    K_READ,
    V_READ,
    ForwardRings,
    block_queue,
    forward_copies,
    has_queries,
    left_by_name,
    let_go,
    tile_of_k,
    tile_of_v,
    tiles_of_group,
    tiles_of_keys,
    told_block,
    walks_alone,
)
from flashmix.ops.attention.gluon_hopper.scores import (
    EDGE,
    EITHER,
    WHOLE,
    bias_of_tile,
    exponents,
    halves,
    joined,
    row_sums,
)
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    allocate_results,
    as_operand,
    as_words,
    by_halves,
    half_in_registers,
    in_halves,
    in_registers,
    operand_of_words,
    ring,
    rings_sharing,
    scores,
    tile_of,
    times_rows,
    waited,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.forward import query_rows
from flashmix.ops.attention.triton_gpu.scores import LOWEST, in_units, log_sum
from flashmix.ops.attention.triton_gpu.tiles import find_queries, result_rows

LEAST = gl.constexpr(LOWEST.value)
TURNS = gl.constexpr(5)  # named barriers, a number for each group that takes turns
REGISTERS_OF_TWO, COPIES_OF_TWO = gl.constexpr(REGISTERS[2][1]), gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_THREE, COPIES_OF_THREE = gl.constexpr(REGISTERS[3][1]), gl.constexpr(REGISTERS[3][2])


class HopperResults(NamedTuple):
    o: Any  # [B, Tq, HQ, V]
    lse: Any  # [B, HQ, Tq], as m and l
    top: Any
    total: Any
    counter: Any  # of blocks


@gluon.jit
def await_turn(group: gl.constexpr, S: gl.constexpr):
    """Until the group before has issued its products."""
    if take_turns(S.BM, S.QK.ALL):
        sync_group(TURNS + group, 256)


@gluon.jit
def pass_turn(group: gl.constexpr, S: gl.constexpr):
    """It is the turn of the next group."""
    if take_turns(S.BM, S.QK.ALL):
        arrive_at_group(TURNS + (group + 1) % (S.BM // 64), 256)


@gluon.jit
def queries_of(q, S: gl.constexpr):
    """The left operand of `scores_of`, in shared memory, which each product would read again, or in registers where those have room."""
    if holds_queries(S.BN, S.QK.ALL, S.V.ALL, S.CAUSAL):
        QK: gl.constexpr = S.QK
        return in_registers(q, S.BN, QK)
    elif holds_half(S.QK.FIRST, S.DECAY or S.ALIBI):
        return half_in_registers(q, S.BN)
    else:
        return q


@gluon.jit
def scores_of(q, k, S: gl.constexpr):
    """Issues `q k^T` with a tile of k, `[64, BN]`."""
    QK: gl.constexpr = S.QK
    if holds_half(S.QK.FIRST, S.DECAY or S.ALIBI):
        HALVES: gl.constexpr = by_halves(QK.ALL, QK.FIRST)
        return scores(q, in_halves(k), HALVES)
    else:
        return scores(q, k, QK)


@gluon.jit
def carried(p, dtype: gl.constexpr, S: gl.constexpr):
    """p as the loops carry it."""
    V: gl.constexpr = S.V
    if in_words(V.ALL, S.DECAY or S.ALIBI):
        return as_words(p, dtype)
    else:
        return as_operand(p, dtype, V)


@gluon.jit
def carried_operand(p, dtype: gl.constexpr, S: gl.constexpr):
    """The left operand of `accumulate` that is `carried`."""
    V: gl.constexpr = S.V
    if in_words(V.ALL, S.DECAY or S.ALIBI):
        return operand_of_words(p, dtype, V)
    else:
        return p


@gluon.jit
def attend(state, span, keys, rows, reads, group, n, KIND: gl.constexpr, S: gl.constexpr):
    """Takes the `span` of tiles of the keys into `state`: `(a, p of the tile before, m, l, what a is still to be multiplied by)`.

    p is as it is `carried`.
    """
    V: gl.constexpr = S.V
    QUARTER: gl.constexpr = quarter_first(V.ALL, S.CAUSAL, S.DECAY or S.SOFTCAP)
    PV: gl.constexpr = 2 if S.V.SECOND > 0 else 1  # products of `p v`
    LATE: gl.constexpr = late(S.V.ALL, S.BN)
    BY_TILE: gl.constexpr = KIND == WHOLE and S.CAUSAL and (S.DECAY or S.ALIBI)
    acc, p, m, l, shrink = state
    begin, end = span
    q, rings = reads
    dtype: gl.constexpr = rings.v.tiles[0].dtype
    for i in range(begin, end):
        bias = m
        if BY_TILE:
            bias = bias_of_tile(rows, keys.low + i * S.BN, n, S)
        # s = q k^T;  a = a + p v of the tile before
        use = keys.base + i
        await_turn(group, S)
        s = scores_of(q, tile_of_k(rings, keys, i, S), S)  # [64, BN]
        if LATE:  # a = a 2^(m - m') of the tile before, under this product; pinned, else it is done before the loop's end is tested for
            acc = times_rows(acc, pin(shrink), V)
        wait_full(rings.v.full, use - 1)
        if QUARTER:
            pass_turn(group, S)
        p = carried_operand(p, dtype, S)
        acc = accumulate(acc, p, tile_of_v(rings, keys, i - 1, S), V)
        if not QUARTER:
            pass_turn(group, S)
        s = products_done(PV, [s])
        let_go(K_READ, rings.k, use, S)
        # m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j
        y, top = exponents(s, m, rows, keys, i, bias, n, KIND, S)
        first, second = halves(y)
        if QUARTER:
            first, rest = halves(first)
        shrink = pin(ex2(m - top))
        m = top
        first = ex2(first)
        l = pin(l * gl.convert_layout(shrink, gl.SliceLayout(1, row_pieces()))[:, None] + row_sums(first))
        # a branch, over which ptxas does not raise the wait for `p v`; what is left to do runs beside the other exponentials
        wait_full(rings.k.full, use + 1, i + 1 < keys.count)
        acc_1, acc_2 = acc
        p_1, p_2 = p
        if V.SECOND > 0:
            acc_1, acc_2, p_1, p_2, l, shrink = products_done(0, [acc_1, acc_2, p_1, p_2, l, shrink])
            acc = (acc_1, acc_2)
        else:
            acc_1, p_1, l, shrink = products_done(0, [acc_1, p_1, l, shrink])
            acc = (acc_1, acc_1)
        let_go(V_READ, rings.v, use - 1, S)
        if QUARTER:
            rest = ex2(rest)
            l += row_sums(rest)
            first = joined(first, rest)
        second = ex2(second)
        l += row_sums(second)
        if not LATE:  # a = a 2^(m - m')
            acc = times_rows(acc, shrink, V)
        p = carried(joined(first.to(dtype), second.to(dtype)), dtype, S)
    return acc, p, m, l, shrink


@gluon.jit
def all_keys(state, keys, rows, reads, group, n, S: gl.constexpr):
    """Takes all tiles after the first into `state`.

    A bias of causal scores is in two for whole tiles: from each key to the block's first row, and from there to each row, from which m is
    counted there. That is one addition an element instead of four.
    """
    if S.CAUSAL and (S.DECAY or S.ALIBI):
        begin, end = gl.maximum(keys.begin, 1), gl.maximum(keys.end, 1)
        if S.LEFT:
            state = attend(state, (1, gl.minimum(begin, keys.count)), keys, rows, reads, group, n, EDGE, S)
        end = gl.maximum(begin, end)
        acc, p, m, l, shrink = state
        before = m - rows.bias
        acc, p, after, l, shrink = attend(
            (acc, p, before, l, shrink), (begin, end), keys, rows, reads, group, n, WHOLE, S
        )
        m = gl.where(after == before, m, after + rows.bias)
        return attend((acc, p, m, l, shrink), (end, keys.count), keys, rows, reads, group, n, EDGE, S)
    else:
        return attend(state, (1, keys.count), keys, rows, reads, group, n, EITHER, S)


@gluon.jit
def pass_by(group: gl.constexpr, use, rings, S: gl.constexpr):
    """Takes a turn without a product, and leaves the tiles of k and v, when they have landed."""
    wait_full(rings.k.full, use)
    await_turn(group, S)
    pass_turn(group, S)
    let_go(K_READ, rings.k, use, S)
    wait_full(rings.v.full, use)
    let_go(V_READ, rings.v, use, S)


@gluon.jit
def attend_block(group: gl.constexpr, at, keys, turn, x, out, rings, n, S: gl.constexpr):
    """o, lse, m and l of 64 queries of a block."""
    V: gl.constexpr = S.V
    L: gl.constexpr = gl.SliceLayout(1, accumulator(S.BN))
    FIRST: gl.constexpr = EDGE if S.CAUSAL and (S.DECAY or S.ALIBI) else EITHER
    GROUPS: gl.constexpr = S.BM // 64
    ALONE: gl.constexpr = walks_alone(S.BM, S.BN, S.DECAY or S.ALIBI)
    dtype: gl.constexpr = x.q.dtype.element_ty
    index = at.first + group * 64 + gl.arange(0, 64, L)
    rows = query_rows(x, at, index, n, S)
    all_tiles = keys.count
    if ALONE:
        keys = tiles_of_group(group, at, keys, n, S)
    m = gl.full([64], LEAST, gl.float32, L)
    # the first tile
    wait_full(rings.q.full, turn * GROUPS + group)
    wait_full(rings.k.full, keys.base)
    await_turn(group, S)
    q = queries_of(tile_of(rings.q.tiles, group), S)
    s = scores_of(q, tile_of_k(rings, keys, 0, S), S)  # [64, BN]
    pass_turn(group, S)
    s = products_done(0, [s])
    let_go(K_READ, rings.k, keys.base, S)
    y, m = exponents(s, m, rows, keys, 0, m, n, FIRST, S)
    found = ex2(y)
    one = gl.full([64], 1.0, gl.float32, L)
    state = (zero_sums(V), carried(found, dtype, S), m, row_sums(found), one)
    wait_full(rings.k.full, keys.base + 1, keys.count > 1)
    acc, p, m, l, shrink = all_keys(state, keys, rows, (q, rings), group, n, S)
    if S.OWN_RESULTS:
        release(rings.q.empty, turn * GROUPS + group)
    # the last product
    last = keys.base + keys.count - 1
    wait_full(rings.v.full, last)
    if late(S.V.ALL, S.BN):
        acc = times_rows(acc, shrink, V)
    p = carried_operand(p, dtype, S)
    acc = waited(accumulate(acc, p, tile_of_v(rings, keys, keys.count - 1, S), V), V)
    let_go(V_READ, rings.v, last, S)
    if ALONE:  # the tiles that the other groups see
        for i in range(keys.count, all_tiles):
            pass_by(group, keys.base + i, rings, S)
    l = gl.convert_layout(gl.sum(l, 1), L)
    # m' = max(m, sink);  l = l 2^(m - m') + 2^(sink - m');  a = a 2^(m - m')
    shrink = gl.full([64], 1.0, gl.float32, L)
    if S.SINK:
        at_sink = in_units(gl.load(x.sink + at.head), S)
        top, m = m, gl.maximum(m, at_sink)
        shrink = ex2(top - m)
        l = l * shrink + ex2(at_sink - m)
    # o = a / l;  lse = m + log l
    acc = times_rows(acc, gl.where(l == 0, 0.0, shrink / gl.where(l == 0, 1.0, l)), V)
    o = result_rows(out.o, at, n.heads_q, at.head, n.tokens_q, at.start_q, V)
    write_rows(o, acc, tile_of(rings.o, group), at.first + group * 64, at.tokens_q, V)
    row = at.bh.to(gl.int64) * n.tokens_q + at.start_q  # of lse `[B, HQ, Tq]`
    inside = index < at.tokens_q
    gl.store(out.lse + row + index, log_sum(m, l, S), mask=inside)
    gl.store(out.top + row + index, m, mask=inside)
    gl.store(out.total + row + index, l, mask=inside)


@gluon.jit
def forward_group(group: gl.constexpr, x, out, rings, queue, n, S: gl.constexpr):
    """Four warps with 64 queries of each block."""
    if group == S.BM // 64 - 1:  # the first group begins
        pass_turn(group, S)
    turn, base = gl.to_tensor(0), gl.to_tensor(0)
    if S.OWN_RESULTS:
        at = told_block(queue, turn, n, S)
        while at.first >= 0:
            keys = tiles_of_keys(at, base, n, S)
            attend_block(group, at, keys, turn, x, out, rings, n, S)
            base += keys.count
            turn += 1
            at = told_block(queue, turn, n, S)
    else:
        at = find_queries(gl.program_id(0), x.table, n, S)
        if has_queries(at):
            attend_block(group, at, tiles_of_keys(at, base, n, S), turn, x, out, rings, n, S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def hopper_forward_kernel(x, out, q_tiles, q_rest, k_tiles, k_rest, v_tiles, v_rest, n, S: gl.constexpr):
    """o, lse, m and l of blocks of BM queries, one after another."""
    GROUPS: gl.constexpr = S.BM // 64
    q = ring(GROUPS, (q_tiles, q_rest), 1)
    READERS: gl.constexpr = 0 if left_by_name(S.QK.FIRST, S.QK.SECOND) else GROUPS
    if S.SECONDS:
        k, v = rings_sharing((k_tiles, k_rest), (v_tiles, v_rest), READERS, S)
    else:
        k, v = ring(S.STAGES, (k_tiles, k_rest), READERS), ring(S.STAGES, (v_tiles, v_rest), READERS)
    o = q.tiles
    if S.OWN_RESULTS:
        o = allocate_results(GROUPS, (v_tiles, v_rest))
    rings = ForwardRings(q, k, v, o)
    queue = block_queue(out.counter, S)
    descriptors = ((q_tiles, q_rest), (k_tiles, k_rest), (v_tiles, v_rest))
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (forward_group, (0, x, out, rings, queue, n, S)),
                (forward_group, (1, x, out, rings, queue, n, S)),
                (forward_copies, (x, descriptors, rings, queue, n, S)),
            ],
            [4, 1],
            [REGISTERS_OF_TWO, COPIES_OF_TWO],
        )
    else:
        gl.warp_specialize(
            [
                (forward_group, (0, x, out, rings, queue, n, S)),
                (forward_group, (1, x, out, rings, queue, n, S)),
                (forward_group, (2, x, out, rings, queue, n, S)),
                (forward_copies, (x, descriptors, rings, queue, n, S)),
            ],
            [4, 4, 1],
            [REGISTERS_OF_THREE, REGISTERS_OF_THREE, COPIES_OF_THREE],
        )
