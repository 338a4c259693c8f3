"""The recurrence's kernels for Hopper over several ranks, on a CPU, in the emulator of Gluon: the bits and the budget of one process."""

from __future__ import annotations

from typing import Any

import pytest
import shard_cases
import threads_as_ranks
import torch
from budget import assert_within_budget
from test_recurrence_gpu import MIXED, fused_backward

import flashmix
from flashmix.op.packing import Packing
from flashmix.parallel.shard import Shard

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card
from recurrence_emulated import apart, cut_into

__all__ = ["apart", "fused_backward"]  # fixtures


@pytest.mark.parametrize("tokens, segments", [(140, 1), pytest.param(264, 2, marks=pytest.mark.whole)])
def test_emulated_ranks_walk_to_the_same_bits(
    tokens: int, segments: int, fused_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ranks too the backward of the output in the walk of the states has the bits of the kernels that it joins."""
    for name, size in (("K", 128), ("V", 128), ("H", 1), ("HV", 1)):
        monkeypatch.setattr(shard_cases, name, size)
    monkeypatch.setattr(flashmix, "l2_norm", lambda x: torch.nn.functional.normalize(x, dim=-1))  # not by a kernel
    cut_into(segments, monkeypatch)
    whole, ranges = Packing.from_lengths([tokens]), shard_cases.layout("contiguous", tokens, 2)
    kernels = shard_cases.recurrence("tied", "token", states=True, impl="gluon")

    def work(group: Any) -> dict[str, Any]:
        shard = Shard(whole.on_host(), ranges, group, whole.cu_seqlens)
        return shard_cases.evaluate(kernels, shard, 0, shard.pieces[shard.rank], torch.bfloat16)

    found = []
    for walk in (False, True):
        fused_backward(walk)
        with hopper_card() as launched:
            found.append(shard_cases.together(threads_as_ranks.run(2, work), [tokens], ranges))
        assert launched.count("walk_backward_kernel") == 2 * walk, launched
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    "job",
    [
        ("tied", "token", 2, "zigzag", 264, 2),
        ("tied", "channel", 2, "contiguous", 140, 1),
        *(
            pytest.param(job, marks=pytest.mark.whole)
            for job in (
                ("dplr", "channel", 2, "contiguous", 140, 1),
                ("tied", "channel", 2, "zigzag", 264, 1),
                ("dplr", "channel", 2, "zigzag", 264, 2),
                ("dplr", "channel", 3, "uneven", 300, 1),
                ("dplr", "channel", 2, "zigzag", 264, 1, 64),
                ("linear", "token", 2, "contiguous", 264, 2),
                ("tied", "token", 3, "contiguous", 400, 2),
                ("tied", "token", 2, "contiguous", 140, 1),
                ("tied", "channel", 2, "zigzag", 264, 2),
                ("tied", "channel", 3, "uneven", 300, 1),
                ("linear", "channel", 2, "contiguous", 264, 2),
                ("linear", "channel", 3, "uneven", 300, 1),
            )
        ),
        pytest.param(("tied", "token", 2, "zigzag", 264, 2, 64), marks=pytest.mark.whole),
        pytest.param(("tied", "token", 2, "contiguous", 140, 1, 64), marks=pytest.mark.whole),
        pytest.param(("linear", "token", 2, "contiguous", 264, 2, 64), marks=pytest.mark.whole),
        *(
            pytest.param((rule, "token", ranks, order, tokens, segments, K, V), marks=pytest.mark.whole)
            for K, V in MIXED
            for rule, ranks, order, tokens, segments in (
                ("tied", 2, "zigzag", 264, 2),
                ("tied", 3, "contiguous", 200, 1),
                ("linear", 2, "contiguous", 264, 2),
            )
        ),
        pytest.param(("tied", "token", 2, "zigzag", 264, 2, 256), marks=pytest.mark.whole),
        pytest.param(("tied", "token", 2, "contiguous", 140, 1, 256), marks=pytest.mark.whole),
        pytest.param(("linear", "token", 2, "zigzag", 264, 2, 256), marks=pytest.mark.whole),
        pytest.param(("linear", "token", 2, "contiguous", 140, 1, 256), marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_emulated_ranks_are_one_process(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule, decay, ranks, layout, tokens, segments of a piece, channels: both halves of a call, with the exchange between them."""
    rule, decay, ranks, order, tokens, segments, *channels = job
    K, V = (channels or [128])[0], (channels or [128])[-1]
    for name, size in (("K", K), ("V", V), ("H", 1), ("HV", 1)):
        monkeypatch.setattr(shard_cases, name, size)
    monkeypatch.setattr(flashmix, "l2_norm", lambda x: torch.nn.functional.normalize(x, dim=-1))  # not by a kernel
    cut_into(segments, monkeypatch)
    whole, dtype = Packing.from_lengths([tokens]), torch.bfloat16
    ranges = shard_cases.layout(order, tokens, ranks)
    kernels, formula = (shard_cases.recurrence(rule, decay, states=True, impl=impl) for impl in ("gluon", "portable"))
    want = shard_cases.evaluate(formula, whole, 0, None, dtype, exact=True)
    baseline = shard_cases.evaluate(formula, whole, 0, None, dtype)

    def work(group: Any) -> dict[str, Any]:
        shard = Shard(whole.on_host(), ranges, group, whole.cu_seqlens)
        return shard_cases.evaluate(kernels, shard, 0, shard.pieces[shard.rank], dtype)

    with hopper_card() as launched:
        have = shard_cases.together(threads_as_ranks.run(ranks, work), [tokens], ranges)
    assert segments == 1 or "enter_segments_kernel" in launched, launched
    channel = "dplr_scores_kernel" if rule == "dplr" else "channel_scores_kernel"
    made = channel if decay == "channel" else "scores_forward_kernel"  # with the pairs, once each way or kept
    assert launched.count(made) == (2 if decay == "channel" else 1) * ranks, launched
    for name, (expected, _) in want.items():
        assert_within_budget(name, have[name], expected, baseline[name][0], dtype)
