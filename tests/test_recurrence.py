"""The recurrence: every case within the error budget, and the laws every implementation keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

import pytest
import torch
from budget import assert_within_budget as within_budget
from budget import relative_errors
from cases import CASES, PAIRS, Case, gradients, make_inputs, run_definition, run_op
from samples import every, sample, sample_of_rows, thinned

import flashmix
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import op
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE
from flashmix.ops.recurrence.segments import scan, transition

CORRELATED = (
    6  # times the token loop's error, and no rounding steps: the budget of float32 for keys that are not random
)
STAGES = 4  # scores, transform, state, output: a chunked implementation rounds after each, the token loop once a token

IMPLS = ["native", "portable"]  # what runs on a CPU; the kernels run all of the cases in test_recurrence_gpu.py
BASE = [case for case in CASES if case.name in {f"{rule}-{gate}" for rule, gate in PAIRS}]

BEGIN_CORRELATED = [case for case in CASES if case.keys == "nearly_parallel" and case.beta == 2]
BEGIN_CORRELATED += [
    replace(case, name=f"{case.rule}-token-K64", gate="token", decay="-1e-3", K=64, V=32)
    for case in BEGIN_CORRELATED
    if case.gate == "none"
]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def assert_within_budget(name, got, reference, baseline):
    within_budget(name, got, reference, baseline, steps=STAGES)


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_decays_per_channel_round_once_a_chunk(impl):
    """Errors do not grow with the tokens: products of e^g, each rounded to one side near 1, are over this budget three times."""
    q, k, v = torch.randn(3, 1, 2048, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    g = (-1e-3 * torch.rand(8, generator=torch.Generator().manual_seed(1))).expand(1, 2048, 1, 8).contiguous()
    outputs = []
    for which, dtype in (("portable", torch.float64), (impl, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v, g)]
        o, _ = flashmix.gla(*leaves, impl=which)
        outputs.append((o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))))
    for name, exact, have in zip(("o", "dq", "dk", "dv", "dg"), *outputs, strict=True):
        within_budget(name, have, exact, exact, steps=2048 // 64)


def evaluate(run, case, inputs, *args, dtype=None):
    """Output, state and gradients by name, of leaves that start at `inputs`; gradients come in as numbers of `dtype`."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    outputs = run(case, leaves, *args)
    return {"o": outputs[0], "state": outputs[1]} | {
        f"d{n}": g for n, g in gradients(outputs, leaves, dtype or inputs["q"].dtype).items()
    }


def references(case, inputs):
    """The definition in float64, and as baseline its loop in float32 with results rounded to the dtype."""
    wide = {name: t.double() for name, t in inputs.items()}
    dtype = inputs["q"].dtype
    exact = evaluate(run_definition, case, wide, torch.float64, dtype=dtype)
    plain = evaluate(run_definition, case, {n: t.float() for n, t in inputs.items()}, torch.float32, dtype=dtype)
    return exact, plain


@lru_cache(maxsize=4)
def inputs_and_references(case, dtype):
    """The inputs of a case and their references, for the tests of one implementation after the other; not to be changed."""
    inputs = make_inputs(case, dtype)
    return inputs, *references(case, inputs)


@pytest.fixture(params=IMPLS)
def taken(request, monkeypatch):
    """What `impl="auto"` takes first: all that is there, or the portable one as where there is no C compiler."""
    if request.param == "portable":
        monkeypatch.setattr(op, "missing", lambda: "left out by this test")


each_implementation = pytest.mark.usefixtures("taken")


def skip_what_is_refused(case, inputs, impl):
    """An implementation may refuse a device or a case, in words; the portable one takes all."""
    reason = None if impl == "portable" else flashmix.explain(run_op, case, inputs).reasons[impl]
    if reason is not None:
        pytest.skip(reason)


# "-20" and "-1e4" lie between the mild decay and -inf, repeated keys between parallel and orthogonal ones.
BETWEEN = [case for case in CASES if case.decay in ("-20", "-1e4") or case.keys == "repeated"]


