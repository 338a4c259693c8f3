"""Numbers of a scan's kernels, real or complex: a tile in float32, or two of them, the real and the imaginary part.

In memory a complex number is one word of 64 bits, the real part in its low half: one load and one store each.
Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-87.3)  # below it e^x is 0


@triton.jit
def reduced(x):
    """`e^r - 1` and `2^n` with `x = n log 2 + r`, for `x` from LEAST to 0."""
    whole: tl.constexpr = 12582912.0  # 1.5 2^23: a sum with it is rounded to whole numbers, which are its last bits
    part = tl.maximum(x, LEAST, propagate_nan=tl.PropagateNan.ALL)
    shifted = part * 1.44269504 + whole
    n = shifted - whole
    r = part - n * 0.693359375 + n * 2.12194440e-4
    y = ((r * 1.9875691500e-4 + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2
    y = ((y * r + 1.6666665459e-1) * r + 5.0000001201e-1) * r * r + r
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return y, power


@triton.jit
def exponential(x):
    """`e^x` to float32's rounding for `x` up to 0: the card's own errs by two steps, which a factor that comes back for thousands of tokens
    multiplies.
    """
    y, power = reduced(x)
    return tl.where(x < LEAST, 0.0, (y + 1.0) * power)


@triton.jit
def exponential_and_rest(x):
    """`e^x` and `1 - e^x` for `x` up to 0, both to float32's rounding."""
    y, power = reduced(x)
    none = x < LEAST
    return tl.where(none, 0.0, (y + 1.0) * power), tl.where(none, 1.0, (1.0 - power) - y * power)


@triton.jit
def cosine_and_sine(x):
    """Of angles in float32 to its rounding, up to about 10^8: the turns are found in float64, the rest by polynomials."""
    turns = x.to(tl.float64) * 0.15915494309189535
    turns -= tl.floor(turns)  # from 0 to 1
    quarter = tl.floor(turns * 4.0 + 0.5)
    r = ((turns - quarter * 0.25) * 6.283185307179586).to(tl.float32)  # |r| <= pi / 4
    q = r * r
    sine = ((q * 2.7183114939898219e-6 - 1.9839334836096632e-4) * q + 8.3333293858894632e-3) * q - 1.6666666641626524e-1
    sine = sine * q * r + r
    cosine = (
        (q * 2.4390448796277409e-5 - 1.3886763774609929e-3) * q + 4.1666623323739063e-2
    ) * q - 4.9999999725103100e-1
    cosine = cosine * q + 1.0
    k = quarter.to(tl.int32)
    swapped, opposite = (k & 1) == 1, (k & 2) == 2
    along, across = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    return tl.where(opposite ^ swapped, -along, along), tl.where(opposite, -across, across)


@triton.jit
def parts_of(word):
    """The real and the imaginary part [c] of a complex number's word."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def number_of(loaded, S: tl.constexpr):
    """The number behind what was loaded."""
    if S.COMPLEX:
        return parts_of(loaded)
    else:
        return loaded.to(tl.float32)


@triton.jit
def stored(x, dtype: tl.constexpr, S: tl.constexpr):
    """A number as memory of this dtype holds it; of a complex one that is to be real, the real part."""
    if not S.COMPLEX:
        return x.to(dtype)
    elif dtype == tl.int64:
        low, high = x[0].to(tl.uint32, bitcast=True), x[1].to(tl.uint32, bitcast=True)
        return (high.to(tl.int64) << 32) | low.to(tl.int64)
    else:
        return x[0].to(dtype)


@triton.jit
def constant(VALUE: tl.constexpr, S: tl.constexpr):
    """The same number for all channels [c]."""
    BLOCK: tl.constexpr = S.BLOCK
    if S.COMPLEX:
        return tl.full([BLOCK], VALUE, tl.float32), tl.full([BLOCK], 0.0, tl.float32)
    else:
        return tl.full([BLOCK], VALUE, tl.float32)


@triton.jit
def chosen(condition, x, y, S: tl.constexpr):
    """`x` where the condition holds, else `y`."""
    if S.COMPLEX:
        return tl.where(condition, x[0], y[0]), tl.where(condition, x[1], y[1])
    else:
        return tl.where(condition, x, y)


@triton.jit
def added(x, y, S: tl.constexpr):
    if S.COMPLEX:
        return x[0] + y[0], x[1] + y[1]
    else:
        return x + y


@triton.jit
def times(factor, x, S: tl.constexpr, CONJUGATE: tl.constexpr = False):
    """A number times a factor, which is real unless S.TURNING, or (of complex numbers) times its conjugate."""
    if S.TURNING:
        turn = -factor[1] if CONJUGATE else factor[1]
        return factor[0] * x[0] - turn * x[1], factor[0] * x[1] + turn * x[0]
    elif S.COMPLEX:
        return factor * x[0], factor * x[1]
    else:
        return factor * x


@triton.jit
def times_conjugate(x, y, S: tl.constexpr):
    """The product of a number and another's conjugate."""
    if S.COMPLEX:
        return x[0] * y[0] + x[1] * y[1], x[1] * y[0] - x[0] * y[1]
    else:
        return x * y
