"""Launches the kernels of the short convolution: one convolution, or those of q, k and v together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.gpu.rows import inner_contiguous
from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing
from flashmix.ops.short_conv.call import Convolutions
from flashmix.ops.short_conv.triton_gpu import backward as backward_kernels
from flashmix.ops.short_conv.triton_gpu.forward import (
    FOLDED,
    LONG,
    PACKED,
    ConvNumbers,
    ConvOperands,
    ConvRows,
    ConvSpec,
    short_conv_forward_kernel,
)

SHORT = 64  # sequences of fewer tokens share a program


@dataclass(frozen=True)
class ConvTile:
    """Channels of a program and its warps, rows that it loads at once, programs a multiprocessor; most registers a thread, or 0."""

    block: int
    warps: int
    group: int
    programs: int
    registers: int = 0


# Of widths and bytes of a number up to the first two: tiles forward, backward, and backward where a program's rows may belong
# to several sequences, which is more code a row: few rows at once.
TABLE = (
    (4, 2, ConvTile(512, 4, 4, 32), ConvTile(512, 4, 4, 4, 128), ConvTile(256, 2, 2, 6)),
    (4, 4, ConvTile(512, 4, 4, 32), ConvTile(512, 4, 4, 3), ConvTile(256, 2, 2, 6)),
    (8, 4, ConvTile(256, 4, 4, 32), ConvTile(128, 4, 4, 16), ConvTile(128, 4, 1, 16)),
)


# Backward of long rows of 16-bit numbers with heads of length 1: in 128 registers, four programs a multiprocessor, it spills and is slower.
UNIT_BACKWARD = ConvTile(512, 4, 4, 3, 168)


@dataclass(frozen=True)
class ConvPlan:
    """How a pass over a call is cut into programs."""

    spec: ConvSpec
    n: ConvNumbers
    warps: int
    registers: int

    def bound(self, kernel: Any) -> Kernel:
        limit = {"maxnreg": self.registers} if self.registers else {}
        return bound(kernel, self.spec, num_warps=self.warps, **limit)

    def rows(self, tensors: tuple[Tensor, ...]) -> ConvRows:
        batch, row = strides_of(tensors)
        align = self.spec.ALIGN
        return ConvRows(tensors, tuple([s // align for s in batch]), tuple([s // align for s in row]))


def strides_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides of batch and token; those of axes with one entry, which say nothing, are 0."""
    first, *_ = tensors
    batch, tokens, _ = first.shape
    along_batch = tuple([t.stride(0) if batch > 1 else 0 for t in tensors])
    return along_batch, tuple([t.stride(1) if tokens > 1 else 0 for t in tensors])


