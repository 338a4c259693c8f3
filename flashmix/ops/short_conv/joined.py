"""The convolutions of queries, keys and values that are parts of one projection on a GPU, with one gradient for the projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.gpu import device as gpu
from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.op.recompute import LEAST
from flashmix.ops.short_conv.call import ShortConvQKVCall
from flashmix.ops.short_conv.op import SHORT_CONV_QKV

Sizes = tuple[int, int, int]
UNITS = (16, 32, 64, 128)  # channels of a head, which one warp holds


def joins(
    qkv: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes, activation: str | None, packing: Any, states: bool
) -> bool:
    """Whether the parts of `qkv` `[B, T, D]` are convolved as one node of autograd, whose backward writes the parts of one gradient.

    It is so for large tensors where Triton's kernels run eagerly, without `states`. Whether a gradient is recorded is no matter: queries
    and keys that are divided by their length in the same pass are not rounded before.
    """
    if qkv.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    if states or not (packing is None or type(packing) is Packing):
        return False
    if type(qkv) is not Tensor or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cuda"):
        return False
    if qkv.numel() * qkv.element_size() < LEAST.get("cuda", 0):
        return False
    if not qkv.is_contiguous() or (packing is not None and packing.sharded):
        return False
    call = call_of(qkv, weight, bias, sizes, activation, packing)
    return choose("short_conv_qkv", SHORT_CONV_QKV.implementations, call).name == "triton"


def takes_unit(sizes: Sizes, unit: int) -> bool:
    """Whether the kernels divide queries and keys by their length per head of `unit` channels."""
    return unit in UNITS and not any(size % unit for size in sizes[:2])


def joined_convolutions(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sizes,
    activation: str | None,
    packing: Packing | None,
    unit: int = 0,
) -> tuple[Tensor, ...]:
    """The convolved parts; queries and keys are divided by their length per head of `unit` channels, unless that is 0."""
    parts: tuple[Tensor, ...] = JoinedConvolutions.apply(qkv, weight, bias, sizes, activation, packing, unit)
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
    """`joined_convolutions` as one node."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
        from flashmix.ops.short_conv.triton_gpu import forward_joined

        ctx.save_for_backward(qkv, weight, bias)
        ctx.options, (*options, unit) = options, options  # type: ignore[assignment]
        packing = options[-1]
        ctx.version = None if packing is None else packing.version
        ctx.set_materialize_grads(False)
        with gpu.on(qkv.device):
            return forward_joined(call_of(qkv, weight, bias, *options), unit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from flashmix.ops.short_conv.triton_gpu import backward_joined

        *options, unit = ctx.options
        packing = options[-1]
        if packing is not None and packing.version != ctx.version:
            raise RuntimeError("short_conv_qkv: cu_seqlens was overwritten between the forward and the backward")
        qkv, weight, bias = ctx.saved_tensors
        made = [
            torch.empty_like(t) if wanted else None
            for t, wanted in zip((qkv, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        dqkv = torch.empty_like(qkv) if made[0] is None else made[0]
        backward_joined(call_of(qkv, weight, bias, *options), grads, unit, dqkv, made[1], made[2])
        return *made, None, None, None, None
