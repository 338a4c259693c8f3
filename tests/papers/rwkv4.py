"""RWKV-4 as its paper writes it: the token loop, and the time mixing around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import linear
from paper_cases import H, K, Mechanism, T, loop, rows, zeros
from torch import Tensor


def rwkv4(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, S: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """2305.13048, equation 16: wkv_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without the values).

    The state is divided by e^m (appendix D), which is a constant of the gradient."""
    if not len(v):
        past = torch.exp(S[2] - S[2].detach())
        return rows([], v), (past * S[0], past * S[1], S[2].detach())
    a, b, m = torch.exp(S[2]) * S[0], torch.exp(S[2]) * S[1], S[2].detach()
    o = []
    for t in range(len(v)):
        own = torch.exp(bonus + k[t])
        o.append((a + own * v[t]) / (b + own))
        a, b = torch.exp(log_decay) * a + torch.exp(k[t]) * v[t], torch.exp(log_decay) * b + torch.exp(k[t])
        m = torch.maximum(log_decay + m, k[t]).detach()
    return rows(o, v), (torch.exp(-m) * a, torch.exp(-m) * b, m)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`: equations 11 to 13 and 17."""
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    r, k, v = (
        linear(mix * x + (1 - mix) * before, project)
        for mix, project in (
            (layer.receptance_mix, layer.receptance),
            (layer.key_mix, layer.key),
            (layer.value_mix, layer.value),
        )
    )
    weights = {"log_decay": -torch.exp(layer.decay.weight)[None], "bonus": layer.bonus[None]}
    return linear(torch.sigmoid(r) * loop(CASES["rwkv4"], k=k[:, None], v=v[:, None], **weights)[:, 0], layer.output)


UNIT = "B T HV V"
CASES = {
    "rwkv4": Mechanism(
        rwkv4,
        {"k": UNIT, "v": UNIT, "log_decay": "HV V", "bonus": "HV V"},
        scale=1.0,
        grouped=False,
        states=("N HV V", "N HV V", "N HV V"),
        logarithms=(2,),
        positive=("initial_state1",),
        layers={"rwkv4": {"inner": 24}},
        layer=layer_output,
        errors=[
            ({"v": zeros(1, T, H, 4)}, ValueError, "v must have shape [1, 6, 2, 8], got [1, 6, 2, 4]"),
            ({"bonus": zeros(H)}, ValueError, "bonus must have shape [2, 8], got [2]"),
            ({"log_decay": zeros(1, T, H, K)}, ValueError, "log_decay must have shape [2, 8], got [1, 6, 2, 8]"),
        ],
    )
}
