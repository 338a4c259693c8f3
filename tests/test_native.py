"""The recurrence in C: what is true of it alone. Its results are in the cases and laws of every implementation."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import budget
import pytest
import torch
from cases import PAIRS, Case, make_inputs, run_op
from samples import sample_of_rows
from test_recurrence import STAGES, assert_within_budget, evaluate, references

import flashmix
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.preconditioner.native.binding import missing as preconditioner_missing
from flashmix.ops.preconditioner.op import PRECONDITIONER
from flashmix.ops.recurrence import native, op
from flashmix.ops.recurrence.native.binding import library, missing

needs_library = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MOST = 2  # AVX-512; 1: AVX2, 0: what every machine has


@pytest.fixture
def instructions():
    """Asks for a set of vector instructions; afterwards it is the machine's best again."""
    yield library().flashmix_instructions
    library().flashmix_instructions(MOST)


def test_it_is_compiled_where_there_is_a_compiler():
    if sys.platform == "win32" or not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("there is no C compiler")
    assert missing() is None


EACH = [(*pair, level) for pair in PAIRS if pair[1] != "value" for level in range(MOST + 1)]


@needs_library
@pytest.mark.parametrize(("rule", "gate", "level"), sample_of_rows(EACH, EACH[::2]))
def test_every_set_of_instructions_is_within_budget(instructions, rule, gate, level):
    if instructions(level) != level:
        pytest.skip("this machine does not have them")
    case = Case("", rule, gate, B=1, T=150, H=1, HV=2, K=40, V=24)
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    for name, got in evaluate(run_op, case, inputs, "native").items():
        assert_within_budget(f"{rule}-{gate} {name}", got, exact[name], plain[name])


@needs_library
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_bits_do_not_depend_on_threads(gate):
    case = Case("", "delta", gate, B=3, T=100, H=1, HV=2, K=20, V=30)
    inputs, threads = make_inputs(case, torch.float32), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(evaluate(run_op, case, inputs, "native"))
    finally:
        torch.set_num_threads(threads)
    for name, expected in found[0].items():
        assert all(torch.equal(other[name], expected) for other in found[1:]), name


@needs_library
def test_widest_heads_and_what_is_past_them():
    case = Case("", "dplr", "channel", B=1, T=70, H=1, HV=1, K=256, V=256)
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    for name, got in evaluate(run_op, case, inputs, "native").items():
        assert_within_budget(name, got, exact[name], plain[name])
    wide = replace(case, V=257)
    with pytest.raises(ValueError, match="head dimensions up to 256, got K = 256 and V = 257"):
        run_op(wide, make_inputs(wide, torch.float32), "native")


def test_without_the_library_the_portable_one_runs(monkeypatch):
    monkeypatch.setattr(op, "missing", lambda: "its C was not compiled when flashmix was installed")
    case = Case("", "delta", "token", B=1, T=5)
    found = flashmix.explain(run_op, case, make_inputs(case, torch.float32))
    assert found.choice == "portable" and "was not compiled" in str(found)
    with pytest.raises(ValueError, match="was not compiled"):
        run_op(case, make_inputs(case, torch.float32), "native")


@needs_library
@pytest.mark.parametrize(("K", "V"), [(100, 3), (33, 250)])
def test_a_thread_stays_within_its_memory(monkeypatch, K, V):
    made, more = [], 1000

    class Guarded:
        def restart(self):
            pass

        def tile(self, like, threads, numbers):
            made.append(torch.full((threads * numbers + more,), 7.5))
            return made[-1]

    monkeypatch.setattr(native, "scratch", Guarded())
    case = Case("", "dplr", "channel", B=1, T=130, H=1, HV=1, K=K, V=V)  # one thread, and everything there is
    evaluate(run_op, case, make_inputs(case, torch.float32), "native")
    assert len(made) == 2
    for memory in made:
        assert bool((memory[-more:] == 7.5).all()) and not bool((memory[:-more] == 7.5).all())


@needs_library
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_a_decay_that_is_no_number_is_not_hidden(gate):
    inputs = make_inputs(Case("", "delta", gate, B=1, T=40, H=1, HV=1), torch.float32)
    inputs["log_decay"][0, 20] = torch.nan
    o, state = run_op(Case("", "delta", gate), inputs, "native")
    assert torch.isnan(o[:, 20:]).all() and torch.isnan(state).all()


@needs_library
def test_a_loss_of_the_output_alone_or_of_the_state_alone():
    case = Case("", "untied", "channel", B=2, T=70)
    inputs = make_inputs(case, torch.float32)
    for part in range(2):
        grads = []
        for impl, dtype in (("native", torch.float32), ("portable", torch.float64), ("portable", torch.float32)):
            leaves = {name: t.to(dtype).requires_grad_() for name, t in inputs.items()}
            loss = run_op(case, leaves, impl)[part].sin().sum()
            grads.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
        for name, got, reference, baseline in zip(inputs, *grads, strict=True):
            budget.assert_within_budget(name, got, reference, baseline, steps=STAGES)


def written(impl: str, dtype: torch.dtype, inputs: list[torch.Tensor], packing: flashmix.Packing | None):
    """Write keys, the last curvature, and the gradient of every tensor."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    outputs = PRECONDITIONER(PreconditionerCall(*leaves, 1.5, 1e-6, packing), impl)
    generator = torch.Generator().manual_seed(1)
    flows = [torch.randn(t.shape, generator=generator).to(dtype) for t in outputs]
    return [t.detach() for t in outputs] + list(torch.autograd.grad(outputs, leaves, flows))


@pytest.mark.skipif(preconditioner_missing() is not None, reason=str(preconditioner_missing()))
@pytest.mark.parametrize("level", range(MOST + 1))
@pytest.mark.parametrize(("heads", "width", "lengths"), [(3, 19, (3, 0, 50, 7)), (2, 64, None), (1, 1, None)])
def test_the_preconditioner_is_its_formula(instructions, heads, width, lengths, level):
    if instructions(level) != level:
        pytest.skip("this machine does not have them")
    packing, batch, tokens = (
        (None, 2, 70) if lengths is None else (flashmix.Packing.from_lengths(lengths), 1, sum(lengths))
    )
    generator, rows = torch.Generator().manual_seed(0), (batch, tokens, heads)
    k, weight, g = torch.randn(*rows, width, generator=generator), *torch.rand(2, *rows, generator=generator)
    start = torch.rand(batch if lengths is None else len(lengths), heads, width, generator=generator)
    inputs = [k, weight, -g, torch.randn(heads, generator=generator), start]
    exact, plain, got = (
        written(impl, dtype, inputs, packing)
        for impl, dtype in (("portable", torch.float64), ("portable", torch.float32), ("native", torch.float32))
    )
    names = ("write", "last", "d_k", "d_weight", "d_log_decay", "d_log_scale", "d_curvature")
    for name, *three in zip(names, got, exact, plain, strict=True):
        budget.assert_within_budget(name, *three, steps=STAGES)