def in_sample():
    """Each rule with each gate once, and of what else a case may have every third rule and gate that has it."""
    features = {}
    for case in CASES:
        features.setdefault(case.name.removeprefix(f"{case.rule}-{case.gate}"), []).append(case)
    some = [case for cases in features.values() for case in cases[len(cases) % 2 :: 3] or cases]
    return [case for case in CASES if case in BASE or (case in some and case not in BETWEEN)]


@pytest.mark.parametrize("impl", IMPLS)
@named(sample(CASES, in_sample()))
def test_float32_is_within_budget(case, impl):
    inputs, exact, plain = inputs_and_references(case, torch.float32)
    skip_what_is_refused(case, inputs, impl)
    budget = {"steps": STAGES} if case.keys == "random" else {"steps": 0, "times": CORRELATED}
    for name, got in evaluate(run_op, case, inputs, impl).items():
        if case.K == 1 and case.keys == "random" and name.startswith("d"):
            budget = {"steps": 2 * STAGES}  # of the forward and the backward: no sum over channels averages them
        within_budget(f"{case.name} {name}", got, exact[name], plain[name], **budget)


@each_implementation
@named(BEGIN_CORRELATED)
def test_laws_hold_where_correlated_keys_begin(case):
    """Only later tokens, and only one sequence, have keys that are correlated: the others keep their bits, gradients too."""
    inputs = make_inputs(replace(case, B=2, T=60, keys="random"), torch.float32)
    other = make_inputs(replace(case, B=2, T=60), torch.float32)
    mixed = {n: t if n == "initial_state" else t.clone() for n, t in inputs.items()}
    for name, t in mixed.items():
        if name not in ("q", "v", "initial_state"):
            t[1, 20:] = other[name][1, 20:]

    def found(x, rows):
        leaves = {n: t[rows].detach().clone().requires_grad_() for n, t in x.items()}
        o, _ = run_op(case, leaves)
        o[:, :20].sum().backward()
        return o[:, :20].detach(), {n: t.grad if n == "initial_state" else t.grad[:, :20] for n, t in leaves.items()}

    (o, grads), (o_mixed, grads_mixed) = found(inputs, slice(None)), found(mixed, slice(None))
    alone, grads_alone = found(mixed, slice(1, 2))
    same_bits(o_mixed, o, "output of the prefix")
    same_bits(alone, o_mixed[1:], "output alone")
    for name, grad in grads.items():
        same_bits(grads_mixed[name], grad, f"gradient of {name}")
        same_bits(grads_alone[name], grad[1:], f"gradient of {name} alone")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    thinned(3, BASE, (torch.bfloat16, torch.float16)),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_half_precision_is_within_budget(case, dtype, impl):
    inputs, exact, plain = inputs_and_references(case, dtype)
    skip_what_is_refused(case, inputs, impl)
    for name, got in evaluate(run_op, case, inputs, impl).items():
        assert_within_budget(f"{case.name} {name}", got, exact[name], plain[name].to(got.dtype))


@named(every(3, BASE + [case for case in CASES if case.name.endswith(("resets", "decay-20", "packed"))]))
def test_float64_is_as_much_better_as_its_dtype(case):
    inputs = make_inputs(case, torch.float64)
    exact, plain = references(case, inputs)
    step = torch.finfo(torch.float64).eps
    for name, got in evaluate(run_op, case, inputs, "portable").items():
        allowed = relative_errors(plain[name], exact[name])
        for have, base in zip(relative_errors(got, exact[name]), allowed, strict=True):
            base = base * step / torch.finfo(torch.float32).eps
            assert have <= 2 * (2 * base + STAGES * step), (name, have, base)  # twice: the reference rounds as well


