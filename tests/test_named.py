"""Each published mechanism equals its paper's own token loop: values, states, gradients, packed, split, in steps."""

from __future__ import annotations

import inspect
from itertools import accumulate, cycle, pairwise, product
from typing import Any

import pytest
import torch
from budget import assert_within_budget, relative_errors, spend
from paper_cases import WIDE, kind_of, kind_of_state
from paper_loops import MECHANISMS, run_loop, state_names
from samples import every, sample, sample_of_rows, thinned
from torch import Tensor

import flashmix
from flashmix.gpu import device as gpu
from flashmix.mechanisms.registry import functions

# What an implementation rounds where the loop does not: after scores, transform, state and output, and, for mechanisms
# that compute an operand of the engine from their arguments, this operand.
STAGES = 5
NEIGHBOURS = 8
SIZES = {"B": 2, "T": 37, "n": 2, "H": 2, "HV": 2, "K": 6, "V": 5, "M": 4, "R": 2, "L": 7, "one": 1, "two": 2}
NAMES = list(MECHANISMS)
GROUPED = [name for name in NAMES if MECHANISMS[name].grouped]
pytestmark = pytest.mark.usefixtures("one_thread")
EPS64, EPS32 = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps


def make_inputs(
    name: str, dtype: torch.dtype, sequences: int | None = None, optional: bool = True, **sizes: int
) -> dict[str, Tensor]:
    """The arguments of a mechanism by name, and an initial state; keys of delta rules have length 1, decays are at most 0."""
    size = SIZES | sizes
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    mechanism, x = MECHANISMS[name], {}
    for argument, axes in mechanism.shapes.items():
        shape = tuple(size[axis] for axis in axes.split())
        if argument in mechanism.optional and not optional:
            continue
        kind = kind_of(mechanism, argument)
        if kind in ("scaled", "unit"):
            length = mechanism.draw.get(argument, 1.0)
            x[argument] = length * torch.nn.functional.normalize(normal(shape), dim=-1)
        elif kind == "normal":
            x[argument] = normal(shape)
        elif kind == "strength":
            x[argument] = uniform(shape) * (2 if argument == "beta" and not mechanism.weak else 1)
        else:
            drawn = uniform(shape)
            x[argument] = {"routing": (drawn - 0.5).clamp(min=0), "ridge": drawn + 0.5, "decay": -drawn}.get(
                kind, drawn
            )
    size |= {"N": size["B"] if sequences is None else sequences, "F": mechanism.features(size["K"])}
    for argument, axes in zip(state_names(name), mechanism.states, strict=True):
        kind = kind_of_state(mechanism, argument, axes)
        if kind == "count":
            x[argument] = torch.randint(6, (size["N"], 1), generator=generator).double()
            continue
        state = normal(tuple(size[axis] for axis in axes.split()))
        x[argument] = state.abs() if kind == "positive" else state @ state.mT if kind == "outer" else state
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {n: t.to(wide if n in WIDE or n.startswith("initial_state") else dtype) for n, t in x.items()}


def call(name: str, x: dict[str, Tensor], **options: Any) -> Any:
    """The mechanism itself; several initial states become its tuple."""
    arguments: dict[str, Any] = {n: t for n, t in x.items() if not n.startswith("initial_state")}
    states = tuple(x[n] for n in state_names(name) if n in x)
    if states:
        arguments["initial_state"] = states if len(states) > 1 else states[0]
    return getattr(flashmix, name)(**arguments, **MECHANISMS[name].options, **options)


