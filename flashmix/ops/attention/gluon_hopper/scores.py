"""From products `q k^T` to probabilities on Hopper, forward and backward; the mathematics is `triton_gpu.scores`'s."""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import accumulator, gl, gluon, opaque_zero, row_pieces
from flashmix.ops.attention.gluon_hopper.forward_choices import masked_raw
from flashmix.ops.attention.gluon_hopper.forward_copies import first_key, number_of
from flashmix.ops.attention.triton_gpu.forward import bias_of_way
from flashmix.ops.attention.triton_gpu.scores import biased, expanded, tanh, visible
from flashmix.ops.attention.triton_gpu.tiles import load_decay

# How a tile is masked: not at all, with what is added to scores in two parts; always; where the tile is not whole; likewise. In the forward
# m is the running maximum at EDGE and EITHER, and stays what it is at WHOLE and KEPT.
WHOLE, EDGE, EITHER, KEPT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def scaled(s, n, S: gl.constexpr):
    """Scores in units of log 2 from `q k^T`, and tanh(scores / softcap)."""
    squashed = s
    y = s * n.scale
    if S.SOFTCAP:
        squashed = tanh(y, S)
        y = squashed * n.softcap
    return y, squashed


@gluon.constexpr_function
def keeps_m(kind):
    """Whether m stays what it is."""
    return kind in (WHOLE, KEPT)


@gluon.jit
def hidden(edge, KIND: gl.constexpr):
    """Whether a tile has scores that are not seen; `edge`: whether it may have."""
    if KIND == WHOLE:
        return False
    elif KIND == EDGE:
        return True
    else:
        return edge


@gluon.jit
def keys_seen(y, position, start, tokens_k, n, S: gl.constexpr):
    """Scores of a tile of keys from `start`, `-inf` where queries at `position`, `[rows, 1]`, do not see a key."""
    if S.DECAY:  # gates are loaded with some of these masks
        return gl.where(visible(position, start + columns_of(y), tokens_k, n, S), y, -float("inf"))
    else:
        last = tokens_k - 1
        if S.CAUSAL:
            last = gl.minimum(last, position)
        elif S.RIGHT:
            last = gl.minimum(last, position + n.right)
        y = up_to(y, last - start)
        if S.LEFT:
            y = from_on(y, position - n.left - start)
        return y


@gluon.jit
def queries_seeing(y, key, start, tokens_k, n, S: gl.constexpr):
    """Scores of a tile of queries at positions from `start`, `-inf` where a query does not see a `key`, `[rows, 1]`."""
    if y.shape[0] == 128:  # roles of eight warps are 1 % slower by columns
        return gl.where(visible(start + columns_of(y), key, tokens_k, n, S), y, -float("inf"))
    else:
        if S.CAUSAL or S.RIGHT:
            first = key - start
            if not S.CAUSAL:
                first -= n.right
            y = from_on(y, gl.where(key < tokens_k, first, y.shape[1]))
        else:
            y = gl.where(key < tokens_k, y, -float("inf"))
        if S.LEFT:
            y = up_to(y, key + n.left - start)
        return y


@gluon.jit
def up_to(y, last):
    """y, `-inf` behind column `last` of each row, `[rows, 1]`, or of all."""
    known, own = known_and_own(columns_of(y))
    return gl.where(known <= last - own, y, -float("inf"))


@gluon.jit
def from_on(y, first):
    """y, `-inf` before column `first` of each row, `[rows, 1]`."""
    known, own = known_and_own(columns_of(y))
    return gl.where(known >= first - own, y, -float("inf"))


@gluon.jit
def columns_of(y):
    """The columns' numbers of a tile in the layout `accumulator`, `[1, columns]`."""
    return gl.arange(0, y.shape[1], gl.SliceLayout(0, accumulator(y.shape[1], y.shape[0])))[None, :]


@gluon.jit
def known_and_own(columns):
    """`columns_of` as two numbers whose sum they are: 8 j + (0 or 1), which is known of a register when the kernel is compiled, and a
    thread's own number, 0 to 6."""
    return columns & ~6, columns & 6


