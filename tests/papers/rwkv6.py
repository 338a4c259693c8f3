"""RWKV-6 as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear, low_rank
from paper_cases import BY_CHANNEL, RKV, H, K, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import layer_norm, silu


def rwkv6(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2404.05892, equation 19: wkv_t = s_{t-1} + diag(u) k_t^T v_t, s_t = diag(w_t) s_{t-1} + k_t^T v_t, o_t = r_t wkv_t."""
    o = []
    for t in range(len(v)):
        wkv = S + torch.diag(bonus) @ torch.outer(k[t], v[t])
        S = torch.diag(torch.exp(log_decay[t])) @ S + torch.outer(k[t], v[t])
        o.append(scale * r[t] @ wkv)
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    step = torch.cat([torch.zeros_like(x[:1]), x[:-1]]) - x
    low = torch.tanh(linear(x + step * layer.first_mix, layer.shift_down)).unflatten(-1, (5, 3))
    r, w, k, v, g = (x + step * (layer.shift_mix[i] + low[:, i] @ layer.shift_up[i]) for i in range(5))
    r, k, v = heads(linear(r, layer.receptance), 2), heads(linear(k, layer.key), 2), heads(linear(v, layer.value), 2)
    decay = -torch.exp(heads(low_rank(w, layer.decay_projection), 2))
    o = loop(CASES["rwkv6"], r=r, k=k, v=v, log_decay=decay, bonus=layer.bonus)
    o = layer_norm(o, (8,), eps=64e-5).flatten(1) * layer.norm_weight + layer.norm_bias
    return linear(o * silu(linear(g, layer.gate)), layer.output)


CASES = {
    "rwkv6": Mechanism(
        rwkv6,
        RKV | BY_CHANNEL | {"bonus": "H K"},
        scale=1.0,
        grouped=False,
        layers={"rwkv6": {"heads": 2, "shift_rank": 3, "decay_rank": 4}},
        layer=layer_output,
        errors=[
            ({"v": zeros(1, T, 4, K)}, ValueError, "v must have shape [1, 6, 2, 8], got [1, 6, 4, 8]"),
            ({"bonus": zeros(H)}, ValueError, "bonus must have shape [2, 8], got [2]"),
        ],
    )
}
