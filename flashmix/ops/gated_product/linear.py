"""The second half of a gated MLP on a GPU: the gated product and the matrix after it, with a backward that keeps neither product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op.choose import choose
from flashmix.ops.gated_product.call import GatedCall
from flashmix.ops.gated_product.op import GATED

LEAST = 1 << 22  # bytes of the product: below it the op and the matrix are two nodes, and less work for the host


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor | None:
    """`(silu(gate) up) weight^T`, where `gate_up` `[..., 2 D]` has gate and up as its halves and `weight` is `[out, D]`.

    The backward keeps `gate_up` alone, makes the product again with the gradients, and writes these into the halves of one tensor.
    None where it is not computed so: it is of large tensors that Triton's kernels run eagerly, without autocast.
    """
    if gate_up.device.type != "cuda" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if gate_up.numel() * gate_up.element_size() < 2 * LEAST or torch.is_autocast_enabled("cuda"):
        return None
    if type(gate_up) is not Tensor or torch._C._are_functorch_transforms_active() or gate_up.dtype != weight.dtype:
        return None
    if choose("swiglu", GATED.implementations, call_of(gate_up)).name != "triton":
        return None
    y: Tensor = SwiGLULinear.apply(gate_up, weight)
    return y


def call_of(gate_up: Tensor) -> GatedCall:
    gate, up = gate_up.chunk(2, dim=-1)
    return GatedCall(gate, up, "silu")


class SwiGLULinear(torch.autograd.Function):
    """`swiglu_linear` as one node."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        (product,), _ = GATED.forward(call_of(gate_up), False, "triton")
        return F.linear(product, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None]:
        from flashmix.ops.gated_product.triton_gpu import backward_of_halves

        gate_up, weight = ctx.saved_tensors
        rows = dz.reshape(-1, dz.shape[-1])
        gradient, y = backward_of_halves(gate_up, (rows @ weight).view(*dz.shape[:-1], -1), "silu")
        return gradient, rows.T @ y.view(-1, y.shape[-1]) if ctx.needs_input_grad[1] else None
