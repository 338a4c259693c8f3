"""Runs the tests marked `interpreted`: the kernels themselves, in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [path for path in sorted(TESTS.glob("test_*.py")) if "pytest.mark.interpreted" in path.read_text()]
LONGEST = TESTS / "test_recurrence_gpu.py"


@pytest.mark.parametrize(
    "files", [[LONGEST], [path for path in FILES if path != LONGEST]], ids=["recurrence", "others"]
)
def test_kernels_in_the_interpreter(files: list[Path]) -> None:
    """In a process of its own, since triton decides by the environment when it is imported; two tests, so that two workers share them."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "interpreted", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1500,  # an EPYC's core took more than 600 s
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
