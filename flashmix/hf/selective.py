"""The Mamba-1 scan of transformers models, from its input to its output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashmix.hf.cached import Cached
from flashmix.hf.rows import BatchRows
from flashmix.hf.scan import convolved
from flashmix.hf.told import hooks_of, masked
from flashmix.op.dtypes import state_dtype
from flashmix.ops.selective_scan import selective_scan
from flashmix.ops.selective_scan.step import selective_scan_step
from flashmix.ops.short_conv.op import short_conv


def forward(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The mixer's output `[B, T, D]`, computed by flashmix; the states in `cache_params` go on in place."""
    x = masked(hidden_states, attention_mask)
    with hooks_of(self, "conv1d", "dt_proj"):
        cached = Cached(cache_params, self.layer_idx, self.conv_kernel_size)
        u, gate = inputs(self, x)
        if cached.steps_in_place(u, self.A_log) and cached.state.dtype in (state_dtype(u.dtype), torch.bfloat16):
            u = masked(convolved(self, u, cached), attention_mask)
            y = selective_scan_step(u, *operands(self, u), by_channel(self, cached.state), **extras(self, gate))
        else:
            rows: BatchRows = self.flashmix_given.rows(x, attention_mask, options)
            y = tokens(self, u, gate, attention_mask, cached, rows)
        out: Tensor = self.out_proj(y.to(hidden_states.dtype))
        return out


def has_heads(mixer: Any) -> bool:
    """Whether each head of the channels has a selection of its own, as in Zamba."""
    return hasattr(mixer, "x_proj_weight")


def inputs(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the convolution and the gate, `[B, T, D]`; Zamba's lie beside each other, channel by channel."""
    both = mixer.in_proj(x)
    u, gate = both.unflatten(-1, (-1, 2)).unbind(-1) if has_heads(mixer) else both.chunk(2, dim=-1)
    return u, gate


def by_channel(mixer: Any, state: Tensor) -> Tensor:
    """The states `[B, D, S]` of a cache, where they lie."""
    return state.view(state.shape[0], -1, state.shape[-1]) if has_heads(mixer) else state


def operands(mixer: Any, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dt, A, B, C)` of the scan from its convolved inputs `[B, T, D]`; `dt` is a logit without its bias."""
    A = -mixer.A_log.float().exp()
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    if has_heads(mixer):
        heads = u.unflatten(-1, (mixer.n_mamba_heads, mixer.mamba_head_dim))
        dt, B, C = torch.einsum("bthp,hrp->bthr", heads, mixer.x_proj_weight).split(sizes, dim=-1)
        dt = torch.einsum("bthr,hpr->bthp", dt, mixer.dt_proj_weight)
        return dt.flatten(2), A.flatten(0, 1), B.to(u.dtype), C.to(u.dtype)
    dt, B, C = mixer.x_proj(u).split(sizes, dim=-1)
    if hasattr(mixer, "dt_layernorm"):  # Falcon-Mamba and Jamba
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    return F.linear(dt, mixer.dt_proj.weight), A, B.to(u.dtype), C.to(u.dtype)


def extras(mixer: Any, gate: Tensor) -> dict[str, Any]:
    """What is around the scan: skip, gate and the step size of its logit."""
    bias = mixer.dt_proj_bias.flatten() if has_heads(mixer) else mixer.dt_proj.bias
    return {"D": mixer.D.flatten(), "z": gate, "dt_bias": bias, "softplus": True}


def tokens(mixer: Any, u: Tensor, gate: Tensor, mask: Tensor | None, cached: Cached, rows: BatchRows) -> Tensor:
    """Output `[B, T, D]` of many tokens, with gradients."""
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    recent, packing = cached.recent(rows), rows.packing
    y, _ = short_conv(rows.join(u), weight, bias, initial_state=recent, cu_seqlens=packing)
    cached.keep_inputs(u)
    u = masked(rows.part(y), mask)
    dt, A, B, C = operands(mixer, u)
    before = cached.initial(rows, u.dtype)
    y, state = selective_scan(
        rows.join(u),
        rows.join(dt),
        A,
        rows.join(B),
        rows.join(C),
        **extras(mixer, rows.join(gate)),
        initial_state=None if before is None else by_channel(mixer, before),
        return_state=cached.exists,
        cu_seqlens=packing,
    )
    last = rows.final(state)
    if last is not None and has_heads(mixer):
        last = last.unflatten(1, (mixer.n_mamba_heads, mixer.mamba_head_dim))
    cached.keep_state(last)
    return rows.part(y)
