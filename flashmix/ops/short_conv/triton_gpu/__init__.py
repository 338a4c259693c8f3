"""Launches the kernels of the short convolution: one convolution, or those of q, k and v together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.rows import inner_contiguous
from flashmix.op.rowwise import Options, Tensors
from flashmix.ops.short_conv.triton_gpu import backward as backward_kernels
from flashmix.ops.short_conv.triton_gpu import forward as forward_kernels

SHORT = 64  # sequences of fewer tokens share a program


@dataclass(frozen=True)
class Tile:
    """Channels of a program and its warps, rows that it loads at once, programs a multiprocessor; most registers a thread, or 0."""

    block: int
    warps: int
    group: int
    programs: int
    registers: int = 0


# Of widths and bytes of a number up to the first two: tiles forward, backward, and backward where a program's rows may belong
# to several sequences, which is more code a row: few rows at once.
TABLE = (
    (4, 2, Tile(512, 4, 4, 32), Tile(512, 4, 4, 4, 128), Tile(256, 2, 2, 6)),
    (4, 4, Tile(512, 4, 4, 32), Tile(512, 4, 4, 3), Tile(256, 2, 2, 6)),
    (8, 4, Tile(256, 4, 4, 32), Tile(128, 4, 4, 16), Tile(128, 4, 1, 16)),
)


@dataclass(frozen=True)
class Convolution:
    """The operands of one launch; the sequences fill `x` in order, row by row."""

    x: tuple[Tensor, ...]  # [B, T, D_i], channels contiguous
    weight: tuple[Tensor, ...]  # [D_i, W], contiguous
    bias: tuple[Tensor, ...]  # [D_i], or none
    state: Tensor | None  # [N, W - 1, D], contiguous
    sequence: Tensor | None  # [T], packed: the sequence of each row
    starts: Tensor | None  # [N + 1], packed
    activation: str

    @classmethod
    def of(
        cls, x: Tensors, weight: Tensors, bias: Tensors, state: Tensor | None, sequence: Tensor | None,
        starts: Tensor | None, activation: str,
    ) -> Convolution:  # fmt: skip
        weights, biases = (tuple(t.contiguous() for t in group if t is not None) for group in (weight, bias))
        state = None if state is None else state.contiguous()
        return cls(rows_of(x), weights, biases, state, sequence, starts, activation)

    @property
    def width(self) -> int:
        return self.weight[0].shape[1]

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(x.shape[2] for x in self.x)

    @property
    def count(self) -> int:
        return self.x[0].shape[0] if self.starts is None else self.starts.shape[0] - 1


def rows_of(tensors: Tensors) -> tuple[Tensor, ...]:
    return tuple(inner_contiguous(t) for t in tensors if t is not None)


@dataclass(frozen=True)
class Plan:
    """How a launch is cut into programs."""

    mode: int
    block: int
    group: int
    warps: int
    registers: int
    span: int
    blocks: int
    jobs: int
    align: int
    strides: tuple[tuple[tuple[int, ...], ...], ...]  # of x (and dy): those of the batch, those of a row

    @property
    def sizes(self) -> dict[str, int]:
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"MODE": self.mode, "BLOCK": self.block, "ALIGN": self.align, "num_warps": self.warps, **limit}


def plan(c: Convolution, *others: tuple[Tensor, ...], backward: bool = False) -> Plan:
    """The programs for a convolution and further tensors with rows like those of x."""
    batch, tokens, _ = c.x[0].shape
    whole = c.starts is None and tokens >= SHORT  # sequences have programs of their own
    kind, size = 0 if not backward else 1 if whole else 2, c.x[0].element_size()
    tile = next(tiles[kind] for width, most, *tiles in TABLE if c.width <= width and size <= most)
    group, programs = tile.group, gpu.target(c.x[0].device).multiprocessors * tile.programs
    block = min(tile.block, triton.next_power_of_2(max(c.channels)))
    blocks = sum(triton.cdiv(size, block) for size in c.channels)
    if whole:
        mode, rows, sequences = 0, tokens, batch
    else:
        mode, rows, sequences = 1 if c.starts is None else 2, batch * tokens, 1
        group = 1 if tokens == 1 else group
    spans = _spans(programs, sequences * blocks, rows)
    span = triton.cdiv(max(triton.cdiv(rows, spans), 1), group) * group
    strides = tuple(
        (
            tuple(t.stride(0) if batch > 1 else 0 for t in group_),
            tuple(t.stride(1) if tokens > 1 else 0 for t in group_),
        )
        for group_ in (c.x, *others)
    )
    align = math.gcd(16, *c.channels, *(stride for pair in strides for part in pair for stride in part))
    jobs = sequences * triton.cdiv(rows, span)
    units = tuple(tuple(tuple(stride // align for stride in part) for part in pair) for pair in strides)
    warps = max(1, tile.warps * block // tile.block)
    return Plan(mode, block, group, warps, tile.registers, span, blocks, jobs, align, units)


def _spans(programs: int, each: int, rows: int) -> int:
    """Into how many spans `rows` are cut, so that `each` programs a span come out even where `programs` run at once."""
    most = max(1, programs // each)
    if most > 3:
        return most
    return min(range(1, max(2, min(9, rows // SHORT))), key=lambda spans: triton.cdiv(spans * each, programs) / spans)


def _common(c: Convolution, p: Plan) -> dict[str, object]:
    return p.sizes | {
        "WIDTH": c.width,
        "PADDED": triton.next_power_of_2(c.width),
        "ACTIVATION": c.activation,
        "PARTS": len(c.x),
        "HAS_BIAS": bool(c.bias),
        "PRECISE": c.x[0].dtype == torch.float32,
    }


def _units(c: Convolution, p: Plan) -> tuple[tuple[int, ...], int]:
    return tuple(size // p.align for size in c.channels), sum(c.channels) // p.align


def forward(c: Convolution, y: tuple[Tensor, ...], final: Tensor | None, residual: Tensor | None = None) -> None:
    """Fills `y`, tensors like x, contiguous, and the state after each sequence; one part may have a residual."""
    batch, tokens, _ = c.x[0].shape
    added = c.x[:1] if residual is None else rows_of([residual])
    p = plan(c, added)
    (channels, total), any_of = _units(c, p), c.x[0]
    jobs, states = p.jobs, 0 if final is None or c.width == 1 else c.count
    if (jobs + states) * p.blocks == 0:
        return
    forward_kernels.short_conv_forward_kernel[((jobs + states) * p.blocks,)](
        c.x, c.weight, c.bias or any_of, added, y, any_of if c.state is None else c.state,
        any_of if final is None else final, any_of if c.sequence is None else c.sequence,
        any_of if c.starts is None else c.starts, *p.strides[0], *p.strides[1], channels,
        tokens, batch * tokens, c.count, p.span, p.blocks, jobs, total,
        HAS_RESIDUAL=residual is not None, HAS_STATE=c.state is not None, GROUP=p.group, **_common(c, p),
    )  # fmt: skip


def backward(
    c: Convolution,
    dy: Tensors,
    dfinal: Tensor | None,
    dx: Tensors,
    dweight: Tensors,
    dbias: Tensors,
    dstate: Tensor | None,
) -> None:
    """Fills the gradients that are there, from those of y (None: zero) and of the final state."""
    batch, tokens, _ = c.x[0].shape
    zeros = (x.new_zeros(x.shape[2]).expand(x.shape) for x in c.x)
    flows = rows_of([zero if given is None else given for given, zero in zip(dy, zeros, strict=True)])
    dfinal = None if dfinal is None else dfinal.contiguous()
    p = plan(c, flows, backward=True)
    (channels, total), any_of = _units(c, p), c.x[0]
    wanted = any(t is not None for t in (*dweight, *dbias))
    dx = tuple(torch.empty_like(x) if d is None else d for x, d in zip(c.x, dx, strict=True))
    partial = torch.empty(
        (p.jobs, c.width + 1, sum(c.channels)) if wanted else 0, dtype=torch.float32, device=any_of.device
    )
    starts = any_of if c.starts is None else c.starts
    state, final = any_of if c.state is None else c.state, any_of if dfinal is None else dfinal
    if p.jobs * p.blocks:
        backward_kernels.short_conv_backward_kernel[(p.jobs * p.blocks,)](
            c.x, c.weight, c.bias or any_of, flows, dx, state, final, partial,
            any_of if c.sequence is None else c.sequence, starts, *p.strides[0], *p.strides[1], channels,
            tokens, batch * tokens, c.count, p.span, p.blocks, p.jobs, total,
            HAS_STATE=c.state is not None, HAS_DFINAL=dfinal is not None, HAS_PARTIAL=wanted,
            HAS_DBIAS=any(t is not None for t in dbias), GROUP=p.group, **_common(c, p),
        )  # fmt: skip
    if wanted:
        _sum_weights(c, p, partial, dweight, dbias)
    if dstate is not None and dstate.numel():
        backward_kernels.short_conv_state_backward_kernel[(c.count * p.blocks,)](
            c.x, c.weight, c.bias or any_of, flows, state, dstate, final, starts, *p.strides[0], *p.strides[1],
            channels, tokens, batch * tokens, c.count, p.blocks, total, HAS_DFINAL=dfinal is not None, **_common(c, p),
        )  # fmt: skip


def _sum_weights(c: Convolution, p: Plan, partial: Tensor, dweight: Tensors, dbias: Tensors) -> None:
    """A frozen part among others is summed too and thrown away."""
    weights, biases = _all_of(dweight, c.weight), _all_of(dbias, c.bias)
    block = min(64, p.block)
    blocks = sum(triton.cdiv(size, block) for size in c.channels)
    channels, total = _units(c, p)
    columns = c.width + 1 if biases else c.width
    backward_kernels.short_conv_weight_backward_kernel[(blocks * columns,)](
        partial, weights or partial, biases or partial, channels, p.jobs, blocks, total, WIDTH=c.width, PARTS=len(c.x),
        HAS_WEIGHT=bool(weights), HAS_BIAS=bool(biases), BLOCK=block, GROUP=16, ALIGN=p.align,
    )  # fmt: skip


def _all_of(gradients: Tensors, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Where to write the gradients of all parts, if one of them is wanted."""
    if all(t is None for t in gradients):
        return ()
    return tuple(torch.empty_like(t) if d is None else d for d, t in zip(gradients, like, strict=True))


