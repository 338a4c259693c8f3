"""Runs the tests marked `interpreted`: the kernels themselves, in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [path for path in sorted(TESTS.glob("test_*.py")) if "pytest.mark.interpreted" in path.read_text()]
GROUPS = 2  # so that workers share them


@pytest.mark.parametrize("which", ["interpreted", pytest.param("interpreted and whole", marks=pytest.mark.whole)])
@pytest.mark.parametrize("group", range(GROUPS))
def test_kernels_in_the_interpreter(group: int, which: str) -> None:
    """In a process of its own, since triton decides by the environment when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", which, *map(str, FILES[group::GROUPS])],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1500,  # an EPYC's core took more than 600 s
    )
    none = pytest.ExitCode.NO_TESTS_COLLECTED if "whole" in which else 0  # a group may have no case for `-m whole`
    assert done.returncode in (0, none), done.stdout[-8000:] + done.stderr[-2000:]
