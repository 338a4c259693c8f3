"""From products `q k^T` to the exponents of probabilities on Hopper, forward and backward; the mathematics is `triton_gpu.scores`'s."""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon
from flashmix.ops.attention.triton_gpu.scores import tanh, visible

# How a tile is masked: not at all, with what is added to a whole tile in two parts; always; where the tile is not whole
WHOLE, EDGE, EITHER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def scaled(s, n, S: gl.constexpr):
    """Scores in units of log 2 from `q k^T`, and tanh(scores / softcap)."""
    squashed = s
    y = s * n.scale
    if S.SOFTCAP:
        squashed = tanh(y, S)
        y = squashed * n.softcap
    return y, squashed


@gluon.jit
def masked(y, position, key, tokens_k, edge, n, KIND: gl.constexpr, S: gl.constexpr):
    """Scores, `-inf` where a key is not seen; `position` and `key` broadcast to them."""
    if KIND == EDGE:
        y = gl.where(visible(position, key, tokens_k, n, S), y, -float("inf"))
    elif KIND == EITHER:
        if edge:
            y = gl.where(visible(position, key, tokens_k, n, S), y, -float("inf"))
    return y
