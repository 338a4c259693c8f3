"""What forward and backward share: where a program works, what it loads, what is added to a score and who sees whom.

A tile of scores has a position (of a query) on one axis and a key on the other. The functions take both as tensors that
broadcast, `[BM, 1]` and `[1, BN]` or the other way round, and so serve `q k^T` as well as `k q^T`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # where a running maximum starts: the difference of two of them is 0


@triton.jit
def find_place(pid, blocks, heads, at_once):
    """(head, block): `at_once` heads take turns, so that their keys stay in cache, block by block in order."""
    in_group = blocks * at_once
    group = pid // in_group
    rest = pid - group * in_group
    width = tl.minimum(at_once, heads - group * at_once)
    block = rest // width
    return group * at_once + rest - block * width, block


@triton.jit
def bounded(cu_seqlens, n, low, total):
    """Boundary `n`, whatever the tensor holds between `low` and `total`."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), low), total)


@triton.jit
def find_sequence(slot, table):
    """The block of a packed sequence that a slot of `launch.packed_blocks` holds: `(sequence, start, tokens, start of the
    other side, tokens there, block)`.

    Past the last sequence there is one more, of what is left, with nothing on the other side; a free slot has no tokens.
    """
    row = table + slot.to(tl.int64) * 8
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@triton.jit
def load_rows(x, start, limit, stride, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
              ROWS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Rows `start ..` and columns `FIRST ..` of x `[T, DIM]` as `[ROWS, WIDTH]`, zero outside; rows are inside unless MASK."""
    rows = start + tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASK:
        if FIRST + WIDTH > DIM:
            return tl.load(at, mask=(rows < limit)[:, None] & (columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    else:
        if FIRST + WIDTH > DIM:
            return tl.load(at, mask=(columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def load_head(x, descriptor, rest, place, start, limit, stride, DIM: tl.constexpr, FIRST: tl.constexpr,
              WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """ROWS rows of one head in its two parts, `[ROWS, WIDTH]` and `[ROWS, WIDTH_2]` (the first again where there is none).

    Through descriptors `[B, H, T, D]` at `place` (batch, head, first row of the sequence) with TMA. These read zeros past T,
    but not past a packed sequence. Unless MASK all rows are inside.
    """
    if descriptor is not None and not (MASK and C.PACKED):
        batch, head, first = place
        a = descriptor.load([batch, head, first + start, FIRST]).reshape([ROWS, WIDTH])
        if WIDTH_2 > 0:
            b = rest.load([batch, head, first + start, FIRST + WIDTH]).reshape([ROWS, WIDTH_2])
            return a, b
        else:
            return a, a
    else:
        a = load_rows(x, start, limit, stride, DIM, FIRST, WIDTH, ROWS, MASK)
        if WIDTH_2 > 0:
            b = load_rows(x, start, limit, stride, DIM, FIRST + WIDTH, WIDTH_2, ROWS, MASK)
            return a, b
        else:
            return a, a


@triton.jit
def store_rows(x, tile, start, limit, stride, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr):  # fmt: skip
    """Writes `[ROWS, WIDTH]` where `load_rows` reads it, within `limit` rows and DIM columns."""
    rows = start + tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    at = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < DIM)[None, :])


@triton.jit
def product(a, a_2, b, b_2, WIDTH_2: tl.constexpr, C: tl.constexpr, begin=None):
    """`a b^T` over both parts of the head, and `begin` where there is one."""
    s = tl.dot(a, tl.trans(b), begin, input_precision=C.PRECISION)
    if WIDTH_2 > 0:
        s = tl.dot(a_2, tl.trans(b_2), s, input_precision=C.PRECISION)
    return s


@triton.jit
def in_units(x, C: tl.constexpr):
    """A number added to scores, in their units: natural in float32, log 2 in half precision."""
    if C.EXACT:
        return x.to(tl.float32)
    else:
        return x.to(tl.float32) * LOG2_E


@triton.jit
def times(x, factor, C: tl.constexpr):
    """`x factor`; in float32 rounded by itself, whatever is added to it then.

    Fused with the subtraction of a row's largest score it would leave that score at half a digit instead of 0, and a row
    that sees one key would not give its value.
    """
    if C.EXACT and not C.INTERPRETED:
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
def exponential(x, C: tl.constexpr):
    """A probability from its score, both in the units of `in_units`.

    Half precision takes the GPU's own 2^x, which is right to 2 units in the last place.
    """
    if C.EXACT:
        return _exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def log_sum(m, l, C: tl.constexpr):
    """`m + log l`, natural, of a row's largest score and sum."""
    if C.EXACT:
        return m + tl.log(l)
    else:
        return (m + tl.log2(l)) * LN_2


@triton.jit
def accumulated(total, a, b, C: tl.constexpr):
    """`total + a b`. In float32 a tile is summed by itself first: one chain over all rows would lose a digit.

    (Starting from `total * 0` keeps the compiler from making it one chain again.)
    """
    if C.EXACT:
        return total + tl.dot(a, b, total * 0.0, input_precision=C.PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=C.PRECISION)


@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, C: tl.constexpr):
    """For half precision the GPU's own, to 2^-11; else to float32: a polynomial near 0 (Cephes), `1 - 2 / (e^2x + 1)` beyond."""
    if C.FAST_TANH:
        return _tanh_approx(x)
    else:
        z = x * x
        near = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
        near = (near * z - 3.33332819422e-1) * z * x + x
        far = 1.0 - tl.div_rn(2.0, _exp(tl.minimum(tl.abs(x), 20.0) * 2.0) + 1.0)
        return tl.where(z < 0.390625, near, tl.where(x < 0, -far, far))