def run_op(
    name: str, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Output and states."""
    cu_seqlens = None if lengths is None else flashmix.Packing.from_lengths(lengths)
    o, state = call(name, x, return_state=True, cu_seqlens=cu_seqlens, **options)
    return (o, *state) if isinstance(state, tuple) else (o, state)


def by_name(outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"o": outputs[0]} | {f"state{place}": state for place, state in enumerate(outputs[1:])}


def evaluate(run: Any, name: str, inputs: dict[str, Tensor], *args: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, states and the gradient of every argument; what flows back are numbers that `dtype` holds exactly."""
    leaves = {argument: t.detach().clone().requires_grad_() for argument, t in inputs.items()}
    outputs = run(name, leaves, *args)
    generator = torch.Generator().manual_seed(1)
    flows = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t) for t in outputs]
    pairs = [(t, flow) for t, flow in zip(outputs, flows, strict=True) if t.requires_grad]  # none: nothing was packed
    grads = torch.autograd.grad(
        [t for t, _ in pairs], list(leaves.values()), [flow for _, flow in pairs], materialize_grads=True
    )
    return by_name(tuple(t.detach() for t in outputs)) | {
        f"d_{argument}": grad for argument, grad in zip(leaves, grads, strict=True)
    }


def references(name: str, inputs: dict[str, Tensor], *args: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """The paper's loop in float64, and as baseline in float32."""
    exact = evaluate(run_loop, name, {n: t.double() for n, t in inputs.items()}, *args, dtype=dtype)
    plain = evaluate(run_loop, name, {n: t.float() for n, t in inputs.items()}, *args, dtype=dtype)
    return exact, plain


def assert_float64(name: str, got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Errors are those of the loop in float32, as much smaller as float64 is finer, and a rounding step a stage."""
    assert got.keys() <= exact.keys()
    for key, value in got.items():
        assert torch.isfinite(value).all() and value.dtype == torch.float64
        allowed = relative_errors(plain[key], exact[key])
        for have, base in zip(relative_errors(value, exact[key]), allowed, strict=True):
            budget = 2 * (2 * base * EPS64 / EPS32 + STAGES * EPS64)  # twice: the reference rounds as well
            assert have <= budget, f"{name} {key}: error {have:.2e} is over the budget {budget:.2e}"


def test_every_mechanism_has_a_loop() -> None:
    assert set(functions()) == set(MECHANISMS)


DTYPES_OF_MODELS = (torch.float32, torch.bfloat16)
WITHOUT_STATE = ("abc", "deltaproduct", "gla", "kda", "lru", "mamba2", "rwkv4", "slstm")
EACH = [(name, state) for name in NAMES for state in (True, False)]


@pytest.mark.parametrize(
    "name, state",
    sample_of_rows(EACH, [(name, state) for name, state in EACH if state or name in WITHOUT_STATE]),
    ids=[f"{name}-{'state' if state else 'no state'}" for name, state in EACH],
)
def test_float64_is_the_papers_loop(name: str, state: bool) -> None:
    """With an initial state; without one also without the optional arguments."""
    inputs = make_inputs(name, torch.float64, optional=state)
    if not state:
        inputs = {n: t for n, t in inputs.items() if not n.startswith("initial_state")}
    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize("name", every(2, GROUPED))
def test_more_heads_of_values_than_of_keys(name: str) -> None:
    inputs = make_inputs(name, torch.float64, B=1, HV=6, T=9)
    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sample_of_rows(
        product(NAMES, (torch.float32, torch.bfloat16, torch.float16)), list(zip(NAMES, cycle(DTYPES_OF_MODELS)))
    ),
    ids=str,
)
def test_narrow_dtypes_are_within_budget(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(name, dtype, B=1)
    exact, plain = references(name, inputs, dtype=dtype)
    for key, got in evaluate(run_op, name, inputs, dtype=dtype).items():
        baseline = plain[key].to(got.dtype)
        if not all(spent.within for spent in spend(got, exact[key], baseline, dtype, STAGES)) and per_head(name, key):
            baseline = neighbouring(name, inputs, key, exact[key], dtype).to(got.dtype)
        assert_within_budget(f"{name} {key}", got, exact[key], baseline, dtype, steps=STAGES)


def per_head(name: str, key: str) -> bool:
    """Whether it is the gradient of an argument without tokens: a sum over all of them, which may cancel."""
    axes = MECHANISMS[name].shapes.get(key.removeprefix("d_"), "B T")
    return not axes.startswith("B T")


def neighbouring(name: str, inputs: dict[str, Tensor], key: str, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The worst plain evaluation of calls that differ by half a rounding step of float32: of a sum that cancels, one may be right by luck.

    The gradient of `log_scale` in the preconditioned rules is such a sum: with a scan exact in float64 it errs as much as with any other.
    """
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(NEIGHBOURS):
        moved = {
            n: t.double() * (1 + EPS32 * (torch.rand(t.shape, generator=generator, dtype=torch.float64) - 0.5))
            for n, t in inputs.items()
        }
        found.append(evaluate(run_loop, name, {n: t.float() for n, t in moved.items()}, dtype=dtype)[key])
    return max(found, key=lambda value: relative_errors(value, exact)[1])


@pytest.mark.parametrize(("name", "lengths"), thinned(2, NAMES, [(5, 0, 1, 34, 0, 3), (0, 0), ()]), ids=str)
def test_packed_is_the_loop_over_each_sequence(name: str, lengths: tuple[int, ...]) -> None:
    inputs = make_inputs(name, torch.float64, sequences=len(lengths), B=1, T=sum(lengths))
    exact, plain = references(name, inputs, lengths, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, lengths, dtype=torch.float64), exact, plain)


def part_of(
    name: str, inputs: dict[str, Tensor], first: int, last: int, states: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    per_token = {argument for argument, axes in MECHANISMS[name].shapes.items() if axes.startswith("B T")}
    part = {argument: t[:, first:last] if argument in per_token else t for argument, t in inputs.items()}
    return part | dict(zip(state_names(name), states, strict=True))


def states_of(name: str, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(inputs[n] for n in state_names(name))


@pytest.mark.parametrize(("name", "cuts"), thinned(3, NAMES, [(0, 33, 37), tuple(range(13))]), ids=str)
def test_parts_with_the_carried_state_are_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    inputs = make_inputs(name, torch.float64, T=cuts[-1])
    exact = by_name(run_loop(name, inputs))
    plain = by_name(run_loop(name, {n: t.float() for n, t in inputs.items()}))
    states, outputs = states_of(name, inputs), []
    for first, last in pairwise(cuts):
        o, *states = run_op(name, part_of(name, inputs, first, last, tuple(states)))
        outputs.append(o)
    assert_float64(name, by_name((torch.cat(outputs, 1), *states)), exact, plain)


@pytest.mark.parametrize("name", every(2, NAMES))
def test_gradients_flow_through_a_carried_state(name: str) -> None:
    inputs = make_inputs(name, torch.float64, T=12)

    def in_two(name: str, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, *states = run_op(name, part_of(name, x, 0, 11, states_of(name, x)))
        second, *states = run_op(name, part_of(name, x, 11, 12, tuple(states)))
        return torch.cat([first, second], 1), *states

    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(in_two, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if not MECHANISMS[n].positive and "scale" in inspect.signature(getattr(flashmix, n)).parameters],
)
def test_scale(name: str) -> None:
    """The default is the documented one (1 where the paper scales nothing, else K^-0.5), and a given one is used."""
    inputs = make_inputs(name, torch.float64, T=5)
    paper = MECHANISMS[name].scale
    assert inspect.signature(getattr(flashmix, name)).parameters["scale"].default == paper
    o, *states = run_op(name, inputs)
    same, *same_states = run_op(name, inputs, scale=SIZES["K"] ** -0.5 if paper is None else paper)
    assert torch.equal(o, same) and all(torch.equal(a, b) for a, b in zip(states, same_states, strict=True))
    o, *other_states = run_op(name, inputs, scale=0.7)
    assert all(torch.equal(a, b) for a, b in zip(states, other_states, strict=True)), "the scale is no part of a state"
    exact, plain = (
        run_loop(name, {n: t.to(dtype) for n, t in inputs.items()}, scale=0.7)[0]
        for dtype in (torch.float64, torch.float32)
    )
    assert_float64(name, {"o": o}, {"o": exact}, {"o": plain})


@pytest.mark.parametrize("name", NAMES)
def test_no_state_unless_asked_for(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=3)
    before = {argument: t.clone() for argument, t in inputs.items()}
    o, state = call(name, inputs)
    assert state is None and o.shape == (2, 3, 2, 5) and o.dtype == torch.float32
    for argument, t in inputs.items():
        assert torch.equal(t, before[argument]), f"{argument} was changed"


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=0)
    o, *states = run_op(name, inputs)
    assert o.shape == (2, 0, 2, 5)
    assert all(torch.equal(*pair) for pair in zip(states, states_of(name, inputs), strict=True))


DECAYS = ("log_decay", "log_forget", "curvature_log_decay", "momentum_log_decay")


@pytest.mark.parametrize(
    ("name", "decay"),
    thinned(2, [n for n in NAMES if set(DECAYS) & set(MECHANISMS[n].shapes)], [0.0, -20.0, -1e4, -torch.inf, None]),
    ids=str,
)
def test_any_strength_of_decay(name: str, decay: float | None) -> None:
    """All tokens alike, or (None) mild decays with single resets among them: values and gradients are the loop's."""
    inputs = make_inputs(name, torch.float64, B=1, T=9)
    for argument in set(DECAYS) & set(inputs):
        t, at = inputs[argument], torch.Generator().manual_seed(2)
        resets = torch.rand(t.shape, generator=at) < 0.2
        inputs[argument] = t.masked_fill(resets, -torch.inf) if decay is None else torch.full_like(t, decay)
    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize("lengths", [None, (30, 0, 1, 69)], ids=str)
def test_abc_takes_any_logits(lengths: tuple[int, ...] | None) -> None:
    """Logits in the thousands, where e^s is no number: GSA with weights and gates from the logarithm of the sum."""
    sequences = 2 if lengths is None else len(lengths)
    inputs = make_inputs("abc", torch.float64, B=2 if lengths is None else 1, T=100, sequences=sequences)
    inputs["s"] = inputs["s"] * 1000
    found = evaluate(run_op, "abc", inputs, lengths, dtype=torch.float64)
    assert all(torch.isfinite(t).all() for t in found.values())
    parts = (
        [(n, 0, 100) for n in range(2)] if lengths is None else [(0, *e) for e in pairwise(accumulate((0, *lengths)))]
    )
    for n, (row, first, last) in enumerate(parts):
        one = {a: t[row : row + 1, first:last] for a, t in inputs.items() if not a.startswith("initial_state")}
        keys, values, start = (inputs[a][n : n + 1] for a in state_names("abc"))
        z = torch.cat([start[:, None], one["s"]], 1).logcumsumexp(1)
        weights, gates = torch.exp(one.pop("s") - z[:, 1:]), z[:, :-1] - z[:, 1:]
        expected, states = flashmix.gsa(
            **one, s=weights, log_decay=gates, initial_state=(keys, values), return_state=True
        )
        got = found["o"][row : row + 1, first:last]
        rounding = 64 * torch.finfo(torch.float64).eps * z.abs().max().item()  # of z, whose exponential is a weight
        torch.testing.assert_close(got, expected, rtol=0, atol=rounding)
        assert states is not None
        for place, state in enumerate((*states, z[:, -1])):
            torch.testing.assert_close(found[f"state{place}"][n : n + 1], state, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", ["abc", "gsa", "oja", "preconditioned_kda"])
def test_packed_is_one_by_one_to_the_bit(name: str) -> None:
    """Also for what these compute beside the engine."""
    lengths = (5, 0, 34, 2, 9)
    inputs = make_inputs(name, torch.float32, sequences=len(lengths), B=1, T=sum(lengths))
    o, *states = run_op(name, inputs, lengths)
    for n, (first, last) in enumerate(pairwise(accumulate((0, *lengths)))):
        own = tuple(state[n : n + 1] for state in states_of(name, inputs))
        one, *alone = run_op(name, part_of(name, inputs, first, last, own))
        assert torch.equal(one, o[:, first:last])
        assert all(torch.equal(state, whole[n : n + 1]) for state, whole in zip(alone, states, strict=True))


@pytest.mark.parametrize("name", sample(NAMES, ("comba", "lru", "mamba", "mamba3")))
def test_compiles_as_one_graph(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run_op(name, x), fullgraph=True, backend="eager")
    for got, expected in zip(compiled(inputs), run_op(name, inputs), strict=True):
        assert torch.equal(got, expected)


def test_normalised_linear_attention_of_no_features_is_zero_with_eps() -> None:
    q, k, v = torch.rand(3, 1, 5, 2, 4, dtype=torch.float64)
    q[:, 2] = 0
    plain, _ = flashmix.normalised_linear_attention(q, k, v)
    o, _ = flashmix.normalised_linear_attention(q, k, v, eps=0.5)
    assert plain[:, 2].isnan().all() and not o[:, 2].any()
    weight = torch.einsum("bthk,bthk->bth", q, k.cumsum(1)).unsqueeze(-1)
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(o[:, kept], (plain * weight / (weight + 0.5))[:, kept])
    assert torch.equal(
        flashmix.normalised_linear_attention(k, k, v, eps=0.0)[0], flashmix.normalised_linear_attention(k, k, v)[0]
    )
    with pytest.raises(ValueError, match="eps"):
        flashmix.normalised_linear_attention(q, k, v, eps=-1.0)


def test_the_derivative_of_the_root_in_rg_lru_is_bounded() -> None:
    """With a closed gate nothing is forgotten or written, and the gradient is that of a root whose derivative is 1000."""
    x, gate = torch.rand(2, 1, 1, 3, dtype=torch.float64)
    closed, decay = torch.zeros_like(x).requires_grad_(), torch.rand(3, dtype=torch.float64)
    h, _ = flashmix.rg_lru(x, closed, gate, decay)
    (gradient,) = torch.autograd.grad(h.sum(), closed)
    assert not h.any()
    torch.testing.assert_close(gradient, 1000 * 16 * torch.nn.functional.softplus(decay) * x * gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_power_of_a_closed_gate_in_rodimus_has_no_infinite_slope(dtype: torch.dtype) -> None:
    """A softplus that has underflowed has the gradient of one that is nearly 0; every power of 0 but the first would give NaN there."""
    inputs = make_inputs("rodimus", dtype)
    before = torch.linspace(-1e3, 2.0, inputs["selection_gate"].numel(), dtype=dtype).view_as(inputs["selection_gate"])
    leaf = before.requires_grad_()
    gate = torch.nn.functional.softplus(leaf)
    assert (gate == 0).any()
    o, _ = call("rodimus", inputs | {"selection_gate": gate})
    (gradient,) = torch.autograd.grad(o.square().sum(), leaf)
    assert gradient.isfinite().all() and (gradient[gate == 0].abs() < torch.finfo(dtype).tiny).all()
    assert gradient[leaf > -1.0].all()


@pytest.mark.parametrize("name", ["s4d", "s5"])
def test_steps_of_a_state_space_are_not_negative(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=3)
    with pytest.raises(ValueError, match=r"^dt must be at least 0 \(a step size\), got -1$"):
        call(name, inputs | {"dt": torch.full_like(inputs["dt"], -1.0)})


def test_mlstm_of_large_values_is_that_of_their_parts() -> None:
    """Values of 320 channels are two value heads of 160 on one key head, in the states too."""
    inputs = make_inputs("mlstm", torch.float64, T=9, HV=4, V=320)
    o, C, n, m = run_op("mlstm", inputs)
    for part in (slice(0, 160), slice(160, 320)):
        cut = inputs | {name: inputs[name][..., part].contiguous() for name in ("v", "initial_state0")}
        found = run_op("mlstm", cut)
        assert all(map(torch.equal, found, (o[..., part], C[..., part], n, m)))


def test_the_bound_of_the_preconditioner_is_positive() -> None:
    q, gate = torch.rand(1, 3, 2, 4), torch.rand(1, 3, 2)
    with pytest.raises(ValueError, match="bound must be positive, got 0"):
        flashmix.preconditioned_gated_deltanet(q, q, q, gate, -gate, gate, -gate, bound=0.0)
    plain, _ = flashmix.preconditioned_gated_deltanet(q, q, q, gate, -gate, gate, -gate, bound=1.0)
    assert torch.equal(plain, flashmix.delta_rule(q, q, q, gate, -gate, write=q)[0])


@pytest.mark.parametrize(("name", "impl"), thinned(3, NAMES, ["native", "portable"]))
def test_half_precision_states_are_as_precise_as_float32(name: str, impl: str) -> None:
    """What an op makes of its arguments reaches the state unrounded."""
    x = make_inputs(name, torch.bfloat16)
    exact = run_op(name, {n: t.double() for n, t in x.items()})[1:]
    single = run_op(name, {n: t.float() for n, t in x.items()}, impl="portable")[1:]
    try:
        found = run_op(name, x, impl=impl)
    except ValueError as error:
        pytest.skip(str(error))
    assert found[0].dtype == torch.bfloat16
    for state, reference, baseline in zip(found[1:], exact, single, strict=True):
        assert_within_budget(name, state, reference, baseline, torch.float32, STAGES)


@pytest.mark.parametrize("name", ["comba", "gated_deltanet2", "hgrn2", "mamba2", "qdelta", "rwkv7"])
def test_kernels_take_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a CPU the operands stay in their dtype, and the kernels of that dtype are taken."""
    monkeypatch.setattr(gpu, "refuses", lambda device, dtype: None if dtype == torch.bfloat16 else f"got {dtype}")
    x = {n: t.to("meta") for n, t in make_inputs(name, torch.bfloat16).items()}
    assert flashmix.explain(call, name, x).choice == "triton"


@pytest.mark.parametrize(("name", "dtype"), thinned(3, NAMES, [torch.bfloat16, torch.float16]))
def test_gates_of_half_precision_mean_their_numbers(name: str, dtype: torch.dtype) -> None:
    """Nothing is computed in the dtype of a gate: the same numbers in float32 give the same bits."""
    x = make_inputs(name, torch.float32)
    gates = {n: t.to(dtype) for n, t in x.items() if n in WIDE or n.endswith("_gate")}
    half, single = run_op(name, x | gates), run_op(name, x | {n: t.float() for n, t in gates.items()})
    assert all(map(torch.equal, half, single))


def test_oja_of_a_strided_state_has_the_same_bits() -> None:
    x = make_inputs("oja", torch.float32, B=5, T=1, H=3, HV=3, K=28, V=28)
    x["initial_state"] = torch.stack([x["initial_state"]] * 2, 1)[:, 0]
    plain = run_op("oja", {n: t.contiguous() for n, t in x.items()})
    assert all(map(torch.equal, run_op("oja", x), plain))


@pytest.mark.parametrize("shape", [(1, 9, 2), (1, 9, 2, 16)])
def test_gates_of_half_precision_in_the_untied_delta_rule(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
    beta, decay = torch.rand(1, 9, 2).bfloat16(), -torch.rand(shape).bfloat16()
    o, _ = flashmix.delta_rule(q, k, v, beta, decay, write=k)
    assert torch.equal(o, flashmix.delta_rule(q, k, v, beta.float(), decay.float(), write=k)[0])
