"""Linear attention as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear
from paper_cases import QKV, Mechanism, rows
from torch import Tensor
from torch.nn.functional import elu


def normalised_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2006.16236, equations 10 to 12: s_i = s_{i-1} + phi(k_i) v_i^T, z_i = z_{i-1} + phi(k_i), phi(q_i)^T s_i / phi(q_i)^T z_i."""
    s, z = S
    o = []
    for t in range(len(v)):
        s, z = s + torch.outer(k[t], v[t]), z + k[t]
        o.append((q[t] @ s) / (q[t] @ z))
    return rows(o, v), (s, z)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = (heads(part, 2) for part in linear(x, layer.qkv).split(layer.qkv.sizes, -1))
    q, k = elu(q) + 1, elu(k) + 1
    weights = torch.einsum("ihc,jhc->hij", q, k).tril()  # equation 4 with the feature map, causal
    o = torch.einsum("hij,jhv->ihv", weights / weights.sum(-1, keepdim=True), v)
    return linear(o.flatten(1), layer.output)


CASES = {
    "normalised_linear_attention": Mechanism(
        normalised_linear_attention,
        QKV,
        states=("N HV K V", "N H K"),
        positive=("q", "k"),
        layers={"linear_attention": {"heads": 2}},
        layer=layer_output,
    )
}