def plan(
    call: Convolutions, *rows: tuple[Tensor, ...], dbias: bool | None = None, joined: bool = False, unit: int = 0
) -> ConvPlan:
    """The programs of a pass that reads `rows`, the call's inputs first.

    Of the backward `dbias` says whether it sums that of the bias, `joined` whether the gradients of the inputs are one tensor.
    `unit` is the size of the heads of all parts but the last whose outputs are divided by their length; 0: none are.
    """
    batch, tokens, _ = rows[0][0].shape
    channels, device, packed = call.channels, call.device, call.packing is not None
    whole = not packed and tokens >= SHORT  # sequences have programs of their own
    kind, size = 0 if dbias is None else 1 if whole else 2, call.dtype.itemsize
    first, *_ = [tiles[kind] for width, most, *tiles in TABLE if call.width <= width and size <= most]
    tile = UNIT_BACKWARD if unit and kind == 1 and first.registers else first
    group, programs = tile.group, gpu.multiprocessors(device) * tile.programs
    block = min(tile.block, power_of_two(max(channels)))
    blocks = sum(cdiv(size, block) for size in channels)
    if whole:
        mode, length, sequences = LONG, tokens, batch
    else:
        mode, length, sequences = PACKED if packed else FOLDED, batch * tokens, 1
        group = 1 if tokens == 1 else group
    spans = _spans(programs, sequences * blocks, length)
    span = cdiv(max(cdiv(length, spans), 1), group) * group
    align = math.gcd(16, *channels, *(stride for part in rows for axis in strides_of(part) for stride in axis))
    spec = ConvSpec(
        call.width,
        power_of_two(call.width),
        len(channels),
        mode.value,
        call.activation or "",
        PRECISE=call.dtype == torch.float32,
        HAS_BIAS=call.biases is not None,
        HAS_DBIAS=bool(dbias),
        BLOCK=block,
        GROUP=group,
        ALIGN=align,
        JOINED=joined,
        UNIT=unit,
    )
    jobs, units = sequences * cdiv(length, span), tuple([size // align for size in channels])
    n = ConvNumbers(tokens, batch * tokens, call.sequences, span, blocks, jobs, units, sum(channels) // align)
    return ConvPlan(spec, n, max(1, tile.warps * block // tile.block), tile.registers)


def _spans(programs: int, each: int, rows: int) -> int:
    """Into how many spans `rows` are cut, so that `each` programs a span come out even where `programs` run at once."""
    most = max(1, programs // max(each, 1))  # none in a batch of 0
    if most > 3:
        return most
    return min(range(1, max(2, min(9, rows // SHORT))), key=lambda spans: cdiv(spans * each, programs) / spans)


def rows_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([inner_contiguous(t) for t in tensors])


def operands_of(call: Convolutions) -> ConvOperands:
    weights, biases, state = call.weights, call.biases, call.initial_state
    sequence = starts = None
    if call.packing is not None:
        sequence, starts = sequence_of(call.packing), call.packing.cu_seqlens
    return ConvOperands(
        tuple([t.contiguous() for t in weights]),
        None if biases is None else tuple([t.contiguous() for t in biases]),
        None if state is None else state.contiguous(),
        sequence,
        starts,
        None if call.skips is None else call.skips.view(torch.uint8),
    )


def sequence_of(packing: Packing) -> Tensor:
    """`[T]`: the sequence of each token, made once a batch."""
    return packing.table("sequence", lambda: Packing.unchecked(packing.cu_seqlens, packing.total).sequence)


def forward(call: Convolutions, save: bool) -> tuple[Outputs, Outputs]:
    return forward_joined(call, 0), ()


def forward_joined(call: Convolutions, unit: int) -> Outputs:
    """The outputs; those of all parts but the last are divided by their length per head of `unit` channels, unless that is 0."""
    outputs, x = call.results(), rows_of(call.inputs)
    added = () if call.added is None else rows_of([call.added])
    y, final = (outputs[:-1], outputs[-1]) if call.return_state else (outputs, None)
    p = plan(call, x, added or x[:1], unit=unit)
    states = 0 if final is None or call.width == 1 else call.sequences
    residual = p.rows(added) if added else None
    grid = (p.n.jobs + states) * p.n.blocks
    p.bound(short_conv_forward_kernel)(grid, p.rows(x), residual, operands_of(call), y, final, p.n)
    return outputs


def backward(call: Convolutions, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    names, weights, biases = ([part[i] for part in call.NAMES] for i in range(3))
    dx = gradients_of(call.inputs) if any(name != "initial_state" for name in wanted) else ()
    dweight = gradients_of(call.weights) if any(name in wanted for name in weights) else None
    dbias = gradients_of(call.biases) if call.biases and any(name in wanted for name in biases) else None
    state = call.initial_state if "initial_state" in wanted else None
    dstate = None if state is None else state.new_empty(state.shape)
    run_backward(call, grads, dx, dweight, dbias, dstate)
    found = dict(zip(names, dx, strict=False)) | dict(zip(weights, dweight or (), strict=False))
    found |= dict(zip(biases, dbias or (), strict=False))
    return found if dstate is None else found | {"initial_state": dstate}


def backward_joined(
    call: Convolutions,
    grads: Sequence[Tensor | None],
    unit: int,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Writes the gradients of inputs `[B, T, D]`, weights `[D, W]` and biases `[D]`, of all parts side by side."""
    weights, biases = ((t if t is None else t.split(call.channels)) for t in (dweight, dbias))
    run_backward(call, grads, (dx,), weights, biases, None, unit)


def run_backward(
    call: Convolutions,
    grads: Sequence[Tensor | None],
    dx: tuple[Tensor, ...],
    dweight: tuple[Tensor, ...] | None,
    dbias: tuple[Tensor, ...] | None,
    dstate: Tensor | None,
    unit: int = 0,
) -> None:
    """Writes the gradients; `dx` has one tensor for each part, one for all side by side, or none where only `dstate` is wanted."""
    x, c, (flows, dfinal) = rows_of(call.inputs), operands_of(call), call.flows(grads)
    dy = rows_of([t.new_zeros(t.shape[2]).expand(t.shape) if g is None else g for g, t in zip(flows, x, strict=True)])
    dfinal = None if dfinal is None else dfinal.contiguous()
    p = plan(call, x, dy, dbias=dbias is not None, joined=0 < len(dx) < len(x), unit=unit)
    partial = None
    if dweight or dbias:
        partial = torch.empty(p.n.jobs, call.width + 1, sum(call.channels), dtype=torch.float32, device=call.device)
    tapes = p.rows(x), p.rows(dy), c
    if dx:
        p.bound(backward_kernels.short_conv_backward_kernel)(p.n.jobs * p.n.blocks, *tapes, dx, dfinal, partial, p.n)
    if partial is not None:
        _sum_weights(p, call.channels, partial, dweight, dbias)
    if dstate is not None:
        grid = call.sequences * p.n.blocks if dstate.numel() else 0
        p.bound(backward_kernels.short_conv_state_backward_kernel)(grid, *tapes, dstate, dfinal, p.n)


def gradients_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Empty, contiguous. A frozen part among others has gradients too, which are thrown away."""
    return tuple([torch.empty(size=t.shape, dtype=t.dtype, device=t.device) for t in tensors])


def _sum_weights(
    p: ConvPlan, channels: Sequence[int], partial: Tensor, dweight: Outputs | None, dbias: Outputs | None
) -> None:
    width, block = p.spec.WIDTH, min(64, p.spec.BLOCK)
    blocks = sum(cdiv(size, block) for size in channels)
    spec = backward_kernels.ConvSumSpec(width, len(channels), BLOCK=block, GROUP=16, ALIGN=p.spec.ALIGN)
    grid = blocks * (width + 1 if dbias else width)
    kernel = bound(backward_kernels.short_conv_weight_backward_kernel, spec)
    kernel(grid, partial, dweight, dbias, p.n._replace(blocks=blocks))
