"""The sLSTM in C, on a CPU, in float32: token after token, one sequence and head per thread at a time, its matrices in cache.

It is part of the library of the recurrence in C, whose vectors and exponential it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import check_boundaries
from flashmix.ops.slstm.call import GATES, SlstmCall, recurrent_gradient
from flashmix.ops.slstm.native.binding import NativeSlstm, library

__all__ = ["backward", "forward", "keeps"]

LANES, PANEL = 16, 64  # as in recurrence.c and call.h
STATE = ("c", "n", "m", "y")


def forward(call: SlstmCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = call.results(), call.kept() if save else ()
    results = dict(zip(("out", *(f"last_{name}" for name in STATE)), outputs, strict=True))
    results |= dict(zip(("logits", "states"), kept, strict=False))
    matrices = None if call.recurrent is None else _panels(_matrices(call.recurrent))
    _run("", call, results, recurrent=matrices, **{name: getattr(call, name) for name in GATES})
    return outputs, kept


def keeps(call: SlstmCall) -> Outputs:
    return call.kept()


def backward(call: SlstmCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all tensors; those of a state count `e^m` times, so that of `m` is theirs."""
    y, logits, states = kept
    d_out, d_c, d_n, _, d_y = grads
    found = {"d_logits": torch.empty_like(logits)} | {
        f"d_start_{name}": torch.empty_like(call.c, memory_format=torch.contiguous_format) for name in ("c", "n", "y")
    }
    matrices = None if call.recurrent is None else _panels(_matrices(call.recurrent).mT)
    given = {"d_out": d_out, "d_c": d_c, "d_n": d_n, "d_y": d_y, "logits": logits, "states": states}
    _run("_backward", call, found, recurrent=matrices, **given)
    d_c, d_n = found["d_start_c"], found["d_start_n"]
    gradients = {"c": d_c, "n": d_n, "m": d_c * call.c + d_n * call.n, "y": found["d_start_y"]}
    gradients |= dict(zip(GATES, found["d_logits"].unbind(0), strict=True))
    if "recurrent" in wanted:
        gradients["recurrent"] = recurrent_gradient(call, found["d_logits"], y)
    return gradients


def _matrices(recurrent: Tensor) -> Tensor:
    """The weights of a head side by side, each with zeros up to a whole number of vectors, `[H, from, gates x to]`."""
    return pad(recurrent.float().permute(1, 3, 0, 2), (0, -recurrent.shape[-1] % LANES)).flatten(2)


def _panels(matrices: Tensor) -> Tensor:
    """Matrices `[H, rows, columns]` in panels of PANEL columns, `[H, panels, rows, PANEL]`."""
    return pad(matrices, (0, -matrices.shape[-1] % PANEL)).unflatten(-1, (-1, PANEL)).transpose(1, 2).contiguous()


def _run(way: str, call: SlstmCall, results: dict[str, Tensor], **operands: Tensor | None) -> None:
    """One call of the library, forward or "_backward"; operands and contiguous results by the names of `NativeSlstm`."""
    batch, tokens, heads, channels = call.write.shape
    operands |= {name: getattr(call, name) for name in STATE}
    tensors = {name: t.contiguous() for name, t in operands.items() if t is not None} | results
    if call.packing is None:
        starts = torch.arange(batch + 1, device="cpu") * tokens
    else:
        starts = call.packing.cu_seqlens.to(torch.int64).contiguous()
        check_boundaries(starts.tolist(), call.packing.total)  # compiled, nothing has looked at them before
    if not heads * channels:
        return
    native = NativeSlstm(
        sequences=call.sequences,
        heads=heads,
        channels=channels,
        tokens=batch * tokens,
        threads=torch.get_num_threads(),
        starts=starts.data_ptr(),
        **{name: t.data_ptr() for name, t in tensors.items()},
    )
    getattr(library(), f"flashmix_slstm{way}")(ctypes.byref(native))
