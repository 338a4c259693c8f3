"""The linear attentions of fla.ops: GLA, RetNet, Lightning, RWKV-6, HGRN, LightNet, Based, ReBased, and attention over slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.compat.fla.common import FLA, HINTS, PACKED, STATE, V_FIRST, run
from flashmix.compat.surface import refuse
from flashmix.mechanisms.abc import abc
from flashmix.mechanisms.gla import gla
from flashmix.mechanisms.gsa import gsa
from flashmix.mechanisms.lightning import lightning
from flashmix.mechanisms.linear_attention import normalised_linear_attention
from flashmix.mechanisms.retnet import retnet
from flashmix.mechanisms.rwkv6 import rwkv6
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import as_packing
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.running_softmax import running_softmax
from flashmix.ops.scan import scan

States = tuple[Tensor, Tensor]


@FLA.function("chunk_gla", f"q k v g {STATE} state_v_first=False {PACKED}")
def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`flashmix.gla(q, k, v, g)`."""
    return run(gla, q, k, v, g, **options)


@FLA.function(
    "fused_recurrent_gla",
    f"q k v gk=None gv=None {STATE} reverse=False state_v_first=False cu_seqlens=None {V_FIRST}",
    "`gk` with `gv`",
)
def recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.linear_attention` with `log_decay=gk` or `value_log_decay=gv`."""
    refuse("fla.fused_recurrent_gla", "gk and gv in one call", gk is None or gv is None)
    return run(linear_attention, q, k, v, log_decay=gk, value_log_decay=gv, **options)


@FLA.function(
    "chunk_simple_gla", f"q k v g=None g_gamma=None {STATE} state_v_first=False {PACKED} {V_FIRST} ~head_first=False"
)
@FLA.function("fused_chunk_simple_gla", f"q k v g=None g_gamma=None {STATE} cu_seqlens=None")
@FLA.function(
    "fused_recurrent_simple_gla",
    f"q k v g=None g_gamma=None {STATE} reverse=False state_v_first=False cu_seqlens=None {V_FIRST}",
)
def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.linear_attention` with a decay per token `g`, per head `g_gamma`, their sum, or none."""
    decay = g if g_gamma is None else g_gamma if g is None else g + g_gamma
    return run(linear_attention, q, k, v, log_decay=decay, **options)


@FLA.function("parallel_simple_gla", f"q k v g=None scale=None !output_attentions=False {PACKED}")
def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, None]:
    """`flashmix.linear_attention`; the second result, the matrix of scores, is None."""
    return linear_attention(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)[0], None


@FLA.function("chunk_retention", f"q k v {STATE} cu_seqlens=None {V_FIRST} ~cu_seqlens_cpu=None state_v_first=False")
@FLA.function("fused_chunk_retention", f"q k v {STATE} cu_seqlens=None")
@FLA.function("fused_recurrent_retention", f"q k v {STATE} reverse=False state_v_first=False cu_seqlens=None {V_FIRST}")
def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`flashmix.retnet(q, k, v)`."""
    return run(retnet, q, k, v, **options)


@FLA.function("parallel_retention", "q k v scale=None !output_attentions=False cu_seqlens=None")
def parallel_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, None]:
    """`flashmix.retnet`; the second result, the matrix of scores, is None."""
    return retnet(q, k, v, scale=scale, cu_seqlens=cu_seqlens)[0], None


@FLA.function("chunk_lightning_attn", f"q k v layer_idx num_layers {STATE} cu_seqlens=None {HINTS}")
@FLA.function("fused_recurrent_lightning_attn", f"q k v layer_idx num_layers {STATE} reverse=False cu_seqlens=None")
def lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.lightning(q, k, v, layer=layer_idx, layers=num_layers)`."""
    return run(lightning, q, k, v, layer=layer_idx, layers=num_layers, **options)


@FLA.function("chunk_linear_attn fused_chunk_linear_attn", f"q k v {STATE} normalize=True cu_seqlens=None")
@FLA.function(
    "fused_recurrent_linear_attn",
    f"q k v {STATE} reverse=False normalize=False cu_seqlens=None",
    "`normalize` with `reverse`",
)
def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    """`flashmix.linear_attention`, normalised `normalised_linear_attention`: the divisor is `scale q . z + 1e-10`, the state `(S, z)`.

    `z` is `[N, 1, H, K]`. The recurrent form does not normalise by default, the chunked ones do.
    """
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "output_final_state": output_final_state, "reverse": reverse}
    if not normalize:
        return run(linear_attention, q, k, v, scale=scale, initial_state=initial_state, **options)
    refuse("fla.fused_recurrent_linear_attn", "normalize with reverse", not reverse)
    S, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    wide = state_dtype(q.dtype)
    if S is not None:
        S = S.to(wide)
        z = S.new_zeros(S.shape[:3]) if z is None else z.squeeze(1).to(wide)
    o, state = normalised_linear_attention(
        q,
        k,
        v,
        eps=1e-10 / (q.shape[-1] ** -0.5 if scale is None else scale),
        initial_state=None if S is None else (S, z),
        return_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
    )
    return o, None if state is None else (state[0], state[1].unsqueeze(1))


@FLA.function("chunk_rwkv6", f"r k v w u {STATE} {PACKED} {HINTS}")
@FLA.function("fused_recurrent_rwkv6", f"r k v w u {STATE} reverse=False cu_seqlens=None")
def rwkv6_rule(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.rwkv6(r, k, v, w, u)`, whose scale is 1 where this one's is `K ** -0.5`."""
    return run(rwkv6, r, k, v, w, u, scale=r.shape[-1] ** -0.5 if scale is None else scale, **options)


