"""Gated DeltaNet and Kimi Delta Attention of transformers models, from their input to their output projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashmix.hf.cached import Cached
from flashmix.hf.rows import BatchRows
from flashmix.hf.told import hooks_of, masked
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength
from flashmix.ops.delta_net_step import delta_net_step
from flashmix.ops.norm.op import l2_norm, rms_norm
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.short_conv.op import short_conv_qkv


class Projected(NamedTuple):
    """What the projections make of the input `[B, T, D]`."""

    qkv: tuple[Tensor, ...]  # q [B, T, H K], k [B, T, H K] and v [B, T, HV V], or all of them side by side
    strength: Tensor  # [B, T, HV], before the sigmoid
    decay: Tensor  # [B, T, HV] or [B, T, HV, K], before the softplus
    gate: Tensor  # [B, T, HV, V]

    @property
    def joined(self) -> Tensor:
        """Queries, keys and values side by side, `[B, T, C]`."""
        return self.qkv[0] if len(self.qkv) == 1 else torch.cat(self.qkv, dim=-1)


class NetParameters(NamedTuple):
    """A mixer's sizes and parameters, as the ops of flashmix take them."""

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV] or [HV, K]
    lower: float | None  # of a bounded decay
    negative_eigenvalues: bool
    norm: Any
    output: nn.Module


def qwen3_next(m: Any, x: Tensor) -> tuple[NetParameters, Projected]:
    """Qwen3-Next: two projections, interleaved by key head."""
    net, qkvz, ba = gated(m, False, m.norm, m.out_proj), m.in_proj_qkvz(x), m.in_proj_ba(x)
    if x.shape[1] == 1 and type(qkvz) is Tensor and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        heads = net.heads, net.value_heads // net.heads
        order, small = sorted_by_kind(*heads, net.key_dim, net.value_dim, qkvz.device)
        qkv, gate = qkvz.index_select(2, order).split([m.conv_dim, m.value_dim], dim=2)
        strength, decay = ba.index_select(2, small).chunk(2, dim=2)
        return net, Projected((qkv,), strength, decay, gate.unflatten(2, (net.value_heads, net.value_dim)))
    q, k, v, gate, strength, decay = m.fix_query_key_value_ordering(qkvz, ba)
    return net, Projected((q.flatten(2), k.flatten(2), v.flatten(2)), strength, decay, gate)


@lru_cache(maxsize=64)
def sorted_by_kind(heads: int, group: int, K: int, V: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where Qwen3-Next's projections have all queries, then all keys, values and gates; and all strengths, then all decays."""
    sizes = [K, K, group * V, group * V]
    rows = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, dim=1)
    small = torch.arange(2 * heads * group).view(heads, 2, group).transpose(0, 1)
    return torch.cat([part.flatten() for part in rows]).to(device), small.flatten().to(device)


def qwen3_5(m: Any, x: Tensor) -> tuple[NetParameters, Projected]:
    """Qwen3.5 and Qwen4: a projection each for q, k and v, the gate, the strength and the decay."""
    gate = m.in_proj_z(x).unflatten(-1, (m.num_v_heads, m.head_v_dim))
    made = Projected((m.in_proj_qkv(x),), m.in_proj_b(x), m.in_proj_a(x), gate)
    return gated(m, False, m.norm, m.out_proj), made


def olmo_hybrid(m: Any, x: Tensor) -> tuple[NetParameters, Projected]:
    """OLMo-hybrid: a projection each for everything."""
    gate = m.g_proj(x).unflatten(-1, (m.num_v_heads, m.head_v_dim))
    made = Projected((m.q_proj(x), m.k_proj(x), m.v_proj(x)), m.b_proj(x), m.a_proj(x), gate)
    return gated(m, bool(m.allow_neg_eigval), m.o_norm, m.o_proj), made


def kimi_linear(m: Any, x: Tensor) -> tuple[NetParameters, Projected]:
    """Kimi-Linear and GLM-5-Next: a per-channel decay and an output gate from low-rank projections."""
    return kda(m, x, m.forget_gate.f_b_proj(m.forget_gate.f_a_proj(x)), m.g_b_proj(m.g_a_proj(x)))


def bailing_hybrid(m: Any, x: Tensor) -> tuple[NetParameters, Projected]:
    """Ling-3 (Bailing hybrid): a per-channel decay and an output gate from one projection each."""
    return kda(m, x, m.forget_gate.f_proj(x), m.g_proj(x))


def floor_of(forget: Any) -> float | None:
    """The floor of the decay of a forget gate, or None: a value in GLM-5-Next, a flag and a value in Ling-3."""
    if hasattr(forget, "safe_gate"):
        return forget.lower_bound if forget.safe_gate else None
    return getattr(forget, "safe_gate_lower_bound", None)


