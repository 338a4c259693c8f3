"""Helpers of several mechanisms: the options that they hand on, shared checks, and the elementwise scan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from flashmix.op.checks import check_dtype, check_floating, check_like, check_shape, dims
from flashmix.op.dtypes import autocast_dtype, product_dtype, state_dtype
from flashmix.op.options import hands_on
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import linear_attention

Result = tuple[Tensor, Tensor | None]
F = TypeVar("F", bound=Callable[..., Any])


class StateOptions(TypedDict, total=False):
    """The options of every op of the recurrence, without `scale`."""

    initial_state: Tensor | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


class EngineOptions(StateOptions, total=False):
    """The options of every op of the recurrence."""

    scale: float | None


# For a mechanism that hands `**options: Unpack[EngineOptions]` (or `StateOptions`) on to `linear_attention`, `delta_rule` or `dplr`.
engine_options = hands_on(linear_attention, EngineOptions.__annotations__)


def unrounded(*operands: str) -> Callable[[F], F]:
    """Decorates a mechanism that makes an operand of the engine from its own `operands`, which share one dtype; its first argument is one.

    It takes them in their `product_dtype`, so that what it makes is rounded to that; the output is returned in their own dtype.
    """

    def decorated(mechanism: F) -> F:
        names = tuple(inspect.signature(mechanism).parameters)

        @functools.wraps(mechanism)
        def call(*args: Any, **options: Any) -> Any:
            x: Any = args[0] if args else options.get(names[0])
            if not isinstance(x, Tensor) or (wide := product_dtype(x, options.get("impl", "auto"))) == x.dtype:
                return mechanism(*args, **options)
            given = dict(zip(names, args, strict=False)) | options
            if any(not isinstance(t := given.get(name), Tensor) or t.dtype != x.dtype for name in operands):
                return mechanism(*args, **options)  # it raises
            args = tuple([t.to(wide) if name in operands else t for name, t in zip(names, args, strict=False)])
            o, state = mechanism(*args, **{n: t.to(wide) if n in operands else t for n, t in options.items()})
            return o.to(x.dtype), state

        return cast(F, call)

    return decorated


def check_same_heads(keys: Tensor, name: str, v: Tensor) -> None:
    """Raises ValueError unless there are as many heads of values as of keys."""
    B, T, H, _ = dims(name, keys, "B T H K")
    check_shape("v", v, B, T, H, dims("v", v, "B T H V")[3])


def check_per_head(name: str, weight: Tensor, like_name: str, like: Tensor, *shape: int) -> None:
    """Raises unless `weight` has this shape, any floating dtype, and the device of `like`."""
    check_shape(name, weight, *shape)
    check_floating(name, weight)
    check_like(name, weight, like_name, like, dtype=False)


def check_states(states: tuple[Tensor, ...] | None, q: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises unless `states`, an `initial_state`, is None or a tuple of tensors of these shapes in the state's dtype."""
    if states is None:
        return
    if not isinstance(states, tuple) or len(states) != len(shapes):
        got = f"{len(states)}" if isinstance(states, tuple) else type(states).__name__
        raise TypeError(f"initial_state must be a tuple of {len(shapes)} tensors, got {got}")
    for place, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        name = f"initial_state[{place}]"
        check_shape(name, state, *shape)
        check_dtype(name, state, state_dtype(q.dtype))
        check_like(name, state, "q", q, dtype=False)


def scan(x: Tensor, log_decay: Tensor, *, initial_state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """`h_t = e^{g_t} h_{t-1} + x_t` for each channel of `x` `[B, T, H, D]`, and the last `h` `[N, H, D]`: a state of one row.

    `log_decay` is `[B, T, H]` or `[B, T, H, D]`; `options` are those of `linear_attention`. The dtype stays that of `x` under autocast.
    """
    one = x.new_ones(1, 1, 1, 1).expand(*x.shape[:3], 1)
    decay: dict[str, Any] = {"log_decay" if log_decay.dim() == 3 else "value_log_decay": log_decay}
    with nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False):
        state = None if initial_state is None else initial_state.unsqueeze(2)
        h, state = linear_attention(one, one, x, scale=1.0, initial_state=state, return_state=True, **decay, **options)
    assert state is not None
    return h, state.squeeze(2)
