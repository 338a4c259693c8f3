"""The preconditioner of keys as a scan and elementwise functions, in plain PyTorch or kernels, which autograd differentiates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashmix.op.call import Gradients, Outputs
from flashmix.op.checks import have_addresses
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.scan.op import scan

BLOCK = 128  # tokens whose numbers stay in a cache


def formula(call: PreconditionerCall, impl: str) -> Outputs:
    """A scan of the squares, and the powers of its logarithm; `impl` is the scan's."""
    squares = _of_square(call.k, call.weight)
    A, last = scan(
        squares, call.log_decay, initial_state=call.curvature, return_state=True, cu_seqlens=call.packing, impl=impl
    )
    assert last is not None
    return _write_keys(call, A), last


def forward(call: PreconditionerCall, save: bool) -> tuple[Outputs, Outputs]:
    """The operator's, where compiled code calls it; nothing is kept."""
    return formula(call, "portable"), ()


def backward(
    call: PreconditionerCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    """The gradients of the formula, which runs again."""
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in call.names if name in wanted}
    with torch.enable_grad():
        outputs = formula(call.but(**leaves), "portable")
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
    ys, flows = [y for y, _ in pairs], [g for _, g in pairs]
    found = torch.autograd.grad(ys, list(leaves.values()), flows, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _of_square(k: Tensor, weight: Tensor) -> Tensor:
    """`weight k^2`, `[B, T, H, K]`."""
    weighted = weight.unsqueeze(-1) * k
    return torch.mul(weighted, k, out=weighted if _is_free(weighted) else None)


def _write_keys(call: PreconditionerCall, A: Tensor) -> Tensor:
    """The write keys of a curvature; on a CPU block by block in the place of `A`, which nobody else reads."""
    k, centre, power = call.k, call.log_scale.unsqueeze(-1), -math.log(call.bound)
    if A.device.type != "cpu" or not _is_free(A, k, centre):
        r = torch.log(A + call.eps) - centre
        return k * torch.exp(power * r / (1 + r.abs()))
    for r, key in zip(A.split(BLOCK, 1), k.split(BLOCK, 1), strict=True):
        r.add_(call.eps).log_().sub_(centre)
        torch.div(r.mul(power), r.abs_().add_(1), out=r)
        r.exp_().mul_(key)
    return A


def _is_free(*tensors: Tensor) -> bool:
    """Whether results may overwrite one another: nothing is recorded and nothing transformed."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not recorded and forward_ad._current_level < 0 and have_addresses(*tensors)
