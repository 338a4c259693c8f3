"""Lightning attention as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

import math
from typing import Any

import torch
from layer_math import heads, linear, rms
from paper_cases import QKV, Mechanism, rows
from torch import Tensor
from torch.nn.functional import silu


def lightning(
    q: Tensor, k: Tensor, v: Tensor, *, S: Tensor, scale: float, head: int, heads: int, layer: int, layers: int
) -> tuple[Tensor, Tensor]:
    """2401.04658, section 3: kv_t = lambda kv_{t-1} + k_t v_t^T, o_t^T = q_t^T kv_t."""
    decay = math.exp(-8 * head / heads * (1 - layer / layers))
    o = []
    for t in range(len(v)):
        S = decay * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v, gate = (heads(part, 2) for part in linear(x, layer.qkvg).chunk(4, -1))
    o = []
    S = x.new_zeros(2, 8, 8)
    decay = torch.exp(-8 / 2 * (1 - torch.tensor(1 / 3, dtype=torch.float64)) * torch.arange(2, dtype=torch.float64))
    for t in range(len(x)):
        S = decay[:, None, None] * S + torch.einsum("hk,hv->hkv", silu(k[t]), silu(v[t]))
        o.append(torch.einsum("hk,hkv->hv", silu(q[t]), S) * 8**-0.5)
    expected = rms(torch.stack(o)) * layer.norm.weight * torch.sigmoid(gate)
    return linear(expected.flatten(1), layer.output)


CASES = {
    "lightning": Mechanism(
        lightning,
        QKV,
        options={"layer": 1, "layers": 7},
        by_head=True,
        layers={"lightning": {"heads": 2, "layer": 1, "layers": 3}},
        layer=layer_output,
        errors=[
            ({"layer": 3}, ValueError, "layer must be between 0 and 2, got 3"),
            ({"layer": -1}, ValueError, "layer must be between 0 and 2, got -1"),
            ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
        ],
    )
}
