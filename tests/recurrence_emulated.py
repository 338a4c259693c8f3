"""Calls of the recurrence's kernels for Hopper in the emulator of Gluon, for several test modules."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from cases import Case, make_inputs, run_op
from compilers.gluon_emulator import hopper_card
from test_recurrence import evaluate
from test_recurrence_gpu import fused_backward

__all__ = ["apart", "fused_backward"]  # fixtures


@pytest.fixture(autouse=True)
def apart(fused_backward: Any) -> None:
    """The backward of the output is a kernel of its own where a test does not ask for the walk, which is for calls that fill a card."""
    fused_backward(False)


def emulated(case: Case, multiprocessors: int = 1) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Output, state and gradients, and the kernels that were launched."""
    with hopper_card(multiprocessors) as launched:
        return evaluate(run_op, case, make_inputs(case, torch.bfloat16), "gluon"), launched


def cut_into(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = importlib.import_module("flashmix.ops.recurrence.triton_gpu.plan")
    monkeypatch.setattr(plan, "segments_of", lambda call, kind: 1 if call.packed else segments)
