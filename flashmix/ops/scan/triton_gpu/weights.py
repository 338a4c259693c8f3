"""The weights `w` of `x` with a coupling, from the exponential that `e^g` comes from, and the gradient of the decay through them.

    complement: w = 1 - e^g;  root: w = sqrt(1 - e^{2g});  logit: e^g = sigmoid(-l), w = sigmoid(l)

Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.scan.call import COUPLINGS
from flashmix.ops.scan.call import STEEPEST as STEEPEST_
from flashmix.ops.scan.triton_gpu.numbers import exponential, exponential_and_rest

COMPLEMENT, ROOT, LOGIT = (tl.constexpr(COUPLINGS.index(name) + 1) for name in ("complement", "root", "logit"))
STEEPEST = tl.constexpr(STEEPEST_)


@triton.jit
def no_decay(S: tl.constexpr):
    """The log decay, or logit, of a factor 1."""
    return float("-inf") if S.COUPLING == LOGIT else 0.0


@triton.jit
def fast_exponential_and_rest(x):
    """`e^x` and `1 - e^x` for `x` up to 0 beside numbers of 16 bits: of small `x` the rest is a series and `e^x` is what it leaves of 1."""
    power = tl.exp2(x * 1.4426950408889634)
    rest = (((x * -0.041666668 - 0.16666667) * x - 0.5) * x - 1.0) * x
    near = x > -0.0625
    return tl.where(near, 1.0 - rest, power), tl.where(near, rest, 1.0 - power)


@triton.jit
def factor_and_weight(g, exists, S: tl.constexpr):
    """`e^g` and `w` of one token, [c] or a number; of none 1 and 0."""
    g = g.to(tl.float32)
    if S.COUPLING == LOGIT:
        if S.PRECISE:
            small = exponential(-tl.abs(g))
            large = tl.math.div_rn(1.0, 1.0 + small)
        else:
            small = tl.exp2(tl.abs(g) * -1.4426950408889634)
            large = 1.0 / (1.0 + small)
        small = small * large
        factor, weight = tl.where(g > 0, small, large), tl.where(g > 0, large, small)
    else:
        if S.PRECISE:
            factor, weight = exponential_and_rest(g)
        else:
            factor, weight = fast_exponential_and_rest(g)
        if S.COUPLING == ROOT:
            weight = tl.sqrt(weight * (1.0 + factor))
    if S.DECAY == 2:
        return tl.where(exists, factor, 1.0), tl.where(exists, weight, 0.0)
    else:
        return factor, weight


@triton.jit
def state_and_own(h, x, factor, weight, S: tl.constexpr):
    """What the gradient of `e^g h` is multiplied by for that of `g`: the state before and, with a coupling, what `w` adds to it."""
    if S.COUPLING == COMPLEMENT:
        return h - x
    elif S.COUPLING == ROOT:
        return h - factor * tl.minimum(1.0 / weight, STEEPEST) * x
    else:
        return weight * (x - h)
