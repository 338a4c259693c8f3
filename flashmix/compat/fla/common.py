"""Helpers of several families: flags that run in the kernel there, layouts of states, and time backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmix.compat.surface import Surface, refuse
from flashmix.op.dtypes import state_dtype
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength
from flashmix.ops.norm.op import l2_norm

_MISSING = {
    "softmax attention with other scores": "deltaformer_attn parallel_parallax parallel_path_attn parallel_stickbreaking_attn "
    "parallel_wall_attn parallel_wall_attn_decode build_wall_kv_cache",
    "block-sparse attention": "parallel_moba parallel_nsa",
    "a layer norm inside, other rates than in `flashmix.titans_linear`": "chunk_titans_linear",
    "rates of the token that reads, other than in `flashmix.ttt_linear`": "chunk_ttt_linear fused_chunk_ttt_linear",
    "cyclic flow attention": "chunk_cyfa fused_recurrent_cyfa",
    "attention over depth": "fused_attnres",
    "the curvature alone (it is inside chunk_precond_*)": "chunk_atk_fwd chunk_atk_bwd recompute_atk_fwd",
    "it only raises there": "fused_chunk_delta_rule fused_chunk_gla",
    "quantised linear layers": "BitLinear FusedBitLinear",
    "long convolutions": "ImplicitLongConvolution LongConvolution",
    "two calls: a norm, then torch.nn.functional.linear": "LayerNormLinear GroupNormLinear RMSNormLinear "
    "FusedLayerNormSwishGateLinear FusedRMSNormSwishGateLinear",
}
FLA = Surface("fla", {name: reason for reason, names in _MISSING.items() for name in names.split()})

STATE = "scale=None initial_state=None output_final_state=False"
KERNEL_STATE = f"{STATE} use_qk_l2norm_in_kernel=False"
PACKED = "cu_seqlens=None ~cu_seqlens_cpu=None"
HINTS = "* ~chunk_size=None"  # what the original takes in **kwargs
V_FIRST = "* ~chunk_size=None transpose_state_layout=None"


def unit(use: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with rows of length 1 where the kernel there would make them so."""
    return tuple(l2_norm(x) for x in tensors) if use else tensors


def strength(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """`beta` after the sigmoid of the kernel there; raises ValueError for `allow_neg_eigval` without it."""
    if negative and not sigmoid:
        raise ValueError("allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True")
    return write_strength(beta, negative_eigenvalues=negative) if sigmoid else beta


def per_head(label: str, beta: Tensor | None, v: Tensor) -> Tensor:
    """`beta` `[B, T, HV]`, ones if None; raises NotImplementedError for one number per channel of the values."""
    if beta is None:
        return torch.ones_like(v[..., 0])
    refuse(f"fla.{label}", "beta of shape [B, T, HV, V]", beta.dim() == 3)
    return beta


def decay(
    g: Tensor, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """The log decay: `g`, or with the gate of the kernel `-e^A softplus(g + bias)`, with a bound `bound sigmoid(e^A (g + bias))`."""
    if not use_gate:
        return g
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, unless lower_bound is")
    shape = g.shape[2:]
    like: dict[str, Any] = {"dtype": state_dtype(g.dtype), "device": g.device}
    rate = torch.zeros(shape[0], **like) if A_log is None else A_log.reshape(shape[0])
    bias = torch.zeros(shape, **like) if dt_bias is None else dt_bias.reshape(shape)
    if lower_bound is None:
        return softplus_decay(g, rate, bias)
    if -5 <= lower_bound < 0:
        return bounded_decay(g, rate, bias, lower=lower_bound)
    sharpness = rate.exp().reshape(-1, *[1] * (len(shape) - 1))
    return lower_bound * torch.sigmoid(sharpness * (g.to(like["dtype"]) + bias))


def run(
    rule: Callable[..., Any],
    q: Tensor,
    *tensors: Tensor,
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    reverse: bool = False,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls a rule of flashmix with a state in the layout and dtype of the original; `reverse` runs from the last token to the first.

    Tensors of less than three axes have no tokens. `options` are the rule's. A state may be a tuple of tensors.
    """
    if transpose_state_layout is not None:
        if state_v_first:
            raise ValueError("state_v_first and transpose_state_layout, its old name, are both given")
        state_v_first = transpose_state_layout
    state = initial_state
    if state is not None:
        state = of_each(lambda S: S.to(state_dtype(q.dtype)), state)
        state = state.mT if state_v_first else state
    packed = cu_seqlens is not None
    if reverse:
        q, tensors = q.flip(1), tuple(x.flip(1) if x.dim() > 2 else x for x in tensors)
        cu_seqlens = None if cu_seqlens is None else (cu_seqlens[-1] - cu_seqlens).flip(0)
        options = {n: x.flip(1) if isinstance(x, Tensor) and x.dim() > 2 else x for n, x in options.items()}
        state = of_each(lambda S: S.flip(0), state) if packed and state is not None else state
    o, final = rule(
        q, *tensors, initial_state=state, return_state=bool(output_final_state), cu_seqlens=cu_seqlens, **options
    )
    if reverse:
        o = o.flip(1)
        final = of_each(lambda S: S.flip(0), final) if packed and final is not None else final
    return o, final.mT if state_v_first and final is not None else final


def of_each(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The state changed, or each of a tuple of states."""
    return tuple(change(S) for S in state) if isinstance(state, tuple) else change(state)


def run_delta(
    rule: Callable[..., Any], keys: tuple[Tensor, ...], v: Tensor, beta: Tensor | None, *decays: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`run` of a delta rule with these queries and keys; a strength per channel of the values, `[B, T, HV, V]`, makes each a head.

    The columns of a state know nothing of each other, so that is exact; it repeats what they share.
    """
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if beta.dim() == 3:
        return run(rule, *keys, v, beta, *decays, **options)
    count, state = v.shape[3], options.pop("initial_state")
    first = options.get("state_v_first") or options.get("transpose_state_layout")
    if state is not None:  # [N, HV V, K, 1], with values first [N, HV V, 1, K]
        state = state.flatten(1, 2).unsqueeze(2) if first else state.mT.flatten(1, 2).unsqueeze(3)
    decays = tuple(g.repeat_interleave(count, 2) for g in decays)
    o, final = run(rule, *keys, v.flatten(2)[..., None], beta.flatten(2), *decays, initial_state=state, **options)
    if final is not None:
        final = final.squeeze(2 if first else 3).unflatten(1, v.shape[2:])  # [N, HV, V, K]
        final = final if first else final.mT
    return o.squeeze(3).unflatten(2, v.shape[2:]), final
