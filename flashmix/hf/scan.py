"""The Mamba-2 scan of transformers models, from its input to its output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashmix.hf.cached import Cached
from flashmix.hf.rows import BatchRows
from flashmix.hf.told import hooks_of, masked
from flashmix.ops.recurrence import linear_attention, linear_attention_step
from flashmix.ops.short_conv.op import short_conv


def forward(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The mixer's output `[B, T, D]`, computed by flashmix; the states in `cache_params` go on in place."""
    x = masked(hidden_states, attention_mask)
    with hooks_of(self, "conv1d"):
        cached = Cached(cache_params, self.layer_idx, self.conv_kernel_size)
        made = self.in_proj(x * getattr(self, "ssm_in_multiplier", 1.0))
        if hasattr(self, "mup_vector"):
            made = made * self.mup_vector
        gate, xbc, dt = made.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        if cached.steps_in_place(xbc, self.A_log):
            y = one_token(self, masked(convolved(self, xbc, cached), attention_mask), dt, cached)
        else:
            rows: BatchRows = self.flashmix_given.rows(x, attention_mask, options)
            y = tokens(self, xbc, dt, attention_mask, cached, rows)
        y = y.flatten(2)
        y = self.norm(y, gate) if getattr(self, "mamba_rms_norm", True) else y * F.silu(gate)
        out: Tensor = self.out_proj(y.to(hidden_states.dtype))
        return out


def convolved(mixer: Any, xbc: Tensor, cached: Cached) -> Tensor:
    """The convolution of one token `[B, 1, C]`; the inputs in the cache move on in place."""
    window = torch.cat([cached.inputs[:, :, 1:], xbc.mT], dim=-1)  # [B, C, W]
    cached.inputs.copy_(window)
    y = (window * mixer.conv1d.weight.squeeze(1)).sum(-1)
    y = y if mixer.conv1d.bias is None else y + mixer.conv1d.bias
    return F.silu(y).to(xbc.dtype).unsqueeze(1)


def operands(mixer: Any, xbc: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(C, B, dt x, log decay, D x)` of the scan from its convolved inputs and step sizes `[B, T, H]`."""
    shared = mixer.n_groups * mixer.ssm_state_size
    values, B, C = xbc.split([mixer.intermediate_size, shared, shared], dim=-1)
    values = values.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    C, B = (part.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)) for part in (C, B))
    log_decay = -mixer.A_log.float().exp() * step
    return C, B, (values * step.unsqueeze(-1)).to(values.dtype), log_decay, values * mixer.D[:, None]


def one_token(mixer: Any, xbc: Tensor, dt: Tensor, cached: Cached) -> Tensor:
    """Output `[B, 1, H, P]` of one token; the state `[B, H, P, N]` in the cache is updated in place."""
    step = F.softplus((dt + mixer.dt_bias).float())
    C, B, v, log_decay, skip = operands(mixer, xbc, step)
    return linear_attention_step(C, B, v, cached.state.mT, log_decay, scale=1.0) + skip


def tokens(mixer: Any, xbc: Tensor, dt: Tensor, mask: Tensor | None, cached: Cached, rows: BatchRows) -> Tensor:
    """Output `[B, T, H, P]` of many tokens, with gradients."""
    y, _ = short_conv(
        rows.join(xbc),
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        initial_state=cached.recent(rows),
        cu_seqlens=rows.packing,
    )
    cached.keep_inputs(xbc)
    step = F.softplus((dt + mixer.dt_bias).float()).clamp(*mixer.time_step_limit)
    C, B, v, log_decay, skip = operands(mixer, masked(rows.part(y), mask), step)
    o, state = linear_attention(
        *(rows.join(part) for part in (C, B, v, log_decay)),
        scale=1.0,
        initial_state=cached.initial(rows, xbc.dtype, transposed=True),
        return_state=cached.exists,
        cu_seqlens=rows.packing,
    )
    if state is not None:
        final = rows.final(state)
        assert final is not None
        cached.keep_state(final.mT.contiguous())
    return rows.part(o) + skip
