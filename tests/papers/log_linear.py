"""Log-linear attention as its paper writes it: the recurrence of a Fenwick tree, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from layer_math import convolve, heads, linear, rms
from paper_cases import BETA, BY_TOKEN, QKV, H, Mechanism, T, householder, loop, rows, zeros
from torch import Tensor
from torch.nn.functional import silu, softplus

States = tuple[Tensor, Tensor]


def trailing_zeros(n: int) -> int:
    """The place of the least significant bit of `n`."""
    return (n & -n).bit_length() - 1


def fenwick(
    q: Tensor, transitions: list[Tensor], writes: list[Tensor], scales: Tensor, S: States, scale: float
) -> tuple[list[Tensor], States]:
    """Section 3.2: the levels up to the least significant bit of t are merged into the next one, and level 0 is the token's own write.
    Before the first token levels that cannot hold anything after so many tokens hold nothing."""
    levels, before = list(S[0]), int(S[1])
    o: list[Tensor] = []
    for t, (A, write) in enumerate(zip(transitions, writes, strict=True)):
        place = before + t
        if t == 0:
            held = [
                place > 0 and (level == 0 or bool(((place - 1) >> (level - 1)) & 1)) for level in range(len(levels))
            ]
            levels = [S if there else torch.zeros_like(S) for S, there in zip(levels, held, strict=True)]
        last = trailing_zeros(place) if place else len(levels)
        merged = A @ sum(levels[: last + 1])
        later = [
            merged if level == last + 1 else A @ levels[level] if level > last else torch.zeros_like(write)
            for level in range(1, len(levels))
        ]
        levels = [write, *later]
        o.append(scale * sum(weight * (q[t] @ S) for weight, S in zip(scales[t], levels, strict=True)))
    return o, (torch.stack(levels), S[1] + len(o))


def log_linear(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, level_scales: Tensor, *, S: States, scale: float
) -> tuple[Tensor, States]:
    """2506.04761, section 3.3: transitions alpha_t and writes k_t v_t^T."""
    transitions = [torch.exp(g) * torch.eye(k.shape[1], dtype=k.dtype) for g in log_decay]
    o, S = fenwick(q, transitions, [torch.outer(*pair) for pair in zip(k, v, strict=True)], level_scales, S, scale)
    return rows(o, v), S


def log_linear_gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, level_scales: Tensor, *, S: States, scale: float
) -> tuple[Tensor, States]:
    """2506.04761, section 3.4: transitions alpha_t (I - beta_t k_t k_t^T) and writes beta_t k_t v_t^T."""
    transitions = [torch.exp(g) * householder(key, b) for key, b, g in zip(k, beta, log_decay, strict=True)]
    writes = [b * torch.outer(key, value) for key, value, b in zip(k, v, beta, strict=True)]
    o, S = fenwick(q, transitions, writes, level_scales, S, scale)
    return rows(o, v), S


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`."""
    xbc, gate, step = linear(x, layer.input).split(layer.input.sizes, -1)
    v, B, C = convolve(xbc, layer.convolution.weight, layer.convolution.bias).split(layer.inner_sizes, -1)
    v, B, C = heads(v, layer.heads), heads(B, 1), heads(C, 1)
    dt = softplus(step + layer.decay.dt_bias)
    scales = softplus(heads(linear(x, layer.level_projection), layer.heads) * layer.level_weight)
    decay = -dt * layer.decay.A_log.exp()
    o = loop(CASES["log_linear"], q=C, k=B, v=v * dt[..., None], log_decay=decay, level_scales=scales)
    o = (o + v * layer.skip[:, None]).flatten(1) * silu(gate)
    return linear(rms(o) * layer.norm.weight, layer.output)


LEVELS, STATES = {"level_scales": "B T HV L"}, ("N HV L K V", "N one")
FEW = "level_scales must have shape [B, T, HV, L] with 2^(L - 1) >= 6 tokens, got L = 3"
CASES = {
    "log_linear": Mechanism(
        log_linear,
        QKV | BY_TOKEN | LEVELS,
        rare=True,
        scale=1.0,
        states=STATES,
        layers={"log_linear": {"heads": 4, "state_dim": 6, "levels": 6}},
        layer=layer_output,
        errors=[
            ({"level_scales": zeros(1, T, H, 3)}, ValueError, FEW),
            ({"level_scales": zeros(1, T, H, 1)}, ValueError, FEW.split("2^")[0] + "L >= 2, got L = 1"),
        ],
    ),
    "log_linear_gated_deltanet": Mechanism(
        log_linear_gated_deltanet, QKV | BETA | BY_TOKEN | LEVELS, rare=True, scale=1.0, states=STATES
    ),
}
