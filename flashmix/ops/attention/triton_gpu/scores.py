"""From products `q k^T` to probabilities and back: units, softcap, what is added to a score, who sees whom, dropout.

A tile of scores has a position (of a query) on one axis and a key on the other. The functions take both as tensors that
broadcast, `[BM, 1]` and `[1, BN]` or the other way round, and so serve `q k^T` as well as `k q^T`. `S` is an `AttentionSpec`, `n` its
`AttentionNumbers`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # where a running maximum starts: the difference of two of them is 0


class ScoreRows(NamedTuple):
    """The rows' side of a tile of scores."""

    position: Any
    level: Any  # taken off a row's scores: m + log l, in float32 m
    share: Any  # float32: 1 / l
    decay: Any  # G in two parts


class ScoreKeys(NamedTuple):
    """The keys' side of a tile of scores."""

    key: Any
    tokens: Any
    decay: Any  # G in two parts
    bias: Any  # from the keys to a reference position, where rows have theirs taken off `level`


@triton.jit
def in_units(x, S: tl.constexpr):
    """A number added to scores, in their units: natural in float32, log 2 in half precision."""
    if S.EXACT:
        return x.to(tl.float32)
    else:
        return x.to(tl.float32) * LOG2_E


@triton.jit
def times(x, factor, S: tl.constexpr):
    """`x factor`; in float32 rounded by itself, whatever is added to it then.

    Fused with the subtraction of a row's largest score it would leave that score at half a digit instead of 0, and a row
    that sees one key would not give its value.
    """
    if S.EXACT and not S.INTERPRETED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * factor


@triton.jit
def _exp(x):
    """e^x to one unit in the last place: a polynomial (Cephes) of what whole powers of 2 leave of x. 0 below -88, x at most 88."""
    x = tl.where(x < -100.0, -100.0, x)
    whole = tl.floor(x * LOG2_E + 0.5)
    rest = (x - whole * 0.693359375) + whole * 2.12194440e-4  # ln 2 in two parts
    y = ((1.9875691500e-4 * rest + 1.3981999507e-3) * rest + 8.3334519073e-3) * rest + 4.1665795894e-2
    y = (((y * rest + 1.6666665459e-1) * rest + 5.0000001201e-1) * (rest * rest) + rest) + 1.0
    power = tl.maximum(whole.to(tl.int32), -127) + 127
    return y * (power << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponential(x, S: tl.constexpr):
    """A probability from its score, both in the units of `in_units`.

    Half precision takes the GPU's own 2^x, which is right to 2 units in the last place.
    """
    if S.EXACT:
        return _exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def log_sum(m, l, S: tl.constexpr):
    """`m + log l`, natural, of a row's largest score and sum."""
    if S.EXACT:
        return m + tl.log(l)
    else:
        return (m + tl.log2(l)) * LN_2


@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, S: tl.constexpr):
    """For half precision the GPU's own, to 2^-11; else to float32: a polynomial near 0 (Cephes), `1 - 2 / (e^2x + 1)` beyond."""
    if S.FAST_TANH:
        return _tanh_approx(x)
    else:
        z = x * x
        near = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
        near = (near * z - 3.33332819422e-1) * z * x + x
        far = 1.0 - tl.div_rn(2.0, _exp(tl.minimum(tl.abs(x), 20.0) * 2.0) + 1.0)
        return tl.where(z < 0.390625, near, tl.where(x < 0, -far, far))


@triton.jit
def visible(position, key, tokens_k, n, S: tl.constexpr):
    """Whether the query at `position` sees `key`."""
    seen = key < tokens_k
    if S.CAUSAL:
        seen = seen & (key <= position)
    elif S.RIGHT:
        seen = seen & (key <= position + n.right)
    if S.LEFT:
        seen = seen & (key >= position - n.left)
    return seen


@triton.jit
def decay_between(decay_q, decay_k):
    """`G_q - G_k`, both in two parts."""
    high_q, low_q = decay_q
    high_k, low_k = decay_k
    return (high_q - high_k) + (low_q - low_k)


