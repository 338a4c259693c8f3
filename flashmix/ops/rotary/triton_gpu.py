"""The rotary kernel: queries and keys in one launch, each element read and written once.

A program turns a tile of heads of some tokens, of queries or of keys; both channels of a pair are in the same thread.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.rows import inner_contiguous, power_of_two
from flashmix.op.packing import Packing
from flashmix.op.rowwise import Options, Tensors

PAIRS, WARPS = 1024, 4  # pairs of channels of a program


@triton.jit
def turn(
    x_ptr, y_ptr, token, batch, place, cos, sin, first_head, total, x_at, y_at,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK_HEADS heads of the tokens `[TOKENS]` by cos and sin `[TOKENS, 1, BLOCK_HALF]`."""
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :]
    there = ((token < total)[:, None] & (head < HEADS))[:, :, None]
    x_start = ((batch * x_at[0] + place * x_at[1])[:, None] + head.to(tl.int64) * x_at[2])[:, :, None]
    y_start = ((batch * y_at[0] + place * y_at[1])[:, None] + head.to(tl.int64) * y_at[2])[:, :, None]
    kind = y_ptr.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        there_pair = there & (channel < 2 * HALF)
        x = tl.load(x_ptr + x_start + channel, mask=there_pair, other=0.0)  # [TOKENS, BLOCK_HEADS, 2 BLOCK_HALF]
        shape: tl.constexpr = [x.shape[0], BLOCK_HEADS, BLOCK_HALF, 2]
        first, second = tl.split(tl.reshape(x.to(tl.float32), shape))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, [x.shape[0], BLOCK_HEADS, 2 * BLOCK_HALF])
        tl.store(y_ptr + y_start + channel, y.to(kind), mask=there_pair)
    else:
        channel = tl.arange(0, BLOCK_HALF)[None, None, :]
        there_pair = there & (channel < HALF)
        first = tl.load(x_ptr + x_start + channel, mask=there_pair, other=0.0)  # [TOKENS, BLOCK_HEADS, BLOCK_HALF]
        second = tl.load(x_ptr + x_start + HALF + channel, mask=there_pair, other=0.0)
        first, second = first.to(tl.float32), second.to(tl.float32)
        tl.store(y_ptr + y_start + channel, (first * cos - second * sin).to(kind), mask=there_pair)
        tl.store(y_ptr + y_start + HALF + channel, (second * cos + first * sin).to(kind), mask=there_pair)
    if BLOCK_REST > 0 and not IN_PLACE:
        channel = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        there = there & (channel < WIDTH)
        rest = tl.load(x_ptr + x_start + channel, mask=there, other=0.0)  # [TOKENS, BLOCK_HEADS, BLOCK_REST]
        tl.store(y_ptr + y_start + channel, rest, mask=there)


