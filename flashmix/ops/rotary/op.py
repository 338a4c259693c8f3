"""Rotary position embedding: turns pairs of channels by an angle that grows with the position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.autograd import of_formula
from flashmix.op.call import Gradients, Op, implementations
from flashmix.op.checks import (
    check_dtype,
    check_floating,
    check_like,
    check_range,
    check_shape,
    check_written,
    contents_are_checked,
    dims,
)
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import check_integer, public
from flashmix.ops.rotary.call import RotaryCall, RotaryInPlaceCall, triton_supports
from flashmix.ops.rotary.portable import formula
from flashmix.ops.rotary.scaling import RotaryScaling, plain_frequencies


def _turned_back(call: RotaryCall, grads: Sequence[Tensor | None], wanted: Sequence[str], impl: str) -> Gradients:
    """The gradient of a rotation is the rotation backwards."""
    if "cos" in wanted or "sin" in wanted:
        return of_formula(formula, call, grads, wanted)
    given = {name: grad for name, grad in zip(("q", "k"), grads, strict=False) if grad is not None}
    first, *second = given.values()
    back = call.but(q=first, k=second.pop() if second else None, inverse=not call.inverse)
    return dict(zip(given, ROTARY(back, impl), strict=True))


IMPLEMENTATIONS = implementations("rotary", triton_supports)
SHARDED = "flashmix.ops.rotary.sharded"
ROTARY = Op("rotary", RotaryCall, IMPLEMENTATIONS, formula=formula, adjoint=_turned_back, sharded=SHARDED)
ROTARY_IN_PLACE = Op("rotary_in_place", RotaryInPlaceCall, IMPLEMENTATIONS, outputs=0, sharded=SHARDED)


@public
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
            `Llama3Scaling` (see `flashmix.ops.rotary.scaling`).
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


@public
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
    _check(cos, sin, x=x)
    packing = as_packing(cu_seqlens, x.shape[0], x.shape[1], x.device)
    places, start, axes = _places(positions, axes, packing, x, cos)
    kind = RotaryInPlaceCall if inplace else RotaryCall
    call = kind(x, None, cos, sin, places, packing, start, axes, interleaved=interleaved, inverse=inverse)
    return _run("rotary", call, impl)[0]


@public
def rotary_qk(
    q: Tensor,
    k: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys of the same tokens together.

        q_out, k_out = rotary(q, ...), rotary(k, ...)

    On a GPU that is one launch.

    Args:
        q: `[B, T, H, D]`, floating.
        k: `[B, T, HK, D]`, the dtype of `q`; any number of heads.
        cos: `[P, R/2]`, see `rotary`, as are all other arguments.
        sin: like `cos`.
        positions: None, an int, `[B, T]`, or `[B, T, A]` with `axes`.
        axes: R/2 numbers below A.
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`.
        interleaved: the pairs are channels `(2 i, 2 i + 1)`, not `(i, i + R/2)`.
        inverse: rotate backwards.
        inplace: write the results into `q` and `k` and return these; only where no gradient is wanted.
        impl: "auto" or the name of an implementation.

    Returns:
        Tensors like `q` and `k`.

    Raises:
        TypeError: an input is not a tensor of a floating dtype, the dtypes of `q` and `k` differ, or `positions` is
            none of the above.
        ValueError: as `rotary`, or `k` has other tokens or channels than `q`.

    Source:
        Su et al., "RoFormer" (2104.09864), equation 34.

    Example:
        >>> import torch
        >>> cos, sin = rotary_table(8, 4)
        >>> q, k = rotary_qk(torch.ones(1, 8, 4, 4), torch.ones(1, 8, 2, 4), cos, sin)
        >>> torch.equal(k, rotary(torch.ones(1, 8, 2, 4), cos, sin)), torch.equal(q[:, :, :2], k)
        (True, True)
    """
    _check(cos, sin, q=q, k=k)
    packing = as_packing(cu_seqlens, q.shape[0], q.shape[1], q.device)
    places, start, axes = _places(positions, axes, packing, q, cos)
    kind = RotaryInPlaceCall if inplace else RotaryCall
    call = kind(q, k, cos, sin, places, packing, start, axes, interleaved=interleaved, inverse=inverse)
    q_out, k_out = _run("rotary_qk", call, impl)
    return q_out, k_out


