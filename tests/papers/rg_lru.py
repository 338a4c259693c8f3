"""RG-LRU as its paper writes it: the token loop, and RecurrentGemma's block around it."""

from __future__ import annotations

from typing import Any

import torch
from paper_cases import H, K, Mechanism, T, rows, run_loop, zeros
from torch import Tensor
from torch.nn.functional import gelu


def rg_lru(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2402.19427, equations 3 to 6: a_t = a^(8 r_t), a = 1 / (1 + e^Lambda), h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)."""
    a, h = 1 / (1 + torch.exp(decay)), []
    for t in range(len(x)):
        log_a = 8 * recurrence_gate[t] * torch.log(a)  # appendix A: the power in log space
        S = torch.exp(log_a) * S + torch.sqrt(-torch.expm1(2 * log_a)) * (input_gate[t] * x[t])
        h.append(S)
    return rows(h, x), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`; the first token's input is not scaled, which is a loop that starts from it."""
    gate, u = (x @ layer.input.weight.T + layer.input.bias).chunk(2, -1)
    width = layer.convolution.weight.shape[1]
    padded = torch.cat([u.new_zeros(width - 1, u.shape[1]), u])
    u = sum(layer.convolution.weight[:, i] * padded[i : i + len(x)] for i in range(width)) + layer.convolution.bias
    u = u.unflatten(-1, (layer.heads, -1))
    r = torch.sigmoid(torch.einsum("thi,hij->thj", u, layer.recurrence_weight) + layer.recurrence_bias)
    i = torch.sigmoid(torch.einsum("thi,hij->thj", u, layer.input_weight) + layer.input_bias)
    first = i[:1] * u[:1]
    later = {"x": u[None, 1:], "recurrence_gate": r[None, 1:], "input_gate": i[None, 1:], "decay": layer.decay.weight}
    h = torch.cat([first, run_loop(CASES["rg_lru"], later | {"initial_state": first})[0][0]])
    return (gelu(gate, approximate="tanh") * h.flatten(1)) @ layer.output.weight.T + layer.output.bias


UNIT = "B T HV V"
CASES = {
    "rg_lru": Mechanism(
        rg_lru,
        {"x": UNIT, "recurrence_gate": UNIT, "input_gate": UNIT, "decay": "HV V"},
        scale=1.0,
        grouped=False,
        positive=("recurrence_gate",),  # the derivative of the root is infinite at 0
        states=("N HV V",),
        layers={"rg_lru": {"heads": 4, "inner": 24, "conv_width": 2}},
        layer=layer_output,
        errors=[
            ({"x": zeros(T, H)}, ValueError, "x must have shape [B, T, D], got [6, 2]"),
            ({"decay": zeros(K)}, ValueError, "decay must have shape [2, 8], got [8]"),
            ({"reset": zeros(1, T)}, TypeError, "reset must have dtype bool, got float32"),
            ({"reset": zeros(T)}, ValueError, "reset must have shape [1, 6], got [6]"),
        ],
    )
}
