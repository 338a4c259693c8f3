"""DPLR's kernels for Hopper on a CPU, in the emulator of Gluon, beside those of Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recurrence_gpu
import test_recurrence_gpu
import torch
from cases import Case, make_inputs
from samples import sample
from test_recurrence import same_bits
from test_recurrence_gpu import DPLR_CASES, fused_backward

import flashmix

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card
from recurrence_emulated import apart, cut_into, emulated

__all__ = ["apart", "fused_backward"]  # fixtures

DPLR = [
    Case("dplr-resets", "dplr", "channel", B=1, T=70, H=1, HV=2, K=128, V=24, decay="resets"),
    Case("dplr-64-packed", "dplr", "channel", B=1, T=75, H=1, HV=1, K=64, V=16, lengths=(5, 0, 70)),
    # These with the Hopper kernels for the state passes and the backward of `output`.
    Case("dplr-output", "dplr", "channel", B=1, T=134, H=1, HV=2, K=128, V=128),
    Case("dplr-output-resets", "dplr", "channel", B=2, T=70, H=1, HV=1, K=72, V=120, decay="resets"),
    Case("dplr-output-packed", "dplr", "channel", B=1, T=75, H=1, HV=1, K=96, V=80, lengths=(5, 0, 70)),
]


@pytest.mark.parametrize(
    "case",
    sample([*DPLR, *DPLR_CASES], [case for case in DPLR if case.name != "dplr-output-resets"]),
    ids=lambda case: case.name,
)
def test_emulated_pairs_of_dplr_are_within_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between Triton's kernels, which make everything else, with other than 72 to 128 channels the state passes and the backward of
    `output` too; the sums of the decay are written in the backward.
    """
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert launched.count("dplr_scores_kernel") == launched.count("channel_inverse_kernel") == 2, launched
    assert "decay_sums_kernel" not in launched and "scores_forward_kernel" not in launched, launched
    own = case.K > 64 and 64 < case.V <= 128
    for phase in ("state_forward", "state_backward", "output"):
        triton = "output_backward" if phase == "output" else phase
        assert (f"dplr_{phase}_kernel" in launched, f"{triton}_kernel" in launched) == (own, not own), launched


def test_emulated_gradients_of_dplr_do_not_depend_on_what_is_asked_for() -> None:
    """Nor on the dtype of a decay that holds the same numbers, nor on which program makes a chunk and which of its roles comes first."""
    case = Case("dplr", "dplr", "channel", B=1, T=70, H=1, HV=2, K=72, V=72)
    x = make_inputs(case, torch.bfloat16)
    x["log_decay"] = x["log_decay"].to(torch.bfloat16).float()
    found = []
    for dtype, asked, card in (
        (torch.float32, list(x), {}),
        (torch.float64, list(x), {"multiprocessors": 3, "seed": 7}),
        (torch.bfloat16, list(x), {"multiprocessors": 2, "seed": 8}),
        (torch.float32, ["k", "b"], {}),
    ):
        leaves = {n: (t.to(dtype) if n == "log_decay" else t).requires_grad_(n in asked) for n, t in x.items()}
        with hopper_card(**card) as launched:
            o, _ = flashmix.dplr(**leaves, impl="gluon")
            grads = torch.autograd.grad(o, [leaves[n] for n in asked], torch.ones_like(o))
        assert "dplr_output_kernel" in launched
        found.append(dict(zip(asked, grads, strict=True)))
    for other in found[1:]:
        for name, t in other.items():
            assert torch.equal(t, found[0][name].to(t.dtype)), name


def test_emulated_gradients_of_dplr_of_one_token_alone_and_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same bits: the step keeps nothing, and its backward is that of a chunk of one token."""
    monkeypatch.setattr(recurrence_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(recurrence_gpu, "impl_of", lambda case: "gluon")
    packed = Case("dplr", "dplr", "channel", B=1, T=3, K=72, V=72, lengths=(1, 2))
    x = recurrence_gpu.small(packed)
    one, first = slice(0, 1), slice(0, 1)
    with hopper_card():
        together = recurrence_gpu.results(packed, x)
    with hopper_card() as launched:
        alone = recurrence_gpu.results(replace(packed, T=1, lengths=None), recurrence_gpu.cut(x, one, first))
    assert "dplr_state_backward_kernel" in launched and "scores_forward_kernel" not in launched, launched
    recurrence_gpu.assert_same(recurrence_gpu.cut(together, one, first), alone, 1)


def test_emulated_dplr_without_tokens_launches_nothing() -> None:
    """Its state stays, and its gradient comes from the state alone."""
    x = make_inputs(Case("dplr", "dplr", "channel", B=1, T=0, K=72, V=72, lengths=(0,)), torch.bfloat16)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    with hopper_card() as launched:
        cu = torch.zeros(2, dtype=torch.long)
        o, state = flashmix.dplr(**leaves, cu_seqlens=cu, return_state=True, impl="gluon")
        grads = torch.autograd.grad([o, state], list(leaves.values()), [o, torch.full_like(state, 0.5)])
    assert launched == [] and torch.equal(state, x["initial_state"])
    for (name, t), grad in zip(leaves.items(), grads, strict=True):
        assert grad.shape == t.shape and bool((grad == 0.5).all()) == (name == "initial_state" or grad.numel() == 0), (
            name
        )


@pytest.mark.whole
def test_emulated_output_of_dplr_beside_tritons_state_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.dplr.has_states", lambda call: False)
    case = Case("dplr-output", "dplr", "channel", B=1, T=75, H=1, HV=1, K=96, V=80, lengths=(5, 0, 70))
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert {"state_forward_kernel", "state_backward_kernel", "dplr_output_kernel"} <= set(launched), launched


@pytest.mark.whole
def test_emulated_segments_of_dplr_are_within_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(2, monkeypatch)
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    case = Case("dplr-segments", "dplr", "channel", B=1, T=140, H=1, HV=1, K=72, V=72)
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert {"dplr_scores_kernel", "segments_forward_kernel", "segments_backward_kernel"} <= set(launched), launched
    assert {"dplr_state_forward_kernel", "dplr_state_backward_kernel", "dplr_output_kernel"} <= set(launched), launched


def test_emulated_halves_of_the_values_of_dplr_change_no_bit() -> None:
    """With few programs a state pass has one warpgroup and half of the values."""
    case = Case("dplr-halves", "dplr", "channel", B=1, T=134, H=1, HV=1, K=72, V=104)
    wanted, found = emulated(case, 1)[0], emulated(case, 132)[0]
    for name, t in wanted.items():
        same_bits(found[name], t, name)
