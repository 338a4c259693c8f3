"""One call of the recurrence: its rule, its decay and its sizes; and the checks of its tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.checks import check_dtype, check_floating, check_like, check_multiple, check_shape, check_tensor, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.kind import keep
from flashmix.op.packing import Packing, as_packing
from flashmix.op.remember import kinds

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FITTING: dict[Hashable, bool] = {}  # names of keys and `kinds` of operands that were found to fit
_OWN_NAMES = {name: name for name in ("q", "v", "k", "beta", "log_decay")}


class Rule(Enum):
    """How a token writes to the state: its value (raw), the value minus what the state already holds (corrected), or both."""

    LINEAR = "linear"  # S += k v^T
    TIED = "tied delta"  # S += beta k nu^T with nu = v - S^T k, S decayed
    UNTIED = "untied delta"  # S += b nu^T with nu = v + S^T a, S before its decay
    DPLR = "dplr"  # S += k v^T + b nu^T with nu = S^T a, S before its decay

    @property
    def raw(self) -> bool:
        return self in (Rule.LINEAR, Rule.DPLR)

    @property
    def corrected(self) -> bool:
        return self is not Rule.LINEAR


class Decay(Enum):
    """The shape of the log decay."""

    NONE = "none"
    HEAD = "[H]"
    TOKEN = "[B, T, H]"
    CHANNEL = "[B, T, H, K]"
    VALUE = "[B, T, H, V] on the value axis"  # S diag(e^g)


DECAY_OF_DIMS = {1: Decay.HEAD, 3: Decay.TOKEN, 4: Decay.CHANNEL}


@dataclass(frozen=True)
class RecurrenceCall(Call):
    """One call of the recurrence: which tensors are given tells the rule, the shape of `log_decay` the decay.

    `q, k, a, b` are `[B, T, H or HV, K]`, `v` is `[B, T, HV, V]`, `beta` is `[B, T, HV]`, `initial_state` is
    `[N, HV, K, V]`. `log_decay` (natural logarithm) is `[HV]`, `[B, T, HV]` or `[B, T, HV, K]`; with `value_decay` it is
    `[B, T, HV, V]` and decays the value axis.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    beta: Tensor | None = None
    log_decay: Tensor | None = None
    initial_state: Tensor | None = None
    packing: Packing | None = None
    scale: float = 1.0
    read_before: bool = False
    value_decay: bool = False

    @property
    def rule(self) -> Rule:
        if self.a is None:
            return Rule.LINEAR if self.beta is None else Rule.TIED
        return Rule.UNTIED if self.k is None else Rule.DPLR

    @property
    def decay(self) -> Decay:
        if self.log_decay is None:
            return Decay.NONE
        if self.value_decay:
            return Decay.VALUE
        return DECAY_OF_DIMS[self.log_decay.dim()]

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def value_heads(self) -> int:
        return self.v.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def packed(self) -> bool:
        return self.packing is not None

    @property
    def sequences(self) -> int:
        return self.batch if self.packing is None else self.packing.count

    @property
    def is_step(self) -> bool:
        """Whether it is one token of each sequence, which takes no chunks."""
        return self.tokens == 1 and not self.packed

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the states and of everything computed inside."""
        return state_dtype(self.dtype)

    def results(self) -> Outputs:
        """Output `[B, T, HV, V]` and final state `[N, HV, K, V]`."""
        v, shape = self.v, (self.sequences, self.value_heads, self.K, self.V)
        state = torch.empty(size=shape, dtype=self.state_dtype, device=v.device)
        return torch.empty(size=v.shape, dtype=v.dtype, device=v.device), state


def check_operands(
    q: Tensor,
    v: Tensor,
    keys: dict[str, Tensor],
    beta: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
    names: dict[str, str] | None = None,
    value_log_decay: Tensor | None = None,
) -> Packing | None:
    """Raises unless the tensors fit one another; returns `cu_seqlens` as a packing. `keys` are those besides `q`, by name.

    `names` are what the caller calls `q`, `v`, `k`, `beta` and `log_decay`, where that differs.
    """
    names = _OWN_NAMES if names is None else _OWN_NAMES | names
    seen = kinds(q, v, *keys.values(), beta, log_decay, value_log_decay)
    key = None if seen is None else (*keys, *seen)
    if key not in FITTING:
        _check_fit(q, v, keys, beta, log_decay, value_log_decay, names)
        if key is not None:
            keep(FITTING, key, True)
    packing = as_packing(cu_seqlens, q.shape[0], q.shape[1], q.device)
    if initial_state is not None:
        N, HV, K, V = q.shape[0] if packing is None else packing.count, v.shape[2], q.shape[3], v.shape[3]
        check_shape("initial_state", initial_state, N, HV, K, V)
        check_dtype("initial_state", initial_state, torch.float64 if q.dtype == torch.float64 else torch.float32)
        check_like("initial_state", initial_state, names["q"], q, dtype=False)
    return packing


def _check_fit(
    q: Tensor,
    v: Tensor,
    keys: dict[str, Tensor],
    beta: Tensor | None,
    log_decay: Tensor | None,
    value_log_decay: Tensor | None,
    names: dict[str, str],
) -> None:
    """Raises unless the tensors of all tokens fit one another, which follows from their `kinds` and the names of the keys alone."""
    q_name, v_name = names["q"], names["v"]
    B, T, H, K = dims(q_name, q, "B T H K")
    check_dtype(q_name, q, *DTYPES)
    of_v = dims(v_name, v, "B T HV V")
    _, _, HV, V = of_v
    if of_v[:2] != (B, T):
        check_shape(v_name, v, B, T, HV, V)
    check_like(v_name, v, q_name, q)
    if H < 1 or HV < 1 or HV % H:
        check_multiple(f"the number of heads of {v_name}", HV, f"the number of heads of {q_name}", H)
    if K < 1 or V < 1:
        raise ValueError(f"{q_name} and {v_name} must have at least one channel, got K = {K} and V = {V}")
    for key_name, key in keys.items():
        name = names.get(key_name, key_name)
        shape = dims(name, key, "B T H K")
        expected = (B, T, HV if key_name != "k" and shape[2] == HV else H, K)
        if shape != expected:
            check_shape(name, key, *expected)
        check_like(name, key, q_name, q)
    if beta is not None:
        _check_per_token(names["beta"], beta, q_name, q, (B, T, HV))
    if log_decay is not None:
        _check_per_token(names["log_decay"], log_decay, q_name, q, (HV,), (B, T, HV), (B, T, HV, K))
    if value_log_decay is not None:
        _check_per_token("value_log_decay", value_log_decay, q_name, q, (B, T, HV, V))
        if log_decay is not None:
            raise ValueError("log_decay and value_log_decay must not both be given: a state decays on one axis")


def _check_per_token(name: str, given: Tensor, q_name: str, q: Tensor, *shapes: tuple[int, ...]) -> None:
    """`beta` and log decays have one of `shapes`, any floating dtype, and the device of `q`."""
    check_tensor(name, given)
    if tuple(given.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(str(list(s)) for s in shapes)}, got {list(given.shape)}")
    check_floating(name, given)
    check_like(name, given, q_name, q, dtype=False)
