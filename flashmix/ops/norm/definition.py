"""The meaning of the norms: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.gated_product.definition import silu


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    y = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, center: bool = True, eps: float = 1e-5) -> Tensor:
    norm = layer_norm if center else rms_norm
    return torch.cat([norm(block, eps=eps) for block in x.chunk(groups, dim=-1)], dim=-1) * weight + bias


def rms_norm(x: Tensor, weight: Tensor | None = None, gate: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if gate is None else y * silu(gate)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)
