"""Rotary position embedding: turns pairs of channels by an angle that grows with the position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix._checks import (
    check_dtype,
    check_floating,
    check_like,
    check_range,
    check_shape,
    contents_are_checked,
    dims,
)
from flashmix._dispatch import choose
from flashmix.ops._rowwise import compute_dtype, portable, wants_gradient
from flashmix.ops.packing import Packing, as_packing
from flashmix.ops.rotary_scaling import RotaryScaling, plain_frequencies

IMPLEMENTATIONS = (portable(__name__),)


def rotary_table(
    positions: int,
    dim: int,
    base: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The cosines and sines that `rotary` reads.

        angle[p, i] = p * base^(-2 i / dim),    i = 0 .. dim / 2 - 1, unless a scaling changes the frequencies

    Args:
        positions: number of positions P of the table.
        dim: number of channels R that are rotated, even: the head's dim or less, not the model's.
        base: the slowest pair turns once in about `2 pi base` positions.
        scaling: None, or how frequencies stretch for long texts: `LinearScaling`, `NTKScaling`, `YarnScaling` or
            `Llama3Scaling` (see `flashmix.ops.rotary_scaling`).
        device: where the table lives.
        dtype: the table's dtype; the angles are computed in float64.

    Returns:
        `(cos, sin)`, each `[P, dim / 2]`.

    Raises:
        ValueError: `dim` is odd or not positive, or `positions` is negative.

    Source:
        Su et al., "RoFormer" (2104.09864), equation 15.

    Example:
        >>> cos, sin = rotary_table(16, 64)
        >>> cos.shape, cos[0, 0].item(), sin[0, 0].item()
        (torch.Size([16, 32]), 1.0, 0.0)
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"dim must be even and positive (channels turn in pairs), got {dim}")
    if positions < 0:
        raise ValueError(f"positions must be non-negative, got {positions}")
    frequencies = plain_frequencies(dim, base) if scaling is None else scaling.frequencies(dim, base)
    angles = torch.arange(positions, dtype=torch.float64, device=device).unsqueeze(1) * frequencies.to(device)
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return angles.cos().mul_(magnitude).to(dtype), angles.sin().mul_(magnitude).to(dtype)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: int | Tensor | None = None,
    axes: Sequence[int] | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Rotates the first R channels of every head by the angles of its position.

        y_i       = x_i cos_i - x_{i+R/2} sin_i
        y_{i+R/2} = x_{i+R/2} cos_i + x_i sin_i        i < R/2, cos and sin of the token's position

    The channels past R stay as they are. The backward is the inverse rotation and keeps cosines and sines only.

    Args:
        x: `[B, T, H, D]`, floating.
        cos: `[P, R/2]` with `R <= D`, floating: row p belongs to position p (see `rotary_table`).
        sin: like `cos`.
        positions: None, tokens count from 0; an int, they count from there (decoding); `[B, T]` int32 or int64, the
            position of each token (left-padded batches); `[B, T, A]` with `axes`.
        axes: R/2 numbers below A, the axis whose position turns each pair: `[0] * 16 + [1] * 24 + [2] * 24` for time,
            height and width of an image's patches (M-RoPE).
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`: counting starts again in each sequence. Not with a tensor of
            positions, which says it all.
        interleaved: the pairs are channels `(2 i, 2 i + 1)`, not `(i, i + R/2)`.
        inverse: rotate backwards (and keep a scaled table's magnitude).
        inplace: write the result into `x` and return `x`; only where no gradient is wanted.
        impl: "auto" or the name of an implementation.

    Returns:
        A tensor like `x`; computed in float32 (float64 for float64 inputs).

    Raises:
        TypeError: an input is not a tensor of a floating dtype, or `positions` is none of the above.
        ValueError: the table is wider than a head, a position is negative or past the table (contents of tensors are
            read on the CPU, and on a GPU after `flashmix.checks(True)`; unread ones are bounded), or shapes or devices
            differ.

    Source:
        Su et al., "RoFormer" (2104.09864), equation 34; several axes: Qwen2-VL (2409.12191), section 2.1.

    Example:
        >>> import torch
        >>> cos, sin = rotary_table(8, 4)
        >>> x = torch.ones(1, 8, 2, 4)
        >>> y = rotary(x, cos, sin)
        >>> y.shape, torch.equal(rotary(x[:, 5:], cos, sin, positions=5), y[:, 5:])
        (torch.Size([1, 8, 2, 4]), True)
    """
    batch, tokens = _check(x, cos, sin)
    packing = as_packing(cu_seqlens, batch, tokens, x.device)
    place = _place(positions, axes, packing, x, *cos.shape)
    if inplace and wants_gradient(x, cos, sin):
        raise ValueError("inplace must be False where a gradient is wanted, got True")
    choose("rotary", IMPLEMENTATIONS, x, impl)
    c, s = cos[place].unsqueeze(-2), sin[place].unsqueeze(-2)  # [T, 1, R/2] or [B, T, 1, R/2]
    if inverse:
        s = -s
    if inplace:
        turned = x[..., : 2 * c.shape[-1]]
        turned.copy_(_forward(turned, c, s, interleaved))
        return x
    if torch.compiler.is_compiling() or wants_gradient(cos, sin):
        return _formula(x, c, s, interleaved)
    return _Rotary.apply(x, c, s, interleaved) if wants_gradient(x) else _forward(x, c, s, interleaved)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int]:
    batch, tokens, _, channels = dims("x", x, "B T H D")
    check_floating("x", x)
    _, half = dims("cos", cos, "P R/2")
    if 2 * half > channels:
        raise ValueError(
            f"cos must have at most D/2 = {channels // 2} columns for heads of D = {channels} channels, got {half}: "
            f"a table for {2 * half} channels (the head's dim belongs in rotary_table, not the model's)"
        )
    check_shape("sin", sin, *cos.shape)
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating(name, table)
        check_like(name, table, "x", x, dtype=False)
    return batch, tokens


