"""The scan in C, on a CPU: in float32 or pairs of it, token after token, one sequence and block of channels per thread at a time.

It is part of the library of the recurrence in C, whose vectors and exponential it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing, check_boundaries
from flashmix.ops.scan.call import COUPLINGS, ScanCall
from flashmix.ops.scan.native.binding import NativeScan, library

__all__ = ["backward", "forward"]

LANES = 16  # as in recurrence.c
BLOCK = 2048  # channels of a block, at most: they lie on the thread's stack
LEAST_WORK = 1 << 15  # numbers for which a second thread pays
BY_CHANNEL, BY_HEAD, CONSTANT = range(3)  # as in call.h
REAL, TURNING, FACTORS = range(3)


def forward(call: ScanCall, save: bool) -> tuple[Outputs, Outputs]:
    h, state = _empty(call, *call.x.shape), _empty(call, call.sequences, *call.x.shape[2:])
    _run("", call, {"h": h, "state": state}, x=call.x)
    return (h.to(call.dtype), state), ()


def backward(call: ScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of the tensors `wanted`, and of `x`; `h` is in its place, and with a coupling `x` is `source`."""
    d_h, d_state = grads
    h, shape = call.x, call.x.shape
    found = {"dx": _empty(call, *shape)}
    if "initial_state" in wanted:
        found["d_initial_state"] = _empty(call, call.sequences, *shape[2:])
    kind = _decay(call)
    if "log_decay" in wanted:
        sizes = {BY_CHANNEL: shape, BY_HEAD: shape[:3], CONSTANT: (call.sequences, *shape[2:])}[kind]
        found["dg"] = _empty(call, *sizes)
    _run("_backward", call, found, h=h, x=call.source, d_h=d_h, d_state=d_state)
    gradients = {"x": found["dx"].to(h.dtype)}
    if "d_initial_state" in found:
        gradients["initial_state"] = found["d_initial_state"]
    if "dg" in found:
        d_g = found["dg"]
        if not call.log_decay.is_complex():
            d_g = d_g.real  # of a real tensor itself
        if kind == CONSTANT:
            d_g = d_g.sum(0, dtype=torch.complex128 if d_g.is_complex() else torch.float64)
        if call.by_head and kind != BY_HEAD:
            d_g = d_g.sum(-1)
        gradients["log_decay"] = d_g.to(call.log_decay.dtype).contiguous()
    return gradients


def _empty(call: ScanCall, *shape: int) -> Tensor:
    return torch.empty(size=shape, dtype=call.state_dtype, device="cpu")


def _decay(call: ScanCall) -> int:
    if call.constant:
        return CONSTANT
    return BY_HEAD if call.by_head and call.x.shape[-1] <= BLOCK and not call.x.is_complex() else BY_CHANNEL


def _run(way: str, call: ScanCall, results: dict[str, Tensor], **operands: Tensor | None) -> None:
    """One call of the library, forward or "_backward"; `results`, wide and contiguous, and `operands` by the names of `NativeScan`."""
    kind, g, (batch, tokens, *sizes) = _decay(call), call.decay, call.x.shape
    turning = REAL if not call.x.is_complex() else FACTORS if kind == CONSTANT else TURNING if g.is_complex() else REAL
    g = call.log_decay if kind == BY_HEAD else g.expand(sizes if kind == CONSTANT else (batch, tokens, *sizes))
    if turning == FACTORS:
        g = g.to(torch.complex128).exp()  # an error of one factor would grow with the tokens
    operands |= {"g": g, "initial_state": call.initial_state}
    tensors = {n: _wide(t) for n, t in operands.items() if t is not None} | results
    if call.packing is None:
        starts = torch.arange(batch + 1, device="cpu") * tokens
    else:
        packing = call.packing
        starts = packing.table(_run, lambda: _packed_starts(packing))
    channels = torch.Size(sizes).numel() * (2 if call.x.is_complex() else 1)  # floats
    threads = torch.get_num_threads() if batch * tokens * channels > LEAST_WORK else 1
    block = _block(channels, sizes[-1] if kind == BY_HEAD else LANES, -(-threads // max(call.sequences, 1)))
    if not channels:
        return
    native = NativeScan(
        sequences=call.sequences,
        channels=channels,
        width=sizes[-1],
        block=block,
        decay=kind,
        read_before=call.read_before,
        maximum=call.maximum,
        turning=turning,
        coupling=COUPLINGS.index(call.coupling) + 1 if call.coupling else 0,
        threads=threads,
        starts=starts.data_ptr(),
        **{n: t.data_ptr() for n, t in tensors.items()},
    )
    getattr(library(), f"flashmix_scan{'_complex' if call.x.is_complex() else ''}{way}")(ctypes.byref(native))


def _wide(t: Tensor) -> Tensor:
    """`t` in 32 bits, or pairs of them, as it lies in memory."""
    return t.to(torch.complex64 if t.is_complex() else torch.float32).resolve_conj().resolve_neg().contiguous()


def _block(channels: int, unit: int, parts: int) -> int:
    """Channels of a block, whole `unit`s: so many blocks of a sequence as threads want, of at most BLOCK channels."""
    wanted = -(-channels // (max(parts, 1) * unit)) * unit
    return max(unit, min(wanted, BLOCK // unit * unit))


def _packed_starts(packing: Packing) -> Tensor:
    starts = packing.cu_seqlens.to(torch.int64)
    check_boundaries(starts.tolist(), packing.total)  # compiled, nothing has looked at them before
    return starts.clone(memory_format=torch.contiguous_format)  # not to change when the boundaries are overwritten
