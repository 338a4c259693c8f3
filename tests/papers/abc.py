"""ABC as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import heads, linear, rms
from paper_cases import QKV, Mechanism, loop, rows
from torch import Tensor
from torch.nn.functional import silu


def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, S: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """2110.02488, section 3: phi_t = exp(s_t), K~_t = sum_{i<=t} (phi_i / sum_{j<=t} phi_j) k_i^T, V~_t the same with v_i;
    o_t = V~_t^T softmax(K~_t q_t). The state holds the quotients and the logarithm of their denominator."""
    total = torch.exp(S[2])
    keys, values = total[:, None] * S[0].T, total[:, None] * S[1]  # the numerators
    o = []
    for t in range(len(v)):
        phi = torch.exp(s[t])
        total = total + phi
        keys, values = keys + torch.outer(phi, k[t]), values + torch.outer(phi, v[t])
        o.append((values / total[:, None]).T @ torch.softmax(scale * (keys / total[:, None]) @ q[t], 0))
    if not o:
        return rows(o, v), S
    return rows(o, v), ((keys / total[:, None]).T, values / total[:, None], torch.log(total))


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    q, k, v, s, gate = (heads(part, 2) for part in linear(x, layer.qkvsg).split(layer.qkvsg.sizes, -1))
    o = loop(CASES["abc"], scale=4**-0.5, q=q, k=k, v=v, s=s)
    return linear((rms(o) * layer.norm.weight * silu(gate)).flatten(1), layer.output)


CASES = {
    "abc": Mechanism(
        abc,
        QKV | {"s": "B T HV M"},
        states=("N HV K M", "N HV M V", "N HV M"),
        logarithms=(2,),
        layers={"abc": {"heads": 2, "slots": 5, "head_dim": 4}},
        layer=layer_output,
    )
}
