"""The preconditioner of keys in C, on a CPU, in float32: token after token, one sequence and block of heads per thread at a time.

It is part of the library of the recurrence in C, whose vectors and exponential it has.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import check_boundaries
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.preconditioner.native.binding import NativePreconditioner, library

__all__ = ["backward", "forward", "keeps"]

BLOCK = 2048  # channels of a block, at most: they lie on the thread's stack
LEAST_WORK = 1 << 15  # numbers for which a second thread pays


def forward(call: PreconditionerCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = call.results(), call.kept() if save else ()
    _run("", call, dict(zip(("out", "last", "kept"), (*outputs, *kept), strict=False)))
    return outputs, kept


def keeps(call: PreconditionerCall) -> Outputs:
    return call.kept()


def backward(
    call: PreconditionerCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    """The gradients of all tensors."""
    d_out, d_last = grads
    rows, heads = call.weight.shape, (call.sequences, call.log_scale.shape[0])
    shapes = {"dk": call.k.shape, "dweight": rows, "dg": rows, "dscale": heads, "d_start": call.curvature.shape}
    found = {name: torch.empty(size=shape, dtype=call.dtype, device="cpu") for name, shape in shapes.items()}
    _run("_backward", call, found, d_out=d_out, d_last=d_last, kept=kept[0])
    d_scale = found["dscale"].sum(0, dtype=torch.float64).to(call.dtype)
    gradients = {"k": found["dk"], "weight": found["dweight"], "log_decay": found["dg"], "log_scale": d_scale}
    return gradients | {"curvature": found["d_start"]}


def _run(way: str, call: PreconditionerCall, results: dict[str, Tensor], **operands: Tensor | None) -> None:
    """One call of the library, forward or "_backward"; operands and contiguous results by the names of `NativePreconditioner`."""
    operands |= {"k": call.k, "weight": call.weight, "g": call.log_decay}
    operands |= {"log_scale": call.log_scale, "start": call.curvature}
    tensors = {name: t.contiguous() for name, t in operands.items() if t is not None} | results
    batch, tokens, heads, width = call.k.shape
    if call.packing is None:
        starts = torch.arange(batch + 1, device="cpu") * tokens
    else:
        starts = call.packing.cu_seqlens.to(torch.int64).contiguous()
        check_boundaries(starts.tolist(), call.packing.total)  # compiled, nothing has looked at them before
    if not heads * width:
        return
    threads = torch.get_num_threads() if call.k.numel() > LEAST_WORK else 1
    parts = max(1, -(-threads // max(call.sequences, 1)))
    native = NativePreconditioner(
        sequences=call.sequences,
        heads=heads,
        width=width,
        block=max(1, min(-(-heads // parts), BLOCK // (-(-width // 16) * 16))),
        threads=threads,
        starts=starts.data_ptr(),
        power=-math.log(call.bound),
        eps=call.eps,
        **{name: t.data_ptr() for name, t in tensors.items()},
    )
    getattr(library(), f"flashmix_preconditioner{way}")(ctypes.byref(native))
