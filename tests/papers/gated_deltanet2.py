"""Gated DeltaNet-2 as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import delta_inputs, finish_kda, heads, kda_decay, linear
from paper_cases import BY_CHANNEL, QKV, H, Mechanism, T, loop, rows, zeros
from torch import Tensor


def gated_deltanet2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase_gate: Tensor,
    write_gate: Tensor,
    log_decay: Tensor,
    *,
    S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """2605.22791: S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T, o_t = S_t^T q_t."""
    o = []
    for t in range(len(v)):
        erasing = torch.eye(len(k[t]), dtype=k.dtype) - torch.outer(k[t], erase_gate[t] * k[t])
        S = erasing @ torch.diag(torch.exp(log_decay[t])) @ S + torch.outer(k[t], write_gate[t] * v[t])
        o.append(scale * S.T @ q[t])
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v = delta_inputs(layer, x)
    gates = {n: torch.sigmoid(heads(linear(x, getattr(layer, n)), 4)) for n in ("erase", "write")}
    o = loop(
        CASES["gated_deltanet2"],
        q=q,
        k=k,
        v=v,
        erase_gate=gates["erase"],
        write_gate=gates["write"],
        log_decay=kda_decay(layer, x),
    )
    return finish_kda(layer, x, o)


CASES = {
    "gated_deltanet2": Mechanism(
        gated_deltanet2,
        QKV | {"erase_gate": "B T HV K", "write_gate": "B T HV V"} | BY_CHANNEL,
        draw={"k": 1.0},
        layers={"gated_deltanet2": {"heads": 2, "value_heads": 4, "rank": 3}},
        layer=layer_output,
        errors=[({"write_gate": zeros(1, T, H)}, ValueError, "write_gate must have shape [1, 6, 2, 8], got [1, 6, 2]")],
    )
}
