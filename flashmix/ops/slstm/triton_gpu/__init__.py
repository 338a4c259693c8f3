"""The sLSTM with recurrent weights on a GPU: one Triton kernel forward and one backward, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.blocks import power_of_two
from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.triton_gpu.kernels import Slots
from flashmix.ops.slstm.call import GATES, SlstmCall, recurrent_gradient
from flashmix.ops.slstm.triton_gpu.backward import cell_backward_kernel
from flashmix.ops.slstm.triton_gpu.kernels import CellKept, CellLogits, CellNumbers, CellSpec, CellStates, cell_kernel

__all__ = ["backward", "forward", "keeps"]

LEAST_TILE = 16
WARPS = 8
RESIDENT, RESIDENT_WIDE, WIDE = (
    32768,
    16384,
    256,
)  # weights of a program in registers; of wide tiles, whose sums take more
STREAMED = 8192  # weights that it reads at a time


def forward(call: SlstmCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = call.results(), call.kept() if save else ()
    assert call.recurrent is not None
    gates = CellLogits(*(getattr(call, name).contiguous() for name in GATES))
    # float32 whatever their dtype: in 16 bits they are slower to read (docs/lab_notes.md)
    matrices = call.recurrent.float().permute(1, 3, 2, 0).contiguous()  # [H, from, to, gate]
    last = CellStates(*outputs[1:])
    _launch(cell_kernel, call, (gates, matrices, _start(call), outputs[0], _kept(kept), last))
    return outputs, kept


def keeps(call: SlstmCall) -> Outputs:
    return call.kept()


def backward(call: SlstmCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all tensors; those of a state count `e^m` times, so that of `m` is theirs."""
    y, *saved = kept
    d_out, d_c, d_n, _, d_y = (None if g is None else g.contiguous() for g in grads)
    assert call.recurrent is not None
    matrices = call.recurrent.float().permute(1, 2, 0, 3).contiguous()  # [H, to, gate, from]
    d_logits = torch.empty_like(saved[0])
    d_start = CellStates(*(None if name == "m" else call.empty(*call.c.shape) for name in CellStates._fields))
    d_last, found = CellStates(d_c, d_n, None, d_y), CellLogits(*d_logits.unbind(0))
    structs = _kept(saved), matrices, _start(call), d_out, d_last, found, d_start
    _launch(cell_backward_kernel, call, structs, backward=True)
    gradients = dict(zip(GATES, found, strict=True)) | {"c": d_start.c, "n": d_start.n, "y": d_start.y}
    gradients["m"] = d_start.c * call.c + d_start.n * call.n
    if "recurrent" in wanted:
        gradients["recurrent"] = recurrent_gradient(call, d_logits, y)
    return gradients


def _start(call: SlstmCall) -> CellStates:
    return CellStates(*(getattr(call, name).contiguous() for name in CellStates._fields))


def _kept(kept: Sequence[Tensor]) -> CellKept:
    """The logits `[4, ...]` and states `[3, ...]` that a forward keeps, if it does."""
    return CellKept(*(t for every in kept for t in every.unbind(0))) if kept else CellKept(*[None] * 7)


def spec_of(call: SlstmCall, backward: bool) -> CellSpec:
    """The tiles of a call's kernels, from the channels of a head alone."""
    heads, channels = call.write.shape[2:]
    tile = power_of_two(max(channels, LEAST_TILE))
    height, width = (4 * tile, tile) if backward else (tile, 4 * tile)
    resident, block = (
        min(height, weights // width) for weights in (RESIDENT_WIDE if tile >= WIDE else RESIDENT, STREAMED)
    )
    packed = call.packing is not None
    return CellSpec(heads, channels, tile, resident, min(block, resident), packed, False)


def _launch(kernel: Any, call: SlstmCall, structs: Sequence[Any], backward: bool = False) -> None:
    """One launch, a program for each head of each sequence."""
    S = spec_of(call, backward)
    cu_seqlens = None if call.packing is None else call.packing.cu_seqlens.contiguous()
    warps = min(WARPS, max(4 * S.TILE**2 // 2048, 1))
    grid = call.sequences * S.HEADS if S.CHANNELS else 0
    bound(kernel, S, num_warps=warps)(
        grid,
        *structs,
        Slots(cu_seqlens, None, None),
        CellNumbers(call.tokens, 4 * S.CHANNELS if backward else S.CHANNELS),
    )
