"""Recurrences of a layer that continue from its cache and update it: in place for one token of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.layer.cache import Lengths, RecurrentCache
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import dplr, dplr_step, linear_attention, linear_attention_step


def carried(
    mechanism: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    *operands: Tensor,
    cache: RecurrentCache | None,
    packing: Packing | None,
    step: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """The output of a mechanism's function, whose state is the cache's.

    With `step` one token of each sequence is a call of that function, which updates the state in place.
    """
    if cache is None:
        return mechanism(q, *operands, cu_seqlens=packing, **options)[0]
    if step is not None and cache.can_step(q, packing):
        cache.own()
        return step(q, *operands, state=cache.state, **options)
    o, cache.state = mechanism(
        q, *operands, initial_state=cache.state, return_state=True, cu_seqlens=packing, **options
    )
    return o


def convolved(
    convolution: ShortConvolution | None, parts: Sequence[Tensor], packing: Packing | None, cache: RecurrentCache | None
) -> Sequence[Tensor]:
    """Parts `[B, T, H, D]` of a projection after a convolution over all their channels, whose last inputs the cache holds."""
    if convolution is None:
        return parts
    x, recent = convolution(
        torch.cat([part.flatten(2) for part in parts], dim=-1),
        initial_state=None if cache is None else cache.recent,
        return_state=cache is not None,
        cu_seqlens=packing,
    )
    if cache is not None:
        cache.recent = recent
    pieces = x.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
    return [piece.unflatten(-1, part.shape[2:]) for piece, part in zip(pieces, parts, strict=True)]


def rotated(rotary: RotaryEmbedding, qk: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
    """Queries and keys `[B, T, H, D]` rotated by their positions, which the cache counts."""
    if cache is None:
        return rotary(qk, cu_seqlens=packing)
    B, T = qk.shape[:2]
    before = cache.lengths or Lengths.zero(B if packing is None else packing.count, qk.device)
    cache.lengths = before.advanced(packing, T)
    return rotary(qk, positions=before.positions(packing, T), limit=cache.lengths.reach(0))


def first_tokens(x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
    """Which tokens of `x` `[B, T, D]` are the first of their sequence, `[B, T]` bool; the cache counts those before."""
    B, T = x.shape[:2]
    place = torch.arange(T, device=x.device).expand(B, T) if packing is None else packing.positions[None]
    if cache is None:
        return place == 0
    before = cache.lengths or Lengths.zero(B if packing is None else packing.count, x.device)
    cache.lengths = before.advanced(packing, T)
    positions = before.positions(packing, T)
    return (place + positions if isinstance(positions, int) else positions) == 0


carried_linear_attention = partial(carried, linear_attention, step=linear_attention_step)
carried_dplr = partial(carried, dplr, step=dplr_step)
