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


def normalised_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2006.16236, equations 10 to 12: s_i = s_{i-1} + phi(k_i) v_i^T, z_i = z_{i-1} + phi(k_i), phi(q_i)^T s_i / phi(q_i)^T z_i."""
    s, z = S
    o = []
    for t in range(len(v)):
        s, z = s + torch.outer(k[t], v[t]), z + k[t]
        o.append((q[t] @ s) / (q[t] @ z))
    return rows(o, v), (s, z)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2405.21060, equation 1 with scalar A: h_t = a_t h_{t-1} + B_t x_t^T, y_t = C_t^T h_t."""
    o = []
    for t in range(len(v)):
        S = torch.exp(log_decay[t]) * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


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


def comba(
    q: Tensor, k: Tensor, p: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2506.02475: S_t = S_{t-1} (alpha_t - beta_t p_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        transition = torch.exp(log_decay[t]) * torch.eye(len(k[t]), dtype=k.dtype) - beta[t] * torch.outer(p[t], k[t])
        S = S @ transition + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


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


def preconditioned(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, curvature_beta: Tensor, curvature_log_decay: Tensor,
    log_scale: Tensor | float = -0.2, *, S: tuple[Tensor, Tensor], scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """2604.21100: A_t = alpha'_t A_{t-1} + beta'_t k_t^2, P_t = Diag(1.5^{-r/(1+|r|)}) with r = log(A_t + eps) - log_scale,
    S_t = (I - beta_t P_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t P_t k_t v_t^T; both papers' decays."""
    memory, A = S
    o = []
    for t in range(len(v)):
        A = torch.exp(curvature_log_decay[t]) * A + curvature_beta[t] * k[t] ** 2
        r = torch.log(A + 1e-6) - log_scale
        P = torch.diag(1.5 ** (-r / (1 + abs(r))))
        alpha = torch.exp(log_decay[t]) * torch.ones_like(k[t])
        transition = torch.eye(len(k[t]), dtype=k.dtype) - beta[t] * P @ torch.outer(k[t], k[t])
        memory = transition @ torch.diag(alpha) @ memory + beta[t] * P @ torch.outer(k[t], v[t])
        o.append(scale * memory.T @ q[t])
    return rows(o, v), (memory, A)


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


def oja(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Oja 1982; 2206.01649: W_t = W_{t-1} + beta_t (k_t - W_{t-1} v_t) v_t^T, on a state whose columns decay."""
    o = []
    for t in range(len(v)):
        S = S if log_decay is None else S @ torch.diag(torch.exp(log_decay[t]))
        S = S + beta[t] * torch.outer(k[t] - S @ v[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


def iplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2503.14456, section 3 without decay: S_t = S_{t-1} (I + a_t b_t^T) + v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        S = S @ (torch.eye(len(k[t]), dtype=k.dtype) + torch.outer(a[t], b[t])) + torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


def householder(k: Tensor, beta: Tensor) -> Tensor:
    """I - beta k k^T."""
    return torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)


def rows(o: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(o) if o else like[:0]


@dataclass(frozen=True)
class Mechanism:
    """A loop, the shapes of its arguments by name, and how the loops above differ in what they take.

    Axes: sequences `B` (of states `N`), tokens `T`, steps of a token `n`, heads of keys `H` and of values `HV`, channels `K` and
    `V`, slots `M`.
    """

    loop: Callable[..., tuple[Tensor, Any]]
    shapes: dict[str, str]
    optional: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None  # the documented default; None: K^-0.5
    values_first: bool = False  # the paper's state is V x K
    by_head: bool = False  # the loop wants to know which head it is
    grouped: bool = True  # more heads of values than of keys are allowed
    states: tuple[str, ...] = ("N HV K V",)  # several: the loop takes and returns a tuple
    unit: tuple[str, ...] = ("k",)  # of length 1 where there is a beta
    draw: dict[str, float] = field(default_factory=dict)  # arguments of unit length times this number
    weak: bool = False  # beta up to 1 instead of 2
    positive: tuple[str, ...] = ()  # between 0 and 1; such an op has no scale


_QKV = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
_RKV = {"r": "B T H K", "k": "B T H K", "v": "B T HV V"}
_STEPS = {"q": "B T H K", "k": "B T n H K", "v": "B T n HV V", "beta": "B T n HV", "log_decay": "B T HV"}
_MAMBA = {"x": "B T HV V", "dt": "B T HV", "A_log": "HV", "B": "B T H K", "C": "B T H K", "D": "HV"}
_RWKV7 = {"r": "B T H K", "log_decay": "B T HV K", "k": "B T H K", "v": "B T HV V", "kk": "B T H K", "a": "B T H K"}
_CURVATURE = {"curvature_beta": "B T H", "curvature_log_decay": "B T H", "log_scale": "H"}
BETA, BY_TOKEN, BY_CHANNEL = {"beta": "B T HV"}, {"log_decay": "B T HV"}, {"log_decay": "B T HV K"}

MECHANISMS = {
    "retnet": Mechanism(retnet, _QKV, by_head=True),
    "lightning": Mechanism(lightning, _QKV, options={"layer": 1, "layers": 7}, by_head=True),
    "mamba2": Mechanism(mamba2, _MAMBA, ("D",), scale=1.0),
    "normalised_linear_attention": Mechanism(
        normalised_linear_attention, _QKV, states=("N HV K V", "N H K"), positive=("q", "k")
    ),
    "simple_gla": Mechanism(simple_gla, _QKV | BY_TOKEN),
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
    "comba": Mechanism(
        comba,
        {"q": "B T H K", "k": "B T H K", "p": "B T H K", "v": "B T HV V"} | BETA | BY_TOKEN,
        values_first=True,
        draw={"p": 0.5},
    ),
    "gated_deltanet2": Mechanism(
        gated_deltanet2, _QKV | {"erase_gate": "B T HV K", "write_gate": "B T HV V"} | BY_CHANNEL, draw={"k": 1.0}
    ),
    "preconditioned_gated_deltanet": Mechanism(
        preconditioned, _QKV | BETA | BY_TOKEN | _CURVATURE, ("log_scale",), states=("N HV K V", "N H K"), weak=True
    ),
    "preconditioned_kda": Mechanism(
        preconditioned, _QKV | BETA | BY_CHANNEL | _CURVATURE, ("log_scale",), states=("N HV K V", "N H K"), weak=True
    ),
    "gsa": Mechanism(gsa, _QKV | {"s": "B T HV M", "log_decay": "B T HV M"}, states=("N HV K M", "N HV M V")),
    "abc": Mechanism(abc, _QKV | {"s": "B T HV M"}, states=("N HV K M", "N HV M V", "N HV M")),
    "oja": Mechanism(oja, _QKV | BETA | {"log_decay": "B T HV V"}, ("log_decay",), unit=("v",)),
    "iplr": Mechanism(
        iplr, _QKV | {"a": "B T HV K", "b": "B T HV K"}, values_first=True, draw={"k": 1.0, "a": 0.5, "b": 0.5}
    ),
}


def run_loop(
    name: str, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Output `[B, T, HV, V]` and states of the paper's loop over every sequence and head of the tensors `x`."""
    mechanism = MECHANISMS[name]
    axes = {name: shape.split() for name, shape in mechanism.shapes.items()}
    main = next(
        name
        for name, shape in mechanism.shapes.items()
        if shape.endswith("HV V") and name not in ("log_decay", "write_gate")
    )
    B, T, HV, V = x[main].shape[0], x[main].shape[1], *x[main].shape[-2:]
    if scale is None:
        scale = x[next(n for n, shape in mechanism.shapes.items() if shape == "B T H K")].shape[-1] ** -0.5
        scale = scale if mechanism.scale is None else mechanism.scale
    parts = (
        [(n, 0, T) for n in range(B)]
        if lengths is None
        else [(0, *ends) for ends in pairwise(accumulate((0, *lengths)))]
    )
    first_states = first_states_of(mechanism, x, len(parts))
    outputs: list[Tensor] = []
    states: list[list[Tensor]] = [[] for _ in first_states]
    for n, (row, first, last) in enumerate(parts):
        heads, found = [], []
        for h in range(HV):
            own = {name: of_head(t, axes[name], row, first, last, h, HV) for name, t in x.items() if name in axes}
            S = [state[n, h // (HV // state.shape[1])] for state in first_states]
            S = [state.T for state in S] if mechanism.values_first else S
            which = {"head": h, "heads": HV} if mechanism.by_head else {}
            o, S = mechanism.loop(**own, **mechanism.options, **which, S=tuple(S) if len(S) > 1 else S[0], scale=scale)
            heads.append(o)
            found.append(S if isinstance(S, tuple) else (S.T if mechanism.values_first else S,))
        outputs.append(torch.stack(heads, 1))
        for place, state in enumerate(first_states):  # heads that share a state agree on it: the first one tells
            states[place].append(torch.stack([S[place] for S in found[:: HV // state.shape[1]]]))
    if not parts:
        return x[main].new_zeros(B, T, HV, V), *first_states
    o = torch.stack(outputs) if lengths is None else torch.cat(outputs)[None]
    return o, *(torch.stack(state) for state in states)


def state_names(name: str) -> list[str]:
    """What the tests call the initial states of a mechanism."""
    count = len(MECHANISMS[name].states)
    return ["initial_state"] if count == 1 else [f"initial_state{place}" for place in range(count)]


def first_states_of(mechanism: Mechanism, x: dict[str, Tensor], sequences: int) -> list[Tensor]:
    """The initial states among `x`, or those of a sequence that begins: zeros, the logarithm of a sum -inf."""
    given = [x[n] for n in sorted(x) if n.startswith("initial_state")]
    if given:
        return given
    sizes = {
        axis: size
        for name, shape in mechanism.shapes.items()
        if name in x
        for axis, size in zip(shape.split(), x[name].shape, strict=True)
    }
    like = next(iter(x.values()))
    sizes["N"] = sequences
    shapes = [[sizes[axis] for axis in state.split()] for state in mechanism.states]
    return [
        like.new_full(shape, -math.inf if mechanism.loop is abc and place == 2 else 0.0)
        for place, shape in enumerate(shapes)
    ]


def of_head(t: Tensor, axes: list[str], row: int, first: int, last: int, head: int, heads: int) -> Tensor:
    """What one head of one sequence sees of a tensor with these axes."""
    axis = axes.index("HV") if "HV" in axes else axes.index("H")
    t = t.select(axis, head // (heads // t.shape[axis]))
    return t[row, first:last] if axes[0] == "B" else t