@triton.jit
def visible(position, key, tokens_k, left, right, C: tl.constexpr):
    """Whether the query at `position` sees `key`."""
    seen = key < tokens_k
    if C.CAUSAL:
        seen = seen & (key <= position)
    elif C.RIGHT:
        seen = seen & (key <= position + right)
    if C.LEFT:
        seen = seen & (key >= position - left)
    return seen


@triton.jit
def load_decay(high, low, at, tokens, MASK: tl.constexpr):
    """The running sum G of the gates at `at`, in two float32 parts; with MASK, outside the sequence that of its end."""
    if MASK:
        at = tl.minimum(tl.maximum(at, 0), tokens - 1)
        return tl.load(high + at, mask=at >= 0, other=0.0), tl.load(low + at, mask=at >= 0, other=0.0)
    else:
        return tl.load(high + at), tl.load(low + at)


@triton.jit
def padded_tokens(tokens):
    """The row length of float32 numbers by token: a multiple of 16 bytes, so that they are loaded two or four at a time."""
    return (tokens + 3) // 4 * 4


@triton.jit
def load_numbers(x, at, tokens, other, EDGE: tl.constexpr):
    """Numbers by token `[rows]`; with EDGE `other` past the last one."""
    if EDGE:
        return tl.load(x + at, mask=at < tokens, other=other)
    else:
        return tl.load(x + at)


@triton.jit
def biased(x, position, key, slope, decay_q, decay_k, C: tl.constexpr):
    """Scores with ALiBi and the decay between key and query added, exact to float32 wherever the two stand.

    `decay_q` and `decay_k` are G in two parts each and broadcast.
    """
    if C.ALIBI:
        x -= slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
    if C.DECAY:
        x += (decay_q[0] - decay_k[0]) + (decay_q[1] - decay_k[1])
    return x


@triton.jit
def bias_of_rows(position, reference, slope, decay_q, decay_ref, C: tl.constexpr):
    """What the way from a `reference` position to a later row takes off all scores of the row, `[rows]`."""
    bias = position.to(tl.float32) * 0.0
    if C.DECAY:
        bias += (decay_q[0] - decay_ref[0]) + (decay_q[1] - decay_ref[1])
    if C.ALIBI and C.CAUSAL:
        bias -= slope * (position - reference).to(tl.float32)
    return bias


@triton.jit
def bias_of_keys(key, reference, slope, decay_k, decay_ref, C: tl.constexpr):
    """What the way from a key up to a `reference` position takes off, `[keys]`; with `bias_of_rows` the whole bias.

    The two are kept apart where every key is before every row: that is one addition an element instead of four.
    """
    bias = key.to(tl.float32) * 0.0
    if C.DECAY:
        bias += (decay_ref[0] - decay_k[0]) + (decay_ref[1] - decay_k[1])
    if C.ALIBI and C.CAUSAL:
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
    """Dropout's hash of query rows, int32 (see `dropout.py`)."""
    number = tl.load(seed)
    low = (number & 0x7FFFFFFF).to(tl.int32)
    high = (number >> 31).to(tl.int32)
    return _mixed(_mixed(_mixed(low + _mixed(head)) + high) + _mixed(rows))