@FLA.function("chunk_hgrn", "x g initial_state=None output_final_state=False")
@FLA.function("fused_recurrent_hgrn", "x g initial_state=None output_final_state=False cu_seqlens=None")
def hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`h_t = e^{g_t} h_{t-1} + x_t` for every channel of `x` `[B, T, D]`; the state is `[N, D]`."""
    start = None if initial_state is None else initial_state.to(state_dtype(x.dtype))
    return scan(x, g, initial_state=start, return_state=output_final_state, cu_seqlens=cu_seqlens)


def _additive_gate(s: Tensor, z: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`e^{s_t - z_t}` with `z_t = log sum_{j <= t} e^{s_j}`, the log decay `z_{t-1} - z_t` (0 without a past), and the last `z`."""
    packing = as_packing(cu_seqlens, s.shape[0], s.shape[1], s.device)
    rows = s.shape[0] if packing is None else packing.count
    wide = state_dtype(s.dtype)
    if z is None:
        z = torch.full((rows, *s.shape[2:]), -torch.inf, dtype=wide, device=s.device)
    weight, decay, last = running_softmax(s, z.to(wide), packing)
    return weight.to(s.dtype), decay.masked_fill(decay == -torch.inf, 0.0), last


@FLA.function(
    "chunk_lightnet fused_recurrent_lightnet",
    "q k v scale=None initial_state=None output_final_state=False state_v_first=False cu_seqlens=None",
)
def lightnet(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any, cu_seqlens: Tensor | None, **options: Any
) -> tuple[Tensor, tuple[Tensor | None, Tensor]]:
    """`flashmix.gla` of the running softmax of the key logits; the state is `(S, z)`, `z` `[N, 1, H, K]`, and `z` is always returned."""
    S, z = (None, None) if initial_state is None else initial_state
    k, g, z = _additive_gate(k, None if z is None else z.squeeze(1), cu_seqlens)
    o, S = run(gla, q, k, v, g, initial_state=S, cu_seqlens=cu_seqlens, **options)
    return o, (S, z.unsqueeze(1))


@FLA.function("chunk_gsa", f"q k v s g=None {STATE} ~checkpoint_level=2 {PACKED} {HINTS}")
@FLA.function("fused_recurrent_gsa", f"q k v s g=None {STATE} reverse=False cu_seqlens=None")
def gated_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: States | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, States | None]:
    """`flashmix.gsa(q, k, v, s, g)`; without `g` the slots hold a running softmax of `s`; heads of keys serve `HQ / H` query heads.

    The running softmax goes from the first token to the last with `reverse` too, as it does there.
    """
    if g is None:
        s, g, _ = _additive_gate(s, None, cu_seqlens)
    group = q.shape[2] // k.shape[2]
    states = None if initial_state is None else tuple(x.repeat_interleave(group, 1) for x in initial_state)
    options: dict[str, Any] = {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "reverse": reverse}
    o, final = run(gsa, q, k, v, s, g, scale=scale, initial_state=states, **options)
    return o, None if final is None else (final[0][:, ::group], final[1][:, ::group])


@FLA.function("chunk_abc", "q k v s initial_state=None output_final_state=False", "a state of two tensors")
def chunk_abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, initial_state: Any, output_final_state: bool
) -> tuple[Tensor, Any]:
    """`flashmix.abc(q, k, v, s)`; its state is a triple with the normaliser, without which a sequence cannot be continued."""
    exact = initial_state is None or len(initial_state) == 3
    refuse("fla.chunk_abc", "initial_state of two tensors (the normaliser is lost); pass on the three", exact)
    return abc(q, k, v, s, initial_state=initial_state, return_state=bool(output_final_state))


@FLA.function("parallel_based fused_chunk_based", "q k v scale=None use_norm=True")
def based(q: Tensor, k: Tensor, v: Tensor, scale: float | None, use_norm: bool) -> Tensor:
    """Causal attention with the weights `1 + s + s^2 / 2`, `s = scale q . k`: linear attention on `1 + K + K^2` features."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def features(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[..., :1]), x, _products(x) * 0.5**0.5], -1)

    return _weighted(features(q * scale), features(k), v, 1e-6 if use_norm else None)


@FLA.function("parallel_rebased", "q k v eps=1e-05 use_scale=True use_normalize=True !return_both=False")
def rebased(q: Tensor, k: Tensor, v: Tensor, eps: float, use_scale: bool, use_normalize: bool) -> Tensor:
    """Causal attention with the weights `(scale q . k)^2`: linear attention on `K^2` features."""
    q = q * q.shape[-1] ** -0.5 if use_scale else q
    return _weighted(_products(q), _products(k), v, eps if use_normalize else None)


def _products(x: Tensor) -> Tensor:
    return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


def _weighted(q: Tensor, k: Tensor, v: Tensor, eps: float | None) -> Tensor:
    """Linear attention on features, divided by the sum of the weights plus `eps` unless that is None."""
    if eps is None:
        return linear_attention(q, k, v, scale=1.0)[0]
    return normalised_linear_attention(q, k, v, eps=eps)[0]
