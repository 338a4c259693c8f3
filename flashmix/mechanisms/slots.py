"""Attention over a fixed number of slots, `M` per head: two passes of `linear_attention` with a softmax between them."""

from __future__ import annotations

from math import prod
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.mechanisms.common import check_per_head
from flashmix.mechanisms.registry import Options, Size
from flashmix.modules.projection import head_size, shared_heads
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.checks import check_like, check_range, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands

SlotStates = tuple[Tensor, Tensor]


class SlotCallOptions(TypedDict, total=False):
    """The options of `gsa`."""

    scale: float | None
    initial_state: SlotStates | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


def shared_slots(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """`k` and the others `[B, T, H, ...]`, each head for as many neighbouring heads of queries as read it."""
    heads = dims("q", q, "B T H K")[2], dims("k", k, "B T H K")[2]
    if heads[0] <= heads[1] or heads[0] % heads[1] or any(x.dim() != 4 for x in others):
        return k, *others
    return tuple([x.repeat_interleave(heads[0] // heads[1], 2) for x in (k, *others)])


def check_slots(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, cu_seqlens: Tensor | Packing | None, name: str = "s"
) -> Packing | None:
    """Raises unless the tokens fit one another, of which `s` is called `name`; returns the packing."""
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    check_per_head(name, s, "q", q, *v.shape[:3], dims(name, s, "B T HV M")[3])
    check_like(name, s, "q", q)
    if s.shape[3] < 1:
        raise ValueError(f"{name} must have shape [B, T, HV, M] with M >= 1, got M = 0")
    return packing


def slot_states(q: Tensor, v: Tensor, s: Tensor, packing: Packing | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the states of the slots' keys and values."""
    N, (HV, M) = q.shape[0] if packing is None else packing.count, s.shape[2:]
    return (N, HV, q.shape[3], M), (N, HV, M, v.shape[3])


def two_passes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None,
    states: SlotStates | None,
    packing: Packing | None,
    **options: Any,
) -> tuple[Tensor, SlotStates | None]:
    """The output and both last states: scores from the keys of the slots, their softmax, its product with the values of the slots.

    `options` are `return_state` and `impl`.
    """
    keys, values = (None, None) if states is None else states
    scores, keys = linear_attention(
        q, k, s, value_log_decay=log_decay, scale=scale, initial_state=keys, cu_seqlens=packing, **options
    )
    p = torch.softmax(scores.to(state_dtype(v.dtype)), -1).to(v.dtype)
    o, values = linear_attention(p, s, v, log_decay, scale=1.0, initial_state=values, cu_seqlens=packing, **options)
    return o, None if keys is None or values is None else (keys, values)


class SlotOptions(TypedDict, total=False):
    """The options of the layers that build on `SlotMixer`."""

    slots: int
    head_dim: int | None
    value_dim: int | None
    kv_heads: int | None
    conv_width: int
    conv_bias: bool
    eps: float


class SlotMixer(Mixer[RecurrentCache]):
    """The base of the layers: heads with slots; a family writes `make` and `mix`."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        slots: int = 64,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kv_heads: int | None = None,
        conv_width: int = 0,
        conv_bias: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("slots", slots, 1, 256)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        self.kv_heads, self.slots, self.eps = shared_heads(heads, kv_heads), slots, eps
        self.make(device=device, dtype=dtype)
        channels = sum(prod(shape) for shape in self.parts().values())
        self.convolution = maybe_convolution(channels, conv_width, bias=conv_bias, device=device, dtype=dtype)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, device=device, dtype=dtype)

    def make(self, **placement: Any) -> None:
        """The projection of queries, keys, values and slots, the decay and the norm."""
        raise NotImplementedError

    def parts(self) -> dict[str, Any]:
        """The shapes of queries, keys and values per token."""
        keys, values = (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        return {"q": (self.heads, self.head_dim), "k": keys, "v": values}


def by_slots(size: Size) -> list[Options]:
    """At most 64 slots per head."""
    return size.depth * [{"heads": size.heads, "slots": min(64, 2 * size.head_dim)}]
