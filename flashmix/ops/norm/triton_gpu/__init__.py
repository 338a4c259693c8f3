"""The norms on a GPU: rows that fit in one tile (`rows.py`), and wide ones (`wide.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.gpu.rows import as_rows, contiguous, programs_for, sum_columns
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.norm.call import NormCall
from flashmix.ops.norm.triton_gpu.rows import norm_backward_kernel, norm_forward_kernel
from flashmix.ops.norm.triton_gpu.structs import (
    NormGradients,
    NormInputs,
    NormNumbers,
    NormResults,
    NormSaved,
    NormSpec,
)
from flashmix.ops.norm.triton_gpu.wide import (
    norm_backward_wide_kernel,
    norm_forward_wide_kernel,
    norm_weights_backward_kernel,
)

WIDEST = 8192  # channels of a row that one program holds
BLOCK, WARPS = 4096, 8  # of wide rows: channels at a time
COLUMNS, LINES, EACH = 128, 16, 4  # of the pass over columns: channels, rows at a time, programs a multiprocessor


@dataclass(frozen=True)
class NormTile:
    """Rows of a program's tile and its warps; with a backward, programs a multiprocessor and tiles on their way at once."""

    rows: int
    warps: int
    programs: int = 1
    stages: int = 1


# Programs of 4 warps that the registers of a multiprocessor hold at once: narrow and float32 rows, plain, with a bias, with
# a gate, with both. One more would run when these are done.
PROGRAMS = {2: (6, 5, 5, 3), 4: (4, 4, 2, 2)}


