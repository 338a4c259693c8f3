"""RWKV-4's averages on a GPU: Triton kernels, one pass forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.triton_gpu.kernels import Slots
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.triton_gpu.kernels import (
    WkvGradients,
    WkvInputs,
    WkvNumbers,
    WkvResults,
    WkvSpec,
    wkv_backward_kernel,
    wkv_kernel,
)

__all__ = ["backward", "forward", "keeps"]

BLOCK = 32  # channels of a program, which is a warp
GROUP, KEEP = 16, 8  # tokens that the forward loads at a time; from one kept state to the next


def forward(call: WkvCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = call.results(), keeps(call) if save else ()
    if call.a.numel():
        spec, inputs = _spec(call, GROUP), _inputs(call)
        results = WkvResults(*(*outputs, kept[0] if kept else None))
        bound(wkv_kernel, spec, num_warps=1)(_programs(call), inputs, results, _slots(call), _numbers(call))
    return outputs, kept


def keeps(call: WkvCall) -> Outputs:
    """States before groups of tokens."""
    size = (3, _groups(call), *call.a.shape[1:])
    return (torch.empty(size=size, dtype=torch.float32, device=call.device),)


def backward(call: WkvCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all tensors; the sums of a state count `e^m` times, so that of `m` is theirs."""
    d_out, d_a, d_b, _ = (None if d is None else d.contiguous() for d in grads)
    found = [torch.empty(size=call.k.shape, dtype=call.k.dtype, device=call.device) for _ in range(2)]
    found += [torch.empty(size=call.a.shape, dtype=torch.float32, device=call.device) for _ in range(4)]
    d_k, d_v, d_w, d_u, d_start_a, d_start_b = found
    if call.a.numel():
        d_out = torch.zeros(call.k.shape, dtype=call.k.dtype, device=call.device) if d_out is None else d_out
        inputs = _inputs(call)._replace(d_out=d_out, d_a=d_a, d_b=d_b, kept=kept[0])
        run = bound(wkv_backward_kernel, _spec(call, KEEP), num_warps=1)
        run(_programs(call), inputs, WkvGradients(*found), _slots(call), _numbers(call))
    d_m = d_start_a * call.a + d_start_b * call.b
    sums = {"log_decay": d_w.sum(0), "bonus": d_u.sum(0)}
    return {"k": d_k, "v": d_v, "a": d_start_a, "b": d_start_b, "m": d_m, **sums}


def _inputs(call: WkvCall) -> WkvInputs:
    tensors = (call.k, call.v, call.log_decay, call.bonus, call.a, call.b, call.m)
    return WkvInputs(*(*(t.contiguous() for t in tensors), None, None, None, None))


def _spec(call: WkvCall, group: int) -> WkvSpec:
    packed, precise = call.packing is not None, call.k.dtype.itemsize == 4
    return WkvSpec(call.log_decay.numel(), BLOCK, group, KEEP, packed, SEGMENTS=False, PRECISE=precise)


def _programs(call: WkvCall) -> int:
    return call.sequences * cdiv(call.log_decay.numel(), BLOCK)


def _groups(call: WkvCall) -> int:
    batch, tokens = call.k.shape[:2]
    return tokens // KEEP + call.sequences if call.packing is not None else batch * cdiv(tokens, KEEP)


def _numbers(call: WkvCall) -> WkvNumbers:
    tokens = call.k.shape[1]
    return WkvNumbers(tokens, cdiv(tokens, KEEP), _groups(call))


def _slots(call: WkvCall) -> Slots:
    return Slots(None if call.packing is None else call.packing.cu_seqlens.contiguous(), None, None)
