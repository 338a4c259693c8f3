"""The recurrence's kernels for Hopper on a CPU, in the emulator of Gluon: results, the order of roles, barriers that everybody passes."""

from __future__ import annotations

import pytest
import test_recurrence_gpu
import torch
from cases import Case
from test_recurrence_gpu import HOPPER_CASES

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card

CASES = [
    Case("grouped-token", "delta", "token", B=1, T=70, H=1, HV=2, K=128, V=128),
    Case("lone-token", "delta", "token", B=1, T=134, H=2, HV=2, K=128, V=128),
    Case("head-K96V80", "delta", "head", B=1, T=66, H=1, HV=1, K=96, V=80),
    Case("linear", "linear", "token", B=1, T=70, H=1, HV=1, K=128, V=128),
    Case("channel", "delta", "channel", B=1, T=70, H=1, HV=1, K=72, V=80),
    Case("channel-resets", "linear", "channel", B=1, T=70, H=1, HV=1, K=72, V=80, decay="resets"),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.whole) for c in HOPPER_CASES)], ids=lambda case: case.name
)
def test_emulated_kernels_are_within_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    output = "channel_output_kernel" if case.gate == "channel" else "output_backward_kernel"
    assert {"state_forward_kernel", output} <= set(launched), launched
