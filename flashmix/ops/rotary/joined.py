"""Queries, keys and values that are parts of one projection on a GPU, the first two rotated, with one gradient for the projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.gpu import device as gpu
from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.op.recompute import LEAST, recompute
from flashmix.ops.rotary.call import RotaryCall
from flashmix.ops.rotary.op import ROTARY

Sizes = tuple[int, int, int]  # heads of queries, keys and values
Angles = tuple[Tensor, Tensor, Packing | None, bool]  # cos, sin, packing, interleaved


def joins(qkv: Tensor, angles: Angles) -> bool:
    """Whether the parts of `qkv` `[B, T, H, D]` are one node of autograd, whose backward writes the parts of one gradient.

    It is so for large tensors that Triton's kernels rotate eagerly, where autograd records.
    """
    if qkv.device.type != "cuda" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if type(qkv) is not Tensor or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cuda"):
        return False
    packing = angles[2]
    if qkv.numel() * qkv.element_size() < LEAST.get("cuda", 0) or not (packing is None or type(packing) is Packing):
        return False
    if not qkv.is_contiguous() or (packing is not None and packing.sharded):
        return False
    return choose("rotary", ROTARY.implementations, call_of(qkv, None, angles)).name == "triton"


def split_and_rotated(qkv: Tensor, sizes: Sizes, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, of `qkv` `[B, T, sum(sizes), D]`."""
    q, k, v, rotated = SplitAndRotated.apply(qkv, sizes, angles)
    recompute("rotary", rotated, rotate, qkv, sizes, angles)
    return q, k, v


def call_of(q: Tensor, k: Tensor | None, angles: Angles, inverse: bool = False) -> RotaryCall:
    cos, sin, packing, interleaved = angles
    return RotaryCall(q, k, cos, sin, None, packing, start=0, axes=(), interleaved=interleaved, inverse=inverse)


def rotate(qkv: Tensor, sizes: Sizes, angles: Angles) -> Tensor:
    """Queries and keys, rotated, `[B, T, HQ + HK, D]`."""
    (rotated,), _ = ROTARY.forward(call_of(qkv[:, :, : sizes[0] + sizes[1]], None, angles), False, "triton")
    return rotated


class SplitAndRotated(torch.autograd.Function):
    """`split_and_rotated` as one node; the tensor that queries and keys are parts of is an output too, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, sizes: Sizes, angles: Angles) -> tuple[Tensor, ...]:
        packing = angles[2]
        ctx.shape, ctx.sizes, ctx.angles = qkv.shape, sizes, angles
        ctx.version = None if packing is None else packing.version
        ctx.set_materialize_grads(False)
        rotated = rotate(qkv, sizes, angles)
        q, k = rotated.split(sizes[:2], dim=2)
        ctx.mark_non_differentiable(rotated)
        return q.detach(), k.detach(), qkv[:, :, -sizes[2] :].detach(), rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from flashmix.ops.rotary.triton_gpu import rotary

        packing = ctx.angles[2]
        if packing is not None and packing.version != ctx.version:
            raise RuntimeError("rotary: cu_seqlens was overwritten between the forward and the backward")
        given = [dy for dy in grads[:3] if dy is not None]
        if not given:
            return None, None, None
        like, *_ = given
        found = like.new_empty(ctx.shape)
        q, k, v = found.split(ctx.sizes, dim=2)
        dq, dk = (part.new_zeros(part.shape) if dy is None else dy for part, dy in zip((q, k), grads, strict=False))
        with gpu.on(found.device):
            rotary(call_of(dq, dk, ctx.angles, inverse=True), (dq, dk), (q, k))
        v.zero_() if grads[2] is None else v.copy_(grads[2])
        return found, None, None
