"""The convolutions of queries, keys and values that are parts of one projection on a GPU, with one gradient for the projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.op.recompute import LEAST
from flashmix.ops.short_conv.call import ShortConvQKVCall
from flashmix.ops.short_conv.op import SHORT_CONV_QKV

Sizes = tuple[int, int, int]


def convolved_parts(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sizes,
    *,
    activation: str | None,
    cu_seqlens: Tensor | Packing | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, ...] | None:
    """`short_conv_qkv` of the parts of `qkv` `[B, T, D]`, whose backward writes the parts of one gradient; autograd would join three.

    None where it is not computed so: it is of large tensors where Triton's kernels run eagerly and record a gradient, without states.
    """
    if qkv.device.type != "cuda" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if initial_state is not None or return_state or not (cu_seqlens is None or type(cu_seqlens) is Packing):
        return None
    if type(qkv) is not Tensor or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cuda"):
        return None
    if not qkv.requires_grad or qkv.numel() * qkv.element_size() < LEAST.get("cuda", 0):
        return None
    if not qkv.is_contiguous() or (cu_seqlens is not None and cu_seqlens.sharded):
        return None
    call = call_of(qkv, weight, bias, sizes, activation, cu_seqlens)
    if choose("short_conv_qkv", SHORT_CONV_QKV.implementations, call).name != "triton":
        return None
    parts: tuple[Tensor, ...] = JoinedConvolutions.apply(qkv, weight, bias, sizes, activation, cu_seqlens)
    return parts


def call_of(
    qkv: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes, activation: str | None, packing: Packing | None
) -> ShortConvQKVCall:
    values: dict[str, Any] = {
        "initial_state": None,
        "packing": packing,
        "activation": activation,
        "return_state": False,
    }
    parts = qkv.split(sizes, dim=-1), weight.split(sizes), [None] * 3 if bias is None else bias.split(sizes)
    for names, tensors in zip(ShortConvQKVCall.NAMES, zip(*parts, strict=True), strict=True):
        values |= zip(names, tensors, strict=True)
    call: ShortConvQKVCall = ShortConvQKVCall.make(values)
    return call


class JoinedConvolutions(torch.autograd.Function):
    """`convolved_parts` as one node."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(qkv, weight, bias)
        ctx.options, (*_, packing) = options, options
        ctx.version = None if packing is None else packing.version
        ctx.set_materialize_grads(False)
        return SHORT_CONV_QKV.forward(call_of(qkv, weight, bias, *options), False, "triton")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from flashmix.ops.short_conv.triton_gpu import backward_joined

        *_, packing = ctx.options
        if packing is not None and packing.version != ctx.version:
            raise RuntimeError("short_conv_qkv: cu_seqlens was overwritten between the forward and the backward")
        qkv, weight, bias = ctx.saved_tensors
        made = [
            torch.empty_like(t) if wanted else None
            for t, wanted in zip((qkv, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        dqkv = torch.empty_like(qkv) if made[0] is None else made[0]
        backward_joined(call_of(qkv, weight, bias, *ctx.options), grads, dqkv, made[1], made[2])
        return *made, None, None, None
