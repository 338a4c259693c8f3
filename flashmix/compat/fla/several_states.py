"""The mechanisms of fla.ops with more than one state: MesaNet, log-linear attention, the delta rule with momentum, RWKV-4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.compat.fla.common import FLA, unit
from flashmix.compat.surface import refuse
from flashmix.mechanisms.log_linear import LevelStates, log_linear
from flashmix.mechanisms.mesa_net import mesa_net
from flashmix.mechanisms.momentum_deltanet import momentum_deltanet
from flashmix.mechanisms.rwkv4 import rwkv4
from flashmix.op.dtypes import state_dtype


@FLA.function(
    "chunk_mesa_net",
    "q k v g beta lamb h_kk_init=None h_kv_init=None output_final_state=False max_CG_iteration=30 use_qk_l2norm_in_kernel=False "
    "cu_seqlens=None ~cu_seqlens_cpu=None",
    "one initial state without the other",
)
def chunk_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    h_kk_init: Tensor | None,
    h_kv_init: Tensor | None,
    output_final_state: bool,
    max_CG_iteration: int,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`flashmix.mesa_net` with `g` before `beta`; returns the output and both final states."""
    refuse("fla.chunk_mesa_net", "one initial state alone", (h_kk_init is None) == (h_kv_init is None))
    states = None
    if h_kk_init is not None and h_kv_init is not None:
        states = h_kk_init.to(state_dtype(q.dtype)), h_kv_init.to(state_dtype(q.dtype))
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    options: dict[str, Any] = {"steps": max_CG_iteration, "initial_state": states, "cu_seqlens": cu_seqlens}
    o, final = mesa_net(q, k, v, beta, g, lamb, return_state=bool(output_final_state), **options)
    return (o, None, None) if final is None else (o, *final)


@FLA.function("mesa_net_decoding_one_step", "q k v g lamb beta prev_h_kk prev_h_kv max_CG_iteration=30")
def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lamb: Tensor,
    beta: Tensor,
    prev_h_kk: Tensor,
    prev_h_kv: Tensor,
    max_CG_iteration: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`flashmix.mesa_net` of one token `[B, H, K]`."""
    token = [x[:, None] for x in (q, k, v, g, beta)]
    o, *states = chunk_mesa(*token, lamb, prev_h_kk, prev_h_kv, True, max_CG_iteration, False, None)
    return o[:, 0], *states


@FLA.function(
    "chunk_log_linear_attn",
    "q k v g level_scales initial_state=None output_final_state=False cu_seqlens=None scale=1.0",
    "a `LogLinearAttentionState`",
)
def log_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    initial_state: LevelStates | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, LevelStates | None]:
    """`flashmix.log_linear`; the state is its pair of levels and numbers of tokens, where the original keeps inputs of a chunk too."""
    refuse(
        "fla.chunk_log_linear_attn", "LogLinearAttentionState", initial_state is None or type(initial_state) is tuple
    )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"initial_state": initial_state, "return_state": bool(output_final_state)}
    return log_linear(q, k, v, g, level_scales, scale=factor, cu_seqlens=cu_seqlens, **options)


@FLA.function(
    "fused_recurrent_momentum_delta_rule chunk_momentum_delta_rule",
    "q k v log_alpha log_mu !p=None beta=None eta=None scale=None initial_state=None output_final_state=False !cu_seqlens=None "
    "use_qk_l2norm_in_kernel=True use_p_times_alpha=True ~chunk_size=64",
    "`use_p_times_alpha=False`",
)
def momentum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor | None,
    eta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_p_times_alpha: bool,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.momentum_deltanet`; the states are one tensor `[2, B, H, K, V]`, whose second is the negative momentum."""
    refuse("fla.momentum_delta_rule", "use_p_times_alpha=False", use_p_times_alpha)
    beta, eta = (torch.ones_like(log_alpha) if x is None else x for x in (beta, eta))
    states = None
    if initial_state is not None:
        S, M = initial_state.to(state_dtype(q.dtype))
        states = S, -M
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    options: dict[str, Any] = {"scale": scale, "initial_state": states, "return_state": bool(output_final_state)}
    o, final = momentum_deltanet(q, k, v, beta, log_alpha, eta, log_mu, **options)
    return o, None if final is None else torch.stack([final[0], -final[1]])


@FLA.function("fused_recurrent_rwkv4", "w u k v state")
def recurrent_rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`flashmix.rwkv4` with the decay `-e^w`; the state `[B, 3, 1, D]` holds both sums and the exponent that they are divided by."""
    wide = state_dtype(k.dtype)
    a, b, m = (x.squeeze(1) for x in state.to(wide).unbind(1))
    o, final = rwkv4(k, v, -w.to(wide).exp(), u, initial_state=(a, b, m), return_state=True)
    assert final is not None
    return o, torch.stack(final, 1).unsqueeze(2)