@pytest.mark.parametrize(("rule", "gate"), PAIRS)
def test_gradcheck(rule, gate):
    case = Case("", rule, gate, B=1, T=35, H=1, HV=2, K=3, V=2)
    inputs = {name: t.requires_grad_() for name, t in make_inputs(case, torch.float64).items()}
    names = list(inputs)
    assert torch.autograd.gradcheck(
        lambda *tensors: run_op(case, dict(zip(names, tensors, strict=True))), tuple(inputs.values()), fast_mode=True
    )


def same_bits(a, b, what):
    assert torch.equal(a, b), f"{what}: {(a != b).sum().item()} of {a.numel()} differ"


@each_implementation
@named(every(2, BASE, 0))
def test_packed_is_one_by_one(case):
    lengths = (5, 0, 64, 65, 1, 33, 129)
    packed = replace(case, B=1, T=sum(lengths), lengths=lengths)
    inputs = make_inputs(packed, torch.float32)
    together = evaluate(run_op, packed, inputs)
    first = 0
    for n, length in enumerate(lengths):
        at = slice(first, first + length)
        part = {
            name: t[n : n + 1] if name == "initial_state" else t if t.dim() == 1 else t[:, at]
            for name, t in inputs.items()
        }
        alone = run_op(replace(case, B=1, T=length), part)
        if length == 1:  # a single token takes the step, which rounds differently
            assert_within_budget("step", alone[0], together["o"][:, at].double(), together["o"][:, at])
        else:
            same_bits(alone[0], together["o"][:, at], f"output of sequence {n}")
            same_bits(alone[1], together["state"][n : n + 1], f"state of sequence {n}")
        first += length


@each_implementation
@named(every(2, BASE, 1))
def test_batch_invariance(case):
    inputs = make_inputs(replace(case, B=5, T=100), torch.float32)
    whole = evaluate(run_op, case, inputs)
    for n in (0, 3):
        part = {name: t if t.dim() == 1 else t[n : n + 1] for name, t in inputs.items()}
        leaves = {name: t.detach().clone().requires_grad_() for name, t in part.items()}
        outputs = run_op(case, leaves)
        same_bits(outputs[0], whole["o"][n : n + 1], "output")
        same_bits(outputs[1], whole["state"][n : n + 1], "state")


@each_implementation
@named(every(2, BASE, 0))
def test_prefix_invariance_of_outputs_and_gradients(case):
    T, prefix = 150, 77
    whole = replace(case, T=T)
    inputs = make_inputs(whole, torch.float32)
    short = {n: t if n == "initial_state" or t.dim() == 1 else t[:, :prefix] for n, t in inputs.items()}
    later = dict(inputs)
    for name, t in inputs.items():  # other tokens after the prefix, with other gates
        if name != "initial_state" and t.dim() > 1:
            later[name] = torch.cat([t[:, :prefix], t[:, prefix:].flip(1) * 0.5], 1)

    def grads(x):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        o, _ = run_op(case, leaves)
        o[:, :prefix].sum().backward()
        return o[:, :prefix].detach(), {name: t.grad for name, t in leaves.items()}

    o_short, g_short = grads(short)
    for other in (inputs, later):
        o, g = grads(other)
        same_bits(o, o_short, "output")
        for name, grad in g_short.items():
            if name == "log_decay" and grad.dim() == 1:
                continue  # one number for all tokens
            same_bits(g[name] if name == "initial_state" else g[name][:, :prefix], grad, f"gradient of {name}")


@each_implementation
@named(every(2, BASE, 1))
def test_split_with_carried_state_is_the_whole(case):
    assert_parts_are_the_whole(replace(case, T=130), 0, 1, 40, 104, 130)


@each_implementation
@named(every(2, BASE, 0))
def test_steps_are_the_whole(case):
    assert_parts_are_the_whole(replace(case, T=20, HV=4), *range(21))


