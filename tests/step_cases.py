"""The cases of the steps, named once: rules and gates of the recurrence over states in place and in pools."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import GATES, Case
from cases import make_inputs as recurrence_inputs
from torch import Tensor

import flashmix
from flashmix.ops.recurrence import definition
from flashmix.ops.recurrence.step.definition import steps_in_pool

RULES = ("linear", "read_before", "delta", "erase", "write", "untied", "dplr")


@dataclass(frozen=True)
class StepCase:
    """One call: a rule, a gate, sizes; in a pool of `slots` with these indices, and with the states of the last `kept` tokens."""

    name: str
    rule: str
    gate: str
    B: int = 2
    T: int = 1
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 8
    slots: tuple[int, ...] | None = None
    pool: int = 5
    kept: int = 0
    decay: str = "mild"
    index: torch.dtype = torch.int64


def _cases() -> list[StepCase]:
    found = [StepCase(f"{rule}-{gate}", rule, gate) for rule in RULES for gate in GATES]
    for rule, gate in (
        ("linear", "token"),
        ("delta", "token"),
        ("delta", "channel"),
        ("untied", "head"),
        ("dplr", "channel"),
    ):
        case, n = StepCase("", rule, gate), f"{rule}-{gate}"
        sizes = ((1, 1), (7, 24), (100, 3), (8, 72), (96, 80), (200, 130))
        found += [replace(case, name=f"{n}-K{K}V{V}", K=K, V=V) for K, V in sizes]
        found += [
            replace(case, name=f"{n}-T{T}-kept{kept}", T=T, kept=kept) for T, kept in ((3, 0), (3, 3), (16, 2), (5, 1))
        ]
        found += [replace(case, name=f"{n}-pool", B=3, slots=(4, 0, 2)), replace(case, name=f"{n}-grouped", H=2, HV=6)]
        idle = replace(case, name=f"{n}-idle", B=4, slots=(-1, 3, -1, 0), index=torch.int32)
        found += [idle, replace(idle, name=f"{n}-idle-T4-kept3", T=4, kept=3)]
        found += [replace(case, name=f"{n}-all-idle", slots=(-1, -1), T=2, kept=1)]
        found += [replace(case, name=f"{n}-decay{d}", decay=d) for d in ("zero", "-20", "-1e4", "-inf")]
    return found


CASES = _cases()


def make_inputs(case: StepCase, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Operands by name, `state` (a batch or the pool), and with a pool `state_indices`."""
    rule = {"erase": "untied", "write": "untied"}.get(case.rule, case.rule)
    like = Case("", rule, case.gate, case.B, case.T, case.H, case.HV, case.K, case.V, decay=case.decay, states=False)
    x = recurrence_inputs(like, dtype)
    generator = torch.Generator().manual_seed(2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if case.rule in ("erase", "write", "untied"):
        tied = recurrence_inputs(Case("", "delta", "none", case.B, case.T, case.H, case.HV, case.K, case.V), dtype)
        x |= {"k": tied["k"], "beta": tied["beta"] / 2}
        x.pop({"erase": "write", "write": "erase"}.get(case.rule, ""), None)
    slots = case.B if case.slots is None else case.pool
    state = torch.randn(slots, case.HV, case.K, case.V, generator=generator, dtype=torch.float64)
    x["state"] = state.to(state_dtype or wide)
    if case.slots is not None:
        x["state_indices"] = torch.tensor(case.slots, dtype=case.index)
    return x


def run_op(case: StepCase, x: dict[str, Tensor], impl: str = "auto", history: Tensor | None = None) -> Tensor:
    """The public op; `x["state"]` and `history` are written."""
    x = dict(x)
    if "log_decay" not in x:
        x["log_decay"] = None  # type: ignore[assignment]
    if case.rule in ("linear", "read_before"):
        return flashmix.linear_attention_step(**x, read_before=case.rule == "read_before", history=history, impl=impl)  # type: ignore[arg-type]
    op = flashmix.dplr_step if case.rule == "dplr" else flashmix.delta_rule_step
    return op(**x, history=history, impl=impl)  # type: ignore[arg-type, operator]


def run_definition(case: StepCase, x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output, states or pool after it, and the states after each token; computed in `dtype`."""
    indices, pool = x.get("state_indices"), x["state"].to(dtype)
    operands = {n: t.to(dtype) for n, t in x.items() if n not in ("state", "state_indices")}

    def loop(part: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        q, v, g = part["q"], part["v"], part.get("log_decay")
        if case.rule in ("linear", "read_before"):
            before = case.rule == "read_before"
            return definition.linear_attention(q, part["k"], v, g, initial_state=S, read_before=before)
        if case.rule == "delta":
            return definition.delta_rule(q, part["k"], v, part["beta"], g, initial_state=S)
        if case.rule == "dplr":
            return definition.dplr(q, part["k"], v, part["a"], part["b"], g, initial_state=S)
        return _untied(part, S)

    return steps_in_pool(loop, operands, pool, indices)


def _untied(part: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule with the vectors that it has by default written out."""
    q, k, v, beta, g = part["q"], part["k"], part["v"], part["beta"], part.get("log_decay")
    erase = part.get("erase")
    if erase is None:
        factor = beta.unsqueeze(-1)
        if g is not None:
            decay = g.exp()[None, None] if g.dim() == 1 else g.exp()
            factor = factor * (decay if decay.dim() == 4 else decay.unsqueeze(-1))
        erase = factor * k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    target = beta.unsqueeze(-1) * v
    return definition.delta_rule_untied(q, erase, part.get("write", k), target, g, initial_state=S)


def make_history(case: StepCase, x: dict[str, Tensor]) -> Tensor | None:
    """Where the last states go: filled with a number that an idle sequence must leave."""
    if not case.kept:
        return None
    return torch.full((case.B, case.kept, *x["state"].shape[1:]), 7.0, dtype=x["state"].dtype, device=x["state"].device)


def expected_history(case: StepCase, x: dict[str, Tensor], states: Tensor) -> Tensor:
    """The definition's states of the last tokens, with what an idle sequence leaves."""
    last = states[:, case.T - case.kept :].clone()
    for n, slot in enumerate(case.slots or ()):
        if not 0 <= slot < x["state"].shape[0]:
            last[n] = 7.0
    return last
