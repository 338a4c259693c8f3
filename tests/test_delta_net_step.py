"""The step of a delta net layer: every form within the budget, pools and idle slots, and that it is what the layers do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from budget import assert_within_budget
from model_cases import WIDTH, assert_same, make_layer, numbers
from torch import Tensor

import flashmix
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.delta_net_step.definition import delta_net_step as definition
from flashmix.ops.delta_net_step.op import DELTA_NET_STEP, IMPLEMENTATIONS

STAGES = 6  # convolution, length, gates, write, read, norm: composed of ops, it rounds to the dtype between them
IMPLS = [implementation.name for implementation in IMPLEMENTATIONS]


@dataclass(frozen=True)
class Case:
    """One call: its decay (none, token, channel, bounded), its output gate, sizes, options, slots."""

    name: str
    decay: str = "token"
    gate: str | None = "silu"
    B: int = 2
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 8
    W: int = 4
    bias: bool = False
    weighted: bool = True
    negative: bool = False
    slots: tuple[int, ...] | None = None
    pool: int = 5
    strength: float = 1.0  # of decay and gates: large numbers saturate them


def _cases() -> list[Case]:
    found = [
        Case(f"{decay}-{gate}", decay, gate)
        for decay in ("none", "token", "channel", "bounded")
        for gate in (None, "silu", "sigmoid")
    ]
    for decay in ("token", "channel"):
        case = Case("", decay, "sigmoid")
        found += [
            replace(case, name=f"{decay}-K{K}V{V}", K=K, V=V)
            for K, V in ((1, 1), (7, 24), (100, 3), (96, 80), (200, 130))
        ]
        found += [replace(case, name=f"{decay}-W{W}", W=W, bias=True) for W in (2, 3, 9)]
        found += [replace(case, name=f"{decay}-group{HV // 2}", HV=HV) for HV in (4, 6, 10)]
        found += [
            replace(case, name=f"{decay}-pool", B=3, slots=(4, 0, 2)),
            replace(case, name=f"{decay}-unweighted", weighted=False),
        ]
        found += [replace(case, name=f"{decay}-idle", B=4, HV=4, slots=(-1, 3, -1, 0), negative=True)]
        found += [
            replace(case, name=f"{decay}-idle-group5", B=4, HV=10, slots=(-1, 3, -1, 0)),
            replace(case, name=f"{decay}-strong", strength=60.0),
        ]
    return found


CASES = _cases()


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def make_inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a case by name."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    C, slots = 2 * case.H * case.K + case.HV * case.V, case.B if case.slots is None else case.pool
    x = {"qkv": normal(case.B, C), "strength": normal(case.B, case.HV), "conv_state": normal(slots, case.W - 1, C)}
    x |= {"state": normal(slots, case.HV, case.K, case.V, dtype=wide), "conv_weight": normal(C, case.W) / case.W}
    if case.bias:
        x["conv_bias"] = normal(C)
    if case.decay != "none":
        heads = (case.HV,) if case.decay == "token" else (case.HV, case.K)
        x |= {"decay": case.strength * normal(case.B, *heads), "A_log": normal(case.HV), "dt_bias": normal(*heads)}
    if case.weighted:
        x["norm_weight"] = normal(case.V)
    if case.gate is not None:
        x["gate"] = case.strength * normal(case.B, case.HV, case.V)
    if case.slots is not None:
        x["state_indices"] = torch.tensor(case.slots)
    return x


def options(case: Case) -> dict[str, object]:
    found: dict[str, object] = {
        "heads": case.H,
        "negative_eigenvalues": case.negative,
        "gate_activation": case.gate or "silu",
    }
    return found | ({"lower": -5.0} if case.decay == "bounded" else {})


def run_definition(case: Case, x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output, states and the convolution's states of the definition, computed in `dtype`."""
    x = {name: t if name == "state_indices" else t.to(dtype) for name, t in x.items()}
    token = {"qkv": x["qkv"][:, None], "strength": x["strength"][:, None]}
    token |= {name: x[name][:, None] for name in ("decay", "gate") if name in x}
    o, state, past = definition(**(x | token), **options(case))  # type: ignore[arg-type]
    return o[:, 0], state, past


