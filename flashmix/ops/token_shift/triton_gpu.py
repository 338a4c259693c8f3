"""The token shift and its adjoint, which is the shift the other way: `y_t = x_{t+1}`, the state in place of the last token.

One launch moves rows. Packed, a second one writes the sequences' first tokens (the adjoint: last) and their states.
Tiles: `t` tokens, `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import inner_contiguous
from flashmix.op.call import Outputs
from flashmix.ops.token_shift.call import ShiftCall

TILE, WARPS, WIDEST_BLOCK = 2048, 8, 1024


class Shifted(NamedTuple):
    """`x [B, T, D]` and the state `[N, 1, D]` with their outer strides, and the contiguous results."""

    x: Any
    state: Any
    y: Any
    last: Any
    x_at: Any  # of batch and token
    state_at: Any  # of the sequence


class ShiftNumbers(NamedTuple):
    tokens: Any  # T
    total: Any  # B T


class ShiftSpec(NamedTuple):
    WIDTH: int
    REVERSE: bool
    PACKED: bool
    ROWS: int  # t
    BLOCK: int  # c


@triton.jit(do_not_specialize=["n"])
def token_shift_kernel(tensors, n, S: tl.constexpr):
    """Rows of `[total]` tokens in sequences of `tokens`; packed, those at a boundary are written once more later."""
    blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
    short = row.to(n.total.dtype)
    batch, place = (short // n.tokens).to(tl.int64), (short % n.tokens).to(tl.int64)
    inside = (column < S.WIDTH) & (row < n.total)[:, None]
    is_first = place == (n.tokens - 1 if S.REVERSE else 0)
    before = place + 1 if S.REVERSE else place - 1
    x_at = tensors.x_at
    ptr = tensors.x + (batch * x_at[0] + before * x_at[1])[:, None] + column
    y = tl.load(ptr, mask=inside & ~is_first[:, None], other=0.0)  # [t, c]
    if tensors.state is not None and not S.PACKED:
        ptr = tensors.state + (batch * tensors.state_at)[:, None] + column
        state = tl.load(ptr, mask=inside & is_first[:, None], other=0.0)  # [t, c]
        y = tl.where(is_first[:, None], state, y)
    tl.store(tensors.y + row[:, None] * S.WIDTH + column, y, mask=inside)
    if tensors.last is not None and not S.PACKED:
        is_last = (place == (0 if S.REVERSE else n.tokens - 1))[:, None] & inside
        ptr = tensors.x + (batch * x_at[0] + place * x_at[1])[:, None] + column
        last = tl.load(ptr, mask=is_last, other=0.0)  # [t, c]
        tl.store(tensors.last + batch[:, None] * S.WIDTH + column, last, mask=is_last)


@triton.jit(do_not_specialize=["tokens"])
def token_shift_states_kernel(tensors, cu_seqlens, tokens, S: tl.constexpr):
    """Of each packed sequence the token that the state stands before, and the state after; bounds are never trusted."""
    BLOCK: tl.constexpr = S.BLOCK
    blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)
    inside = column < S.WIDTH
    start = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), tokens)
    filled = start < end
    first, last = (end - 1, start) if S.REVERSE else (start, end - 1)
    state = tl.zeros([BLOCK], tensors.x.dtype.element_ty)
    if tensors.state is not None:
        state = tl.load(tensors.state + sequence * tensors.state_at + column, mask=inside, other=0.0)  # [c]
    tl.store(tensors.y + first * S.WIDTH + column, state, mask=inside & filled)
    if tensors.last is not None:
        x = tl.load(tensors.x + last * tensors.x_at[1] + column, mask=inside & filled, other=0.0)  # [c]
        tl.store(tensors.last + sequence * S.WIDTH + column, tl.where(filled, x, state), mask=inside)


def forward(call: ShiftCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, packing = call.results(), call.packing
    batch, tokens, width = call.x.shape
    x, state = inner_contiguous(call.x), None if call.initial_state is None else inner_contiguous(call.initial_state)
    last = outputs[1] if call.return_state else None
    block = min(power_of_two(width), WIDEST_BLOCK)
    rows, blocks = TILE // block, cdiv(width, block)
    tensors = Shifted(x, state, outputs[0], last, x.stride()[:2], 0 if state is None else state.stride(0))
    spec = ShiftSpec(width, call.reverse, packing is not None, ROWS=rows, BLOCK=block)
    if x.numel():
        grid = cdiv(batch * tokens, rows) * blocks
        bound(token_shift_kernel, spec, num_warps=WARPS)(grid, tensors, ShiftNumbers(tokens, batch * tokens))
    elif last is not None and packing is None:  # no tokens: the state is what it was
        last.zero_() if state is None else last.copy_(state)
    if packing is not None and packing.count and width:
        kernel = bound(token_shift_states_kernel, spec, num_warps=WARPS)
        kernel(packing.count * blocks, tensors, packing.cu_seqlens.contiguous(), tokens)
    return outputs, ()
