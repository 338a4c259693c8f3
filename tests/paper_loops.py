"""Each mechanism of `flashmix.ops.named` as its paper writes it: one sequence, one head, one token at a time.

Written from the papers, not from the library, with every matrix written out. `S` is the state in the paper's own layout:
`K x V` where vectors are rows (`o = q S`), `V x K` where they are columns (`o = S q`). Run the loops in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


def retnet(q: Tensor, k: Tensor, v: Tensor, *, S: Tensor, scale: float, head: int, heads: int) -> tuple[Tensor, Tensor]:
    """2307.08621, equations 5 and 8: S_n = gamma S_{n-1} + K_n^T V_n, Q_n S_n."""
    gamma = 1 - 2.0 ** (-5 - head)
    o = []
    for t in range(len(v)):
        S = gamma * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def lightning(
    q: Tensor, k: Tensor, v: Tensor, *, S: Tensor, scale: float, head: int, heads: int, layer: int, layers: int
) -> tuple[Tensor, Tensor]:
    """2401.04658, section 3: kv_t = lambda kv_{t-1} + k_t v_t^T, o_t^T = q_t^T kv_t."""
    decay = math.exp(-8 * head / heads * (1 - layer / layers))
    o = []
    for t in range(len(v)):
        S = decay * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def mamba2(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2405.21060, equation 1 with scalar A, discretised: h_t = exp(dt A) h_{t-1} + dt B x_t^T, y_t = C^T h_t + D x_t."""
    A = -torch.exp(A_log)
    y = []
    for t in range(len(x)):
        S = torch.exp(dt[t] * A) * S + dt[t] * torch.outer(B[t], x[t])
        y.append(scale * C[t] @ S + (0 if D is None else D * x[t]))
    return rows(y, x), S


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2312.06635, equation 3: S_t = (alpha_t^T 1) * S_{t-1} + k_t^T v_t, o_t = q_t S_t."""
    o = []
    for t in range(len(v)):
        alpha, ones = torch.exp(log_decay[t]), torch.ones_like(v[t])
        S = torch.outer(alpha, ones) * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def hgrn2(q: Tensor, log_forget: Tensor, v: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2404.07904, equation 6: h_t = h_{t-1} Diag(f_t) + i_t (1 - f_t)^T, y_t = h_t o_t; `h` is `V x K`."""
    y = []
    for t in range(len(v)):
        f = torch.exp(log_forget[t])
        S = S @ torch.diag(f) + torch.outer(v[t], 1 - f)
        y.append(scale * S @ q[t])
    return rows(y, v), S


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