@triton.jit(do_not_specialize=["total", "tokens", "start", "table"])
def rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, axes_ptr,
    total, tokens, start, table, cos_row, sin_row, positions_at, q_at, k_at, q_out_at, k_out_at,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, IN_PLACE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    blocks_q: tl.constexpr = (HEADS_Q + BLOCK_HEADS - 1) // BLOCK_HEADS
    blocks: tl.constexpr = blocks_q + (HEADS_K + BLOCK_HEADS - 1) // BLOCK_HEADS
    block = tl.program_id(0) % blocks
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    short = token.to(total.dtype)
    batch, place = (short // tokens).to(tl.int64), (short % tokens).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    there = (token < total)[:, None] & (pair < HALF)[None, :]
    if positions_ptr is None:
        row = place[:, None]
    else:
        said = positions_ptr + (batch * positions_at[0] + place * positions_at[1])[:, None]
        if axes_ptr is None:
            row = tl.load(said, mask=(token < total)[:, None], other=0).to(tl.int64)  # [TOKENS, 1]
        else:
            axis = tl.load(axes_ptr + pair, mask=pair < HALF, other=0).to(tl.int64)[None, :]
            row = tl.load(said + axis * positions_at[2], mask=there, other=0).to(tl.int64)  # [TOKENS, BLOCK_HALF]
    row = tl.minimum(tl.maximum(row + start, 0), table - 1)  # never outside the table
    there = there & (table > 0)
    cos = tl.load(cos_ptr + row * cos_row + pair[None, :], mask=there, other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(sin_ptr + row * sin_row + pair[None, :], mask=there, other=0.0).to(tl.float32)[:, None, :]
    if INVERSE:
        sin = -sin
    if block < blocks_q:
        turn(
            q_ptr, q_out_ptr, token, batch, place, cos, sin, block * BLOCK_HEADS, total, q_at, q_out_at,
            HEADS_Q, WIDTH, HALF, INTERLEAVED, IN_PLACE, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif HEADS_K > 0:
        turn(
            k_ptr, k_out_ptr, token, batch, place, cos, sin, (block - blocks_q) * BLOCK_HEADS, total, k_at, k_out_at,
            HEADS_K, WIDTH, HALF, INTERLEAVED, IN_PLACE, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


class Rotary:
    """Inputs `q, k, cos, sin, positions, cu_seqlens`; options `start, axes, interleaved, inverse`, see `rotary.py`."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:2] if x is not None], []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        _launch(results, inputs, options, in_place=False)

    @staticmethod
    def backward(*arguments: Any) -> None:
        raise AssertionError("the backward of a rotation is a rotation")


def rotate_in_place(inputs: Tensors, options: Options) -> None:
    """Overwrites `q` and `k`."""
    present = [x for x in inputs[:2] if x is not None]
    odd = [x for x in present if x.shape[-1] > 1 and x.stride(-1) != 1]
    if odd:
        rotated, _ = Rotary.allocate(inputs, options, False)
        _launch(rotated, inputs, options, in_place=False)
        for x, y in zip(present, rotated, strict=True):
            x.copy_(y)
    else:
        _launch(present, inputs, options, in_place=True)


@lru_cache(maxsize=256)
def numbers_on(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """`values` as an int32 tensor that stays on `device`; made once, so that calls do not wait for a copy."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


def _launch(results: Sequence[Tensor], inputs: Tensors, options: Options, in_place: bool) -> None:
    q, k, cos, sin, positions, cu_seqlens = inputs
    start, axes, interleaved, inverse = options
    assert q is not None and cos is not None and sin is not None
    (batch, tokens, heads_q, width), half = q.shape, cos.shape[1]
    heads_k = 0 if k is None else k.shape[2]
    if batch * tokens * max(heads_q, heads_k) * width == 0:
        return
    if cu_seqlens is not None:
        positions = Packing(cu_seqlens, tokens).positions.unsqueeze(0)
    if half == 0:
        for y, x in zip(results, [q] if k is None else [q, k], strict=True):
            y.copy_(x)
        return
    cos, sin = inner_contiguous(cos), inner_contiguous(sin)
    if not in_place:
        q, k = inner_contiguous(q), None if k is None else inner_contiguous(k)
    q_out, k_out = results[0], results[1] if k is not None else None
    block_half = power_of_two(half)
    block_rest = power_of_two(width - 2 * half) if width > 2 * half else 0
    block_heads = min(power_of_two(max(heads_q, heads_k)), max(1, PAIRS // max(block_half, block_rest // 2)))
    block_tokens = max(1, PAIRS // (max(block_half, block_rest // 2) * block_heads))
    blocks = triton.cdiv(heads_q, block_heads) + triton.cdiv(heads_k, block_heads)
    at = () if positions is None else (*positions.stride(), 0)[:3]
    rotary_kernel[(triton.cdiv(batch * tokens, block_tokens) * blocks,)](
        q, k, q_out, k_out, cos, sin, positions, numbers_on(q.device, tuple(axes)) if axes else None,
        batch * tokens, tokens, start, cos.shape[0], cos.stride(0), sin.stride(0), at,
        q.stride()[:3], () if k is None else k.stride()[:3],
        q_out.stride()[:3], () if k_out is None else k_out.stride()[:3],
        HEADS_Q=heads_q, HEADS_K=heads_k, WIDTH=width, HALF=half,
        INTERLEAVED=interleaved, INVERSE=inverse, IN_PLACE=in_place,
        TOKENS=block_tokens, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
        BLOCK_REST=block_rest, num_warps=WARPS,
    )  # fmt: skip
