"""Recurrences of a layer that continue from its cache and update it: in place for one token of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashmix.layer.cache import RecurrentCache
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import dplr, dplr_step, linear_attention, linear_attention_step


def carried_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    cache: RecurrentCache | None,
    packing: Packing | None,
    scale: float | None = None,
) -> Tensor:
    """The output of `linear_attention`, whose state is the cache's."""
    if cache is not None and cache.can_step(q, packing):
        cache.own()
        return linear_attention_step(q, k, v, cache.state, log_decay, scale=scale)
    state = None if cache is None else cache.state
    o, state = linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=state, return_state=cache is not None, cu_seqlens=packing
    )
    if cache is not None:
        cache.state = state
    return o


def carried_dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    cache: RecurrentCache | None,
    packing: Packing | None,
    scale: float | None = None,
) -> Tensor:
    """The output of `dplr`, whose state is the cache's."""
    if cache is not None and cache.can_step(q, packing):
        cache.own()
        return dplr_step(q, k, v, a, b, cache.state, log_decay, scale=scale)
    state = None if cache is None else cache.state
    o, state = dplr(
        q, k, v, a, b, log_decay, scale=scale, initial_state=state, return_state=cache is not None, cu_seqlens=packing
    )
    if cache is not None:
        cache.state = state
    return o


def carried(
    mechanism: Callable[..., tuple[Tensor, Any]],
    *operands: Tensor,
    cache: RecurrentCache | None,
    packing: Packing | None,
    **options: Any,
) -> Tensor:
    """The output of a mechanism's function, whose state is the cache's."""
    o, state = mechanism(
        *operands,
        initial_state=None if cache is None else cache.state,
        return_state=cache is not None,
        cu_seqlens=packing,
        **options,
    )
    if cache is not None:
        cache.state = state
    return o
