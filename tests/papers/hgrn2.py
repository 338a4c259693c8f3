"""HGRN-2 as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear, rms
from paper_cases import H, K, Mechanism, T, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import silu


def hgrn2(q: Tensor, log_forget: Tensor, v: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2404.07904, equation 6: h_t = h_{t-1} Diag(f_t) + i_t (1 - f_t)^T, y_t = h_t o_t; `h` is `V x K`."""
    y = []
    for t in range(len(v)):
        f = torch.exp(log_forget[t])
        S = S @ torch.diag(f) + torch.outer(v[t], 1 - f)
        y.append(scale * S @ q[t])
    return rows(y, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, f, v = (heads(part, 2) for part in linear(x, layer.qfv).chunk(3, -1))
    forget = 0.25 + 0.75 * torch.sigmoid(f)
    o = loop(CASES["hgrn2"], q=silu(q), log_forget=forget.log(), v=v).flatten(1)
    return linear(rms(o) * layer.norm.weight, layer.output)


CASES = {
    "hgrn2": Mechanism(
        hgrn2,
        {"q": "B T H K", "log_forget": "B T H K", "v": "B T HV V"},
        scale=1.0,
        values_first=True,
        grouped=False,
        layers={"hgrn2": {"heads": 2, "lower": 0.25}},
        layer=layer_output,
        errors=[
            ({"v": zeros(1, T, 4, K)}, ValueError, "v must have shape [1, 6, 2, 8], got [1, 6, 4, 8]"),
            ({"log_forget": zeros(H)}, ValueError, "log_forget must have shape [B, T, H, K], got [2]"),
        ],
    )
}
