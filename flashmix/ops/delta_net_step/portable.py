"""The step of a delta net layer in plain PyTorch: one op of the library after the other, over the slots of the pools."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flashmix.ops.norm.op import l2_norm, rms_norm
from flashmix.ops.recurrence.call import DeltaNetOptions, RecurrenceCall
from flashmix.ops.recurrence.step.portable.in_place import live_slots, put_states
from flashmix.ops.recurrence.step.portable.token import step
from flashmix.ops.short_conv.op import short_conv

# qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, state_indices
Tensors = tuple[Tensor | None, ...]


def delta_net_step(tensors: Tensors, options: DeltaNetOptions) -> Tensor:
    """The output `[B, HV, V]`; states are written."""
    qkv, strength, state, past, weight, bias, decay, A_log, dt_bias, norm_weight, gate, slots = tensors
    assert qkv is not None and strength is not None and state is not None and past is not None and weight is not None
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    (B, _), H, (HV, K, V) = qkv.shape, options.heads, state.shape[1:]
    live, rows = live_slots(slots, B, state.shape[0], state.device)
    mixed, moved = short_conv(
        qkv[:, None], weight, bias, initial_state=past.index_select(0, rows), return_state=True, impl="portable"
    )
    assert moved is not None
    q, k, v = (
        t.unflatten(-1, (-1, size)) for t, size in zip(mixed.split([H * K, H * K, HV * V], -1), (K, K, V), strict=True)
    )
    q, k = (l2_norm(t, impl="portable") for t in (q, k))
    beta = torch.sigmoid(strength.to(wide))[:, None] * (2 if options.negative_eigenvalues else 1)
    g = None
    if decay is not None and A_log is not None and dt_bias is not None:
        g = _log_decay(decay.to(wide), A_log.to(wide), dt_bias, options.lower)[:, None]
    S = state.index_select(0, rows).to(wide)
    call = RecurrenceCall(q, k, v, beta=beta, log_decay=g, initial_state=S, scale=K**-0.5)
    o, S = step(call, wide)
    z = None if gate is None else gate.view_as(o[:, 0])
    y = rms_norm(
        o[:, 0], norm_weight, eps=options.eps, gate=z, gate_activation=options.gate_activation, impl="portable"
    )
    put_states(state, S, slots, live, rows)
    put_states(past, moved, slots, live, rows)
    return y.masked_fill(~live[:, None, None], 0)


def _log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower: float | None) -> Tensor:
    """As the modules `MambaDecay` and `BoundedDecay` have it."""
    rate = A_log.exp() if dt_bias.dim() == 1 else A_log.exp()[:, None]
    if lower is not None:
        return lower * torch.sigmoid(rate * (x + dt_bias))
    return softplus(x + dt_bias) * -rate
