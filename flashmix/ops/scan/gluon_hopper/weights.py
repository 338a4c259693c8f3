"""Factors `e^g` and the weights `w` of `x` with a coupling, and the gradient of the decay through them, beside numbers of 16 bits.

    complement: w = 1 - e^g;  root: w = sqrt(1 - e^{2g});  logit: e^g = sigmoid(-l), w = sigmoid(l)

Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import ex2, gl, gluon
from flashmix.ops.scan.call import COUPLINGS
from flashmix.ops.scan.call import STEEPEST as STEEPEST_

COMPLEMENT, ROOT, LOGIT = (gl.constexpr(COUPLINGS.index(name) + 1) for name in ("complement", "root", "logit"))
STEEPEST = gl.constexpr(STEEPEST_)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def factors_of(g, exists, S: gl.constexpr):
    """`e^g` and `w` [c] of one token, whose decay is 0 if it is not there; without a coupling both are `e^g`."""
    if S.COUPLING == LOGIT:
        small = ex2(gl.abs(g) * -LOG2_E)
        large = 1.0 / (1.0 + small)
        small = small * large
        factor, weight = gl.where(g > 0, small, large), gl.where(g > 0, large, small)
        return gl.where(exists, factor, 1.0), weight
    else:
        factor = ex2(g * LOG2_E)
        weight = factor
        if S.COUPLING:
            rest = (((g * -0.041666668 - 0.16666667) * g - 0.5) * g - 1.0) * g  # of small g the rest is a series
            near = g > -0.0625
            weight = gl.where(near, rest, 1.0 - factor)
            factor = gl.where(near, 1.0 - rest, factor)
            if S.COUPLING == ROOT:
                weight = gl.sqrt(weight * (1.0 + factor))
        return factor, weight


@gluon.jit
def state_and_own(h, x, factor, weight, S: gl.constexpr):
    """What the gradient of `e^g h` is multiplied by for that of `g`: the state before and, with a coupling, what `w` adds to it."""
    if S.COUPLING == COMPLEMENT:
        return h - x
    elif S.COUPLING == ROOT:
        return h - factor * gl.minimum(1.0 / weight, STEEPEST) * x
    else:
        return weight * (x - h)