@gluon.jit
def bias_of_tile(rows, start, S: gl.constexpr):
    """What is added to the scores of a whole tile for the way from its keys to the tile's end, `[1, BN]`."""
    place = gl.arange(0, S.BN, gl.SliceLayout(0, accumulator(S.BN)))
    from_end = (place - (S.BN - 1)).to(gl.float32)
    if S.DECAY:
        known, own = known_and_own(place)
        falls = gl.load(
            rows.gates_to_end + (start + own + opaque_zero()) + known
        )  # [BN]; one address, not one a column
    else:
        falls = rows.slope * from_end
    if S.DECAY and S.ALIBI:
        falls += rows.slope * from_end
    return falls[None, :]


@gluon.jit
def gates_at_end(rows, start, tokens_k, S: gl.constexpr):
    """Both parts of G at the end of the tile of keys from `start`; 0 if it is not whole."""
    if S.DECAY:
        high, low = rows.gates
        end = start + (S.BN - 1)
        inside = end < tokens_k
        return gl.load(high + end, mask=inside, other=0.0), gl.load(low + end, mask=inside, other=0.0)  # []
    else:
        return 0.0, 0.0


@gluon.jit
def way_of_tile(rows, start, end, S: gl.constexpr):
    """What is added for the way from a tile's end, where G is `end`, to the block's first row."""
    return bias_of_way(rows.decay_ref, end, rows.reference - start - (S.BN - 1), rows.slope, S)


@gluon.jit
def raised(m, largest, S: gl.constexpr):
    """What scores are counted from: m, or what lies above the `largest` of each row."""
    if S.HEADROOM > 0:
        largest += S.HEADROOM
    return gl.maximum(m, largest)


@gluon.jit
def exponents(s, m, rows, keys, i, bias, n, KIND: gl.constexpr, S: gl.constexpr):
    """log2 of P of `q k^T` of the `i`-th tile of keys, `[64, BN]`, and what it is counted from: m if that stays, else the running maximum
    with it."""
    V: gl.constexpr = S.V
    RAW: gl.constexpr = masked_raw(V.ALL, S.SCALED, S.SOFTCAP, S.DECAY or S.ALIBI)
    start = first_key(keys, i, S)
    number = number_of(keys, i, S)
    edge = (number < keys.begin) | (number >= keys.end)
    key = (start + gl.arange(0, S.BN, gl.SliceLayout(0, accumulator(S.BN))))[None, :]
    if RAW:
        factor = n.scale
        if S.SOFTCAP:
            s, factor = tanh(s * n.scale, S), n.softcap
        if hidden(edge, KIND):
            s = keys_seen(s, rows.position, start, keys.tokens, n, S)
        top = m
        if not keeps_m(KIND):
            top = raised(m, gl.max(s, 1) * factor, S)
        return s * factor - top[:, None], top
    else:
        y, _ = scaled(s, n, S)
        way = 0.0
        if KIND == WHOLE:
            falls, way = bias
            y += falls
        elif S.DECAY or S.ALIBI:
            decay_k = (0.0, 0.0)
            if S.DECAY:
                L: gl.constexpr = gl.SliceLayout(0, accumulator(S.BN))
                at = start + gl.arange(0, S.BN, L)
                decay_k = expanded(load_decay(rows.gates, at, keys.tokens, True), 0)  # [1, BN]
            y = biased(y, rows.position, key, rows.slope, rows.decay, decay_k, S)
        if hidden(edge, KIND):
            y = keys_seen(y, rows.position, start, keys.tokens, n, S)
        top = m
        if not keeps_m(KIND):
            top = raised(m, gl.max(y, 1), S)
        return y - (top - way)[:, None], top


@gluon.jit
def row_sums(p):
    """The sums of each row over the columns that a thread has, `[64, 4]`; the four of a row are added at the end."""
    pieces = gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(pieces, row_pieces())
