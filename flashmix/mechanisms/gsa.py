"""Gated slot attention: softmax attention over a fixed number of slots that decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.recurrent_state import carried, convolved
from flashmix.mechanisms.common import check_per_head, check_states
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.mechanisms.slots import (
    SlotMixer,
    SlotStates,
    by_slots,
    check_slots,
    shared_slots,
    slot_states,
    two_passes,
)
from flashmix.modules.decay import LogSigmoidDecay
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.op.public import public


@public
def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: SlotStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, SlotStates | None]:
    """Gated slot attention: softmax attention over slots, each of which decays and takes new tokens with its own weight.

        K~_t = K~_{t-1} diag(e^{g_t}) + k_t s_t^T;  V~_t = diag(e^{g_t}) V~_{t-1} + s_t v_t^T
        o_t  = V~_t^T softmax(scale K~_t^T q_t)

    Args:
        q, k: queries and keys `[B, T, H, K]`. More heads of queries, a multiple of those of keys, share them, the values and slots:
            each has states of its own.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        s: the write weight of each slot, `[B, T, HV, M]`; the paper's is `1 - e^g`.
        log_decay: `g`, at most 0, `[B, T, HV, M]`.
        initial_state: keys and values of the slots, `([N, HV, K, M], [N, HV, M, V])`, float32 (float64 for float64 inputs).

    Source: Zhang et al. 2024 (arXiv 2409.07146), section 3.

    Example:
        >>> q, k, v, s = torch.randn(4, 1, 10, 4, 16)
        >>> o, (keys, values) = gsa(q, k, v, s, -torch.rand(1, 10, 4, 16), return_state=True)
        >>> o.shape, keys.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    k, v, s, log_decay = shared_slots(q, k, v, s, log_decay)
    packing = check_slots(q, k, v, s, cu_seqlens)
    check_per_head("log_decay", log_decay, "q", q, *s.shape)
    check_states(initial_state, q, *slot_states(q, v, s, packing))
    return two_passes(
        q, k, v, s, log_decay, states=initial_state, scale=scale, return_state=return_state, packing=packing, impl=impl
    )


class GSA(SlotMixer):
    """Gated slot attention: silu of queries, keys and values, slots with the log decay `g = logsigmoid(W x) / 8`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        slots: memory slots of a head.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `width / heads`.
        kv_heads: heads of keys, values and slots, a divisor of `heads`; default `heads`.
        conv_width: tokens that a short convolution of queries, keys and values sees; 0: there is none.
        conv_bias: whether it has a bias.
        eps: of the norm of the output.

    Source: Zhang et al., arXiv:2409.07146, section 3.

    Example:
        >>> import torch
        >>> GSA(32, heads=2, slots=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make(self, **placement: Any) -> None:
        self.qkvf = HeadProjection(self.width, **self.parts(), f=(self.kv_heads, self.slots), **placement)
        self.decay = LogSigmoidDecay(8.0)
        self.norm = RMSNorm(self.heads * self.value_dim, self.eps, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        *qkv, f = self.qkvf(x)
        qkv = convolved(self.convolution, qkv, packing, cache)
        q, k, v, f = (repeat_heads(part, self.heads) for part in (*qkv, f))
        log_decay = self.decay(f)
        s = -torch.expm1(log_decay).to(q.dtype)
        o = carried(gsa, silu(q), silu(k), silu(v), s, log_decay, cache=cache, packing=packing, scale=1.0)
        return self.output(self.norm(silu(o).flatten(2)))


register(
    Mechanism(
        title="GSA",
        paper="2409.07146",
        function=gsa,
        call="q:BTHK k:BTHK v:BTHK s:BTHK log_decay:BTHK",
        layer=GSA,
        preset=by_slots,
    )
)
