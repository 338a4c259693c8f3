"""The delta rule with momentum, for several mechanisms: two states, chunks of plain PyTorch that torch differentiates."""

from __future__ import annotations

from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashmix.mechanisms.common import check_per_head, check_states
from flashmix.op.choose import Implementation, choose
from flashmix.op.dtypes import state_dtype, without_autocast
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing, check_whole
from flashmix.ops.recurrence.call import check_operands

MomentumStates = tuple[Tensor, Tensor]
CHUNK = 32
IMPLEMENTATIONS: tuple[Implementation[Tensor], ...] = (Implementation("portable", __name__, lambda q: None),)


class MomentumOptions(TypedDict, total=False):
    """The options of the mechanisms with momentum."""

    scale: float | None
    initial_state: MomentumStates | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


def momentum_rule(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    *,
    reads_decayed: bool,
    scale: float | None = None,
    initial_state: MomentumStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MomentumStates | None]:
    """The mechanism `name`; `gates` `[B, T, HV]`, by their names there: log decays of memory and momentum, `beta` if any, `eta`.

        u_t = v_t - S_{t-1}^T p_t;  M_t = mu_t M_{t-1} + eta_t k_t u_t^T;  S_t = alpha_t S_{t-1} + beta_t M_t;  o_t = scale S_t^T q_t

    `p = alpha k` with `reads_decayed`, else `k`; `beta` is 1 where there is none.
    """
    check_whole(cu_seqlens, name)
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    (B, T, _, K), (HV, V), wide = q.shape, v.shape[2:], state_dtype(q.dtype)
    for own, gate in gates.items():
        check_per_head(own, gate, "q", q, B, T, HV)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, K, V), (N, HV, K, V))
    choose(name, IMPLEMENTATIONS, q, impl)
    scale = K**-0.5 if scale is None else scale
    S, M = initial_state or (q.new_zeros(2, N, HV, K, V, dtype=wide)).unbind()
    with without_autocast(q):
        q, k = (repeat_heads(x.to(wide), HV) for x in (q, k))
        log_decay, momentum_log_decay, *beta, rate = (gate.to(wide) for gate in gates.values())
        p = log_decay.exp().unsqueeze(-1) * k if reads_decayed else k
        tokens = [
            scale * q,
            k,
            p,
            v.to(wide),
            log_decay,
            momentum_log_decay,
            beta[0] if beta else torch.ones_like(rate),
            rate,
        ]
        if packing is not None:
            tokens = [_padded(x, packing) for x in tokens]
        o, S, M = _chunks(tokens, S, M)
        o = o if packing is None else o[packing.sequence, packing.positions].unsqueeze(0)
    return o.to(v.dtype), (S, M) if return_state else None


def _padded(x: Tensor, packing: Packing) -> Tensor:
    """A packed row `[1, T, ...]` as a row a sequence, `[N, longest, ...]`, with zeros behind: such tokens change no state."""
    bounds = packing.on_host()
    longest = max([0, *[last - first for first, last in pairwise(bounds)]])
    rows = x.new_zeros(packing.count, longest, *x.shape[2:])
    return rows.index_put((packing.sequence, packing.positions), x[0])


def _chunks(tokens: list[Tensor], S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, T, HV, V]` and last states, from queries (scaled), keys, `p`, values and the four gates of each token.

    With S and M before a chunk, `S_t = a_t S + f_t M + sum_{j <= t} c_tj eta_j k_j u_j^T`, where `a` and `m` are products of decays over
    intervals, `c_tj = sum_{j <= i <= t} a_ti beta_i m_ij` and `f_t = c_t0`; `(I + E) U = V - a' P S - f' P M` with `E` below its
    diagonal and `a'`, `f'` those of the token before.
    """
    T = tokens[0].shape[1]
    if T == 0 or not tokens[0].shape[0]:
        return tokens[3].clone(), S.clone(), M.clone()
    C = CHUNK if T > 1 else 1  # of one size, so that later tokens do not change the order of sums
    q, k, p, v, log_decay, momentum_log_decay, beta, rate = (_tiles(x, C) for x in tokens)
    a, m = _products(log_decay), _products(momentum_log_decay)  # [B, HV, n, C + 1, C + 1]
    c = a[..., 1:, 1:] @ (beta.unsqueeze(-1) * m[..., 1:, :])  # [B, HV, n, C, C + 1]
    memory, momentum, c = a[..., 1:, :1], c[..., :1], c[..., 1:] * rate.unsqueeze(-2)
    before = [pad(x, (0, 0, 1, 0))[..., :-1, :] for x in (memory, momentum, c)]
    before[0] = a[..., :-1, :1]
    E = torch.tril(before[2] * (p @ k.mT), -1)
    right = torch.cat([v, before[0] * p, before[1] * p], -1)
    values, by_memory, by_momentum = torch.linalg.solve_triangular(E, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1], k.shape[-1]], -1
    )
    scores = torch.tril(c * (q @ k.mT))
    to_memory, to_momentum = c[..., -1:, :].mT, (m[..., -1:, 1:] * rate.unsqueeze(-2)).mT
    o = []
    for n in range(q.shape[2]):
        U = values[:, :, n] - by_memory[:, :, n] @ S - by_momentum[:, :, n] @ M
        read = (memory * q)[:, :, n] @ S + (momentum * q)[:, :, n] @ M
        o.append(read + scores[:, :, n] @ U)
        S = memory[:, :, n, -1:] * S + momentum[:, :, n, -1:] * M + k[:, :, n].mT @ (to_memory[:, :, n] * U)
        M = m[:, :, n, -1:, :1] * M + k[:, :, n].mT @ (to_momentum[:, :, n] * U)
    return torch.cat(o, 2).transpose(1, 2)[:, :T], S, M


def _tiles(x: Tensor, C: int) -> Tensor:
    """`[B, T, HV, ...]` in chunks, `[B, HV, n, C, ...]`; 0 in the tokens after the last, which change no state."""
    x = x.transpose(1, 2)
    x = pad(x, (0, 0) * (x.dim() - 3) + (0, -x.shape[2] % C))
    return x.unflatten(2, (-1, C))


def _products(log_decay: Tensor) -> Tensor:
    """`e^{g_{i+1} + ... + g_t}` in row t and column i, `[..., C + 1, C + 1]`; 0 is the place before the first token. 0 for i > t."""
    size = log_decay.shape[-1] + 1
    rows = pad(log_decay, (1, 0)).unsqueeze(-1).expand(*log_decay.shape[:-1], size, size)
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    return rows.masked_fill(~later.tril(-1), 0.0).cumsum(-2).exp().masked_fill(~later, 0.0)
