"""Rodimus: gated linear attention whose writes and decays come from one selection gate with a temperature."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, check_per_head, engine_options, unrounded
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
@unrounded("q", "k", "v")
def rodimus(
    q: Tensor, k: Tensor, v: Tensor, selection_gate: Tensor, temperature_gate: Tensor, **options: Unpack[EngineOptions]
) -> Result:
    """Rodimus: one gate per channel says how strong a key is and, the stronger, how much of the past it replaces.

        S_t = diag(e^{-g_t tau_t}) S_{t-1} + (g_t^{tau_t} * k_t / |k_t|) v_t^T;  o_t = scale S_t^T q_t

    Args:
        q, k: queries and keys `[B, T, H, K]`; keys are divided by their length here.
        v: values `[B, T, HV, V]`, times the paper's input gate; `HV` is a multiple of `H`.
        selection_gate: `g`, positive (the paper's is a softplus), `[B, T, H, K]`, any floating dtype; where it has underflowed to 0,
            `g^tau` passes no gradient to it.
        temperature_gate: `tau`, in [0, 1], `[B, T, H, K]`, any floating dtype.

    Source: He et al. 2024 (arXiv 2410.06577), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> rodimus(q, k, v, torch.rand(1, 10, 4, 16), torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    check_operands(q, v, {"k": k}, None, None, options.get("initial_state"), options.get("cu_seqlens"))
    for name, gate in (("selection_gate", selection_gate), ("temperature_gate", temperature_gate)):
        check_per_head(name, gate, "q", q, *q.shape)
    wide = state_dtype(q.dtype)
    g, tau = selection_gate.to(wide), temperature_gate.to(wide)
    # a softplus that has underflowed: the slope of its power is infinite, that of both together is 0
    base = torch.where(g < torch.finfo(wide).tiny, g.detach(), g)
    key = torch.nn.functional.normalize(k.to(wide), dim=-1) * base**tau
    return linear_attention(q, key.to(k.dtype), v, repeat_heads(-g * tau, v.shape[2]), **options)


register(
    Mechanism(
        title="Rodimus",
        paper="2410.06577",
        function=rodimus,
        call="q:BTHK k:BTHK v:BTHK selection_gate:BTHK temperature_gate:BTHK",
        positive=("selection_gate", "temperature_gate"),
        wide=("selection_gate", "temperature_gate"),
    )
)
