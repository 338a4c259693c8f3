"""RWKV-4's averages in C, on a CPU, in float32: token after token, one sequence and block of channels per thread at a time.

It is part of the library of the recurrence in C, whose vectors and exponential it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import check_boundaries
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.native.binding import NativeWkv, library

__all__ = ["backward", "forward", "keeps"]

LANES, BLOCK = 16, 2048  # channels of a vector, and of a block at most: they lie on the thread's stack


def forward(call: WkvCall, save: bool) -> tuple[Outputs, Outputs]:
    call, dtype = _in_float32(call), call.dtype
    (out, *states), kept = call.results(), call.kept() if save else ()
    results = dict(zip(("out", "last_a", "last_b", "last_m", "kept"), (out, *states, *kept), strict=False))
    _run("", call, results)
    return (out.to(dtype), *states), kept


def _in_float32(call: WkvCall) -> WkvCall:
    return call.but(k=call.k.float(), v=call.v.float())


def keeps(call: WkvCall) -> Outputs:
    return call.kept()


def backward(call: WkvCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all tensors; the sums of a state count `e^m` times, so that of `m` is theirs."""
    call, dtype = _in_float32(call), call.dtype
    d_out, d_a, d_b, _ = (None if d is None else d.float() for d in grads)
    shapes = dict.fromkeys(("dk", "dv"), call.k.shape) | dict.fromkeys(
        ("dw", "du", "d_start_a", "d_start_b"), call.a.shape
    )
    found = {name: torch.empty(size=shape, dtype=call.dtype, device="cpu") for name, shape in shapes.items()}
    _run("_backward", call, found, d_out=d_out, d_a=d_a, d_b=d_b, kept=kept[0])
    d_a, d_b = found["d_start_a"], found["d_start_b"]
    sums = {name: found[short].sum(0, dtype=torch.float64) for name, short in (("log_decay", "dw"), ("bonus", "du"))}
    gradients = {
        "k": found["dk"].to(dtype),
        "v": found["dv"].to(dtype),
        "a": d_a,
        "b": d_b,
        "m": d_a * call.a + d_b * call.b,
    }
    return gradients | {name: total.to(call.dtype) for name, total in sums.items()}


def _run(way: str, call: WkvCall, results: dict[str, Tensor], **operands: Tensor | None) -> None:
    """One call of the library, forward or "_backward"; operands and contiguous results by the names of `NativeWkv`."""
    operands |= {"k": call.k, "v": call.v, "w": call.log_decay, "u": call.bonus, "a": call.a, "b": call.b, "m": call.m}
    tensors = {name: t.contiguous() for name, t in operands.items() if t is not None} | results
    batch, tokens = call.k.shape[:2]
    if call.packing is None:
        starts = torch.arange(batch + 1, device="cpu") * tokens
    else:
        starts = call.packing.cu_seqlens.to(torch.int64).contiguous()
        check_boundaries(starts.tolist(), call.packing.total)  # compiled, nothing has looked at them before
    channels = call.log_decay.numel()
    if not channels:
        return
    parts = max(1, -(-torch.get_num_threads() // max(call.sequences, 1)))
    block = min(-(-channels // (parts * LANES)) * LANES, BLOCK)
    native = NativeWkv(
        sequences=call.sequences,
        channels=channels,
        tokens=batch * tokens,
        block=block,
        threads=torch.get_num_threads(),
        starts=starts.data_ptr(),
        **{name: t.data_ptr() for name, t in tensors.items()},
    )
    getattr(library(), f"flashmix_wkv{way}")(ctypes.byref(native))
