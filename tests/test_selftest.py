"""`flashmix doctor --check`: it tries what runs here, passes on sound code, and names what is wrong and the way around it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample_of_rows

from flashmix.capabilities import capabilities, public_ops
from flashmix.gpu.arch import Gpu
from flashmix.mechanisms.registry import functions
from flashmix.op.call import Call
from flashmix.ops.recurrence.native.binding import missing
from flashmix.selftest import check
from flashmix.selftest.budget import spend
from flashmix.selftest.definitions import DEFINITIONS
from flashmix.train import cli

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
has_native = pytest.mark.skipif(missing() is not None, reason="the C was not compiled")


def test_every_op_that_is_no_mechanism_has_its_definition() -> None:
    assert set(DEFINITIONS) == set(public_ops()) - set(functions())


def test_every_implementation_that_runs_here_is_checked_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--check"]) == 0
    head, *lines = capsys.readouterr().out.split("on cpu: ")[1].splitlines()
    *lines, total = (line.split() for line in lines)
    listed = {op: [word for word in words if not word[0].isdigit()] for op, *words in lines}
    for op, can in capabilities().items():
        wanted = set(can.implementations) - ({"portable"} if op in functions() else set())
        assert set(listed.get(op, [])) == wanted, op
    assert "budget" in head and total[:2] == ["all", "of"]


@pytest.mark.parametrize("op", ["delta_rule", "kda", "rms_norm", "linear_cross_entropy"])
def test_trials_have_gradients_and_two_dtypes(op: str) -> None:
    trials = list(check.trials(op))
    assert check.differentiable(trials[0]) and trials[0].dtype == torch.float32
    assert op in functions() or {trial.dtype for trial in trials} == {torch.float32, torch.bfloat16}
    results = check.evaluate(
        DEFINITIONS.get(op, public_ops()[op]), trials[0].arguments(torch.float64, CPU), torch.float32, True
    )
    assert any(name.startswith("gradient") and t.count_nonzero() for name, t in results.items())


def test_steps_are_checked_by_what_they_write() -> None:
    (first, *_) = check.trials("delta_rule_step")
    exact, _ = check.expected(first, False)
    assert list(exact) == ["result 1", "result 2"] and exact["result 2"].shape == (2, 2, 32, 32)


def spoil(monkeypatch: pytest.MonkeyPatch, module: str, name: str, change: Callable[[Any], Any]) -> None:
    """Changes what a function of an implementation returns."""
    loaded = importlib.import_module(module)
    before = getattr(loaded, name)
    monkeypatch.setattr(loaded, name, lambda *arguments: change(before(*arguments)))


def failed_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *ops: str) -> list[str]:
    """What `doctor --check` of some ops prints as it fails."""
    all_ops = public_ops()
    monkeypatch.setattr(check, "public_ops", lambda: {op: all_ops[op] for op in ops})
    assert cli.main(["doctor", "--check"]) == 1
    return capsys.readouterr().out.split("on cpu: ")[1].splitlines()[1:]


@has_native
def test_a_wrong_gradient_is_named_with_the_way_around_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient is off by 2^-14 of its size, which no test by eye would see."""
    native = "flashmix.ops.recurrence.native"
    spoil(monkeypatch, native, "backward", lambda found: found | {"v": found["v"] * (1 + 2**-14)})
    sound, *lines = failed_lines(capsys, monkeypatch, "rms_norm", "kda")
    assert sound.split()[:2] == ["rms_norm", "portable"]
    assert lines[0].split() == ["kda", "native", "FAILED"]
    assert "kda, native, float32, 150 tokens: gradient of v: " in lines[1] and "is over the budget" in lines[1]
    assert 'kda(..., impl="portable"), or FLASHMIX_AVOID=native in the environment' in lines[1]
    assert lines[2].startswith("1 of 2 ops are not within the error budget")