def _run(op: str, call: RotaryCall, impl: str) -> tuple[Tensor, ...]:
    """The outputs of a checked call, or the overwritten inputs."""
    if not call.in_place:
        return ROTARY(call, impl, op)
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
        raise ValueError("inplace must be False where a gradient is wanted, got True")
    for name, t in zip(("x",) if op == "rotary" else ("q", "k"), call.turned, strict=False):
        check_written(name, t)
    ROTARY_IN_PLACE(call, impl, op)
    return call.turned


def _check(cos: Tensor, sin: Tensor, **turned: Tensor) -> None:
    """Raises unless the turned tensors, by the names that the caller gave them, and the table fit one another."""
    (name, x), *others = turned.items()
    batch, tokens, _, channels = dims(name, x, "B T H D")
    check_floating(name, x)
    for other_name, other in others:
        heads = dims(other_name, other, "B T H D")[2]
        check_shape(other_name, other, batch, tokens, heads, channels)
        check_like(other_name, other, name, x)
    _, half = dims("cos", cos, "P R/2")
    if 2 * half > channels:
        raise ValueError(
            f"cos must have at most D/2 = {channels // 2} columns for heads of D = {channels} channels, got {half}: "
            f"a table for {2 * half} channels (the head's dim belongs in rotary_table, not the model's)"
        )
    check_shape("sin", sin, *cos.shape)
    for table_name, table in (("cos", cos), ("sin", sin)):
        check_floating(table_name, table)
        check_like(table_name, table, name, x, dtype=False)


def _places(
    positions: int | Tensor | None, axes: Sequence[int] | None, packing: Packing | None, x: Tensor, cos: Tensor
) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """The tensor of positions, the position of the first token and the axes; contents are checked where they may be read."""
    table = cos.shape[0]
    if axes is not None:
        return _places_by_axes(positions, axes, packing, x, cos)
    if isinstance(positions, Tensor):
        if packing is not None:
            raise ValueError("positions must be None or an int together with cu_seqlens, got a tensor")
        check_shape("positions", positions, *x.shape[:2])
        return _checked(positions, x, table), 0, ()
    if positions is not None and (isinstance(positions, bool) or not isinstance(positions, int)):
        raise TypeError(f"positions must be None, an int or a tensor, got {type(positions).__name__}")
    start = positions or 0
    if start < 0:
        raise ValueError(f"positions must be non-negative, got {start}")
    if packing is not None:
        if packing.sharded and start + packing.reach > table:  # known without the device
            raise ValueError(f"positions must be below the table's length {table}, got {start + packing.reach - 1}")
        if contents_are_checked(packing.cu_seqlens):
            _check_contents(packing.positions, table, start)
    elif start + x.shape[1] > table:
        raise ValueError(f"positions must be below the table's length {table}, got {start + x.shape[1] - 1}")
    return None, start, ()


def _places_by_axes(
    positions: int | Tensor | None, axes: Sequence[int], packing: Packing | None, x: Tensor, cos: Tensor
) -> tuple[Tensor, int, tuple[int, ...]]:
    table, half = cos.shape
    if not isinstance(axes, (tuple, list)):
        raise TypeError(f"axes must be a sequence of integers, got {type(axes).__name__}")
    if packing is not None:
        raise ValueError("cu_seqlens must be None with axes (positions say it all), got a packing")
    *_, count = dims("positions", positions, "B T A")  # type: ignore[arg-type]
    check_shape("positions", positions, *x.shape[:2], count)  # type: ignore[arg-type]
    if len(axes) != half:
        raise ValueError(f"axes must have R/2 = {half} entries, got {len(axes)}")
    for axis in axes:
        check_range("axes", check_integer("axes", axis), 0, count - 1)
    return _checked(positions, x, table), 0, tuple(axes)  # type: ignore[arg-type]


def _checked(positions: Tensor, x: Tensor, table: int) -> Tensor:
    """The caller's tensor of positions."""
    check_dtype("positions", positions, torch.int32, torch.int64)
    check_like("positions", positions, "x", x, dtype=False)
    _check_contents(positions, table, 0)
    return positions


def _check_contents(positions: Tensor, table: int, start: int) -> None:
    """Raises unless `positions + start` are rows of the table, where they may be read; else reading bounds them."""
    if contents_are_checked(positions) and positions.numel():
        low, high = (int(bound) + start for bound in positions.aminmax())
        if low < 0:
            raise ValueError(f"positions must be non-negative, got {low}")
        if high >= table:
            raise ValueError(f"positions must be below the table's length {table}, got {high}")
