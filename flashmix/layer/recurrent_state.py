"""Recurrences of a layer that continue from its cache and update it: in place for one token of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from flashmix.layer.cache import RecurrentCache
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


carried_linear_attention = partial(carried, linear_attention, step=linear_attention_step)
carried_dplr = partial(carried, dplr, step=dplr_step)
