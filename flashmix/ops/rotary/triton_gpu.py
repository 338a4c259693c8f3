"""The rotary kernel: queries and keys in one launch, each element read and written once.

    y_i = x_i cos_i - x_{i+R/2} sin_i;    y_{i+R/2} = x_{i+R/2} cos_i + x_i sin_i

A program turns a tile of heads of some tokens, of queries or of keys; both channels of a pair are in the same thread.
Tiles: `t` tokens, `h` heads, `r` pairs of channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import inner_contiguous
from flashmix.op.call import Outputs
from flashmix.ops.rotary.call import RotaryCall

PAIRS, WARPS = 1024, 4  # pairs of channels of a program


class Heads(NamedTuple):
    """A tensor `[B, T, H, D]` that is turned, its result, and their strides of batch, token and head."""

    x: Any
    y: Any
    x_at: Any
    y_at: Any


class Angles(NamedTuple):
    """The table `cos, sin [P, R/2]`, and where tokens read it: `positions [B, T]` or `[B, T, A]` with `axes [R/2]`."""

    cos: Any
    sin: Any
    cos_row: Any
    sin_row: Any
    positions: Any
    positions_at: Any
    axes: Any


class Numbers(NamedTuple):
    total: Any  # B T
    tokens: Any  # T
    start: Any
    table: Any  # P


class Spec(NamedTuple):
    HEADS_Q: int
    HEADS_K: int
    WIDTH: int  # D
    HALF: int  # R/2
    INTERLEAVED: bool
    INVERSE: bool
    IN_PLACE: bool
    TOKENS: int  # t
    BLOCK_HEADS: int  # h
    BLOCK_HALF: int  # r
    BLOCK_REST: int  # channels past R, padded


@triton.jit
def turn(heads, cos, sin, where, first_head, HEADS: tl.constexpr, S: tl.constexpr):
    """Rotates BLOCK_HEADS heads of tokens by cos and sin [t, 1, r]; `where`: batch, place and mask of the tokens, [t] each."""
    batch, place, inside = where
    head = first_head + tl.arange(0, S.BLOCK_HEADS)[None, :]
    mask = (inside[:, None] & (head < HEADS))[:, :, None]
    x_at, y_at = heads.x_at, heads.y_at
    x = heads.x + ((batch * x_at[0] + place * x_at[1])[:, None] + head.to(tl.int64) * x_at[2])[:, :, None]
    y = heads.y + ((batch * y_at[0] + place * y_at[1])[:, None] + head.to(tl.int64) * y_at[2])[:, :, None]
    DT: tl.constexpr = heads.y.dtype.element_ty
    if S.INTERLEAVED:
        channel = tl.arange(0, 2 * S.BLOCK_HALF)[None, None, :]
        pairs = mask & (channel < 2 * S.HALF)
        tile = tl.load(x + channel, mask=pairs, other=0.0)  # [t, h, 2 r]
        shape: tl.constexpr = [tile.shape[0], S.BLOCK_HEADS, S.BLOCK_HALF, 2]
        first, second = tl.split(tl.reshape(tile.to(tl.float32), shape))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, [tile.shape[0], S.BLOCK_HEADS, 2 * S.BLOCK_HALF])
        tl.store(y + channel, turned.to(DT), mask=pairs)
    else:
        channel = tl.arange(0, S.BLOCK_HALF)[None, None, :]
        pairs = mask & (channel < S.HALF)
        first = tl.load(x + channel, mask=pairs, other=0.0).to(tl.float32)  # [t, h, r]
        second = tl.load(x + S.HALF + channel, mask=pairs, other=0.0).to(tl.float32)  # [t, h, r]
        tl.store(y + channel, (first * cos - second * sin).to(DT), mask=pairs)
        tl.store(y + S.HALF + channel, (second * cos + first * sin).to(DT), mask=pairs)
    if S.BLOCK_REST > 0 and not S.IN_PLACE:
        channel = 2 * S.HALF + tl.arange(0, S.BLOCK_REST)[None, None, :]
        mask = mask & (channel < S.WIDTH)
        tl.store(y + channel, tl.load(x + channel, mask=mask, other=0.0), mask=mask)  # [t, h, BLOCK_REST]


@triton.jit(do_not_specialize=["n"])
def rotary_kernel(q, k, angles, n, S: tl.constexpr):
    """One program per (tokens, block of heads): the blocks of q first, then those of k."""
    blocks_q: tl.constexpr = (S.HEADS_Q + S.BLOCK_HEADS - 1) // S.BLOCK_HEADS
    blocks: tl.constexpr = blocks_q + (S.HEADS_K + S.BLOCK_HEADS - 1) // S.BLOCK_HEADS
    block = tl.program_id(0) % blocks
    token = (tl.program_id(0) // blocks).to(tl.int64) * S.TOKENS + tl.arange(0, S.TOKENS)
    short = token.to(n.total.dtype)
    batch, place = (short // n.tokens).to(tl.int64), (short % n.tokens).to(tl.int64)
    pair = tl.arange(0, S.BLOCK_HALF)
    mask = (token < n.total)[:, None] & (pair < S.HALF)[None, :]
    if angles.positions is None:
        row = place[:, None]
    else:
        at = angles.positions_at
        ptr = angles.positions + (batch * at[0] + place * at[1])[:, None]
        if angles.axes is None:
            row = tl.load(ptr, mask=(token < n.total)[:, None], other=0).to(tl.int64)  # [t, 1]
        else:
            axis = tl.load(angles.axes + pair, mask=pair < S.HALF, other=0).to(tl.int64)[None, :]  # [1, r]
            row = tl.load(ptr + axis * at[2], mask=mask, other=0).to(tl.int64)  # [t, r]
    row = tl.minimum(tl.maximum(row + n.start, 0), n.table - 1)  # never outside the table
    mask = mask & (n.table > 0)
    cos = tl.load(angles.cos + row * angles.cos_row + pair[None, :], mask=mask, other=0.0).to(tl.float32)  # [t, r]
    sin = tl.load(angles.sin + row * angles.sin_row + pair[None, :], mask=mask, other=0.0).to(tl.float32)  # [t, r]
    if S.INVERSE:
        sin = -sin
    where = batch, place, token < n.total
    if block < blocks_q:
        turn(q, cos[:, None, :], sin[:, None, :], where, block * S.BLOCK_HEADS, S.HEADS_Q, S)
    elif S.HEADS_K > 0:
        turn(k, cos[:, None, :], sin[:, None, :], where, (block - blocks_q) * S.BLOCK_HEADS, S.HEADS_K, S)


def forward(call: RotaryCall, save: bool) -> tuple[Outputs, Outputs]:
    if not call.in_place:
        outputs = call.results()
        rotary(call, call.turned, outputs)
        return outputs, ()
    if all(x.shape[-1] == 1 or x.stride(-1) == 1 for x in call.turned):
        rotary(call, call.turned, call.turned)
        return (), ()
    rotated = tuple(torch.empty(size=x.shape, dtype=x.dtype, device=x.device) for x in call.turned)
    rotary(call, call.turned, rotated)
    for x, y in zip(call.turned, rotated, strict=True):
        x.copy_(y)
    return (), ()


@lru_cache(maxsize=256)
def axes_on(device: torch.device, axes: tuple[int, ...]) -> Tensor:
    """`axes` as an int32 tensor that stays on `device`; made once, so that calls do not wait for a copy."""
    with torch.inference_mode(False):
        return torch.tensor(axes, dtype=torch.int32, device=device)


def rotary(call: RotaryCall, sources: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    """Launches the kernel for `sources` (q, or q and k), written to `results`."""
    (batch, tokens, heads_q, width), half = call.q.shape, call.cos.shape[1]
    heads_k = 0 if call.k is None else call.k.shape[2]
    if batch * tokens * max(heads_q, heads_k) * width == 0:
        return
    if half == 0:
        for x, y in zip(sources, results, strict=True):
            y.copy_(x)
        return
    cos, sin, positions = inner_contiguous(call.cos), inner_contiguous(call.sin), call.places
    axes = axes_on(call.device, call.axes) if call.axes else None
    at = () if positions is None else (*positions.stride(), 0)[:3]
    angles = Angles(cos, sin, cos.stride(0), sin.stride(0), positions, at, axes)
    turned = []
    for x, y in zip(sources, results, strict=True):
        source = inner_contiguous(x)
        turned.append(Heads(source, y, source.stride()[:3], y.stride()[:3]))
    block_half = power_of_two(half)
    block_rest = power_of_two(width - 2 * half) if width > 2 * half else 0
    channels = max(block_half, block_rest // 2)
    block_heads = min(power_of_two(max(heads_q, heads_k)), max(1, PAIRS // channels))
    block_tokens = max(1, PAIRS // (channels * block_heads))
    spec = Spec(
        heads_q,
        heads_k,
        width,
        half,
        call.interleaved,
        call.inverse,
        call.in_place,
        TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
    )
    blocks = cdiv(heads_q, block_heads) + cdiv(heads_k, block_heads)
    numbers = Numbers(batch * tokens, tokens, call.start, cos.shape[0])
    grid = cdiv(batch * tokens, block_tokens) * blocks
    bound(rotary_kernel, spec, num_warps=WARPS)(grid, turned[0], turned[1] if heads_k else None, angles, numbers)
