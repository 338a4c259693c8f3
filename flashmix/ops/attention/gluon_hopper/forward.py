"""Forward of softmax attention on Hopper: warps that copy, and groups of four warps, 64 queries each, that compute.

One warp copies the tiles of q, then k and v in turns through rings in shared memory. Each group walks over the keys:

    S_i = q k_i^T and a += P_{i-1} v_{i-1} are issued together; the softmax of S_i runs under the second product
    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m')
    o = a / l;  lse = (m + log2 l) / log2 e;  a sink comes last, as a score whose value is 0

With FIRST_MAX (all but slopes that are not causal) m is the largest score of a row's first tile alone, so that p = 2^(s - m) waits for no
maximum and a is never rescaled; p, l and a are floating-point numbers, which keep their precision with any m. Sums that leave their range,
where later scores are some 70 natural units above the first tile's, are noticed at a block's end (`within_range`), and the block comes
again with m the largest score of all. In float16, whose range is smaller, m lies HEADROOM above that. With gates and slopes the keys are
walked over from the last, near which scores have the least taken off them.

Scores, masks and what is kept for backward are those of `triton_gpu`. A block of queries that see nothing takes one tile of which
nothing is visible.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import accumulator, ex2, fence_async_shared, gl, gluon, products_done, release, wait_full
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.gluon_hopper.forward_choices import late
from flashmix.ops.attention.gluon_hopper.forward_copies import (
    K_READ,
    V_READ,
    ForwardRings,
    KeyTiles,
    forward_copies,
    left_by_name,
    let_go,
    tile_of_k,
    tile_of_v,
    tiles_of_group,
    tiles_of_keys,
    walks_alone,
)
from flashmix.ops.attention.gluon_hopper.forward_queue import block_queue, judge, told_block
from flashmix.ops.attention.gluon_hopper.forward_walk import (
    LEAST,
    all_keys,
    await_turn,
    carried,
    carried_operand,
    largest_scores,
    pass_by,
    pass_turn,
    queries_of,
    scores_of,
)
from flashmix.ops.attention.gluon_hopper.scores import EDGE, EITHER, exponents, row_sums
from flashmix.ops.attention.gluon_hopper.table import REGISTERS
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    allocate_results,
    ring,
    tile_of,
    times_rows,
    waited,
    write_rows,
    zero_sums,
)
from flashmix.ops.attention.triton_gpu.forward import query_rows
from flashmix.ops.attention.triton_gpu.scores import in_units, log_sum
from flashmix.ops.attention.triton_gpu.tiles import result_rows

MOST = gl.constexpr(2.0**100)  # sums l from here on are not `within_range`
REGISTERS_OF_TWO, COPIES_OF_TWO = gl.constexpr(REGISTERS[2][1]), gl.constexpr(REGISTERS[2][2])
REGISTERS_OF_THREE, COPIES_OF_THREE = gl.constexpr(REGISTERS[3][1]), gl.constexpr(REGISTERS[3][2])


class HopperResults(NamedTuple):
    o: Any  # [B, Tq, HQ, V]
    lse: Any  # [B, HQ, Tq], as m and l
    top: Any
    total: Any
    counter: Any  # of blocks


@gluon.jit
def within_range(acc, l, S: gl.constexpr):
    """Whether the sums of 64 queries are finite, and l small enough for 1 / l to be a normal number."""
    V: gl.constexpr = S.V
    L: gl.constexpr = gl.SliceLayout(1, accumulator(S.BN))
    acc_1, acc_2 = acc
    nothing = gl.convert_layout(gl.sum(acc_1 * 0.0, 1), L)  # or NaN, [64]
    if V.SECOND > 0:
        nothing += gl.convert_layout(gl.sum(acc_2 * 0.0, 1), L)
    return gl.min(((l < MOST) & (nothing == 0)).to(gl.int32), 0)


@gluon.jit
def attend_block(group: gl.constexpr, place, keys, x, out, rings, queue, n, S: gl.constexpr):
    """o, lse, m and l of 64 queries of a block, from its `place`: where it lies, whether it comes again, how many came before."""
    at, again, turn = place
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
    wait_full(rings.q.full, turn * GROUPS + group)
    q = queries_of(tile_of(rings.q.tiles, group), S)
    if S.FIRST_MAX:
        if again != 0:
            m = largest_scores(group, q, keys, all_tiles, rows, rings, n, S)
        base = keys.base + again * all_tiles
        keys = KeyTiles(base, keys.low, keys.begin, keys.end, keys.count, keys.tokens)
    # the first tile
    wait_full(rings.k.full, keys.base)
    await_turn(group, S)
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
    if not S.FIRST_MAX and late(S.V.ALL):
        acc = times_rows(acc, shrink, V)
    p = carried_operand(p, dtype, S)
    acc = waited(accumulate(acc, p, tile_of_v(rings, keys, keys.count - 1, S), V), V)
    let_go(V_READ, rings.v, last, S)
    if ALONE:  # the tiles that the other groups see
        for i in range(keys.count, all_tiles):
            pass_by(group, keys.base + i, rings, S)
    l = gl.convert_layout(gl.sum(l, 1), L)
    if S.FIRST_MAX:
        judge(group, within_range(acc, l, S), turn, queue, S)
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
    if not S.OWN_RESULTS:
        fence_async_shared()
        release(rings.q.empty, turn * GROUPS + group)
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
    at, again = told_block(queue, turn, n, S)
    while at.first >= 0:
        keys = tiles_of_keys(at, base, n, S)
        attend_block(group, (at, again, turn), keys, x, out, rings, queue, n, S)
        base += keys.count * (1 + again)
        turn += 1
        at, again = told_block(queue, turn, n, S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def hopper_forward_kernel(x, out, q_tiles, q_rest, k_tiles, k_rest, v_tiles, v_rest, n, S: gl.constexpr):
    """o, lse, m and l of blocks of BM queries, one after another."""
    GROUPS: gl.constexpr = S.BM // 64
    q = ring(GROUPS, (q_tiles, q_rest), 1)
    READERS: gl.constexpr = 0 if left_by_name(S.QK.FIRST, S.QK.SECOND) else GROUPS
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