@triton.jit
def expanded(pair, AXIS: tl.constexpr):
    """Both parts of G `[rows]` as `[1, rows]` (AXIS 0) or `[rows, 1]` (AXIS 1)."""
    high, low = pair
    return tl.expand_dims(high, AXIS), tl.expand_dims(low, AXIS)


@triton.jit
def biased(x, position, key, slope, decay_q, decay_k, S: tl.constexpr):
    """Scores with ALiBi and the decay between key and query added, exact to float32 wherever the two stand.

    `decay_q` and `decay_k` are G in two parts each and broadcast.
    """
    if S.ALIBI:
        x -= slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
    if S.DECAY:
        x += decay_between(decay_q, decay_k)
    return x


@triton.jit
def bias_of_rows(position, reference, slope, decay_q, decay_ref, S: tl.constexpr):
    """What the way from a `reference` position to a later row takes off all scores of the row, `[rows]`."""
    bias = position.to(tl.float32) * 0.0
    if S.DECAY:
        bias += decay_between(decay_q, decay_ref)
    if S.ALIBI and S.CAUSAL:
        bias -= slope * (position - reference).to(tl.float32)
    return bias


@triton.jit
def bias_of_keys(key, reference, slope, decay_k, decay_ref, S: tl.constexpr):
    """What the way from a key up to a `reference` position takes off, `[keys]`; with `bias_of_rows` the whole bias.

    The two are kept apart where every key is before every row: that is one addition an element instead of four.
    """
    bias = key.to(tl.float32) * 0.0
    if S.DECAY:
        bias += decay_between(decay_ref, decay_k)
    if S.ALIBI and S.CAUSAL:
        bias -= slope * (reference - key).to(tl.float32)
    return bias


@triton.jit
def _mixed(x):
    x = x * 0x2C1B3C6D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x297A2D39
    return x ^ ((x >> 14) & 0x3FFFF)


@triton.jit
def dropout_rows(seed, head, rows):
    """Dropout's hash of query rows, int32 (see `portable/dropout.py`)."""
    number = tl.load(seed)
    low = (number & 0x7FFFFFFF).to(tl.int32)
    high = (number >> 31).to(tl.int32)
    return _mixed(_mixed(_mixed(low + _mixed(head)) + high) + _mixed(rows))


@triton.jit
def dropout_keeps(of_row, key, threshold):
    """Whether dropout keeps a probability: the same function of (seed, head, row, key) as in `portable/dropout.py`."""
    return _mixed(of_row + _mixed(key)) >= threshold


@triton.jit
def probabilities(s, rows, keys, slope, n, MASK: tl.constexpr, S: tl.constexpr):
    """P of a tile from `q k^T`, and tanh(scores / softcap). Unless MASK, the level of `rows` has their bias taken off it."""
    squashed = s
    x = times(s, n.scale, S)
    if S.SOFTCAP:
        squashed = tanh(x, S)
        x = times(squashed, n.softcap, S)
    if MASK:
        x = biased(x, rows.position, keys.key, slope, rows.decay, keys.decay, S)
    elif S.DECAY or (S.ALIBI and S.CAUSAL):
        x += keys.bias
    if S.ALIBI and not MASK and not S.CAUSAL:
        x -= slope * tl.abs(rows.position.to(tl.float32) - keys.key.to(tl.float32))
    x -= rows.level
    if MASK:
        x = tl.where(visible(rows.position, keys.key, keys.tokens, n, S), x, -float("inf"))
    p = exponential(x, S)
    if S.EXACT:
        p *= rows.share
    return p, squashed


@triton.jit
def score_gradients(p, d_p, squashed, delta, flow, keeps, keep_scale, S: tl.constexpr):
    """dS of the whole score, and of `scale q k^T`, from P and `dO V^T`."""
    if S.DROPOUT:
        d_p = tl.where(keeps, d_p * keep_scale, 0.0)
    d_p -= delta
    if S.EXACT:
        d_p += flow  # of lse: by itself, or it would be rounded as delta is
    d_s = p * d_p
    if S.SOFTCAP:
        return d_s, d_s * (1.0 - squashed * squashed)
    else:
        return d_s, d_s