@triton.jit
def dropout_keeps(of_row, key, threshold):
    """Whether dropout keeps a probability: the same function of (seed, head, row, key) as in `dropout.py`."""
    return _mixed(of_row + _mixed(key)) >= threshold


@triton.jit
def keys_of_rows(first, tokens_k, left, right, C: tl.constexpr):
    """The keys that BM queries from position `first` see: all in `[low, high)`; whole tiles that all of them see in
    `[inner, outer)`. All are multiples of BN but `high`, and `low <= inner <= outer`."""
    low = 0
    high = tokens_k
    outer = tokens_k
    if C.CAUSAL:
        high = tl.minimum(high, first + C.BM)
        outer = tl.minimum(outer, first + 1)
    elif C.RIGHT:
        high = tl.minimum(high, first + C.BM + right)
        outer = tl.minimum(outer, first + 1 + right)
    if C.LEFT:
        low = tl.maximum(first - left, 0) // C.BN * C.BN
        inner = tl.cdiv(tl.maximum(first + C.BM - 1 - left, 0), C.BN) * C.BN
        inner = tl.maximum(tl.minimum(inner, tl.cdiv(tl.maximum(high, 0), C.BN) * C.BN), low)
    else:
        inner = low
    return low, inner, tl.maximum(tl.maximum(outer, 0) // C.BN * C.BN, inner), high


@triton.jit
def rows_of_keys(first, shift, tokens_q, left, right, C: tl.constexpr):
    """The queries that see some of BN keys from `first`, as `keys_of_rows` has it; query i stands at `i + shift`."""
    low = 0
    high = tokens_q
    inner = 0
    outer = tokens_q
    if C.CAUSAL:
        low = tl.maximum(first - shift, 0) // C.BM * C.BM
        inner = first + C.BN - 1 - shift
    elif C.RIGHT:
        low = tl.maximum(first - right - shift, 0) // C.BM * C.BM
        inner = first + C.BN - 1 - right - shift
    if C.LEFT:
        high = tl.minimum(high, first + C.BN + left - shift)
        outer = tl.minimum(outer, first + left - shift + 1)
    inner = tl.cdiv(tl.maximum(inner, 0), C.BM) * C.BM
    inner = tl.maximum(tl.minimum(inner, tl.cdiv(tl.maximum(high, 0), C.BM) * C.BM), low)
    return low, inner, tl.maximum(tl.maximum(outer, 0) // C.BM * C.BM, inner), high


@triton.jit
def probabilities(s, position, key, level, share, decay_q, decay_k, key_bias, numbers, scale, MASK: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """P of a tile from `q k^T`, and tanh(scores / softcap). Unless MASK, `level` has the bias of the rows taken off it."""
    tokens_k, _, softcap, left, right, slope, _, _ = numbers
    squashed = s
    x = times(s, scale, C)
    if C.SOFTCAP:
        squashed = tanh(x, C)
        x = times(squashed, softcap, C)
    if MASK:
        x = biased(x, position, key, slope, decay_q, decay_k, C)
    elif C.DECAY or (C.ALIBI and C.CAUSAL):
        x += key_bias
    if C.ALIBI and not MASK and not C.CAUSAL:
        x -= slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
    x -= level
    if MASK:
        x = tl.where(visible(position, key, tokens_k, left, right, C), x, -float("inf"))
    p = exponential(x, C)
    if C.EXACT:
        p *= share
    return p, squashed


@triton.jit
def score_gradients(p, d_p, squashed, delta, flow, keeps, keep_scale, C: tl.constexpr):
    """dS of the whole score, and of `scale q k^T`, from P and `dO V^T`."""
    if C.DROPOUT:
        d_p = tl.where(keeps, d_p * keep_scale, 0.0)
    d_p -= delta
    if C.EXACT:
        d_p += flow  # of lse: by itself, or it would be rounded as delta is
    d_s = p * d_p
    if C.SOFTCAP:
        return d_s, d_s * (1.0 - squashed * squashed)
    else:
        return d_s, d_s