def kda(m: Any, x: Tensor, decay: Tensor, gate: Tensor) -> tuple[NetParameters, Projected]:
    """Kimi Delta Attention with the decay's logits and the output gate, `[B, T, H K]` each."""
    shape, forget = (m.num_heads, m.head_dim), m.forget_gate
    net = NetParameters(
        heads=m.num_heads,
        value_heads=m.num_heads,
        key_dim=m.head_dim,
        value_dim=m.head_dim,
        A_log=forget.A_log.view(-1),
        dt_bias=forget.dt_bias.view(shape),
        lower=floor_of(forget),
        negative_eigenvalues=False,
        norm=m.o_norm,
        output=m.o_proj,
    )
    parts = (m.q_proj(x), m.k_proj(x), m.v_proj(x))
    return net, Projected(parts, m.b_proj(x), decay.unflatten(-1, shape), gate.unflatten(-1, shape))


def gated(m: Any, negative_eigenvalues: bool, norm: nn.Module, output: nn.Module) -> NetParameters:
    """A Gated DeltaNet by the names that transformers gives its sizes and parameters."""
    return NetParameters(
        heads=m.num_k_heads,
        value_heads=m.num_v_heads,
        key_dim=m.head_k_dim,
        value_dim=m.head_v_dim,
        A_log=m.A_log,
        dt_bias=m.dt_bias,
        lower=None,
        negative_eigenvalues=negative_eigenvalues,
        norm=norm,
        output=output,
    )


Projection = Callable[[Any, Tensor], tuple[NetParameters, Projected]]


def forward(
    project: Projection,
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The output `[B, T, D]` of a mixer whose projections are `project`; the states in `cache_params` go on in place."""
    x = masked(hidden_states, attention_mask)
    with hooks_of(self, "conv1d", "norm", "o_norm", "forget_gate"):
        cached = Cached(cache_params, self.layer_idx, self.conv_kernel_size)
        net, made = project(self, x)
        if cached.steps_in_place(made.qkv[0], net.A_log):
            o = one_token(self.conv1d, net, made, cached)
        else:
            rows: BatchRows = self.flashmix_given.rows(x, attention_mask, options)
            o = tokens(self, net, made, cached, rows)
        return net.output(o.flatten(2).to(x.dtype))


def one_token(conv: nn.Conv1d, net: NetParameters, made: Projected, cached: Cached) -> Tensor:
    """Output `[B, 1, HV, V]` of one token; the states in the cache are updated in place."""
    y = delta_net_step(
        made.joined.squeeze(1),
        made.strength.squeeze(1),
        cached.state,
        cached.inputs[:, :, 1:].mT,
        conv.weight.squeeze(1),
        net.heads,
        conv_bias=conv.bias,
        decay=made.decay.squeeze(1),
        A_log=net.A_log,
        dt_bias=net.dt_bias,
        lower=net.lower,
        negative_eigenvalues=net.negative_eigenvalues,
        norm_weight=net.norm.weight,
        gate=made.gate.squeeze(1),
        gate_activation=net.norm.activation,
        eps=net.norm.variance_epsilon,
    )
    return y.unsqueeze(1)


def tokens(mixer: Any, net: NetParameters, made: Projected, cached: Cached, rows: BatchRows) -> Tensor:
    """Output `[B, T, HV, V]` of many tokens, with gradients."""
    sizes = [net.heads * net.key_dim] * 2 + [net.value_heads * net.value_dim]
    parts = made.joined.split(sizes, dim=-1) if len(made.qkv) == 1 else made.qkv
    q, k, v = (rows.join(part) for part in parts)
    weights = mixer.conv1d.weight.squeeze(1).split(sizes)
    biases = (None, None, None) if mixer.conv1d.bias is None else mixer.conv1d.bias.split(sizes)
    q, k, v, _ = short_conv_qkv(q, k, v, *weights, *biases, initial_state=cached.recent(rows), cu_seqlens=rows.packing)
    if cached.exists:
        cached.keep_inputs(made.joined)
    q, k = (l2_norm(part.unflatten(-1, (net.heads, net.key_dim))) for part in (q, k))
    v = v.unflatten(-1, (net.value_heads, net.value_dim))
    beta = write_strength(rows.join(made.strength), negative_eigenvalues=net.negative_eigenvalues)
    decay = rows.join(made.decay)
    if net.lower is None:
        decay = softplus_decay(decay, net.A_log, net.dt_bias)
    else:
        decay = bounded_decay(decay, net.A_log, net.dt_bias, lower=net.lower)
    o, state = delta_rule(
        q,
        k,
        v,
        beta,
        decay,
        initial_state=cached.initial(rows, q.dtype),
        return_state=cached.exists,
        cu_seqlens=rows.packing,
    )
    cached.keep_state(rows.final(state))
    norm = net.norm
    return rms_norm(
        rows.part(o), norm.weight, eps=norm.variance_epsilon, gate=made.gate, gate_activation=norm.activation
    )