def check(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """Output and state are within the budget; the convolution's past has the very bits; free slots keep theirs."""
    inputs = make_inputs(case, dtype)
    exact = run_definition(case, inputs, torch.float64)
    plain = run_definition(case, inputs, torch.float32)
    x = {name: t.to(device) for name, t in inputs.items()}
    y = flashmix.delta_net_step(**x, **options(case), impl=impl)  # type: ignore[arg-type]
    assert y.dtype == dtype
    assert_within_budget(f"{case.name} y", y.cpu(), exact[0], plain[0].to(dtype), dtype, STAGES)
    assert_within_budget(f"{case.name} state", x["state"].cpu(), exact[1], plain[1], dtype, STAGES)
    assert torch.equal(x["conv_state"].cpu().double(), exact[2])
    idle = [n for n, slot in enumerate(case.slots or ()) if not 0 <= slot < case.pool]
    assert not y[idle].any()
    free = [p for p in range(len(inputs["state"])) if case.slots is not None and p not in case.slots]
    assert torch.equal(x["state"][free].cpu(), inputs["state"][free])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@named(CASES)
def test_within_budget(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "portable")


@pytest.mark.interpreted
@named([case for case in CASES if not case.name.endswith(("V130", "V80", "silu"))])
def test_interpreted(case: Case) -> None:
    check(case, torch.float32, "triton")


@pytest.mark.interpreted
def test_interpreted_tensors_whose_channels_lie_apart() -> None:
    case = Case("", "channel", HV=4, bias=True, slots=(1, -1))
    inputs, other = make_inputs(case, torch.float32), make_inputs(case, torch.float32)
    plain = flashmix.delta_net_step(**inputs, **options(case), impl="triton")  # type: ignore[arg-type]
    apart = {n: torch.stack([t, t], -1)[..., 0] if t.is_floating_point() else t for n, t in other.items()}
    assert torch.equal(flashmix.delta_net_step(**apart, **options(case), impl="triton"), plain)  # type: ignore[arg-type]
    assert torch.equal(apart["state"], inputs["state"]) and torch.equal(apart["conv_state"], inputs["conv_state"])


@pytest.mark.interpreted
def test_interpreted_past_whose_taps_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cache `[B, C, W]` of transformers, of which nothing is copied."""
    case = Case("", "channel", HV=4, bias=True, slots=(1, -1))
    inputs, other = make_inputs(case, torch.float32), make_inputs(case, torch.float32)
    plain = flashmix.delta_net_step(**inputs, **options(case), impl="triton")  # type: ignore[arg-type]
    cache = torch.nn.functional.pad(other["conv_state"].mT, (1, 0))
    other["conv_state"] = cache[:, :, 1:].mT
    triton_gpu = import_module("flashmix.ops.delta_net_step.triton_gpu")  # which has no Triton everywhere
    monkeypatch.setattr(triton_gpu, "_copies", lambda call: {})
    assert torch.equal(flashmix.delta_net_step(**other, **options(case), impl="triton"), plain)  # type: ignore[arg-type]
    assert torch.equal(cache[:, :, 1:].mT, inputs["conv_state"]) and not cache[:, :, 0].any()


def test_a_decay_whose_channels_lie_apart_has_the_same_bits() -> None:
    case = Case("", "channel", K=12)
    inputs, other = make_inputs(case, torch.float32), make_inputs(case, torch.float32)
    apart = {n: t.mT.contiguous().mT if n == "decay" else t for n, t in other.items()}
    plain = flashmix.delta_net_step(**inputs, **options(case))  # type: ignore[arg-type]
    assert torch.equal(flashmix.delta_net_step(**apart, **options(case)), plain)  # type: ignore[arg-type]
    assert torch.equal(apart["state"], inputs["state"])


def test_what_is_refused() -> None:
    inputs = make_inputs(Case(""), torch.float32)
    for change, error, text in (
        ({"qkv": torch.zeros(2, 79)}, ValueError, "qkv must have shape [2, 80], got [2, 79]"),
        ({"heads": 3}, ValueError, "the number of heads of state must be a positive multiple of heads = 3, got 2"),
        ({"A_log": None}, ValueError, "decay, A_log and dt_bias must be given together"),
        ({"decay": torch.zeros(2, 3)}, ValueError, "decay must have shape [2, 2] or [2, 2, 16], got [2, 3]"),
        (
            {"conv_state": torch.zeros(2, 3, 80).half()},
            TypeError,
            "conv_state must have dtype float32 like qkv, got float16",
        ),
        (
            {"conv_state": torch.zeros(3, 80).expand(2, 3, 80)},
            ValueError,
            "conv_state must have memory of its own for each number, got strides [0, 80, 1]",
        ),
        ({"lower": 1.0}, ValueError, "lower must be between -5.0 and -1e-06, got 1.0"),
        ({"gate_activation": "gelu"}, ValueError, "gate_activation must be one of 'silu', 'sigmoid', got 'gelu'"),
        ({"conv_weight": torch.zeros(80, 1)}, ValueError, "the width of conv_weight must be between 2 and 64, got 1"),
    ):
        with pytest.raises(error) as raised:
            flashmix.delta_net_step(**(inputs | {"heads": 2} | change))  # type: ignore[arg-type]
        assert str(raised.value) == text
    inputs["gate"].requires_grad_()
    with pytest.raises(RuntimeError, match="delta_net_step has no gradient, it writes its state in place"):
        flashmix.delta_net_step(**inputs, heads=2)  # type: ignore[arg-type]


def test_compiles_as_one_graph() -> None:
    case = Case("", "channel", slots=(1, -1))
    x = make_inputs(case, torch.float32)
    other = {n: t.clone() for n, t in x.items()}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: flashmix.delta_net_step(**x, **options(case)), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        assert torch.equal(compiled(other), flashmix.delta_net_step(**x, **options(case)))  # type: ignore[arg-type]
    assert torch.equal(other["state"], x["state"]) and torch.equal(other["conv_state"], x["conv_state"])


def test_opcheck() -> None:
    x = make_inputs(Case("", slots=(1, -1)), torch.float32)
    names = (
        "qkv",
        "strength",
        "state",
        "conv_state",
        "conv_weight",
        "conv_bias",
        "decay",
        "A_log",
        "dt_bias",
        "norm_weight",
    )
    tensors = {name: x.get(name) for name in (*names, "gate", "state_indices")}
    rest = {"lower": None, "negative_eigenvalues": False, "gate_activation": "silu", "eps": 1e-6}
    call = DeltaNetStepCall(**tensors, heads=2, **rest)  # type: ignore[arg-type]
    torch.library.opcheck(DELTA_NET_STEP.operator, (*DELTA_NET_STEP.flat(call), False, "portable"))


@pytest.mark.parametrize(
    "name", ["retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "kda_bounded", "rwkv7"]
)
def test_layers_write_their_states_in_place_and_leave_those_of_a_snapshot(name: str) -> None:
    """One token allocates no state; after a snapshot the next one copies, and the ones after that write again."""
    layer, x = make_layer(name), numbers(2, 6, WIDTH)
    with torch.no_grad():
        full, cache = layer(x), layer.new_cache()
        layer(x[:, :2], cache=cache)
        state = cache.state
        steps = [layer(x[:, 2:3], cache=cache)]
        assert cache.state is state
        snapshot = cache.snapshot()
        kept = state.clone()
        steps.append(layer(x[:, 3:4], cache=cache))
        assert cache.state is not state and torch.equal(snapshot.state, kept)
        state = cache.state
        steps.append(layer(x[:, 4:5], cache=cache))
        assert cache.state is state
        assert_same(torch.cat(steps, 1), full[:, 2:5])
        for _ in range(2):
            cache.restore(snapshot)
            assert_same(layer(x[:, 3:4], cache=cache), full[:, 3:4])
            assert torch.equal(snapshot.state, kept)
        cache.reorder(torch.tensor([1, 0]))
        state = cache.state
        assert_same(layer(x[[1, 0], 4:5], cache=cache), full[[1, 0], 4:5])
        assert cache.state is state
