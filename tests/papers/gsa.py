"""GSA as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear, rms
from paper_cases import QKV, H, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import logsigmoid, silu


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2409.07146, section 3: K~_t = Diag(alpha_t) K~_{t-1} + s_t k_t^T, V~_t the same with v_t, both with a row for each slot;
    o_t = V~_t^T softmax(K~_t q_t)."""
    keys, values = S[0].T, S[1]
    o = []
    for t in range(len(v)):
        alpha = torch.diag(torch.exp(log_decay[t]))
        keys, values = alpha @ keys + torch.outer(s[t], k[t]), alpha @ values + torch.outer(s[t], v[t])
        o.append(values.T @ torch.softmax(scale * keys @ q[t], 0))
    return rows(o, v), (keys.T, values)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v, f = (heads(part, 2) for part in linear(x, layer.qkvf).split(layer.qkvf.sizes, -1))
    decay = logsigmoid(f) / 8
    o = loop(CASES["gsa"], q=silu(q), k=silu(k), v=silu(v), s=1 - decay.exp(), log_decay=decay)
    return linear(rms(silu(o).flatten(1)) * layer.norm.weight, layer.output)


CASES = {
    "gsa": Mechanism(
        gsa,
        QKV | {"s": "B T HV M", "log_decay": "B T HV M"},
        states=("N HV K M", "N HV M V"),
        layers={"gsa": {"heads": 2, "slots": 5}},
        layer=layer_output,
        errors=[
            ({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [1, 6, 2, 8], got [1, 6, 2]"),
            ({"s": zeros(1, T, H, 0)}, ValueError, "s must have shape [B, T, HV, M] with M >= 1, got M = 0"),
        ],
    )
}
