"""A `RecurrenceCall` in the form that these kernels take, until they take it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from flashmix.op.call import Gradients
from flashmix.ops.recurrence.call import RecurrenceCall, Rule


class Gate(Enum):
    """The shape of the log decay."""

    NONE = "none"
    HEAD = "[H]"
    TOKEN = "[B, T, H]"
    CHANNEL = "[B, T, H, K]"
    VALUE = "[B, T, H, V] on the value axis"


@dataclass(frozen=True)
class Operands:
    """The tensors of a call."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    @staticmethod
    def of(call: RecurrenceCall) -> Operands:
        cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
        state = call.initial_state
        return Operands(call.q, call.k, call.v, call.beta, call.a, call.b, call.log_decay, state, cu_seqlens)

    def named(self, found: Sequence[Tensor], gate_gradient: bool) -> Gradients:
        """The gradients of those that are given, in the order of the fields, by the call's names."""
        its = replace(self, g=self.g if gate_gradient else None)
        names = [n for n in ("q", "k", "v", "beta", "a", "b", "g", "initial_state") if getattr(its, n) is not None]
        return {{"g": "log_decay"}.get(n, n): t for n, t in zip(names, found, strict=True)}


@dataclass(frozen=True)
class Problem:
    """The facts of a call that decide with which tiles it runs."""

    rule: Rule
    gate: Gate
    batch: int
    tokens: int
    heads: int
    value_heads: int
    K: int
    V: int
    sequences: int
    packed: bool
    read_before: bool
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(call: RecurrenceCall) -> Problem:
        return Problem(
            call.rule, Gate[call.decay.name], call.batch, call.tokens, call.heads, call.value_heads, call.K, call.V,
            call.sequences, call.packed, call.read_before, call.dtype, call.device,
        )  # fmt: skip
