"""The rotation in plain PyTorch, and where its angles are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.checks import contents_are_checked
from flashmix.op.rowwise import compute_dtype, wants_gradient


@dataclass(frozen=True)
class Place:
    """The row of the table that a token reads: `start` plus `positions` (`[B, T]`, or `[1, T]` of a packed row; None:
    the token's own place), or with `axes` for each pair its own row, of `positions [B, T, A]`."""

    start: int
    positions: Tensor | None
    axes: tuple[int, ...]

    def of(self, table: Tensor, tokens: int) -> Tensor:
        """What of `table [P, R/2]` belongs to each token: `[T, R/2]` or `[B, T, R/2]`."""
        if self.positions is None:
            return table[self.start : self.start + tokens]
        rows = self.positions if self.start == 0 else self.positions + self.start
        if not contents_are_checked(rows):
            rows = rows.clamp(0, max(table.shape[0] - 1, 0))
        if not self.axes:
            return table[rows]
        return table[rows[..., list(self.axes)], torch.arange(len(self.axes), device=table.device)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, place: Place, interleaved: bool, inverse: bool) -> Tensor:
    c, s = (place.of(table, x.shape[1]).unsqueeze(-2) for table in (cos, sin))  # [T, 1, R/2] or [B, T, 1, R/2]
    if inverse:
        s = -s
    if torch.compiler.is_compiling() or wants_gradient(cos, sin):
        return _formula(x, c, s, interleaved)
    return _Rotary.apply(x, c, s, interleaved) if wants_gradient(x) else _forward(x, c, s, interleaved)


def _pairs(x: Tensor, interleaved: bool) -> Tensor:
    """`[..., R]` as `[..., 2, R/2]`: the first and the second channel of each pair."""
    half = x.shape[-1] // 2
    return x.view(*x.shape[:-1], half, 2).transpose(-1, -2) if interleaved else x.view(*x.shape[:-1], 2, half)


def _formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype, rotated = compute_dtype(x, cos), 2 * cos.shape[-1]
    first, second = _pairs(x[..., :rotated].to(dtype), interleaved).unbind(-2)
    turned = [first * cos - second * sin, second * cos + first * sin]
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([y.to(x.dtype), x[..., rotated:]], -1)


def _forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype, rotated = compute_dtype(x, cos), 2 * cos.shape[-1]
    pairs, cos, sin = _pairs(x[..., :rotated].to(dtype), interleaved), cos.to(dtype), sin.to(dtype)
    turned = pairs * cos.unsqueeze(-2)
    (first, second), (new_first, new_second) = pairs.unbind(-2), turned.unbind(-2)
    new_first.addcmul_(second, sin, value=-1)
    new_second.addcmul_(first, sin)
    y = (turned.transpose(-1, -2) if interleaved else turned).flatten(-2).to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat([y, x[..., rotated:]], -1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _forward(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _Rotary.apply(grad, cos, -sin, ctx.interleaved), None, None, None
