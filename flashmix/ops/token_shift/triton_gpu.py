"""The token shift and its adjoint, which is the shift the other way: `y_t = x_{t+1}`, the state in place of the last token.

One launch moves rows. Packed, a second one writes the sequences' first tokens (the adjoint: last) and their states.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.rows import inner_contiguous, power_of_two
from flashmix.op.rowwise import Options, Tensors

TILE, WARPS, WIDEST_BLOCK = 2048, 8, 1024


@triton.jit(do_not_specialize=["tokens", "total"])
def token_shift_kernel(
    x_ptr, state_ptr, y_ptr, last_ptr, tokens, total, x_at, state_at,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `[total]` tokens in sequences of `tokens`; packed, those at a boundary are written once more later."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    short = row.to(total.dtype)
    batch, place = (short // tokens).to(tl.int64), (short % tokens).to(tl.int64)
    inside = (column < WIDTH) & (row < total)[:, None]
    is_first = place == (tokens - 1 if REVERSE else 0)
    before = place + 1 if REVERSE else place - 1
    at = x_ptr + (batch * x_at[0] + before * x_at[1])[:, None] + column
    y = tl.load(at, mask=inside & ~is_first[:, None], other=0.0)  # [ROWS, BLOCK]
    if state_ptr is not None and not PACKED:
        at = state_ptr + (batch * state_at[0])[:, None] + column
        state = tl.load(at, mask=inside & is_first[:, None], other=0.0)  # [ROWS, BLOCK]
        y = tl.where(is_first[:, None], state, y)
    tl.store(y_ptr + row[:, None] * WIDTH + column, y, mask=inside)
    if last_ptr is not None and not PACKED:
        is_last = (place == (0 if REVERSE else tokens - 1))[:, None] & inside
        at = x_ptr + (batch * x_at[0] + place * x_at[1])[:, None] + column
        tl.store(last_ptr + batch[:, None] * WIDTH + column, tl.load(at, mask=is_last, other=0.0), mask=is_last)


@triton.jit(do_not_specialize=["tokens"])
def token_shift_states_kernel(
    x_ptr, state_ptr, y_ptr, last_ptr, cu_seqlens_ptr, tokens, x_row, state_row,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each packed sequence the token that the state stands before, and the state after; bounds are never trusted."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    start = tl.maximum(tl.load(cu_seqlens_ptr + sequence).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64), tokens)
    filled = start < end
    first, last = (end - 1, start) if REVERSE else (start, end - 1)
    state = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    if state_ptr is not None:
        state = tl.load(state_ptr + sequence * state_row + column, mask=inside, other=0.0)  # [BLOCK]
    tl.store(y_ptr + first * WIDTH + column, state, mask=inside & filled)
    if last_ptr is not None:
        x = tl.load(x_ptr + last * x_row + column, mask=inside & filled, other=0.0)  # [BLOCK]
        tl.store(last_ptr + sequence * WIDTH + column, tl.where(filled, x, state), mask=inside)


class TokenShift:
    """Inputs `x, initial_state, cu_seqlens`; options `count` of sequences, `tokens`, `reverse`, whether the state comes back."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        x = inputs[0]
        assert x is not None
        count, _, _, return_state = options
        shapes = [x.shape, (count, 1, x.shape[2])] if return_state else [x.shape]
        return [torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes], []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        x, state, cu_seqlens = inputs
        assert x is not None
        y, last = results[0], results[1] if len(results) > 1 else None
        (batch, tokens, width), (_, _, reverse, _) = x.shape, options
        x, state = inner_contiguous(x), None if state is None else inner_contiguous(state)
        block = min(power_of_two(width), WIDEST_BLOCK)
        rows, blocks = TILE // block, triton.cdiv(width, block)
        if x.numel():
            token_shift_kernel[(triton.cdiv(batch * tokens, rows) * blocks,)](
                x, state, y, last, tokens, batch * tokens, x.stride()[:2], () if state is None else state.stride()[:1],
                WIDTH=width, REVERSE=reverse, PACKED=cu_seqlens is not None, ROWS=rows, BLOCK=block, num_warps=WARPS,
            )  # fmt: skip
        elif last is not None and cu_seqlens is None:  # no tokens: the state is what it was
            last.zero_() if state is None else last.copy_(state)
        if cu_seqlens is not None and cu_seqlens.shape[0] > 1 and width:
            token_shift_states_kernel[((cu_seqlens.shape[0] - 1) * blocks,)](
                x, state, y, last, cu_seqlens.contiguous(), tokens, x.stride(1),
                0 if state is None else state.stride(0), WIDTH=width, REVERSE=reverse, BLOCK=block, num_warps=WARPS,
            )  # fmt: skip

    @staticmethod
    def backward(*arguments: Any) -> None:
        raise AssertionError("the backward of a shift is a shift")
