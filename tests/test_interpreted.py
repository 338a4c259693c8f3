"""Runs the tests marked `interpreted`: the kernels themselves, in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreted", str(TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 5), done.stdout[-8000:] + done.stderr[-2000:]