class ShortConv:
    """x, weight, bias, residual, state, sequence, starts; activation, whether the state is returned."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        return _results(inputs[:1], inputs[1], inputs[6], options), []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        x, weight, bias, residual, state, sequence, starts = inputs
        final = results[1] if options[1] else None
        forward(
            Convolution.of((x,), (weight,), (bias,), state, sequence, starts, options[0]),
            (results[0],),
            final,
            residual,
        )

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        x, weight, bias, _, state, sequence, starts = inputs
        dx, dweight, dbias, _, dstate, *_ = gradients
        c = Convolution.of((x,), (weight,), (bias,), state, sequence, starts, options[0])
        backward(c, grads[:1], grads[1] if options[1] else None, (dx,), (dweight,), (dbias,), dstate)


class ShortConvQKV:
    """q, k, v, their weights, their biases, state, sequence, starts; activation, whether the state is returned."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        return _results(inputs[:3], inputs[3], inputs[11], options), []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        final = results[3] if options[1] else None
        c = Convolution.of(inputs[:3], inputs[3:6], inputs[6:9], inputs[9], inputs[10], inputs[11], options[0])
        forward(c, tuple(results[:3]), final)

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        c = Convolution.of(inputs[:3], inputs[3:6], inputs[6:9], inputs[9], inputs[10], inputs[11], options[0])
        dfinal = grads[3] if options[1] else None
        backward(c, grads[:3], dfinal, gradients[:3], gradients[3:6], gradients[6:9], gradients[9])


def _results(x: Tensors, weight: Tensor | None, starts: Tensor | None, options: Options) -> list[Tensor]:
    given = [t for t in x if t is not None]
    assert weight is not None
    results = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    if options[1]:
        count = given[0].shape[0] if starts is None else starts.shape[0] - 1
        results.append(given[0].new_empty(count, weight.shape[1] - 1, sum(t.shape[2] for t in given)))
    return results