def assert_parts_are_the_whole(case, *boundaries):
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    state, outputs = inputs["initial_state"], []
    for first, last in pairwise(boundaries):
        part = {n: t if n == "initial_state" or t.dim() == 1 else t[:, first:last] for n, t in inputs.items()}
        o, state = run_op(case, part | {"initial_state": state})
        outputs.append(o)
    assert_within_budget("output", torch.cat(outputs, 1), exact["o"], plain["o"])
    assert_within_budget("state", state, exact["state"], plain["state"])


@each_implementation
@named(every(2, BASE, 1))
def test_determinism(case):
    inputs = make_inputs(replace(case, T=200), torch.float32)
    first = evaluate(run_op, case, inputs)
    for _ in range(5):
        for name, got in evaluate(run_op, case, inputs).items():
            same_bits(got, first[name], name)


@each_implementation
def test_threads_do_not_share_scratch_memory():
    case = Case("", "delta", "token", T=300)
    inputs = make_inputs(case, torch.float32)
    expected = evaluate(run_op, case, inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: evaluate(run_op, case, inputs), range(12)):
            for name, got in found.items():
                same_bits(got, expected[name], name)


@each_implementation
def test_calls_in_inference_mode_leave_memory_that_others_can_write():
    case = Case("", "delta", "token", T=100)
    inputs = make_inputs(case, torch.float32)

    def evaluated(_: int) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            for _ in range(2):
                run_op(case, inputs)
        return evaluate(run_op, case, inputs)

    with ThreadPoolExecutor(1) as pool:  # a thread that has no scratch memory yet
        (found,) = pool.map(evaluated, range(1))
    for name, got in evaluate(run_op, case, inputs).items():
        same_bits(found[name], got, name)


@each_implementation
@named(every(2, BASE, 0))
def test_non_contiguous_inputs(case):
    inputs = make_inputs(case, torch.float32)
    strided = {n: t if t.dim() == 1 else t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in inputs.items()}
    spread = {n: t.unsqueeze(-1).expand(*t.shape, 2)[..., 0] if t.dim() > 1 else t for n, t in inputs.items()}
    plain = evaluate(run_op, case, inputs)
    for other in (strided, spread):
        for name, got in zip(("o", "state"), run_op(case, other), strict=True):
            same_bits(got, plain[name], name)


@each_implementation
@named(every(2, [case for case in BASE if case.gate != "value" and not case.rule.endswith("_before")]))
def test_segments_join_to_the_whole(case):
    whole = replace(case, T=96)
    inputs = make_inputs(whole, torch.float32)
    exact, plain = references(whole, inputs)
    x = {name: inputs.get(name) for name in ("q", "k", "v", "a", "b", "beta", "log_decay")}
    if case.rule == "untied":
        x |= {"a": -inputs["erase"], "b": inputs["write"]}
    cut = [
        RecurrenceCall(**{n: t if t is None or t.dim() == 1 else t[:, i : i + 32] for n, t in x.items()})
        for i in (0, 32, 64)
    ]
    M, N = (torch.stack(parts) for parts in zip(*(transition(part) for part in cut), strict=True))
    states = scan(M, N, inputs["initial_state"])
    assert_within_budget("state", states[-1], exact["state"], plain["state"])
    outputs = []
    for i in range(3):
        part = {n: t if n == "initial_state" or t.dim() == 1 else t[:, 32 * i : 32 * i + 32] for n, t in inputs.items()}
        outputs.append(run_op(case, part | {"initial_state": states[i]})[0])
    assert_within_budget("output", torch.cat(outputs, 1), exact["o"], plain["o"])


COMPILED = (("linear", "value"), ("delta", "channel"))


@each_implementation
@pytest.mark.parametrize(
    "case",
    sample(
        [case for case in BASE if case.gate in ("none", "channel", "value")],
        [case for case in BASE if (case.rule, case.gate) in COMPILED],
    ),
    ids=lambda case: case.name,
)
def test_compiles_as_one_graph(case):
    inputs = make_inputs(case, torch.float32)
    expected = evaluate(run_op, case, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run_op(case, x), fullgraph=True, backend="aot_eager")
    got = evaluate(lambda case, x: compiled(x), case, inputs)
    for name, t in expected.items():
        same_bits(got[name], t, name)


