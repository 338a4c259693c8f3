"""One call of the steps of the recurrence, and the checks of states that are updated in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written
from flashmix.op.checks import (
    check_dtype,
    check_like,
    check_range,
    check_shape,
    check_written,
    contents_are_checked,
    dims,
    have_addresses,
)

MOST_TOKENS = 16


@dataclass(frozen=True)
class StepCall(Call):
    """A few tokens of each sequence, `q, k, a, b` `[B, T, H or HV, K]`, `v` `[B, T, HV, V]`, `beta` `[B, T, HV]`, on states in place.

    `a` is negated with `minus_a`; with `beta`, `a` or `b` is a delta rule's erase or write vector, and may be None. `log_decay` is as in
    `RecurrenceCall`, `state` `[B, HV, K, V]`, or with `state_indices` `[B]` a pool `[P, HV, K, V]`, `history` `[B, n, HV, K, V]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    beta: Tensor | None
    log_decay: Tensor | None
    state: Written
    history: Written | None
    state_indices: Tensor | None
    scale: float | None
    read_before: bool
    minus_a: bool

    @property
    def factor(self) -> float:
        """The factor of the output."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def tokens(self) -> int:
        return self.v.shape[1]

    @property
    def kept(self) -> int:
        """How many states of each sequence `history` holds."""
        return 0 if self.history is None else self.history.shape[1]

    def results(self) -> Outputs:
        """Output `[B, T, HV, V]`."""
        return (torch.empty(size=self.v.shape, dtype=self.v.dtype, device=self.v.device),)


def check_state(
    state: Tensor, state_indices: Tensor | None, q: Tensor, batch: int, heads: int, K: int, V: int, like: str = "q"
) -> None:
    """A state `[B, HV, K, V]`, or with indices a pool `[P, HV, K, V]`, that may be written; `like` is what `q` is called."""
    slots = dims("state", state, "P HV K V")[0] if state_indices is not None else batch
    check_shape("state", state, slots, heads, K, V)
    check_dtype("state", state, *((torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)))
    check_like("state", state, like, q, dtype=False)
    check_written("state", state)
    if state_indices is not None and slots < 1:
        raise ValueError("state must have at least one slot, got 0")


def check_indices(state_indices: Tensor | None, q: Tensor, batch: int, slots: int, like: str = "q") -> None:
    """`[B]` whole numbers; where contents are checked, slots of the pool or -1, each slot once."""
    if state_indices is None:
        return
    check_shape("state_indices", state_indices, batch)
    check_dtype("state_indices", state_indices, torch.int32, torch.int64)
    check_like("state_indices", state_indices, like, q, dtype=False)
    if not contents_are_checked(state_indices):
        return
    seen: set[int] = set()
    for index in state_indices.tolist():
        check_range("state_indices", index, -1, slots - 1)
        if index >= 0 and index in seen:
            raise ValueError(f"state_indices must name each slot at most once, got {index} twice")
        seen.add(index)


def check_history(history: Tensor | None, state: Tensor, q: Tensor, tokens: int) -> None:
    """`[B, n, HV, K, V]` like the state, `1 <= n <= T`."""
    check_range("the number of tokens", tokens, 1, MOST_TOKENS)
    if history is None:
        return
    kept = dims("history", history, "B n HV K V")[1]
    check_shape("history", history, q.shape[0], kept, *state.shape[1:])
    if not 1 <= kept <= tokens:
        raise ValueError(f"history must hold between 1 and {tokens} tokens, those of the call, got {kept}")
    check_like("history", history, "state", state)
    check_written("history", history)
    if (
        history.numel()
        and have_addresses(history, state)
        and history.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()
    ):
        raise ValueError("history must not be in the memory of state, got a view of it")
