"""benchmarks/card.py runs jobs in a given time and knows which GPU tests were not reached."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT, load


@pytest.fixture
def card() -> Any:
    return load(ROOT / "benchmarks" / "card.py")


def test_a_job_that_takes_too_long_is_ended_and_the_next_one_runs(card, monkeypatch, tmp_path, capsys) -> None:
    quick = "python -c \"import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['BENCHMARK_RESULTS'])\""
    slow = "python -c \"import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('what there is')\""
    stubborn = 'python -c "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"'
    monkeypatch.setattr(card, "GRACE", 1)
    jobs = {
        "slow": card.Job(slow, 5),  # by then Python has begun, also beside other work
        "stubborn": card.Job(stubborn, 1),
        "quick": card.Job(quick, 20),
        "check": card.Job(quick, 20, False),
    }
    monkeypatch.setattr(card, "JOBS", jobs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(sys, "argv", ["card.py", "--out", str(tmp_path)])
    card.main()
    printed = capsys.readouterr().out
    assert "slow: ended after its 5 s" in printed and "stubborn: ended after its 1 s" in printed
    assert (tmp_path / "slow.log").read_text() == "what there is\n"  # it was asked first
    assert "quick: exit status 0" in printed and "check: exit status 0" in printed
    assert (tmp_path / "quick.log").read_text().split() == ["3", str(tmp_path)]
    assert (tmp_path / "check.log").read_text().split()[0] == "5"


def test_tests_that_failed_or_were_not_reached_are_listed(card, tmp_path: Path) -> None:
    wanted = [
        "tests/test_a.py::test_x[1 - 2]",
        "tests/test_a.py::test_y",
        "tests/test_b.py::test_z",
        "tests/test_b.py::test_w",
    ]
    (tmp_path / "all.txt").write_text("\n".join(wanted))
    lines = [
        "[gw0] [ 10%] PASSED tests/test_a.py::test_x[1 - 2] ",
        "[gw1] [ 20%] FAILED tests/test_a.py::test_y ",
        "[gw1] [ 30%] SKIPPED tests/test_b.py::test_z <- tests/other.py ",
    ]
    (tmp_path / "tests.log").write_text("\n".join(lines))
    assert "2 of 4" in card.write_missing(tmp_path, tmp_path / "all.txt")
    assert (tmp_path / "missing.txt").read_text().split("\n") == [wanted[1], wanted[3]]


def test_kernels_that_have_not_run_on_a_card_are_switched_on(card, monkeypatch, tmp_path: Path) -> None:
    """All variables of the library are in the list, and a job sees them."""
    files = (ROOT / "flashmix").rglob("*.py")
    assert set(card.TRIED) == {name for file in files for name in re.findall(r"FLASHMIX_TRY_\w+", file.read_text())}
    job = card.Job(
        "python -c \"import os; print(os.environ['FLASHMIX_TRY_THIS'])\"", 60, switches=("FLASHMIX_TRY_THIS",)
    )
    monkeypatch.setattr(card, "JOBS", {"tried": job})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["card.py", "--out", str(tmp_path)])
    card.main()
    assert (tmp_path / "tried.log").read_text() == "1\n"


def test_names_of_jobs_are_checked(card, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["card.py", "--out", "x", "--jobs", "recurence"])
    with pytest.raises(SystemExit):
        card.main()
    assert "no such job: recurence" in capsys.readouterr().err
