"""Raven: gated slot attention whose tokens write to the slots that a router chose."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import check_per_head, check_states, complement, unrounded
from flashmix.mechanisms.gsa import gsa
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.mechanisms.slots import SlotCallOptions, SlotStates, check_slots, slot_states
from flashmix.op.dtypes import state_dtype
from flashmix.op.options import hands_on
from flashmix.op.public import public


@public
@hands_on(gsa)
@unrounded("q", "k", "v", "routing")
def raven(
    q: Tensor, k: Tensor, v: Tensor, routing: Tensor, log_decay: Tensor, **options: Unpack[SlotCallOptions]
) -> tuple[Tensor, SlotStates | None]:
    """Raven: a token decays the slots it is routed to and writes to them what they lost; the others keep all they have.

        f_t = g_t r_t;  K~_t = K~_{t-1} diag(e^{f_t}) + k_t (1 - e^{f_t})^T;  V~_t = diag(e^{f_t}) V~_{t-1} + (1 - e^{f_t}) v_t^T
        o_t = V~_t^T softmax(scale K~_t^T q_t)

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        routing: `r`, at least 0 and 0 for the slots that were not chosen, `[B, T, HV, M]`; the paper's are the largest of
            `sigmoid(W x)`, divided by their sum.
        log_decay: `g`, at most 0, `[B, T, HV]`.
        initial_state: keys and values of the slots, `([N, HV, K, M], [N, HV, M, V])`, float32 (float64 for float64 inputs).

    Source: Afzal et al. 2026, "Raven: High-Recall Sequence Modeling with Sparse Memory Routing" (github.com/goombalab/raven).

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> raven(q, k, v, torch.eye(10, 4).view(1, 10, 4, 1).expand(1, 10, 4, 8), -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    packing = check_slots(q, k, v, routing, options.get("cu_seqlens"), "routing")
    check_per_head("log_decay", log_decay, "q", q, *v.shape[:3])
    check_states(options.get("initial_state"), q, *slot_states(q, v, routing, packing))
    wide = state_dtype(q.dtype)
    rate, forgets = log_decay.to(wide).unsqueeze(-1), torch.isinf(log_decay).unsqueeze(-1)
    decay = torch.where(forgets, -torch.inf, rate.masked_fill(forgets, 0.0) * routing.to(wide))
    decay = decay.masked_fill(forgets & (routing == 0), 0.0)
    return gsa(q, k, v, complement(decay).to(q.dtype), decay, **options)


register(
    Mechanism(
        title="Raven",
        paper="github.com/goombalab/raven",
        function=raven,
        call="q:BTHK k:BTHK v:BTHK routing:BTHK log_decay:BTH",
        positive=("routing",),
    )
)
