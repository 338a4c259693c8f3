"""ABC, attention with bounded memory control: each slot holds a softmax over the past."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.recurrent_state import carried, convolved, rotated
from flashmix.mechanisms.common import check_states, unrounded
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.mechanisms.slots import (
    SlotMixer,
    SlotOptions,
    by_slots,
    check_slots,
    shared_slots,
    slot_states,
    two_passes,
)
from flashmix.modules.norm import GatedRMSNorm
from flashmix.modules.projection import HeadProjection
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.options import hands_on
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.running_softmax import running_softmax

NormalisedStates = tuple[Tensor, Tensor, Tensor]


@public
@unrounded("q", "k", "v", "s")
def abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    scale: float | None = None,
    initial_state: NormalisedStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, NormalisedStates | None]:
    """Attention with bounded memory control: each slot holds a softmax over the past, by a learned logit `s`.

        z_t = log sum_{j <= t} e^{s_j};  K~_t = sum_{j <= t} k_j e^{s_j - z_t}^T;  V~_t = sum_{j <= t} e^{s_j - z_t} v_j^T
        o_t = V~_t^T softmax(scale K~_t^T q_t)

    It is `gsa` with `s' = e^{s_t - z_t}` and `g_t = z_{t-1} - z_t`, both computed from the running normaliser `z` without overflow.

    Args:
        q, k: queries and keys `[B, T, H, K]`. More heads of queries, a multiple of those of keys, share them, the values and slots:
            each has states of its own.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        s: logits `[B, T, HV, M]`.
        initial_state: keys and values of the slots and `z`, `([N, HV, K, M], [N, HV, M, V], [N, HV, M])`, float32 (float64 for
            float64 inputs); by default zeros, zeros and -inf.

    Source: Peng et al. 2021 (arXiv 2110.02488), section 3.

    Example:
        >>> q, k, v, s = torch.randn(4, 1, 10, 4, 16)
        >>> o, (keys, values, z) = abc(q, k, v, s, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]))
    """
    k, v, s = shared_slots(q, k, v, s)
    packing = check_slots(q, k, v, s, cu_seqlens)
    shapes = slot_states(q, v, s, packing)
    normaliser = (shapes[1][0], *s.shape[2:])
    check_states(initial_state, q, *shapes, normaliser)
    if initial_state is None:
        slots, start = None, torch.full(normaliser, -torch.inf, dtype=state_dtype(q.dtype), device=q.device)
    else:
        *pair, start = initial_state
        slots = (pair[0], pair[1])
    weight, decay, z = running_softmax(s, start, packing, impl)
    weight = weight.to(q.dtype)
    o, states = two_passes(
        q, k, v, weight, decay, states=slots, scale=scale, return_state=return_state, packing=packing, impl=impl
    )
    return o, None if states is None else (*states, z)


class ABC(SlotMixer):
    """Attention with bounded memory control: a learned softmax over the past fills each slot; a silu gate on the output.

    Args: those of `GSA`, and
        rotary: whether queries and keys are rotated by their positions.
        base: of the rotary embedding.
        bound: None, or slot logits are kept between `-bound` and it.

    Source: Peng et al., arXiv:2110.02488, section 3.

    Example:
        >>> import torch
        >>> ABC(32, heads=2, slots=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    @hands_on(SlotMixer.__init__, first=True)
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rotary: bool = False,
        base: float = 10000.0,
        bound: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SlotOptions],
    ) -> None:
        self.rotary_base, self.bound = base if rotary else None, bound
        super().__init__(width, heads, device=device, dtype=dtype, **options)

    def make(self, **placement: Any) -> None:
        slots, gate = (self.kv_heads, self.slots), (self.heads, self.value_dim)
        self.qkvsg = HeadProjection(self.width, **self.parts(), s=slots, gate=gate, **placement)
        self.rotary = None if self.rotary_base is None else RotaryEmbedding(self.head_dim, self.rotary_base)
        self.norm = GatedRMSNorm(self.value_dim, self.eps, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        *qkv, s, gate = self.qkvsg(x)
        qkv = convolved(self.convolution, qkv, packing, cache)
        q, k, v, s = (repeat_heads(part, self.heads) for part in (*qkv, s))
        if self.rotary is not None:
            q, k = rotated(self.rotary, torch.cat([q, k], dim=2), packing, cache).chunk(2, dim=2)
        if self.bound is not None:
            s = s.clamp(-self.bound, self.bound)
        o = carried(abc, q, k, v, s, cache=cache, packing=packing)
        return self.output(self.norm(o, gate).flatten(2))


register(
    Mechanism(
        title="ABC", paper="2110.02488", function=abc, call="q:BTHK k:BTHK v:BTHK s:BTHK", layer=ABC, preset=by_slots
    )
)
