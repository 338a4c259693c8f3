"""Runs the tests marked `interpreted`: the kernels themselves, in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONG = "test_recurrence_gpu.py"  # about as long as all others together


def test_kernels_in_the_interpreter():
    """In two processes at once, one thread each: they are most of the suite's longest test."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreted"]
    parts = ([str(TESTS / LONG)], [str(TESTS), f"--ignore={TESTS / LONG}"])
    running = [
        subprocess.Popen(
            [*command, *part],
            env=environment,
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in parts
    ]
    try:
        for process in running:
            printed, _ = process.communicate(timeout=600)
            assert process.returncode in (0, 5), printed[-8000:]
    finally:
        for process in running:
            process.kill()
