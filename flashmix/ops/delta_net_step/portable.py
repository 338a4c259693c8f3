"""The step of a delta net layer in plain PyTorch: one op of the library after the other, over the slots of the pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.remember import Again
from flashmix.op.softplus import softplus
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.norm.call import norm_call
from flashmix.ops.norm.portable import forward as normalise
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step.portable.in_place import put_states, rows_of, slots_of, writes_through
from flashmix.ops.recurrence.step.portable.token import step
from flashmix.ops.short_conv.call import ShortConvCall
from flashmix.ops.short_conv.portable import forward as convolve


def forward(call: DeltaNetStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """The output `[B, HV, V]`; states are written."""
    if call.qkv.shape[0] == 0:
        return call.results(), ()
    state, past, indices, wide = call.state, call.conv_state, call.state_indices, state_dtype(call.dtype)
    H, (HV, K, V) = call.heads, state.shape[1:]
    through = writes_through(state, indices, wide)
    slots = slots_of(indices, state)
    mixed, moved = _convolved(call, rows_of(past, slots))
    keys, v = mixed.split([2 * H * K, HV * V], -1)
    length: Any = {"eps": 1e-6, "groups": 1, "center": False, "mean": False, "activation": "silu"}
    (keys,), _ = normalise(norm_call(keys.unflatten(-1, (2 * H, K)), None, None, None, None, **length), False)
    q, k = keys.split(H, 2)
    beta = torch.sigmoid(call.strength.to(wide).contiguous())[:, None]
    beta = beta * 2 if call.negative_eigenvalues else beta
    S = rows_of(state, slots).to(wide)
    made = RecurrenceCall(
        q, k, v.unflatten(-1, (HV, V)), beta=beta, log_decay=_log_decay(call, wide), initial_state=S, scale=K**-0.5
    )
    o, S = step(made, wide, in_place=through)
    z = None if call.gate is None else call.gate.view_as(o[:, 0])
    finish: Any = {"eps": call.eps, "groups": 1, "center": False, "activation": call.gate_activation}
    (y,), _ = normalise(norm_call(o[:, 0], None, call.norm_weight, None, z, **finish), False)
    if not through:
        put_states(state, S, slots)
    put_states(past, moved, slots)
    return (y if slots is None else y.masked_fill(~slots.mask[:, None, None], 0),), ()


def prepare(call: DeltaNetStepCall) -> Again | None:
    """The short way of calls like this one; None where contents of their tensors are checked each time."""
    if call.state_indices is not None:
        return None
    options = {name: getattr(call, name) for name in call.options}
    return lambda tensors: forward(DeltaNetStepCall.make({**tensors, **options}), False)[0][0]


def _convolved(call: DeltaNetStepCall, past: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the convolution, `[B, 1, C]`, and the inputs that the next token sees, `[B, W - 1, C]`."""
    made = ShortConvCall.make(
        {
            "x": call.qkv[:, None],
            "weight": call.conv_weight,
            "bias": call.conv_bias,
            "residual": None,
            "initial_state": past,
            "packing": None,
            "activation": "silu",
            "return_state": True,
        }
    )
    (mixed, moved), _ = convolve(made, False)
    return mixed, moved


def _log_decay(call: DeltaNetStepCall, wide: torch.dtype) -> Tensor | None:
    """`[B, 1, HV]` or `[B, 1, HV, K]`, as the modules `MambaDecay` and `BoundedDecay` have it."""
    if call.decay is None or call.A_log is None or call.dt_bias is None:
        return None
    x, rate, dt_bias = call.decay.to(wide).contiguous(), call.A_log.to(wide).contiguous().exp(), call.dt_bias
    rate, dt_bias = rate if dt_bias.dim() == 1 else rate[:, None], dt_bias.contiguous()
    if call.lower is not None:
        return (call.lower * torch.sigmoid(rate * (x + dt_bias)))[:, None]
    return (softplus(x + dt_bias) * -rate)[:, None]
