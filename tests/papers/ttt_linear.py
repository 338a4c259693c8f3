"""TTT-Linear as its paper writes it: the token loop, with torch's own layer norm and gradient."""

from __future__ import annotations

import torch
from paper_cases import BETA, H, K, Mechanism, T, rows, zeros
from torch import Tensor
from torch.nn.functional import layer_norm

States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gradient(Z: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of |LN(Z) - target|^2 / 2 at Z: the transposed Jacobian of the layer norm times the error."""
    D = len(Z)
    std = torch.sqrt(((Z - Z.mean()) ** 2).mean() + 1e-6)
    x = (Z - Z.mean()) / std
    ones = torch.ones(D, dtype=Z.dtype)
    jacobian = (torch.eye(D, dtype=Z.dtype) - torch.outer(ones, ones) / D - torch.outer(x, x) / D) / std
    return jacobian @ (weight * (layer_norm(Z, (D,), weight, bias, 1e-6) - target))


def ttt_linear(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, norm_weight: Tensor, norm_bias: Tensor, *, mini_batch: int, S: States
) -> tuple[Tensor, States]:
    """2407.04620, sections 2.3 and 2.4: W_t = W_t' - eta_t sum grad l(W_t'; x_s) over the tokens s <= t of the mini-batch that begins
    after t', f(x) = x + LN(x W + b)."""
    W, b, dW, db, count = S
    o = []
    for t in range(len(v)):
        place = (int(count) + t) % mini_batch
        U = beta[t] * gradient(k[t] @ W + b, v[t] - k[t], norm_weight, norm_bias)
        dW, db = dW + torch.outer(k[t], U), db + U
        W_t, b_t = W - dW / (place + 1), b - db / (place + 1)
        o.append(q[t] + layer_norm(q[t] @ W_t + b_t, q[t].shape, norm_weight, norm_bias, 1e-6))
        if place == mini_batch - 1:
            W, b, dW, db = W_t, b_t, torch.zeros_like(dW), torch.zeros_like(db)
    return rows(o, v), (W, b, dW, db, count + len(o))


CASES = {
    "ttt_linear": Mechanism(
        lambda *args, scale, **options: ttt_linear(*args, **options),
        dict.fromkeys("qkv", "B T HV V") | BETA | dict.fromkeys(("norm_weight", "norm_bias"), "HV V"),
        rare=True,
        options={"mini_batch": 4},
        scale=1.0,
        grouped=False,
        weak=True,
        states=("N HV V V", "N HV V", "N HV V V", "N HV V", "N one"),
        errors=[
            ({"mini_batch": 0}, ValueError, "mini_batch must be between 1 and 4096, got 0"),
            ({"v": zeros(1, T, H, 5)}, ValueError, f"v must have shape [1, {T}, {H}, {K}], got [1, {T}, {H}, 5]"),
        ],
    )
}