@each_implementation
@pytest.mark.parametrize(
    "rule, packed",
    sample_of_rows(
        list(product(("linear", "delta", "dplr", "value"), (False, True))), [("delta", True), ("value", False)]
    ),
)
def test_opcheck(rule, packed):
    lengths = (40, 0, 3, 30) if packed else None
    rule, gate = ("linear", "value") if rule == "value" else (rule, "token")
    case = Case("", rule, gate, B=1 if packed else 2, T=73 if packed else 40, HV=4, lengths=lengths)
    x = {name: t.requires_grad_() for name, t in make_inputs(case, torch.float32).items()}
    tensors = {n: x.get(n) for n in ("q", "k", "v", "a", "b", "beta", "log_decay", "initial_state")}
    packing = None if lengths is None else Packing.from_lengths(lengths)
    call = RecurrenceCall(**tensors, packing=packing, scale=0.5, value_decay=gate == "value")
    torch.library.opcheck(RECURRENCE.operator, (*RECURRENCE.flat(call), True, "portable"))


@each_implementation
def test_autocast_lowers_the_operands_and_keeps_gates_and_states():
    case = Case("", "delta", "token")
    inputs = make_inputs(case, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evaluate(run_op, case, inputs, dtype=torch.bfloat16)
    lowered = {n: t.bfloat16() if n in ("q", "k", "v") else t for n, t in inputs.items()}
    expected = evaluate(run_op, case, lowered)
    assert got["o"].dtype == torch.bfloat16 and got["state"].dtype == torch.float32
    for name, t in expected.items():
        same_bits(got[name], t.to(got[name].dtype), name)


@each_implementation
def test_checkpointing_gives_the_same_gradients():
    case = Case("", "delta", "channel", T=100)
    inputs = make_inputs(case, torch.float32)
    expected = evaluate(run_op, case, inputs)

    def checkpointed(case, x):
        return torch.utils.checkpoint.checkpoint(lambda: run_op(case, x), use_reentrant=False)

    for name, got in evaluate(checkpointed, case, inputs).items():
        same_bits(got, expected[name], name)


@each_implementation
def test_one_token_has_gradients():
    case = Case("", "delta", "token", T=1)
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    for name, got in evaluate(run_op, case, inputs).items():
        assert_within_budget(name, got, exact[name], plain[name])


@each_implementation
def test_double_backward_is_refused_in_words():
    q, k, v = torch.randn(3, 1, 8, 1, 4, requires_grad=True)
    o, _ = flashmix.linear_attention(q, k, v)
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="recurrence has no second derivative"):
        grad.sum().backward()


@each_implementation
def test_what_a_decay_of_values_refuses():
    q, v = torch.randn(1, 8, 1, 4), torch.randn(1, 8, 2, 6)
    with pytest.raises(ValueError, match=r"value_log_decay must have shape \[1, 8, 2, 6\], got \[1, 8, 2, 4\]"):
        flashmix.linear_attention(q, q, v, value_log_decay=torch.zeros(1, 8, 2, 4))
    with pytest.raises(ValueError, match="log_decay and value_log_decay must not both be given"):
        flashmix.linear_attention(q, q, v, torch.zeros(2), value_log_decay=torch.zeros_like(v))
    with pytest.raises(ValueError, match="transition cannot take value_log_decay"):
        transition(RecurrenceCall(q, q, v, log_decay=torch.zeros_like(v), value_decay=True))


@each_implementation
def test_inputs_are_left_alone():
    for case in BASE:
        inputs = make_inputs(case, torch.float32)
        before = {name: t.clone() for name, t in inputs.items()}
        evaluate(run_op, case, inputs)
        run_op(case, {n: t[:, :1] if t.dim() > 1 and n != "initial_state" else t for n, t in inputs.items()})
        for name, t in inputs.items():
            same_bits(t, before[name], name)
