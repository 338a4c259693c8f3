"""Ops over a shard: gloo processes on the CPU, in float64, whose results together are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shard_cases
import shard_extras
import torch
from shard_cases import CASES, JOBS, PACKINGS, RANKS, SAMPLE

from flashmix.op.packing import Packing

CLOSE = 1e-12  # of the largest entry: float64 rounds at 1e-16, and these rows have at most 89 tokens


def name_of(job: tuple[int, int, str, str]) -> str:
    case, ranks, order, packing = job
    return f"{CASES[case].name}, {ranks} ranks, {order}, {packing}"


def of_all_ranks(folder: Path, jobs: list[tuple[int, int, str, str]], extras: bool) -> list[dict[Any, Any]]:
    torch.multiprocessing.spawn(shard_cases.work, (str(folder), jobs, extras), nprocs=max(RANKS))
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(max(RANKS))]


def assert_one_process(job: tuple[int, int, str, str], found: list[dict[Any, Any]]) -> None:
    case, ranks, order, packing = job
    lengths = PACKINGS[packing]
    whole = Packing.from_lengths(lengths)
    ranges = shard_cases.layout(order, whole.total, ranks)
    have = shard_cases.together([found[rank][job] for rank in range(ranks)], lengths, ranges)
    want = shard_cases.evaluate(CASES[case], whole, case, None)
    for name, (expected, _) in want.items():
        error = (have[name] - expected).abs().max() if expected.numel() else torch.zeros(())
        assert error <= CLOSE * max(1.0, float(expected.abs().max() if expected.numel() else 0)), (name, float(error))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What every rank computed for the sample, in one start of the processes."""
    return of_all_ranks(tmp_path_factory.mktemp("ranks"), SAMPLE, extras=True)


@pytest.mark.parametrize("job", SAMPLE, ids=name_of)
def test_ranks_are_one_process(job: tuple[int, int, str, str], found: list[dict[Any, Any]]) -> None:
    assert_one_process(job, found)


@pytest.mark.parametrize("name", shard_extras.CHECKS)
def test_ranks(name: str, found: list[dict[Any, Any]]) -> None:
    """A check of shard_extras.py, which says what it is."""
    complaints = [its["extras"][name] for its in found if name in its["extras"]]
    assert len(complaints) >= 3 and not any(complaints), complaints


@pytest.mark.whole
def test_the_whole_product(tmp_path: Path) -> None:
    found = of_all_ranks(tmp_path, JOBS, extras=False)
    for job in JOBS:
        assert_one_process(job, found)
