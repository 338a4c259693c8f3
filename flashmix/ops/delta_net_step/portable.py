"""The step of a delta net layer in plain PyTorch: one op of the library after the other, over the slots of the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.softplus import softplus
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.norm.op import l2_norm, rms_norm
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step.portable.in_place import put_states, rows_of, slots_of
from flashmix.ops.recurrence.step.portable.token import step
from flashmix.ops.short_conv.op import short_conv


def forward(call: DeltaNetStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """The output `[B, HV, V]`; states are written."""
    if call.qkv.shape[0] == 0:
        return call.results(), ()
    state, past, wide = call.state, call.conv_state, state_dtype(call.dtype)
    (B, _), H, (HV, K, V) = call.qkv.shape, call.heads, state.shape[1:]
    mask, slots = slots_of(call.state_indices, B, state)
    mixed, moved = short_conv(
        call.qkv[:, None],
        call.conv_weight,
        call.conv_bias,
        initial_state=rows_of(past, call.state_indices, slots),
        return_state=True,
        impl="portable",
    )
    assert moved is not None
    q, k, v = (
        t.unflatten(-1, (-1, size)) for t, size in zip(mixed.split([H * K, H * K, HV * V], -1), (K, K, V), strict=True)
    )
    q, k = (l2_norm(t, impl="portable") for t in (q, k))
    beta = torch.sigmoid(call.strength.to(wide))[:, None] * (2 if call.negative_eigenvalues else 1)
    g = None
    if call.decay is not None and call.A_log is not None and call.dt_bias is not None:
        decay, A_log = call.decay.to(wide).contiguous(), call.A_log.to(wide).contiguous()
        g = _log_decay(decay, A_log, call.dt_bias.contiguous(), call.lower)[:, None]
    S = rows_of(state, call.state_indices, slots).to(wide)
    o, S = step(RecurrenceCall(q, k, v, beta=beta, log_decay=g, initial_state=S, scale=K**-0.5), wide)
    z = None if call.gate is None else call.gate.view_as(o[:, 0])
    y = rms_norm(o[:, 0], call.norm_weight, eps=call.eps, gate=z, gate_activation=call.gate_activation, impl="portable")
    put_states(state, S, call.state_indices, mask, slots)
    put_states(past, moved, call.state_indices, mask, slots)
    return (y if call.state_indices is None else y.masked_fill(~mask[:, None, None], 0),), ()


def _log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower: float | None) -> Tensor:
    """As the modules `MambaDecay` and `BoundedDecay` have it."""
    rate = A_log.exp() if dt_bias.dim() == 1 else A_log.exp()[:, None]
    if lower is not None:
        return lower * torch.sigmoid(rate * (x + dt_bias))
    return softplus(x + dt_bias) * -rate