def _place(
    positions: int | Tensor | None,
    axes: Sequence[int] | None,
    packing: Packing | None,
    x: Tensor,
    table: int,
    half: int,
) -> slice | Tensor | tuple[Tensor, Tensor]:
    """What the tokens of `x` read of the tables `[table, half]`: rows (a slice, `[T]`, `[B, T]`), or one for each pair."""
    batch, tokens = x.shape[:2]
    if axes is not None:
        return _rows_and_pairs(positions, axes, packing, x, table, half)
    if isinstance(positions, Tensor):
        if packing is not None:
            raise ValueError("positions must be None or an int together with cu_seqlens, got a tensor")
        check_shape("positions", positions, batch, tokens)
        return _read(positions, x, table)
    if positions is not None and (isinstance(positions, bool) or not isinstance(positions, int)):
        raise TypeError(f"positions must be None, an int or a tensor, got {type(positions).__name__}")
    start = positions or 0
    if start < 0:
        raise ValueError(f"positions must be non-negative, got {start}")
    if packing is not None:
        return _bounded(packing.positions + start, table)
    if start + tokens > table:
        raise ValueError(f"positions must be below the table's length {table}, got {start + tokens - 1}")
    return slice(start, start + tokens)


def _read(positions: Tensor, x: Tensor, table: int) -> Tensor:
    """The caller's tensor of positions, checked and bounded."""
    check_dtype("positions", positions, torch.int32, torch.int64)
    check_like("positions", positions, "x", x, dtype=False)
    return _bounded(positions, table)


def _rows_and_pairs(
    positions: int | Tensor | None, axes: Sequence[int], packing: Packing | None, x: Tensor, table: int, half: int
) -> tuple[Tensor, Tensor]:
    """Which row `[B, T, R/2]` and column `[R/2]` of the table each pair reads along its own axis of `[B, T, A]`."""
    if packing is not None:
        raise ValueError("cu_seqlens must be None with axes (positions say it all), got a packing")
    *_, count = dims("positions", positions, "B T A")  # type: ignore[arg-type]
    check_shape("positions", positions, *x.shape[:2], count)  # type: ignore[arg-type]
    if len(axes) != half:
        raise ValueError(f"axes must have R/2 = {half} entries, got {len(axes)}")
    for axis in axes:
        check_range("axes", axis, 0, count - 1)
    rows = _read(positions, x, table)[..., list(axes)]  # type: ignore[arg-type]
    return rows, torch.arange(half, device=x.device)


def _bounded(positions: Tensor, table: int) -> Tensor:
    """`positions`, checked against the table's length where they may be read, else clamped to it."""
    if not contents_are_checked(positions):
        return positions.clamp(0, max(table - 1, 0))
    if positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0:
            raise ValueError(f"positions must be non-negative, got {low}")
        if high >= table:
            raise ValueError(f"positions must be below the table's length {table}, got {high}")
    return positions


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