def test_wrong_plain_pytorch_is_noticed_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(
        monkeypatch,
        "flashmix.ops.norm.portable",
        "forward",
        lambda found: (tuple(t * 1.001 for t in found[0]), found[1]),
    )
    lines = failed_lines(capsys, monkeypatch, "rms_norm")
    assert "result 1: " in lines[1] and "another version of torch" in lines[1]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    spoil(
        monkeypatch,
        "flashmix.ops.norm.portable",
        "forward",
        lambda found: (tuple(t * number for t in found[0]), found[1]),
    )
    lines = failed_lines(capsys, monkeypatch, "l2_norm")
    assert "result 1: not finite" in lines[1]


def test_an_implementation_that_raises_fails_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Call, save: bool) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(importlib.import_module("flashmix.ops.norm.portable"), "forward", refuse)
    lines = failed_lines(capsys, monkeypatch, "rms_norm", "swiglu")
    assert "RuntimeError: no kernel image;" in lines[1] and lines[2].split()[0] == "swiglu"


class Pool(Executor):
    """Runs at once, on the CPU, what is sent to another process for a GPU; one op's process dies."""

    def __init__(self, dies: str = "") -> None:
        self.begun: list[str] = []
        self.dies = dies

    def submit(self, function: Callable[..., Any], /, op: str, device: torch.device) -> Future[Any]:  # type: ignore[override]
        assert function is check.verdicts_of and device.type == "cuda"
        self.begun.append(op)
        done: Future[Any] = Future()
        if op == self.dies:
            done.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
        else:
            done.set_result(function(op, CPU))
        return done


@pytest.mark.parametrize("dies", ["", "rms_norm"])
def test_gpus_are_checked_beside_the_cpu_the_ops_with_most_calls_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    all_ops, pool = public_ops(), Pool(dies)
    ops = ("mingru", "rms_norm", "token_shift", "dplr")  # 1, 2, 3 and 3 calls
    monkeypatch.setattr(check, "public_ops", lambda: {op: all_ops[op] for op in ops})
    monkeypatch.setattr(check, "processes", lambda: pool)
    monkeypatch.setattr(check.arch, "gpus", lambda: [Gpu(0, "H200", (9, 0), 232448, 132)])
    before = check.verdicts_of
    began_before_the_cpu: list[bool] = []

    def verdicts_of(op: str, device: torch.device) -> list[check.Verdict]:
        began_before_the_cpu.append(len(pool.begun) > 0)
        return before(op, device)

    monkeypatch.setattr(check, "verdicts_of", verdicts_of)
    assert check.check() is (dies == "")
    assert pool.begun == ["token_shift", "dplr", "rms_norm", "mingru"] and all(began_before_the_cpu)
    on_cpu, on_gpu = capsys.readouterr().out.split("on cuda:0: ")
    assert [line.split()[0] for line in on_cpu.splitlines()[1:]] == list(ops)
    wanted = "rms_norm, triton, BrokenProcessPool: A process in the process pool" if dies else "all of 8 ops"
    assert wanted in on_gpu and on_gpu.count("FAILED") == bool(dies)


def test_processes_have_one_thread_each() -> None:
    with check.processes() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_the_budget_is_twice_the_baseline_and_its_steps() -> None:
    exact = torch.ones(8, dtype=torch.float64)
    step = torch.finfo(torch.float32).eps
    for off, within in ((0, True), (3, True), (5, False)):
        got = exact.float() * (1 + off * step)
        assert all(s.within == within for s in spend(got, exact, exact.float() * (1 + step), steps=2))


@has_native
@pytest.mark.parametrize(
    "avoided, taken",
    sample_of_rows([("native", "portable"), ("triton, portable", "native"), ("", "native")], [("native", "portable")]),
)
def test_the_environment_leaves_an_implementation_out(avoided: str, taken: str) -> None:
    """Of "auto" alone: by name it runs as before. Plain PyTorch cannot be left out."""
    code = """
import torch, flashmix
q = torch.ones(1, 2, 1, 4)
found = flashmix.explain(flashmix.linear_attention, q, q, q)
flashmix.linear_attention(q, q, q, impl="native")
print(found.choice, "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FLASHMIX_AVOID": avoided},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split()[0] == taken, done.stderr
    assert ("native: the environment variable FLASHMIX_AVOID names it" in done.stdout) == (avoided == "native")
