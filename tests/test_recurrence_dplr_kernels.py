"""The kernels that make the pairs of DPLR on Hopper compile without a GPU, and serve only where they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashmix.gpu.arch import SHARED_MEMORY_KIB

pytest.importorskip("triton")
from kernels import compile_launch
from test_recurrence_kernels import WIDE, launches

LOW_RANK = replace(WIDE, rule="dplr", gate="channel")
DPLR = {
    "two value heads": LOW_RANK,
    "64 channels, packed": replace(LOW_RANK, K=64, V=64, lengths=(60, 0, 70)),
    "many heads": replace(LOW_RANK, H=80, HV=80),
    "packed": replace(LOW_RANK, lengths=(60, 0, 70)),
    "narrow": replace(LOW_RANK, K=96, V=80),
    "segments": replace(LOW_RANK, T=8192, states=False),
}


def test_pairs_of_dplr_on_hopper_are_asked_for():
    """They have not run on a card: see `TRY_DPLR`."""
    with pytest.raises(ValueError, match="the tied delta rule"):
        launches(LOW_RANK, torch.bfloat16, (9, 0), "gluon")
    assert not any(launch.kernel.is_gluon() for launch in launches(LOW_RANK, torch.bfloat16, (9, 0), "auto"))


@pytest.mark.parametrize("K, V, dtype", [(32, 64, torch.bfloat16), (136, 64, torch.bfloat16), (64, 64, torch.float16)])
def test_pairs_of_dplr_that_hopper_kernels_leave(K, V, dtype, monkeypatch):
    monkeypatch.setattr("flashmix.ops.recurrence.op.TRY_DPLR", True)
    with pytest.raises(ValueError, match=r"above 32 and up to 128|float16"):
        launches(replace(LOW_RANK, K=K, V=V), dtype, (9, 0), "gluon")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=[pytest.mark.whole] * (name not in ("two value heads", "64 channels, packed"))
        )
        for name, case in DPLR.items()
    ],
)
def test_pairs_of_dplr_on_hopper_compile(case, monkeypatch):
    """Within shared memory for two programs a multiprocessor, without spills, lost descriptors or products awaited early."""
    monkeypatch.setattr("flashmix.ops.recurrence.op.TRY_DPLR", True)
    found = launches(case, torch.bfloat16, (9, 0), "gluon")
    made = {launch.name for launch in found}
    assert {"dplr_scores_kernel", "channel_far_rows_kernel", "channel_inverse_kernel"} <= made
    assert not {"decay_sums_kernel", "scores_forward_kernel"} & made
    for launch in found:
        if launch.name in ("dplr_scores_kernel", "channel_far_rows_kernel", "channel_inverse_kernel"):
            made = compile_launch(launch)
            assert 2 * (made.shared + 1024) <= (SHARED_MEMORY_KIB[9, 0] + 1) * 1024, (launch.name, made.shared)
            assert made.stack == 0, (launch.name, made.stack)
            assert not made.advice, (launch.name, made.advice)
