"""The delta rules of fla.ops: DeltaNet, Gated DeltaNet and its variants, KDA, Comba, Oja, and diagonal plus low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.compat.fla.common import (
    FLA,
    HINTS,
    KERNEL_STATE,
    PACKED,
    STATE,
    V_FIRST,
    decay,
    per_head,
    run,
    run_delta,
    strength,
    unit,
)
from flashmix.compat.surface import refuse
from flashmix.mechanisms.comba import comba
from flashmix.mechanisms.deltanet import deltanet
from flashmix.mechanisms.deltaproduct import deltaproduct
from flashmix.mechanisms.gated_deltanet import gated_deltanet
from flashmix.mechanisms.gated_deltanet2 import gated_deltanet2
from flashmix.mechanisms.iplr import iplr
from flashmix.mechanisms.kda import kda
from flashmix.mechanisms.oja import oja
from flashmix.mechanisms.preconditioned import preconditioned_gated_deltanet, preconditioned_kda
from flashmix.mechanisms.rwkv7 import rwkv7
from flashmix.op.dtypes import state_dtype
from flashmix.ops.recurrence import dplr

BETA_FLAGS = "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False"
GATE = "use_gate_in_kernel=False A_log=None dt_bias=None"


@FLA.function(
    "chunk_gated_delta_rule chunk_gdn",
    f"q k v g beta {KERNEL_STATE} {BETA_FLAGS} state_v_first=False {PACKED} ~chunk_indices=None !cp_context=None {V_FIRST} {GATE}",
)
@FLA.function(
    "fused_recurrent_gated_delta_rule fused_recurrent_gdn",
    f"q k v g=None gk=None !gv=None beta=None {KERNEL_STATE} {GATE} {BETA_FLAGS} state_v_first=False cu_seqlens=None {V_FIRST}",
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gk: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.gated_deltanet` with `g` before `beta`; with the per-channel `gk` `flashmix.kda`; without both `flashmix.deltanet`."""
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    beta = strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    if g is not None:
        g = decay(g, use_gate_in_kernel, A_log, dt_bias)
    elif use_gate_in_kernel:
        raise ValueError("g must be given with use_gate_in_kernel=True")
    if gk is not None:
        return run_delta(kda, (q, k), v, beta, gk if g is None else gk + g[..., None], **options)
    if g is None:
        return run_delta(deltanet, (q, k), v, beta, **options)
    return run_delta(gated_deltanet, (q, k), v, beta, g, **options)


