"""The walk of a group of attention's forward on Hopper over the tiles of keys, see `forward`."""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import (
    accumulator,
    arrive_at_group,
    ex2,
    gl,
    gluon,
    halves,
    joined,
    pin,
    products_done,
    row_pieces,
    sync_group,
    wait_full,
)
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
    first_key,
    from_last,
    let_go,
    tile_of_k,
    tile_of_v,
)
from flashmix.ops.attention.gluon_hopper.scores import (
    EDGE,
    EITHER,
    KEPT,
    WHOLE,
    bias_of_tile,
    exponents,
    gates_at_end,
    keeps_m,
    row_sums,
    way_of_tile,
)
from flashmix.ops.attention.gluon_hopper.tiles import (
    accumulate,
    as_operand,
    as_words,
    by_halves,
    half_in_registers,
    in_halves,
    in_registers,
    operand_of_words,
    scores,
    times_rows,
)
from flashmix.ops.attention.triton_gpu.scores import LOWEST

LEAST = gl.constexpr(LOWEST.value)
TURNS = gl.constexpr(5)  # named barriers, a number for each group that takes turns


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
    if holds_queries(S.BN, S.QK.ALL, S.CAUSAL):
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
    if in_words(V.ALL, S.DECAY or S.ALIBI, S.FIRST_MAX, S.LEFT):
        return as_words(p, dtype)
    else:
        return as_operand(p, dtype, V)


@gluon.jit
def carried_operand(p, dtype: gl.constexpr, S: gl.constexpr):
    """The left operand of `accumulate` that is `carried`."""
    V: gl.constexpr = S.V
    if in_words(V.ALL, S.DECAY or S.ALIBI, S.FIRST_MAX, S.LEFT):
        return operand_of_words(p, dtype, V)
    else:
        return p


@gluon.jit
def await_product(acc, p, l, shrink, FRESH: gl.constexpr, S: gl.constexpr):
    """The sums and the left operand of `p v`, when that is done; l and shrink are computed before."""
    V: gl.constexpr = S.V
    acc_1, acc_2 = acc
    p_1, p_2 = p
    if V.SECOND > 0:
        if FRESH:
            acc_1, acc_2, p_1, p_2, l, shrink = products_done(0, [acc_1, acc_2, p_1, p_2, l, shrink])
        else:
            acc_1, acc_2, p_1, p_2, l = products_done(0, [acc_1, acc_2, p_1, p_2, l])
        return (acc_1, acc_2), (p_1, p_2), l, shrink
    else:
        if FRESH:
            acc_1, p_1, l, shrink = products_done(0, [acc_1, p_1, l, shrink])
        else:
            acc_1, p_1, l = products_done(0, [acc_1, p_1, l])
        return (acc_1, acc_1), (p_1, p_1), l, shrink


@gluon.jit
def attend(state, span, keys, rows, reads, group, n, KIND: gl.constexpr, S: gl.constexpr):
    """Takes the `span` of tiles of the keys into `state`: `(a, p of the tile before, m, l, what a is still to be multiplied by)`.

    p is as it is `carried`. Where m stays what it is a is not multiplied; else m is the running maximum.
    """
    V: gl.constexpr = S.V
    QUARTER: gl.constexpr = quarter_first(V.ALL, S.DECAY or S.SOFTCAP, not S.FIRST_MAX)
    PV: gl.constexpr = 2 if S.V.SECOND > 0 else 1  # products of `p v`
    FRESH: gl.constexpr = not keeps_m(KIND)
    LATE: gl.constexpr = FRESH and late(S.V.ALL)
    acc, p, m, l, shrink = state
    begin, end = span
    q, rings = reads
    dtype: gl.constexpr = rings.v.tiles[0].dtype
    gates = (0.0, 0.0)
    if KIND == WHOLE:
        gates = gates_at_end(rows, first_key(keys, gl.minimum(begin, keys.count - 1), S), keys.tokens, S)
    for i in range(begin, end):
        bias = m
        if KIND == WHOLE:
            start = first_key(keys, i, S)
            bias = (bias_of_tile(rows, start, S), way_of_tile(rows, start, gates, S))
            ahead = first_key(keys, gl.minimum(i + 1, keys.count - 1), S)
            gates = gates_at_end(rows, ahead, keys.tokens, S)
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
        if FRESH:
            shrink = pin(ex2(m - top))
            m = top
            l = l * gl.convert_layout(shrink, gl.SliceLayout(1, row_pieces()))[:, None]
        first = ex2(first)
        l = pin(l + row_sums(first))
        # a branch, over which ptxas does not raise the wait for `p v`; what is left to do runs beside the other exponentials
        wait_full(rings.k.full, use + 1, i + 1 < keys.count)
        acc, p, l, shrink = await_product(acc, p, l, shrink, FRESH, S)
        let_go(V_READ, rings.v, use - 1, S)
        if QUARTER:
            rest = ex2(rest)
            l += row_sums(rest)
            first = joined(first, rest)
        second = ex2(second)
        l += row_sums(second)
        if FRESH and not LATE:  # a = a 2^(m - m')
            acc = times_rows(acc, shrink, V)
        p = carried(joined(first.to(dtype), second.to(dtype)), dtype, S)
    return acc, p, m, l, shrink