def deltanet(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2406.06484, equation 4: S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        S = S @ householder(k[t], beta[t]) + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2412.06464, equation 10: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        alpha = torch.exp(log_decay[t])
        S = S @ (alpha * householder(k[t], beta[t])) + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def kda(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2510.26692, equation 1: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t."""
    o = []
    for t in range(len(v)):
        alpha = torch.diag(torch.exp(log_decay[t]))
        S = householder(k[t], beta[t]) @ alpha @ S + beta[t] * torch.outer(k[t], v[t])
        o.append(scale * S.T @ q[t])
    return rows(o, v), S


def deltaproduct(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2502.10297, equation 3: H_i = A(x_i) H_{i-1} + B(x_i) with A = g prod_j (I - beta_ij k_ij k_ij^T),
    B = sum_j (prod_{l > j} (I - beta_il k_il k_il^T)) beta_ij k_ij v_ij^T, o_i = H_i^T q_i."""
    o = []
    for t in range(len(q)):
        A, B = torch.eye(k.shape[-1], dtype=k.dtype), torch.zeros_like(S)
        for j in range(k.shape[1]):
            step = householder(k[t, j], beta[t, j])
            A, B = step @ A, step @ B + beta[t, j] * torch.outer(k[t, j], v[t, j])
        g = 1.0 if log_decay is None else torch.exp(log_decay[t])
        S = g * A @ S + B
        o.append(scale * S.T @ q[t])
    return rows(o, v[:, 0]), S


def rwkv7(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2503.14456, equation 17: wkv_t = wkv_{t-1} (diag(w_t) - kk_t^T (a_t * kk_t)) + v_t^T k_t; `wkv` is `V x K`."""
    o = []
    for t in range(len(v)):
        transition = torch.diag(torch.exp(log_decay[t])) - torch.outer(kk[t], a[t] * kk[t])
        S = S @ transition + torch.outer(v[t], k[t])
        o.append(scale * S @ r[t])
    return rows(o, v), S


def householder(k: Tensor, beta: Tensor) -> Tensor:
    """I - beta k k^T."""
    return torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)


def rows(o: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(o) if o else like[:0]


@dataclass(frozen=True)
class Mechanism:
    """A loop, the shapes of its arguments by name, and how the loops above differ in what they take.

    Axes: sequences `B`, tokens `T`, steps of a token `n`, heads of keys `H` and of values `HV`, channels `K` and `V`.
    """

    loop: Callable[..., tuple[Tensor, Tensor]]
    shapes: dict[str, str]
    optional: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None  # the documented default; None: K^-0.5
    values_first: bool = False  # the paper's state is V x K
    by_head: bool = False  # the loop wants to know which head it is
    grouped: bool = True  # more heads of values than of keys are allowed


_QKV = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
_RKV = {"r": "B T H K", "k": "B T H K", "v": "B T HV V"}
_STEPS = {"q": "B T H K", "k": "B T n H K", "v": "B T n HV V", "beta": "B T n HV", "log_decay": "B T HV"}
_MAMBA = {"x": "B T HV V", "dt": "B T HV", "A_log": "HV", "B": "B T H K", "C": "B T H K", "D": "HV"}
_RWKV7 = {"r": "B T H K", "log_decay": "B T HV K", "k": "B T H K", "v": "B T HV V", "kk": "B T H K", "a": "B T H K"}
BETA, BY_TOKEN, BY_CHANNEL = {"beta": "B T HV"}, {"log_decay": "B T HV"}, {"log_decay": "B T HV K"}

MECHANISMS = {
    "retnet": Mechanism(retnet, _QKV, by_head=True),
    "lightning": Mechanism(lightning, _QKV, options={"layer": 1, "layers": 7}, by_head=True),
    "mamba2": Mechanism(mamba2, _MAMBA, ("D",), scale=1.0),
    "gla": Mechanism(gla, _QKV | BY_CHANNEL),
    "hgrn2": Mechanism(
        hgrn2, {"q": "B T H K", "log_forget": "B T H K", "v": "B T HV V"}, scale=1.0, values_first=True, grouped=False
    ),
    "rwkv6": Mechanism(rwkv6, _RKV | BY_CHANNEL | {"bonus": "H K"}, scale=1.0, grouped=False),
    "deltanet": Mechanism(deltanet, _QKV | BETA, values_first=True),
    "gated_deltanet": Mechanism(gated_deltanet, _QKV | BETA | BY_TOKEN, values_first=True),
    "kda": Mechanism(kda, _QKV | BETA | BY_CHANNEL),
    "deltaproduct": Mechanism(deltaproduct, _STEPS, ("log_decay",)),
    "rwkv7": Mechanism(rwkv7, _RWKV7, scale=1.0, values_first=True, grouped=False),
}


def run_loop(
    name: str, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[B, T, HV, V]` and states `[N, HV, K, V]` of the paper's loop over every sequence and head of the tensors `x`."""
    mechanism = MECHANISMS[name]
    axes = {name: shape.split() for name, shape in mechanism.shapes.items()}
    main = next(name for name, shape in mechanism.shapes.items() if shape.endswith("HV V"))
    HV, V = x[main].shape[-2:]
    B, T = x[main].shape[:2]
    K = next(x[name].shape[-1] for name, shape in mechanism.shapes.items() if shape == "B T H K")
    if scale is None:
        scale = K**-0.5 if mechanism.scale is None else mechanism.scale
    parts = (
        [(n, 0, T) for n in range(B)]
        if lengths is None
        else [(0, *ends) for ends in pairwise(accumulate((0, *lengths)))]
    )
    outputs, states = [], []
    for n, (row, first, last) in enumerate(parts):
        heads = []
        for h in range(HV):
            own = {name: of_head(t, axes[name], row, first, last, h, HV) for name, t in x.items() if name in axes}
            S = x["initial_state"][n, h] if "initial_state" in x else x[main].new_zeros(K, V)
            which = {"head": h, "heads": HV} if mechanism.by_head else {}
            o, S = mechanism.loop(
                **own, **mechanism.options, **which, S=S.T if mechanism.values_first else S, scale=scale
            )
            heads.append((o, S.T if mechanism.values_first else S))
        outputs.append(torch.stack([o for o, _ in heads], 1))
        states.append(torch.stack([S for _, S in heads]))
    if not parts:
        return x[main].new_zeros(B, T, HV, V), x[main].new_zeros(0, HV, K, V)
    return torch.stack(outputs) if lengths is None else torch.cat(outputs)[None], torch.stack(states)


def of_head(t: Tensor, axes: list[str], row: int, first: int, last: int, head: int, heads: int) -> Tensor:
    """What one head of one sequence sees of a tensor with these axes."""
    axis = axes.index("HV") if "HV" in axes else axes.index("H")
    t = t.select(axis, head // (heads // t.shape[axis]))
    return t[row, first:last] if axes[0] == "B" else t
