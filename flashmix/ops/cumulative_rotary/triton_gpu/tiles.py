"""Shared by the kernels of the rotation by summed angles: where tokens lie, their angles and weights, pairs of channels.

Angles are whole numbers of 2^-62 turns in int64, which wrap: sums in any order are equal.
Tiles: `t` tokens of a block, `m` pairs of channels, `c` channels. A line is a head of a rank.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import exp_of_minus

TURN = tl.constexpr(2 * math.pi)
WHOLE = tl.constexpr(2.0**62)  # a turn
QUARTER = tl.constexpr(2**60)  # of a turn


class Gates(NamedTuple):
    """`dt`, `log_decay` and `trapezoid_gate`, contiguous `[B, T, H]`."""

    dt: Any
    log_decay: Any
    gate: Any


class Places(NamedTuple):
    """Of a packed batch, in int64: of each block `[blocks, 4]` its sequence, its first token, and the sequence's first token and end;
    of each sequence `[N, 3]` its first block, its blocks (one at least) and its tokens. Of a dense one None: all sequences are alike.
    """

    blocks: Any
    sequences: Any


class RotaryNumbers(NamedTuple):
    tokens: Any  # T
    each: Any  # blocks of a sequence of a dense batch
    blocks: Any
    rows: Any  # B T


class RotarySpec(NamedTuple):
    HEADS: int
    RANKS: int
    GROUPS: int
    WIDTH: int  # K
    PAIRS: int  # M
    TOKENS: int  # t
    BLOCK_PAIRS: int  # m, 0 without angles
    BLOCK_REST: int  # channels past 2 M, padded
    BLOCK_WIDTH: int  # channels, padded
    LINES: int  # blocks that a sum over blocks takes at a time
    STAGES: int  # heads whose gradients the backward reads ahead


@triton.jit
def place_of(places, n, block, S: tl.constexpr):
    """Sequence, row of the batch, first token, and first token and end of the sequence; no tokens in a block too many."""
    if places.blocks is None:
        sequence = (block // n.each).to(tl.int64)
        first = (block % n.each).to(tl.int64) * S.TOKENS
        return sequence, sequence, first, first * 0, first * 0 + n.tokens
    else:
        ptr = places.blocks + block.to(tl.int64) * 4
        sequence = tl.load(ptr)
        return sequence, sequence * 0, tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)


@triton.jit
def blocks_of(places, n, sequence):
    """First block, number of blocks and of tokens of a sequence."""
    if places.sequences is None:
        return sequence * n.each, n.each, n.tokens
    else:
        ptr = places.sequences + sequence * 3
        return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)


@triton.jit
def fixed(turns):
    """Turns in float64 as whole numbers, less than one of them."""
    whole = tl.floor(tl.abs(turns))
    return (tl.where(turns < 0, turns + whole, turns - whole) * WHOLE).to(tl.int64)


@triton.jit
def angles_of(angles, where, head, n, S: tl.constexpr):
    """Angles [t, m] of a head; 0 past the last token and pair. `where`: row of the batch, place and mask of the tokens, [t] each."""
    batch, token, inside = where
    pair = tl.arange(0, S.BLOCK_PAIRS)[None, :]
    if angles.at is None:
        start = ((batch * n.tokens + token) * S.HEADS + head) * S.PAIRS
    else:
        start = batch * angles.at[0] + token * angles.at[1] + head.to(tl.int64) * angles.at[2]
    return tl.load(angles.data + start[:, None] + pair, mask=inside[:, None] & (pair < S.PAIRS), other=0.0)


@triton.jit
def turns_of(angles, dt):
    """What tokens with step sizes `dt` [t] add to their angles, [t, m]."""
    return fixed(angles.to(tl.float64) * (dt.to(tl.float64) / TURN)[:, None])


@triton.jit
def cos_and_sin(theta):
    """Of whole numbers of 2^-62 turns: polynomials of what is left beside quarters, at most an eighth of a turn.

    The coefficients are those of Cephes for float32; the first terms are added last.
    """
    quarter = (theta + QUARTER // 2) >> 60
    x = (theta - (quarter << 60)).to(tl.float32) * (TURN / WHOLE)
    z = x * x
    sine = tl.fma(z, -1.9515295891e-4, 8.3321608736e-3)
    sine = tl.fma(z, sine, -1.6666654611e-1)
    sine = tl.fma(z * x, sine, x)
    cosine = tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3)
    cosine = tl.fma(z, cosine, 4.166664568298827e-2)
    cosine = tl.fma(z * z, cosine, tl.fma(z, -0.5, 1.0))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def rotations(inputs, dt, where, block, head, n, S: tl.constexpr):
    """`cos theta_t, sin theta_t` [t, m] of a head; `where` as in `angles_of`."""
    pair = tl.arange(0, S.BLOCK_PAIRS)
    before = tl.load(
        inputs.offsets + (block.to(tl.int64) * S.HEADS + head) * S.PAIRS + pair, mask=pair < S.PAIRS, other=0
    )  # [m]
    turns = turns_of(angles_of(inputs.angles, where, head, n, S), dt)
    return cos_and_sin(before[None, :] + tl.cumsum(turns, 0))


@triton.jit
def own_weight(gates, row, inside):
    """`dt` and `own = lambda dt` of the rows of a head."""
    dt = tl.load(gates.dt + row, mask=inside, other=0.0)  # [t]
    return dt, tl.load(gates.gate + row, mask=inside, other=0.0).to(tl.float32) * dt.to(tl.float32)  # [t]


@triton.jit
def late_weight(gates, row, own_before, inside):
    """`w = e^g (own_before + (1 - lambda) dt)` of the rows of a head, and `e^g`; both 0 outside."""
    dt = tl.load(gates.dt + row, mask=inside, other=0.0).to(tl.float32)  # [t]
    gate = tl.load(gates.gate + row, mask=inside, other=0.0).to(tl.float32)  # [t]
    g = tl.load(gates.log_decay + row, mask=inside, other=0.0).to(tl.float32)  # [t]
    decay = tl.where(inside, exp_of_minus(-g, True), 0.0)
    return decay * (own_before + (1.0 - gate) * dt), decay


@triton.jit
def first_of(x, batch, token, rank, group, n, S: tl.constexpr):
    """Where tokens of a rank and group of keys or queries begin, [t, 1]."""
    if x.at is None:
        start = ((batch * n.tokens + token) * (S.RANKS * S.GROUPS) + rank * S.GROUPS + group) * S.WIDTH
    else:
        start = batch * x.at[0] + token * x.at[1] + rank.to(tl.int64) * x.at[2] + group.to(tl.int64) * x.at[3]
    return x.data + start[:, None]


@triton.jit
def load_pairs(ptr, mask, S: tl.constexpr):
    """Both channels of pairs, [t, m] each; `ptr` and `mask` are those of tokens, [t, 1]."""
    channel = tl.arange(0, 2 * S.BLOCK_PAIRS)[None, :]
    x = tl.load(ptr + channel, mask=mask & (channel < 2 * S.PAIRS), other=0.0).to(tl.float32)  # [t, 2 m]
    shape: tl.constexpr = [S.TOKENS, S.BLOCK_PAIRS, 2]
    return tl.split(tl.reshape(x, shape))


@triton.jit
def store_pairs(ptr, even, odd, mask, S: tl.constexpr):
    channel = tl.arange(0, 2 * S.BLOCK_PAIRS)[None, :]
    shape: tl.constexpr = [S.TOKENS, 2 * S.BLOCK_PAIRS]
    x = tl.reshape(tl.join(even, odd), shape)
    tl.store(ptr + channel, x.to(ptr.dtype.element_ty), mask=mask & (channel < 2 * S.PAIRS))


@triton.jit
def load_rest(ptr, mask, S: tl.constexpr):
    """The channels that are not rotated, [t, c]."""
    channel = 2 * S.PAIRS + tl.arange(0, S.BLOCK_REST)[None, :]
    return tl.load(ptr + channel, mask=mask & (channel < S.WIDTH), other=0.0).to(tl.float32)


@triton.jit
def store_rest(ptr, x, mask, S: tl.constexpr):
    channel = 2 * S.PAIRS + tl.arange(0, S.BLOCK_REST)[None, :]
    tl.store(ptr + channel, x.to(ptr.dtype.element_ty), mask=mask & (channel < S.WIDTH))


@triton.jit
def rounded(x, ptr):
    """`x` as it is kept where `ptr` points."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)