def forward_tile(block: int, center: bool, gate: bool) -> NormTile:
    """By what is computed alone: a row's bits must depend neither on how many there are nor on whether it is summed in the same pass."""
    mean = center and not gate  # two sums, one after the other: few warps wait less
    if block <= 128:
        return NormTile(max(1, 512 // block), 1) if gate else NormTile(max(1, 1024 // block), 2)
    if block < 4096:
        return NormTile(1024 // block, 2) if mean and 512 <= block <= 1024 else NormTile(2048 // block, 4)
    if gate and block > 4096:
        return NormTile(1, 16)
    return NormTile(1, 4 if mean else 8)


def backward_tile(block: int, itemsize: int, bias: bool, gate: bool, shared_memory: int) -> NormTile:
    """As many programs as fit at once; where those are few, the next two rows of each are on their way, if there is room."""
    rows, warps = max(1, 2048 // block), max(4, block // 512)
    programs = PROGRAMS[itemsize][bias + 2 * gate] - (block == 512 and itemsize == 2)
    programs = max(1, programs * 4 // warps)
    if block < 2048 or (programs * warps > 16 and not bias and not gate):
        return NormTile(rows, warps, programs)
    programs = min(programs, 16 // warps)
    coming = 2 * programs * block * itemsize * (3 + gate)  # h, dy, perhaps a gradient of h itself, the gate
    pays = coming <= shared_memory - 2**14 and not (gate and itemsize == 4)
    return NormTile(rows, warps, programs, 3 if pays else 1)


Norm = tuple[int, int, int, bool, str, int]  # the first fields of NormSpec: what is computed, and where rows lie


@lru_cache(maxsize=1024)
def forward_kernel(norm: Norm, gate: bool) -> tuple[Kernel, int]:
    """The forward's kernel, and the rows of its tile."""
    width, _, _, center, _, _ = norm
    if width > WIDEST:
        return bound(norm_forward_wide_kernel, NormSpec(*norm, ROWS=1, BLOCK=BLOCK), num_warps=WARPS), 1
    block = power_of_two(width)
    tile = forward_tile(block, center, gate)
    spec = NormSpec(*norm, ROWS=tile.rows, BLOCK=block)
    return bound(norm_forward_kernel, spec, num_warps=tile.warps), tile.rows


@lru_cache(maxsize=1024)
def backward_kernel(norm: Norm, itemsize: int, bias: bool, gate: bool, shared_memory: int) -> tuple[Kernel, NormTile]:
    """The kernel of rows that one program holds, and its tile."""
    block = power_of_two(norm[0])
    tile = backward_tile(block, itemsize, bias, gate, shared_memory)
    spec = NormSpec(*norm, ROWS=tile.rows, BLOCK=block, STAGES=tile.stages)
    return bound(norm_backward_kernel, spec, num_warps=tile.warps), tile


def forward(call: NormCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = _outputs(call), keeps(call)
    if call.x.numel() == 0:
        return outputs, kept
    rows = as_rows(*_grouped(call.groups, call.x, call.residual, call.gate))
    x, residual, gate = rows.rows
    norm = (call.width, call.groups, call.divisor, call.center, call.activation, rows.outer)
    kernel, each = forward_kernel(norm, gate is not None)
    kernel(
        cdiv(rows.total, each),
        NormInputs(x, residual, contiguous(call.weight), contiguous(call.bias), gate, rows.sizes),
        NormResults(outputs[0], None if residual is None else outputs[1], kept[0], kept[1] if call.center else None),
        NormNumbers(rows.total, call.eps),
    )
    return outputs, kept


def _outputs(call: NormCall) -> Outputs:
    """What the forward writes, and `x` where it goes on as it is."""
    if call.residual is not None or not call.sums:
        return call.results()
    return *call.but(sums=False).results(), call.x.contiguous()


def keeps(call: NormCall) -> Outputs:
    """Of each row (group) its scale, and its mean if that is taken off."""
    x, shape = call.x, (*call.x.shape[:-1], call.groups)
    scale = torch.empty(size=shape, dtype=torch.float32, device=x.device)
    return (scale, torch.empty_like(scale)) if call.center else (scale,)


def backward(call: NormCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    d_y, d_h = (*grads, None)[:2]
    if d_y is None:
        return call.gradients_of_sum(d_h, wanted)
    found = {name: (t := getattr(call, name)).new_empty(t.shape) for name in wanted}
    if call.x.numel() == 0:
        return {name: gradient.zero_() for name, gradient in found.items()}
    rows = as_rows(*_grouped(call.groups, call.x, call.gate, d_y, d_h))
    h, gate, dy, dh = rows.rows
    scale, mean = kept if call.center else (kept[0], None)
    saved = NormSaved(h, contiguous(call.weight), contiguous(call.bias), gate, dy, dh, scale, mean, rows.sizes)
    norm = (call.width, call.groups, call.divisor, call.center, call.activation, rows.outer)
    spills = gate is not None and (call.bias is not None or gate.data.dtype == torch.float32)
    if call.width > (WIDEST // 2 if spills else WIDEST):
        _wide_backward(saved, found, rows.total, norm)
        return found
    size = max([t.data.element_size() for t in (h, gate, dy) if t is not None])
    shared_memory = gpu.target(call.device).shared_memory
    kernel, tile = backward_kernel(norm, size, call.bias is not None, gate is not None, shared_memory)
    programs = cdiv(rows.total // call.groups, tile.rows)
    if "weight" in found or "bias" in found:
        programs = programs_for(programs, call.device, max(1, tile.programs // call.groups))
    partial = _partial(found, programs)
    kernel(programs * call.groups, saved, partial, rows.total)
    _sum_partial(partial, found)
    return found


def _wide_backward(saved: NormSaved, found: Gradients, count: int, norm: Norm) -> None:
    """Fills the gradients `found`; one pass over rows, and one over columns for those of weights."""
    width, groups, *_ = norm
    if "x" in found or "gate" in found:
        spec = NormSpec(*norm, ROWS=1, BLOCK=BLOCK)
        gradients = NormGradients(found.get("x"), found.get("gate"), None, None)
        bound(norm_backward_wide_kernel, spec, num_warps=WARPS)(count, saved, gradients, count)
    if "weight" not in found and "bias" not in found:
        return
    blocks = cdiv(width * groups, COLUMNS)
    each = cdiv(programs_for(2**31 - 1, saved.dy.data.device, EACH), blocks)
    parts = min(cdiv(count // groups, LINES), each)
    partial = _partial(found, parts)
    kernel = bound(norm_weights_backward_kernel, NormSpec(*norm, ROWS=LINES, BLOCK=COLUMNS), num_warps=4)
    kernel(blocks * parts, saved, partial, count, parts)
    _sum_partial(partial, found)


def _partial(found: Gradients, programs: int) -> NormGradients:
    """The gradients, with partial sums of `programs` in place of those of weight and bias."""
    sums = {
        name: found[name].new_empty((programs, found[name].numel()), dtype=torch.float32)
        for name in ("weight", "bias")
        if name in found
    }
    return NormGradients(found.get("x"), found.get("gate"), sums.get("weight"), sums.get("bias"))


def _sum_partial(partial: NormGradients, found: Gradients) -> None:
    for name in ("weight", "bias"):
        if name in found:
            sum_columns(getattr(partial, name), found[name])


def _empty(like: Tensor) -> Tensor:
    return torch.empty(size=like.shape, dtype=like.dtype, device=like.device)


def _grouped(groups: int, *tensors: Tensor | None) -> Sequence[Tensor | None]:
    """The tensors with an axis of the groups."""
    return tensors if groups == 1 else [None if t is None else t.unflatten(-1, (groups, -1)) for t in tensors]
