"""The read of a token's own write, one pass forward and one backward; keys and queries are read once for the heads of a group.

    z = y + w x,    w_h = scale own_h s + D_h,    s = B . C
    dx = w dz,    dw_h = x_h . dz_h,    down_h = scale s dw_h,    dD_h = sum dw_h
    ds = sum_h scale own_h dw_h,    dB = ds C,    dC = ds B

Tiles: `t` tokens, `h` heads of a group, `p` channels of values, `k` channels of keys.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.gpu.rows import contiguous, strided
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.own_write.call import OwnWriteCall

TILE, WARPS = 4096, 4  # values of a program at a time
MOST_HEADS = 8  # of them


class OwnWriteInputs(NamedTuple):
    """`y` (of the backward the gradient of `z`), `x`, `B` and `C` are `Strided`; `own [B, T, H]`, and `D [H]` or None."""

    y: Any
    x: Any
    B: Any
    C: Any
    own: Any
    D: Any


class OwnWriteGradients(NamedTuple):
    """Each None where it is not wanted; of `D` the sum of each tile of tokens, `[tiles, H]`."""

    x: Any
    B: Any
    C: Any
    own: Any
    D: Any


class OwnWriteNumbers(NamedTuple):
    rows: Any  # B T
    tokens: Any  # T
    scale: Any


class OwnWriteSpec(NamedTuple):
    HEADS: int
    GROUPS: int
    KEYS: int
    VALUES: int
    TOKENS: int  # t
    BLOCK_HEADS: int  # h
    BLOCK_KEYS: int  # k
    BLOCK_VALUES: int  # p


@triton.jit
def tokens_of(n, S: tl.constexpr):
    """Numbers of a program's tokens in all rows, and their row and place, [t]."""
    row = (tl.program_id(0) // S.GROUPS).to(tl.int64) * S.TOKENS + tl.arange(0, S.TOKENS)
    short = row.to(n.rows.dtype)
    return row, (short // n.tokens).to(tl.int64), (short % n.tokens).to(tl.int64)


@triton.jit
def key_of(keys, row, batch, place, mask, S: tl.constexpr):
    """Keys or queries of a group, [t, k]."""
    channel = tl.arange(0, S.BLOCK_KEYS)[None, :]
    group = (tl.program_id(0) % S.GROUPS).to(tl.int64)
    if keys.at is None:
        start = (row * S.GROUPS + group) * S.KEYS
    else:
        start = batch * keys.at[0] + place * keys.at[1] + group * keys.at[2]
    return tl.load(keys.data + start[:, None] + channel, mask=mask[:, None] & (channel < S.KEYS), other=0.0).to(
        tl.float32
    )


@triton.jit
def value_of(values, row, batch, place, head, mask, S: tl.constexpr):
    """Values of some heads, [t, h, p]; `mask` is that of tokens and heads, [t, h]."""
    channel = tl.arange(0, S.BLOCK_VALUES)[None, None, :]
    if values.at is None:
        start = ((row * S.HEADS)[:, None] + head[None, :]) * S.VALUES
    else:
        at = values.at
        start = (batch * at[0] + place * at[1])[:, None] + head.to(tl.int64)[None, :] * at[2]
    return tl.load(
        values.data + start[:, :, None] + channel, mask=mask[:, :, None] & (channel < S.VALUES), other=0.0
    ).to(tl.float32)


@triton.jit
def store_value(ptr, row, head, value, mask, S: tl.constexpr):
    channel = tl.arange(0, S.BLOCK_VALUES)[None, None, :]
    ptr += ((row * S.HEADS)[:, None] + head[None, :])[:, :, None] * S.VALUES + channel
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask[:, :, None] & (channel < S.VALUES))


@triton.jit
def heads_of(first, inside, S: tl.constexpr):
    """Some heads [h] of a program's group from its `first` on, and which tokens have them, [t, h]."""
    share: tl.constexpr = S.HEADS // S.GROUPS
    its = first + tl.arange(0, S.BLOCK_HEADS)
    return tl.program_id(0) % S.GROUPS * share + its, inside[:, None] & (its < share)[None, :]


@triton.jit
def weights(inputs, row, head, score, mask, n, S: tl.constexpr):
    """`w` [t, h] and `scale own` [t, h] of some heads."""
    own = tl.load(inputs.own + (row * S.HEADS)[:, None] + head[None, :], mask=mask, other=0.0).to(tl.float32) * n.scale
    weight = score[:, None] * own
    if inputs.D is not None:
        weight += tl.load(inputs.D + head, mask=head < S.HEADS, other=0.0).to(tl.float32)[None, :]
    return weight, own


@triton.jit(do_not_specialize=["n"])
def own_write_forward_kernel(inputs, z, n, S: tl.constexpr):
    row, batch, place = tokens_of(n, S)
    inside = row < n.rows
    score = tl.sum(key_of(inputs.C, row, batch, place, inside, S) * key_of(inputs.B, row, batch, place, inside, S), 1)
    for first in range(0, S.HEADS // S.GROUPS, S.BLOCK_HEADS):
        head, mask = heads_of(first, inside, S)
        weight, _ = weights(inputs, row, head, score, mask, n, S)
        value = value_of(inputs.x, row, batch, place, head, mask, S)
        value = value_of(inputs.y, row, batch, place, head, mask, S) + weight[:, :, None] * value
        store_value(z, row, head, value, mask, S)


@triton.jit(do_not_specialize=["n"])
def own_write_backward_kernel(inputs, found, n, S: tl.constexpr):
    row, batch, place = tokens_of(n, S)
    inside = row < n.rows
    C, B = key_of(inputs.C, row, batch, place, inside, S), key_of(inputs.B, row, batch, place, inside, S)
    score = tl.sum(C * B, 1)
    d_score = tl.zeros_like(score)
    for first in range(0, S.HEADS // S.GROUPS, S.BLOCK_HEADS):
        head, mask = heads_of(first, inside, S)
        weight, own = weights(inputs, row, head, score, mask, n, S)
        d_z = value_of(inputs.y, row, batch, place, head, mask, S)
        if found.x is not None:
            store_value(found.x, row, head, weight[:, :, None] * d_z, mask, S)
        d_weight = tl.sum(d_z * value_of(inputs.x, row, batch, place, head, mask, S), 2)  # [t, h]
        d_score += tl.sum(d_weight * own, 1)
        if found.own is not None:
            d_own = n.scale * score[:, None] * d_weight
            ptr = found.own + (row * S.HEADS)[:, None] + head[None, :]
            tl.store(ptr, d_own.to(ptr.dtype.element_ty), mask=mask)
        if found.D is not None:
            tile = (tl.program_id(0) // S.GROUPS).to(tl.int64)
            its = first + tl.arange(0, S.BLOCK_HEADS) < S.HEADS // S.GROUPS
            tl.store(found.D + tile * S.HEADS + head, tl.sum(d_weight, 0), mask=its)
    channel = tl.arange(0, S.BLOCK_KEYS)[None, :]
    at = ((row * S.GROUPS + tl.program_id(0) % S.GROUPS) * S.KEYS)[:, None] + channel
    mask = inside[:, None] & (channel < S.KEYS)
    if found.B is not None:
        tl.store(found.B + at, (d_score[:, None] * C).to(found.B.dtype.element_ty), mask=mask)
    if found.C is not None:
        tl.store(found.C + at, (d_score[:, None] * B).to(found.C.dtype.element_ty), mask=mask)


def forward(call: OwnWriteCall, save: bool) -> tuple[Outputs, Outputs]:
    (z,) = outputs = call.results()
    if z.numel():
        kernel, tiles, n = _launch(own_write_forward_kernel, call)
        kernel(tiles * call.B.shape[2], _inputs(call, call.y), z, n)
    return outputs, ()


def backward(call: OwnWriteCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    (d_z,) = grads
    assert d_z is not None  # autograd asks for no gradient of an unused output
    found = {}
    for name in wanted:
        t = getattr(call, name)
        found[name] = torch.empty(size=t.shape, dtype=t.dtype, device=t.device)
    if not call.x.numel():
        return {name: gradient.zero_() for name, gradient in found.items()}
    kernel, tiles, n = _launch(own_write_backward_kernel, call)
    sums = d_z.new_empty((tiles, call.own.shape[2]), dtype=torch.float32) if "D" in found else None
    gradients = OwnWriteGradients(found.get("x"), found.get("B"), found.get("C"), found.get("own"), sums)
    kernel(tiles * call.B.shape[2], _inputs(call, d_z), gradients, n)
    if sums is not None:
        found["D"].copy_(sums.sum(0))
    return found


def _inputs(call: OwnWriteCall, y: Tensor) -> OwnWriteInputs:
    its_y, x, B, C = (strided(t) for t in (y, call.x, call.B, call.C))
    return OwnWriteInputs(its_y, x, B, C, call.own.contiguous(), contiguous(call.D))


def _launch(kernel: Any, call: OwnWriteCall) -> tuple[Kernel, int, OwnWriteNumbers]:
    """The kernel of a call, its tiles of tokens, and its numbers."""
    (batch, tokens, heads, values), (groups, keys) = call.x.shape, call.B.shape[2:]
    block = power_of_two(values)
    block_heads = min(power_of_two(heads // groups), MOST_HEADS)
    block_tokens = max(1, TILE // (block_heads * block))
    spec = OwnWriteSpec(
        heads,
        groups,
        keys,
        values,
        TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        BLOCK_KEYS=power_of_two(keys),
        BLOCK_VALUES=block,
    )
    n = OwnWriteNumbers(batch * tokens, tokens, call.scale)
    return bound(kernel, spec, num_warps=WARPS), cdiv(batch * tokens, block_tokens), n
