"""`flashmix doctor` and `explain`: they answer on any machine, and name every op that has a choice."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashmix
from flashmix import doctor
from flashmix.gpu import arch
from flashmix.mechanisms.registry import MECHANISMS
from flashmix.op.choose import Explanation, Implementation, choose, explain
from flashmix.train import cli

ROOT = Path(__file__).resolve().parent.parent


def test_doctor_names_every_op_that_chooses() -> None:
    """An op whose last keyword is `impl` is in the doctor's list, unless it is a mechanism that calls one that is."""
    ops = {name for name in flashmix.__all__ if "impl" in _parameters(getattr(flashmix, name))}
    mechanisms = ops & set(MECHANISMS)
    assert {choice.op for choice in doctor.choices("cpu")} == ops - mechanisms


def _parameters(thing: object) -> list[str]:
    return list(inspect.signature(thing).parameters) if callable(thing) else []


def test_every_op_has_an_implementation_here() -> None:
    for choice in doctor.choices("cpu"):
        assert choice.choice is not None and choice.reasons["portable"] is None


def test_a_line_tells_the_choice_and_the_reasons() -> None:
    choice = Explanation("op", "plain", {"fast": "it needs a GPU", "plain": None, "slow": None})
    line = doctor.describe(choice)
    assert line.split()[:2] == ["op", "plain"] and line.endswith("(fast: it needs a GPU; slow: could run this too)")
    line = doctor.describe(Explanation("op", None, {"fast": "no"}))
    assert line.split() == ["op", "nothing", "(fast:", "no)"]


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"torch {torch.__version__}" in printed
        and "CPU: " in printed
        and "delta_rule" in printed
        and "portable" in printed
    )
    assert "GPU" in printed and "triton" in printed


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = arch.Gpu(0, "Some Card", (9, 0), 227 * 1024, 132)
    monkeypatch.setattr(arch, "gpus", lambda: [card])
    line = next(line for line in doctor.hardware() if line.startswith("GPU 0"))
    assert line == "GPU 0: Some Card, compute capability 9.0, 227 KiB shared memory per block, 132 multiprocessors"


@pytest.mark.parametrize("version", [None, "3.6.0"])
def test_triton_is_looked_up_not_imported(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(arch, "triton_version", lambda: version)
    line = list(doctor.hardware())[1]
    assert line == "triton is not installed: no triton implementation can run" if version is None else "triton 3.6.0"


def test_doctor_answers_in_a_process_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashmix.train.cli", "doctor"],
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "GPU: none" in done.stdout


FAST = Implementation[int]("fast", "nowhere", lambda size: None if size > 3 else f"size {size} is under 4")
PLAIN = Implementation[int]("plain", "nowhere", lambda size: None)
PICKY = Implementation[int]("picky", "nowhere", lambda size: "it never can")


def op(size: int, impl: str = "auto") -> str:
    return choose("op", (FAST, PLAIN), size, impl).name


def test_auto_takes_the_first_that_can_and_a_name_never_falls_back() -> None:
    assert op(4) == "fast" and op(3) == "plain" and op(4, "plain") == "plain"
    with pytest.raises(ValueError, match=r"^impl='fast' cannot run this: size 3 is under 4$"):
        op(3, "fast")
    with pytest.raises(ValueError, match=r"^impl must be one of 'auto', 'fast', 'plain', got 'quick'$"):
        op(3, "quick")
    with pytest.raises(ValueError, match=r"^impl='auto' cannot run this: it never can$"):
        choose("op", (PICKY,), 3)


def test_explain_tells_the_choice_and_the_reasons() -> None:
    assert explain(op, 3) == Explanation("op", "plain", {"fast": "size 3 is under 4", "plain": None})
    assert str(explain(op, 3)) == "op: plain\n  fast: cannot run this: size 3 is under 4\n  plain: taken"
    assert str(explain(op, 4)) == "op: fast\n  fast: taken\n  plain: can run this, but an earlier one is taken"
    assert str(explain(op, 3, "fast")).startswith("op: no implementation can run this")
    assert op(4) == "fast", "explain leaves ordinary calls alone"


def test_explain_checks_like_a_call_and_refuses_other_functions() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="must have shape"):
        explain(flashmix.linear_attention, q, q[..., :4], q)
    with pytest.raises(TypeError, match="is not a flashmix op"):
        explain(len, [1])