@gluon.jit
def settled(state, S: gl.constexpr):
    """The state of `attend` where m is to stay, with a multiplied by what it still was to be."""
    V: gl.constexpr = S.V
    acc, p, m, l, shrink = state
    if late(S.V.ALL):
        acc = times_rows(acc, shrink, V)
    return acc, p, m, l, shrink


@gluon.jit
def all_keys_from_last(state, keys, rows, reads, group, n, S: gl.constexpr):
    """`all_keys` with a bias, from the last: those that not all rows see, until each has seen its own key, then those that all see whole,
    then those that a window cuts off.

    The bias of whole tiles is in two: from each key to the block's first row, and from there to each row, from which m is counted there.
    That is one addition an element instead of four.
    """
    end = keys.end - gl.where((rows.reference + 1 - keys.low) % S.BN == 0, 1, 0)  # the first row's own key ends a tile
    own = gl.minimum(gl.maximum(keys.count - end, 1), keys.count)
    state = settled(attend(state, (1, own), keys, rows, reads, group, n, EDGE, S), S)
    cut = keys.count
    if S.LEFT:
        cut = gl.maximum(keys.count - keys.begin, own)
    acc, p, m, l, shrink = state
    acc, p, _, l, shrink = attend((acc, p, m - rows.bias, l, shrink), (own, cut), keys, rows, reads, group, n, WHOLE, S)
    state = (acc, p, m, l, shrink)
    if S.LEFT:
        state = attend(state, (cut, keys.count), keys, rows, reads, group, n, KEPT, S)
    return state


@gluon.jit
def all_keys(state, keys, rows, reads, group, n, S: gl.constexpr):
    """Takes all tiles after the first into `state`. With FIRST_MAX m stays when each row has seen a key."""
    if from_last(S.FIRST_MAX, S.DECAY or S.ALIBI):
        return all_keys_from_last(state, keys, rows, reads, group, n, S)
    else:
        begin = 1
        if S.FIRST_MAX and S.LEFT:
            begin = gl.minimum(gl.maximum(keys.begin, 0) + 1, keys.count)
            state = settled(attend(state, (1, begin), keys, rows, reads, group, n, EITHER, S), S)
        REST: gl.constexpr = KEPT if S.FIRST_MAX else EITHER
        return attend(state, (begin, keys.count), keys, rows, reads, group, n, REST, S)


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
def largest_scores(group: gl.constexpr, q, keys, all_tiles, rows, rings, n, S: gl.constexpr):
    """The largest score of each row, over all tiles."""
    m = gl.full([64], LEAST, gl.float32, gl.SliceLayout(1, accumulator(S.BN)))
    for i in range(keys.count):
        wait_full(rings.k.full, keys.base + i)
        await_turn(group, S)
        s = scores_of(q, tile_of_k(rings, keys, i, S), S)  # [64, BN]
        pass_turn(group, S)
        s = products_done(0, [s])
        let_go(K_READ, rings.k, keys.base + i, S)
        _, m = exponents(s, m, rows, keys, i, m, n, EITHER, S)
        wait_full(rings.v.full, keys.base + i)
        let_go(V_READ, rings.v, keys.base + i, S)
    for i in range(keys.count, all_tiles):
        pass_by(group, keys.base + i, rings, S)
    return m
