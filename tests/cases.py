"""The cases of the recurrence, named once; every implementation runs all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashmix.ops.recurrence import definition, delta_rule, dplr, linear_attention

RULES = ("linear", "read_before", "delta", "untied", "dplr")
GATES = ("none", "head", "token", "channel")
# What not every rule or gate has: decays of the value axis, and outputs that read before the write.
SPECIAL = (
    *((rule, "value") for rule in ("linear", "read_before")),
    *(("delta_before", gate) for gate in ("none", "token", "channel")),
    ("untied_before", "channel"),
)
PAIRS = (*((rule, gate) for rule in RULES for gate in GATES), *SPECIAL)


@dataclass(frozen=True)
class Case:
    """One call: a rule, a gate, sizes, and what its gate and its write strength look like."""

    name: str
    rule: str
    gate: str
    B: int = 2
    T: int = 70
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 8
    lengths: tuple[int, ...] | None = None  # packed
    decay: str = "mild"  # mild, zero, or a number, or "resets": mild with single -inf among them
    beta: float | None = None  # None: random in (0, 2)
    keys: str = "random"  # how the keys of one head lie to one another: see `correlated`
    states: bool = True

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


def _cases() -> list[Case]:
    found = [Case(f"{rule}-{gate}", rule, gate) for rule, gate in PAIRS]
    pairs = (
        ("linear", "head"),
        ("read_before", "channel"),
        ("delta", "token"),
        ("delta", "channel"),
        ("untied", "token"),
        ("dplr", "channel"),
        ("linear", "value"),
    )
    some = [Case(f"{rule}-{gate}", rule, gate) for rule, gate in pairs]
    for case in some:
        n = case.name
        found += [replace(case, name=f"{n}-T{T}", T=T) for T in (0, 1, 2, 31, 32, 33, 63, 64, 65, 129)]
        found += [replace(case, name=f"{n}-K{K}V{V}", K=K, V=V, T=40) for K, V in ((7, 24), (100, 3), (8, 72))]
        found += [replace(case, name=f"{n}-K1V1", K=1, V=1, T=40, B=4, H=8, HV=8)]
        found += [replace(case, name=f"{n}-grouped", H=2, HV=6), replace(case, name=f"{n}-stateless", states=False)]
        packed = replace(case, name=f"{n}-packed", B=1, T=237, H=1, lengths=(5, 0, 64, 65, 1, 0, 33, 69, 0))
        found += [packed, replace(packed, name=f"{n}-packed-empty", T=0, lengths=(0, 0))]
        found += [replace(packed, name=f"{n}-packed-none", T=0, lengths=())]
    for rule, gate in PAIRS:
        found += [
            replace(Case("", rule, gate), name=f"{rule}-{gate}-decay{d}", decay=d)
            for d in ("zero", "-20", "-1e4", "-inf", "resets")
            if gate != "none"
        ]
    for rule in ("delta", "untied", "dplr"):
        small = Case("", rule, "none", B=1, T=100, H=1, HV=2)
        for keys in ("parallel", "nearly_parallel", "repeated", "orthogonal"):
            for beta in (1.999, 2.0, None):
                strength = "uniform" if beta is None else f"{beta:g}"
                found += [replace(small, name=f"{rule}-none-{keys}-beta{strength}", keys=keys, beta=beta)]
        name = f"{rule}-channel-nearly_parallel-beta2"
        found += [replace(small, name=name, gate="channel", decay="-1e-3", keys="nearly_parallel", beta=2.0)]
    for rule in ("delta", "untied"):
        for beta in (0.0, 1.0, 2.0):
            found += [Case(f"{rule}-token-beta{beta:g}", rule, "token", beta=beta)]
    return found


CASES = _cases()


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a case by name; keys have unit length, so that every rule is stable. Gates and states are float32 or float64."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def keys(*shape: int) -> Tensor:
        return unit(*shape) if case.keys == "random" else correlated(case.keys, *shape, normal=normal)

    most = 1 if case.keys == "random" else 2

    x = {"q": normal(B, T, H, K).to(dtype), "v": normal(B, T, HV, V).to(dtype)}
    rule = case.rule.removesuffix("_before")
    if rule != "untied":
        x["k"] = (keys if rule == "delta" else unit)(B, T, H, K).to(dtype)
    if rule == "delta":
        beta = 2 * uniform(B, T, HV) if case.beta is None else torch.full((B, T, HV), case.beta)
        x["beta"] = beta.to(wide)
    if rule == "untied":
        strength = most * uniform(B, T, HV, 1) if case.beta is None else case.beta
        write = keys(B, T, HV, K)
        x |= {"erase": (strength * write).to(dtype), "write": write.to(dtype)}
    if rule == "dplr":
        strength = most * uniform(B, T, HV, 1) if case.beta is None else case.beta
        removal = keys(B, T, HV, K)
        x |= {"a": -removal.to(dtype), "b": (strength * removal).to(dtype)}
    if case.gate != "none":
        shape = {"head": (HV,), "token": (B, T, HV), "channel": (B, T, HV, K), "value": (B, T, HV, V)}[case.gate]
        x["log_decay"] = _decay(case.decay, shape, uniform).to(wide)
    if case.states:
        x["initial_state"] = normal(case.sequences, HV, K, V).to(wide)
    return x


def correlated(kind: str, B: int, T: int, H: int, K: int, normal) -> Tensor:  # type: ignore[no-untyped-def]
    """Keys of length 1, as trained models have them: parallel or nearly parallel, the same four again and again, or an orthogonal basis."""
    if kind == "parallel":
        found = torch.ones(B, T, H, K, dtype=torch.float64) * normal(B, T, H, 1)
    elif kind == "nearly_parallel":
        found = 1 + 0.1 * normal(B, T, H, K)
    elif kind == "repeated":
        found = normal(B, 4, H, K)[:, torch.arange(T) % 4]
    else:
        found = torch.linalg.qr(normal(B, H, K, K))[0][:, :, torch.arange(T) % K].transpose(1, 2)
    return torch.nn.functional.normalize(found, dim=-1)


def _decay(kind: str, shape: tuple[int, ...], uniform) -> Tensor:  # type: ignore[no-untyped-def]
    mild = -uniform(*shape)
    if kind == "mild":
        return mild
    if kind == "zero":
        return torch.zeros_like(mild)
    if kind == "resets":
        return mild.masked_fill(uniform(*shape) < 0.1, -torch.inf)
    return torch.full_like(mild, float(kind))


def run_op(case: Case, x: dict[str, Tensor], impl: str = "auto", cu_seqlens=None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """The public op of a case on tensors `x`."""
    if case.lengths is not None and cu_seqlens is None:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(x["q"].device)
    options = {"initial_state": x.get("initial_state"), "return_state": True, "cu_seqlens": cu_seqlens, "impl": impl}
    q, v, g = x["q"], x["v"], x.get("log_decay")
    if case.rule != "dplr":
        options["read_before"] = case.rule.endswith("before")
    if case.rule in ("linear", "read_before"):
        decay = {"value_log_decay" if case.gate == "value" else "log_decay": g}
        return linear_attention(q, x["k"], v, **decay, **options)
    if "beta" in x:
        return delta_rule(q, x["k"], v, x["beta"], g, **options)
    if "erase" in x:
        one = v.new_ones(v.shape[:3])
        return delta_rule(q, q, v, one, g, erase=x["erase"], write=x["write"], **options)
    return dplr(q, x["k"], v, x["a"], x["b"], g, **options)


def run_definition(case: Case, x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition of a case, its token loop run in `dtype`; packed sequences one after the other."""
    if case.lengths is not None:
        return _packed_definition(case, x, dtype)
    x = {name: t.to(dtype) for name, t in x.items()}
    options = {"initial_state": x.get("initial_state")}
    if case.rule != "dplr":
        options["read_before"] = case.rule.endswith("before")
    q, v, g = x["q"], x["v"], x.get("log_decay")
    if case.rule in ("linear", "read_before"):
        decay = {"value_log_decay" if case.gate == "value" else "log_decay": g}
        return definition.linear_attention(q, x["k"], v, **decay, **options)
    if "beta" in x:
        return definition.delta_rule(q, x["k"], v, x["beta"], g, **options)
    if "erase" in x:
        return definition.delta_rule_untied(q, x["erase"], x["write"], v, g, **options)
    return definition.dplr(q, x["k"], v, x["a"], x["b"], g, **options)


def _packed_definition(case: Case, x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, states, first = [x["v"][:, :0].to(dtype)], [x["v"].new_zeros(0, case.HV, case.K, case.V, dtype=dtype)], 0
    for n, length in enumerate(case.lengths or ()):
        part = {
            name: t[n : n + 1] if name == "initial_state" else t if t.dim() == 1 else t[:, first : first + length]
            for name, t in x.items()
        }
        o, state = run_definition(replace(case, lengths=None, B=1), part, dtype)
        outputs.append(o)
        states.append(state)
        first += length
    return torch.cat(outputs, 1), torch.cat(states)


def gradients(
    outputs: tuple[Tensor, Tensor], x: dict[str, Tensor], dtype: torch.dtype, seed: int = 1
) -> dict[str, Tensor]:
    """Gradients of all inputs from fixed random gradients of output and state, numbers that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t) for t in outputs]
    pairs = [(t, g) for t, g in zip(outputs, given, strict=True) if t.requires_grad]
    found = torch.autograd.grad([t for t, _ in pairs], list(x.values()), [g for _, g in pairs], allow_unused=True)
    return {
        name: torch.zeros_like(t) if grad is None else grad for (name, t), grad in zip(x.items(), found, strict=True)
    }
