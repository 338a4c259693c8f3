"""The fuzzer: a short run of random calls, and that a planted defect is found and replayed. `make fuzz` runs it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import cases
from fuzz.cases import Space, run_case, sample_of
from fuzz.runner import replay, run
from torch import Tensor

import flashmix
from flashmix.ops.decay import portable

TESTS = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread")


def test_random_calls_have_no_defect(capfd: pytest.CaptureFixture[str]) -> None:
    status = run(Space(seed=14), seconds=None, calls=100, start=0, workers=1)
    assert status == 0, capfd.readouterr().out


@pytest.mark.whole
def test_many_random_calls_have_no_defect(capfd: pytest.CaptureFixture[str]) -> None:
    status = run(Space(seed=15), seconds=None, calls=10_000, start=0, workers=2)
    assert status == 0, capfd.readouterr().out


def test_a_case_is_a_function_of_seed_and_index() -> None:
    space = Space(seed=3)
    for index in range(len(space.names)):
        first, second = (sample_of(space.draw(index), space.names[index]) for _ in range(2))
        assert first.options == second.options and first.layouts == second.layouts and first.lengths == second.lengths
        assert first.tensors.keys() == second.tensors.keys()
        assert all(torch.equal(t, second.tensors[name]) for name, t in first.tensors.items())


def test_a_structure_has_the_same_kernels_whatever_the_index() -> None:
    """On a GPU: dtypes, options, layouts and all sizes but those of the batch and of time."""
    space = Space(seed=3, few=True)
    for slot in range(0, space.slots, 7):
        samples = [
            sample_of(space.draw(slot + round_ * space.slots), space.names[slot % len(space.names)])
            for round_ in range(3)
        ]
        assert (
            len({(s.dtype, *s.tensors, *(t.dtype for t in s.tensors.values()), *s.layouts.values()) for s in samples})
            == 1
        )


def planted(monkeypatch: pytest.MonkeyPatch) -> Space:
    right = portable.formula

    def wrong(call: object) -> tuple[Tensor, ...]:
        return tuple(g * 1.001 for g in right(call))  # type: ignore[arg-type]

    monkeypatch.setattr(portable, "formula", wrong)
    return Space(seed=1, only=("bounded_decay",))


def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    space = planted(monkeypatch)
    assert run(space, seconds=None, calls=20, start=0, workers=1) == 1
    printed = capsys.readouterr().out
    assert "DEFECT bounded_decay" in printed and "python -m fuzz --seed 1 --index" in printed
    index = next(int(line.split("--index ")[1].split()[0]) for line in printed.splitlines() if "--index" in line)
    assert run_case(space, index).findings and replay(space, index) in printed


def test_a_call_that_is_taken_though_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.OPS, "l2_norm", lambda x, **options: x)
    space = Space(seed=1, only=("l2_norm",))
    found = [outcome for outcome in (run_case(space, index) for index in range(60)) if outcome.kind.startswith("wrong")]
    assert found and all(outcome.findings for outcome in found)
    assert flashmix.l2_norm is not cases.OPS["l2_norm"]


def test_one_case_in_one_command() -> None:
    command = [sys.executable, "-m", "fuzz", "--seed", "1", "--index", "9"]
    done = subprocess.run(command, cwd=TESTS, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("no defect\n"), done.stdout + done.stderr


@pytest.mark.whole
def test_two_workers_share_the_indices() -> None:
    command = [sys.executable, "-m", "fuzz", "--seed", "1", "--calls", "60", "--workers", "2", "--ops", "rotary,swiglu"]
    done = subprocess.run(command, cwd=TESTS, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {
        line.split()[0]: sum(map(int, line.split()[1:]))
        for line in done.stdout.splitlines()
        if line.startswith(("rotary", "swiglu"))
    }
    assert counts == {"rotary": 30, "swiglu": 30}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS.parent)}