@FLA.function(
    "chunk_kda",
    f"q k v g beta {KERNEL_STATE} use_gate_in_kernel=False {BETA_FLAGS} ~safe_gate=False lower_bound=None ~disable_recompute=False "
    f"!return_intermediate_states=False state_v_first=False {PACKED} !cp_context=None ~use_graph=False ~max_num_seqs=None "
    f"{V_FIRST} A_log=None dt_bias=None",
)
@FLA.function(
    "fused_recurrent_kda",
    f"q k v g beta A_log=None dt_bias=None {KERNEL_STATE} use_gate_in_kernel=False {BETA_FLAGS} lower_bound=None "
    f"state_v_first=False cu_seqlens=None {V_FIRST}",
)
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.kda` with `g` before `beta`; the gate in the kernel is `softplus_decay`, with `lower_bound` `bounded_decay`."""
    beta = strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g = decay(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return run_delta(kda, unit(use_qk_l2norm_in_kernel, q, k), v, beta, g, **options)


@FLA.function("chunk_delta_rule", f"q k v beta {KERNEL_STATE} {PACKED} {HINTS}")
@FLA.function("fused_recurrent_delta_rule", f"q k v beta=None {KERNEL_STATE} cu_seqlens=None")
def delta_net(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, use_qk_l2norm_in_kernel: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.deltanet`; `beta` of None is 1."""
    return run_delta(deltanet, unit(use_qk_l2norm_in_kernel, q, k), v, beta, **options)


@FLA.function(
    "chunk_gdn2",
    f"q k v g b w {KERNEL_STATE} use_gate_in_kernel=False {PACKED} ~safe_gate=False lower_bound=None ~disable_recompute=False "
    f"!return_intermediate_states=False state_v_first=False !cp_context=None {V_FIRST} A_log=None dt_bias=None",
)
@FLA.function(
    "fused_recurrent_gdn2",
    f"q k v g b w A_log=None dt_bias=None {KERNEL_STATE} use_gate_in_kernel=False lower_bound=None state_v_first=False "
    f"cu_seqlens=None {V_FIRST}",
)
def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.gated_deltanet2(q, k, v, b, w, g)`."""
    g = decay(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return run(gated_deltanet2, *unit(use_qk_l2norm_in_kernel, q, k), v, b, w, g, **options)


@FLA.function("chunk_gated_delta_product", f"q k v g beta num_householder {KERNEL_STATE} {PACKED} !cp_context=None")
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    use_qk_l2norm_in_kernel: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.deltaproduct`; keys, values and betas of a token's steps lie end to end, `[B, T n, ...]`."""
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    k, v, beta = (x.unflatten(1, (q.shape[1], num_householder)) for x in (k, v, beta))
    return run(deltaproduct, q, k, v, beta, log_decay=g, **options)


@FLA.function("chunk_comba", f"q k v p g beta=None {KERNEL_STATE} {PACKED}")
@FLA.function("fused_recurrent_comba", f"q k p v g beta=None {KERNEL_STATE} cu_seqlens=None")
def comba_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.comba`; `p` of None is `k`, and the norm in the kernel is of `p` too."""
    q, k, p = unit(use_qk_l2norm_in_kernel, q, k, k if p is None else p)
    return run_delta(comba, (q, k, p), v, beta, g, **options)


_OJA = "use_q_l2norm=False use_k_l2norm=False cu_seqlens=None"


@FLA.function(
    "chunk_gated_oja_rule",
    f"q k v gv beta {STATE} {_OJA} ~cu_seqlens_cpu=None {HINTS} use_qk_l2norm_in_kernel=None",
    "`beta` `[B, T, HV, V]`",
)
@FLA.function(
    "fused_recurrent_gated_oja_rule",
    f"q k v gv=None beta=None {STATE} {_OJA} {HINTS} use_qk_l2norm_in_kernel=None",
    "`beta` `[B, T, HV, V]`",
)
def gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor | None,
    use_q_l2norm: bool,
    use_k_l2norm: bool,
    use_qk_l2norm_in_kernel: bool | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.oja`; `gv` is the decay of the channels of the values."""
    both = bool(use_qk_l2norm_in_kernel)
    (q,), (k,) = unit(use_q_l2norm or both, q), unit(use_k_l2norm or both, k)
    return run(oja, q, k, v, per_head("gated_oja_rule", beta, v), log_decay=gv, **options)


_CURVED = "initial_A_state=None output_final_state=False"
_CONSTANTS = "x=1.5 eps=1e-06 log_atk_scale=None"


@FLA.function(
    "chunk_precond_gated_delta_rule",
    f"q k v g_atk g beta_atk beta scale=None initial_state=None {_CURVED} use_qk_l2norm_in_kernel=True {PACKED} "
    f"!cp_context=None transpose_state_layout=False {_CONSTANTS}",
    "`beta` `[B, T, HV, V]`",
)
@FLA.function(
    "fused_recurrent_precond_gated_delta_rule",
    f"q k v g=None gk=None !gv=None beta=None g_atk=None beta_atk=None scale=None initial_state=None {_CURVED} "
    f"use_qk_l2norm_in_kernel=True cu_seqlens=None transpose_state_layout=False {_CONSTANTS}",
    "`beta` `[B, T, HV, V]`",
)
@FLA.function(
    "chunk_precond_kda",
    f"q k v g g_atk beta_atk beta scale=None initial_state=None {_CURVED} use_gate_in_kernel=False ~safe_gate=False "
    f"lower_bound=None {PACKED} ~chunk_indices=None !cp_context=None transpose_state_layout=False {_CONSTANTS} "
    "~solve_tril_precision=None ~disable_recompute=False !return_intermediate_states=False * A_log=None dt_bias=None "
    "~use_qk_l2norm_in_kernel=True",
    "`beta` `[B, T, HV, V]`",
)
@FLA.function(
    "fused_recurrent_precond_kda",
    f"q k v g g_atk beta_atk beta A_log=None dt_bias=None scale=None initial_state=None {_CURVED} use_qk_l2norm_in_kernel=True "
    f"use_gate_in_kernel=False lower_bound=None cu_seqlens=None transpose_state_layout=False {_CONSTANTS}",
    "`beta` `[B, T, HV, V]`",
)
def preconditioned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    initial_A_state: Tensor | None,
    output_final_state: bool,
    transpose_state_layout: bool,
    log_atk_scale: Tensor | None,
    x: float,
    eps: float,
    cu_seqlens: Tensor | None,
    scale: float | None,
    gk: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`flashmix.preconditioned_gated_deltanet` and `preconditioned_kda`: `(o, state, curvature)`; the norm is on by default."""
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    if v.shape[2] != q.shape[2] and g_atk.shape[2] == v.shape[2]:  # one curvature per value head
        q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (q, k))
    parts = [] if g is None else [decay(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)]
    if gk is not None:
        parts = [gk + parts[0][..., None] if parts else gk]
    refuse("fla.precond_gated_delta_rule", "call without g and gk", bool(parts))
    rule = preconditioned_kda if parts[0].dim() == 4 else preconditioned_gated_deltanet
    start = _curved_state(q, k, v, cu_seqlens, initial_state, initial_A_state, transpose_state_layout)
    optional: dict[str, Any] = {} if log_atk_scale is None else {"log_scale": log_atk_scale}
    o, state = rule(
        *(q, k, v, per_head("precond", beta, v), parts[0], beta_atk, g_atk),
        **optional,
        bound=x if x > 0 else 1.0,
        eps=eps,
        scale=scale,
        initial_state=start,
        return_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    S, A = (None, None) if state is None else state
    return o, S.mT if transpose_state_layout and S is not None else S, A


def _curved_state(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, S: Tensor | None, A: Tensor | None, v_first: bool
) -> tuple[Tensor, Tensor] | None:
    """Both states, zeros for one that is None, or None if both are."""
    if S is None and A is None:
        return None
    wide = state_dtype(q.dtype)
    rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if S is None:
        S = torch.zeros(rows, v.shape[2], k.shape[3], v.shape[3], dtype=wide, device=q.device)
    else:
        S = (S.mT if v_first else S).to(wide)
    A = torch.zeros(rows, *k.shape[2:], dtype=wide, device=q.device) if A is None else A.to(wide)
    return S, A


_DPLR = "~safe_gate=False ~chunk_size=None ~disable_recompute=False !cp_context=None ~lower_bound=None"


@FLA.function("chunk_dplr_delta_rule", f"q k v a b gk {STATE} {PACKED} {_DPLR}")
@FLA.function("fused_recurrent_dplr_delta_rule", f"q k v a b gk {STATE} reverse=False cu_seqlens=None")
def dplr_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.dplr(q, k, v, a, b, gk)`."""
    return run(dplr, q, k, v, a, b, gk, **options)


@FLA.function("chunk_iplr_delta_rule", f"q k v a b {STATE} {PACKED} {HINTS}")
@FLA.function("fused_recurrent_iplr_delta_rule", f"q k v a b {STATE} cu_seqlens=None")
def iplr_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`flashmix.iplr(q, k, v, a, b)`."""
    return run(iplr, q, k, v, a, b, **options)


_RWKV7 = "initial_state=None output_final_state"


@FLA.function("chunk_rwkv7", f"r w k v a b scale=1.0 {_RWKV7}=False {PACKED} {_DPLR}")
@FLA.function("fused_recurrent_rwkv7", f"r w k v a b scale=None {_RWKV7}=True cu_seqlens=None")
def rwkv7_dplr(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.dplr(r, k, v, a, b, w)`; the chunked form has scale 1, the recurrent form `K ** -0.5` and returns the state."""
    return run(dplr, r, k, v, a, b, w, **options)


@FLA.function("fused_mul_recurrent_rwkv7", f"r w k v kk a scale=1.0 {_RWKV7}=False reverse=False cu_seqlens=None")
def rwkv7_product(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.rwkv7(r, w, k, v, kk, a)`."""
    return run(rwkv7, r, w, k, v, kk, a, scale=r.shape[-1] ** -0.5 if scale is None else scale, **options)
