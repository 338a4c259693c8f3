"""Launches of the Hopper kernels, kept for calls of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from flashmix.op.kind import keep
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.spec import aligned, laid_out


def kind_of(call: AttentionCall, d_o: Tensor | None) -> Hashable:
    """All that launches for a call (and for `d_o`) depend on but addresses; None if a tensor does not begin on 16 bytes."""
    found: list[Any] = []
    for t in (call.q, call.k, call.v, call.sink, call.alibi_slopes, call.log_decay, d_o):
        if t is None:
            found.append(None)
        elif t.data_ptr() & 15:
            return None
        elif call.of_kind is None or t is d_o:
            found += (t.dtype, t.shape, t.stride())
    if call.of_kind is not None:
        return (call.of_kind, *found)
    for packing in (call.packing, call.packing_k):
        if packing is not None:
            found += (packing.count, packing.total)
    options = call.scale, call.left, call.right, call.softcap, call.return_lse, call.q.get_device()
    return (*found, *options)


class Plans:
    """Plans by the `kind_of` a call, made by `make(call)` from tensors as kernels read them."""

    def __init__(self, make: Callable[[AttentionCall], Any]) -> None:
        self.make = make
        self._kept: dict[Any, Any] = {}

    def of(self, call: AttentionCall, d_o: Tensor | None = None) -> Any:
        """The plan of a call, then the call and (backward) `d_o` as kernels read them."""
        kind = kind_of(call, d_o)
        plan = None if kind is None else self._kept.get(kind)
        if plan is not None:
            return plan, call, d_o
        laid, flow = laid_out(call), None if d_o is None else aligned(d_o)
        plan = self.make(laid)
        if kind is not None and flow is d_o and all(getattr(laid, n) is getattr(call, n) for n in call.names):
            keep(self._kept, kind, plan)
        return plan, laid, flow
