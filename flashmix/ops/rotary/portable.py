"""The rotation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.checks import contents_are_checked
from flashmix.op.dtypes import compute_dtype
from flashmix.ops.rotary.call import RotaryCall


def forward(call: RotaryCall, save: bool) -> tuple[Outputs, Outputs]:
    turned = _turned(call, _rotate)
    if not call.in_place:
        return turned, ()
    for x, y in zip(call.turned, turned, strict=True):
        x.copy_(y)
    return (), ()


def formula(call: RotaryCall) -> Outputs:
    return _turned(call, _formula)


def _turned(call: RotaryCall, rotate: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> Outputs:
    cos, sin = (_rows(call, table).unsqueeze(-2) for table in (call.cos, call.sin))  # [T, 1, R/2] or [B, T, 1, R/2]
    if call.inverse:
        sin = -sin
    return tuple([rotate(x, cos, sin, call.interleaved) for x in call.turned])


def _rows(call: RotaryCall, table: Tensor) -> Tensor:
    """The row of `table [P, R/2]` that belongs to each token: `[T, R/2]` or `[B, T, R/2]`."""
    rows = call.places
    if rows is None:
        return table[call.start : call.start + call.turned[0].shape[1]]
    rows = rows if call.start == 0 else rows + call.start
    if not contents_are_checked(rows):
        rows = rows.clamp(0, max(table.shape[0] - 1, 0))
    if not call.axes:
        return table[rows]
    return table[rows[..., list(call.axes)], torch.arange(len(call.axes), device=table.device)]


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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`_formula` with fewer passes over memory; autograd cannot differentiate it."""
    dtype, rotated = compute_dtype(x, cos), 2 * cos.shape[-1]
    pairs, cos, sin = _pairs(x[..., :rotated].to(dtype), interleaved), cos.to(dtype), sin.to(dtype)
    turned = pairs * cos.unsqueeze(-2)
    (first, second), (new_first, new_second) = pairs.unbind(-2), turned.unbind(-2)
    new_first.addcmul_(second, sin, value=-1)
    new_second.addcmul_(first, sin)
    y = (turned.transpose(-1, -2) if interleaved else turned).flatten(-2).to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat([y, x[..., rotated:]], -1)
