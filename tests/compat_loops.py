"""The functions of other libraries as token loops, written from what their documentation says; tensors are `[B, T, H, D]`.

`S` is `[B, H, K, V]`. Keys and queries have the heads of the values: a test repeats them before the call of a loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, int], Tensor]


def read(S: Tensor, key: Tensor) -> Tensor:
    """`S^T key`, `[B, H, V]`."""
    return torch.einsum("bhkv,bhk->bhv", S, key)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def faded(S: Tensor, g: Tensor | None) -> Tensor:
    """`S` after a decay `[B, H]` or `[B, H, K]`."""
    if g is None:
        return S
    return S * (g.exp()[..., None, None] if g.dim() == 2 else g.exp().unsqueeze(-1))


def scanned(q: Tensor, v: Tensor, step: Step, scale: float | None, S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs `scale S_t^T q_t` of the states that `step` makes, and the last state."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if S is None else S
    scale = K**-0.5 if scale is None else scale
    o = []
    for t in range(T):
        S = step(S, t)
        o.append(scale * read(S, q[:, t]))
    return torch.stack(o, 1), S


def delta(q, k, v, beta, g=None, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        S = faded(S, None if g is None else g[:, t])
        return S + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(S, k[:, t])))

    return scanned(q, v, step, scale, S)


def gdn2(q, k, v, g, b, w, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        S = faded(S, g[:, t])
        return S + outer(k[:, t], w[:, t] * v[:, t] - read(S, b[:, t] * k[:, t]))

    return scanned(q, v, step, scale, S)


def comba(q, k, v, p, g, beta, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        u = beta[:, t, :, None] * (v[:, t] - read(S, p[:, t]))
        return faded(S, g[:, t]) + outer(k[:, t], u)

    return scanned(q, v, step, scale, S)


def product(q, k, v, g, beta, n, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        S = faded(S, None if g is None else g[:, t])
        for j in range(n * t, n * t + n):
            S = S + outer(k[:, j], beta[:, j, :, None] * (v[:, j] - read(S, k[:, j])))
        return S

    return scanned(q, v, step, scale, S)


def oja(q, k, v, gv, beta, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        S = S if gv is None else S * gv[:, t].exp().unsqueeze(-2)
        return S + outer(beta[:, t, :, None] * (k[:, t] - (S * v[:, t].unsqueeze(-2)).sum(-1)), v[:, t])

    return scanned(q, v, step, scale, S)


def dplr(q, k, v, a, b, gk=None, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        return faded(S, None if gk is None else gk[:, t]) + outer(b[:, t], read(S, a[:, t])) + outer(k[:, t], v[:, t])

    return scanned(q, v, step, scale, S)


def preconditioned(q, k, v, g, g_atk, beta_atk, beta, centre, *, scale=None, S=None, A=None, x=1.5, eps=1e-6):
    A = torch.zeros_like(k[:, 0]) if A is None else A
    kept = [A]

    def step(S: Tensor, t: int) -> Tensor:
        A = g_atk[:, t, :, None].exp() * kept.pop() + beta_atk[:, t, :, None] * k[:, t] ** 2
        kept.append(A)
        r = (A + eps).log() - centre
        write = k[:, t] * x ** (-r / (1 + r.abs()))
        S = faded(S, g[:, t])
        return S + outer(write, beta[:, t, :, None] * (v[:, t] - read(S, k[:, t])))

    o, S = scanned(q, v, step, scale, S)
    return o, S, kept.pop()


def linear(q, k, v, g=None, gv=None, *, scale=None, S=None):
    def step(S: Tensor, t: int) -> Tensor:
        S = faded(S, None if g is None else g[:, t])
        S = S if gv is None else S * gv[:, t].exp().unsqueeze(-2)
        return S + outer(k[:, t], v[:, t])

    return scanned(q, v, step, scale, S)


def rwkv6(r, k, v, w, u, *, scale=None, S=None):
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    S = r.new_zeros(*r.shape[:1], *r.shape[2:], v.shape[-1]) if S is None else S
    o = []
    for t in range(r.shape[1]):
        o.append(scale * read(S + u.unsqueeze(-1) * outer(k[:, t], v[:, t]), r[:, t]))
        S = faded(S, w[:, t]) + outer(k[:, t], v[:, t])
    return torch.stack(o, 1), S


def slots(q, k, v, s, g, *, scale=None, states=None):
    """Keys and values in slots, `[B, H, K, M]` and `[B, H, M, V]`, of which each decays by `g` `[B, T, H, M]`."""
    B, T, H, K = q.shape
    shapes = (B, H, K, s.shape[-1]), (B, H, s.shape[-1], v.shape[-1])
    keys, values = (q.new_zeros(x) for x in shapes) if states is None else states
    scale = K**-0.5 if scale is None else scale
    o = []
    for t in range(T):
        keys = keys * g[:, t].exp().unsqueeze(-2) + outer(k[:, t], s[:, t])
        values = values * g[:, t].exp().unsqueeze(-1) + outer(s[:, t], v[:, t])
        o.append(read(values, (scale * read(keys, q[:, t])).softmax(-1)))
    return torch.stack(o, 1), (keys, values)


def additive_gate(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`e^{s_t - z_t}`, `z_{t-1} - z_t` (0 at first) and the last `z`, with `z_t = log sum_{j <= t} e^{s_j}`."""
    z = s.logcumsumexp(1)
    return (s - z).exp(), torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]], 1), z[:, -1:]


def weighted(weights: Tensor, v: Tensor, eps: float | None) -> Tensor:
    """Causal attention with weights `[B, H, T, T]`, divided by their sum plus `eps` unless that is None."""
    weights = weights.tril()
    o = torch.einsum("bhij,bjhv->bihv", weights, v)
    return o if eps is None else o / (weights.sum(-1).transpose(1, 2).unsqueeze(-1) + eps)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * torch.einsum("bihk,bjhk->bhij", q, k)


def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sink=None, decay=None):
    """`(o, lse)` of flash_attn: bottom-right alignment, inclusive window, -1 unbounded; slopes `[H]` or `[B, H]`."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = scores(q, k, q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * (i - j).abs()
    if decay is not None:
        total = decay.cumsum(1).transpose(1, 2)
        s = s + total.unsqueeze(-1) - total.unsqueeze(-2)
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros(i.shape[0], len(j), dtype=torch.bool)
    hidden |= (j < i - left) if left >= 0 else hidden
    hidden |= (j > i + right) if right >= 0 else hidden
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1) if sink is None else torch.logaddexp(s.logsumexp(-1), sink.to(s.dtype)[:, None])
    p = torch.where(s == -torch.inf, torch.zeros_like(s), (s - lse.unsqueeze(-1)).exp())
    return torch.einsum("bhij,bjhv->bihv", p, v), lse
