"""IPLR as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, heads, linear, rms, unit
from paper_cases import QKV, Mechanism, loop, rows
from torch import Tensor


def iplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2503.14456, section 3 without decay: S_t = S_{t-1} (I + a_t b_t^T) + v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        S = S @ (torch.eye(len(k[t]), dtype=k.dtype) + torch.outer(a[t], b[t])) + torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = delta_inputs(layer, x)
    removal = unit(heads(linear(x, layer.removal), 4))
    beta = torch.sigmoid(linear(x, layer.strength))[..., None]
    o = loop(CASES["iplr"], q=q, k=k, v=v, a=-removal, b=beta * removal)
    return linear((rms(o) * layer.norm.weight).flatten(1), layer.output)


CASES = {
    "iplr": Mechanism(
        iplr,
        QKV | {"a": "B T HV K", "b": "B T HV K"},
        values_first=True,
        draw={"k": 1.0, "a": 0.5, "b": 0.5},
        layers={"iplr": {"heads": 2, "value_heads": 4}},
        layer=layer_output,
    )
}
