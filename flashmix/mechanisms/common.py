"""Helpers of several mechanisms: the options that they hand on, shared checks, and the scan beside another op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from flashmix.op.checks import check_dtype, check_floating, check_like, check_shape, check_tensor, dims
from flashmix.op.choose import preparing
from flashmix.op.dtypes import product_dtype, state_dtype
from flashmix.op.options import hands_on
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.scan.call import check_start
from flashmix.ops.scan.op import IMPLEMENTATIONS, scan

Result = tuple[Tensor, Tensor | None]
F = TypeVar("F", bound=Callable[..., Any])


class StateOptions(TypedDict, total=False):
    """The options of every op of the recurrence and of `scan`, without `scale`."""

    initial_state: Tensor | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


class EngineOptions(StateOptions, total=False):
    """The options of every op of the recurrence."""

    scale: float | None


# For a mechanism that hands `**options: Unpack[EngineOptions]` (or `StateOptions`) on to `linear_attention`, `delta_rule` or `dplr`.
engine_options = hands_on(linear_attention, EngineOptions.__annotations__)
# For one that hands `**options: Unpack[StateOptions]` on to `scan`.
scan_options = hands_on(scan, StateOptions.__annotations__)


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


def check_elementwise(options: StateOptions, **tensors: Tensor) -> Packing | None:
    """Raises unless all tensors are `[B, T, D]` or `[B, T, H, D]` like the first, and the state and packing fit; returns the packing.

    Of gates and their logarithms the dtype may differ.
    """
    (first_name, first), *rest = tensors.items()
    check_tensor(first_name, first)
    sizes = dims(first_name, first, "B T H D" if first.dim() == 4 else "B T D")
    check_floating(first_name, first)
    for name, t in rest:
        check_shape(name, t, *sizes)
        check_floating(name, t)
        check_like(name, t, first_name, first, dtype=not name.startswith("log_") and not name.endswith("_gate"))
    return check_start(first, options.get("initial_state"), options.get("cu_seqlens"), first_name)


def complement(log_forget: Tensor) -> Tensor:
    """`1 - e^{log_forget}` to full precision."""
    # expm1's gradient adds 1 to -1 + f
    return torch.where(log_forget < -1, 1 - log_forget.exp(), -torch.expm1(log_forget))


def positive_candidate(c: Tensor) -> Tensor:
    """What minGRU and minLSTM write: `c + 1/2` from 0 on, else `sigmoid(c)`."""
    u = torch.exp(-torch.relu(-c))  # 1 from 0 on: there u / (1 + u) is the half
    return u / (1 + u) + c.clamp(min=0)


def check_states(states: tuple[Tensor, ...] | None, q: Tensor, *shapes: tuple[int, ...], like_name: str = "q") -> None:
    """Raises unless `states`, an `initial_state`, is None or a tuple of tensors of these shapes in the state's dtype.

    The caller calls `q` by `like_name`.
    """
    if states is None:
        return
    if not isinstance(states, tuple) or len(states) != len(shapes):
        got = f"{len(states)}" if isinstance(states, tuple) else type(states).__name__
        raise TypeError(f"initial_state must be a tuple of {len(shapes)} tensors, got {got}")
    for place, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        name = f"initial_state[{place}]"
        check_shape(name, state, *shape)
        check_dtype(name, state, state_dtype(q.dtype))
        check_like(name, state, like_name, q, dtype=False)


def normaliser(
    q: Tensor, k: Tensor, log_decay: Tensor | None = None, *, initial_state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`scale q_t . z_t` `[B, T, H, 1]` with `z_t = e^{g_t} z_{t-1} + k_t`, and the last `z` `[N, H, K]`.

    A call of its own with a value of one channel: in C it takes a tenth of a call with 128, a column more in that takes a half.
    """
    one = q.new_ones(1, 1, 1, 1).expand(*q.shape[:3], 1)
    z = None if initial_state is None else initial_state.unsqueeze(-1)
    weight, z = linear_attention(q, k, one, log_decay, initial_state=z, **options)
    return weight, None if z is None else z.squeeze(-1)


def at_step(x: Tensor, n: int, step: int) -> Tensor:
    """`x` `[B, T, ...]` as `[B, T * n, ...]`: each token at one of its `n` steps, zeros at the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if j == step else zeros for j in range(n)], 2).flatten(1, 2)


def scan_beside(
    x: Tensor,
    log_decay: Tensor | None,
    *,
    op: Callable[..., tuple[Tensor, Tensor | None]] = scan,
    initial_state: Tensor | None = None,
    packing: Packing | None = None,
    read_before: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`scan` or `scan_max` with its last state, beside another op, which `explain` and an unknown `impl` are about."""
    with preparing():
        h, state = op(
            x,
            log_decay,
            initial_state=initial_state,
            return_state=True,
            cu_seqlens=packing,
            read_before=read_before,
            impl=impl if impl in [one.name for one in IMPLEMENTATIONS] else "auto",
        )
    assert state is not None
    return h, state
