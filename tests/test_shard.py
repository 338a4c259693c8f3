"""Ops over a shard: gloo processes on the CPU, in float64, whose results together are those of one process."""

from __future__ import annotations

import fcntl
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shard_cases
import shard_extras
import torch
from budget import assert_within_budget
from processes import together
from shard_cases import CASES, JOBS, PACKINGS, RANKS, SAMPLE, Job

import flashmix
from flashmix.op.packing import Packing
from flashmix.parallel.exchange import GROUPS
from flashmix.parallel.join import by_heads
from flashmix.parallel.shard import Link

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 1e-12  # of the largest entry: float64 rounds at 1e-16, and these rows have at most 89 tokens


def name_of(job: Job) -> str:
    case, ranks, order, packing, dtype = job
    narrow = "" if dtype == torch.float64 else f", {str(dtype).removeprefix('torch.')}"
    return f"{CASES[case].name}, {ranks} ranks, {order}, {packing}{narrow}"


def compute(folder: Path, jobs: list[Job], whole: bool) -> None:
    together(shard_cases.work, (str(folder), jobs, whole), max(RANKS))


def of_all_ranks(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(max(RANKS))]


def assert_one_process(job: Job, found: list[dict[Any, Any]]) -> None:
    case, ranks, order, packing, dtype = job
    lengths = PACKINGS[packing]
    whole = Packing.from_lengths(lengths)
    ranges = shard_cases.layout(order, whole.total, ranks)
    have = shard_cases.together([found[rank][job] for rank in range(ranks)], lengths, ranges)
    want = shard_cases.evaluate(CASES[case], whole, case, None, dtype, exact=True)
    if dtype == torch.float64:
        for name, (expected, _) in want.items():
            most = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            error = float((have[name] - expected).abs().max()) if expected.numel() else 0.0
            assert error <= CLOSE * most, (name, error)
        return
    baseline = shard_cases.evaluate(CASES[case], whole, case, None, dtype)
    for name, (expected, _) in want.items():
        assert_within_budget(name, have[name], expected, baseline[name][0], dtype)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What every rank computed for the sample, in one start of the processes, which all workers of pytest share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ranks"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            compute(folder, SAMPLE, whole=False)
    return of_all_ranks(folder)


@pytest.mark.parametrize("job", SAMPLE, ids=name_of)
def test_ranks_are_one_process(job: Job, found: list[dict[Any, Any]]) -> None:
    assert_one_process(job, found)


@pytest.mark.parametrize("name", shard_extras.CHECKS)
def test_ranks(name: str, found: list[dict[Any, Any]]) -> None:
    """A check of shard_extras.py, which says what it is."""
    assert_no_complaints(name, found)


def assert_no_complaints(name: str, found: list[dict[Any, Any]]) -> None:
    complaints = [its["extras"][name] for its in found if name in its["extras"]]
    assert len(complaints) >= 3 and not any(complaints), complaints


@pytest.mark.whole
def test_the_whole_product(tmp_path: Path) -> None:
    compute(tmp_path, JOBS, whole=True)
    found = of_all_ranks(tmp_path)
    for job in JOBS:
        assert_one_process(job, found)
    for name in shard_extras.CHECKS:
        assert_no_complaints(name, found)


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_the_join_goes_by_heads_where_that_is_less(ranks: int) -> None:
    """One sequence over more than four ranks; not sequences that end at the next rank."""
    shapes = {"N": torch.Size((16, 128, 128)), "M": torch.Size((16, 128, 128))}
    long = [tuple(Link(rank, 0) for rank in range(ranks))]
    short = [(Link(rank, 1), Link(rank + 1, 0)) for rank in range(ranks - 1)]
    for chains, wanted in ((long, ranks > 4), (short, False)):
        shard: Any = SimpleNamespace(ranks=ranks, chains=chains, made=lambda key, make: make())
        assert by_heads(shard, shapes, gradient=True) == wanted
        assert by_heads(shard, shapes, gradient=False) == wanted


def test_a_group_lives_no_longer_than_its_shards() -> None:
    """A group that the library kept would keep its threads, and one of gloo's that meets the end of Python aborts the process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        shard = Packing.from_lengths([9]).shard(group, ranges=[(0, 4, 9), (0, 0, 4)])
        q = torch.rand(1, 9, 1, 2)
        flashmix.linear_attention(q, q, q, cu_seqlens=shard)
        assert list(GROUPS.values()) == [group]
    finally:
        dist.destroy_process_group()
    del shard, group
    gc.collect()
    assert not list(GROUPS.values())


@pytest.mark.whole
def test_a_compiled_decoder_ends_its_graphs_at_the_ops_over_ranks_alone() -> None:
    """One rank whose pieces lie out of order, so that states and keys are exchanged as between ranks."""
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from flashmix.models import Decoder, DecoderConfig, LayerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        mixers = [LayerConfig("gated_deltanet", {"heads": 2}), LayerConfig("attention", {"heads": 2, "window": 6})]
        model = Decoder(DecoderConfig(vocab_size=11, width=16, layers=mixers)).double()
        ranges = [(0, 30, 47), (0, 0, 20), (0, 20, 30)]
        group: Any = dist.group.WORLD
        shard = Packing.from_lengths([40, 7]).shard(group, ranges=ranges)
        tokens, targets = (shard.take(x) for x in torch.randint(11, (2, 1, 47)))
        found, breaks = [], []
        config: Any = torch._dynamo.config
        nested = hasattr(config, "nested_graph_breaks")  # then a break ends the graph of the innermost frame alone
        for compiled, patches in ((False, {}), (True, {}), *([(True, {"nested_graph_breaks": True})] * nested)):
            torch._dynamo.reset()
            counters.clear()
            model.zero_grad(set_to_none=True)
            with config.patch(patches):
                forward = torch.compile(model, backend="aot_eager") if compiled else model
                loss = forward(tokens, cu_seqlens=shard, targets=targets, reduction="sum")
                loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
            breaks.append(dict(counters["graph_break"]))
    finally:
        dist.destroy_process_group()
    for compiled in found[1:]:
        assert all(
            float((a - b).abs().max()) <= CLOSE * max(1.0, float(b.abs().max()))
            for a, b in zip(found[0], compiled, strict=True)
        )
    _, plain, *nested_breaks = breaks
    for reasons in (plain, *nested_breaks):
        assert reasons and all("over_ranks" in reason or "exchanged" in reason for reason in reasons), reasons
    # Four ops are called over ranks. Each is counted once in every Python frame around it (eight of the convolution, which grew by those of
    # `recomputed` and of the decoder's blocks; attention's and the recurrence's have one more, which asks for the kind of a call), and once
    # where `over_ranks` reaches `exchanged`.
    assert sum(plain.values()) <= 41, plain
    assert all(sum(reasons.values()) <= 10 for reasons in nested_breaks), nested_breaks


def test_on_a_gpu_kernels_start_behind_the_exchange_that_is_to_run_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what streams are told, of tensors without data: the collective waits for a multiprocessor if it is not the first."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flashmix.parallel import heads

    told: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.events = name, 0

        def wait_stream(self, other: Any) -> None:
            told.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            self.events += 1
            told.append(f"{self.name} reaches {self.events}")
            return f"{self.events} of {self.name}"

        def wait_event(self, event: str) -> None:
            told.append(f"{self.name} waits for {event}")

    own, lane = Stream("own"), Stream("lane")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(told.append(f"on {stream.name}")))
    monkeypatch.setattr(heads, "lane", lambda device: lane)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *given, **options: told.append("exchange"))
    shard: Any = SimpleNamespace(group=None)
    with FakeTensorMode():
        transfer = heads.begun(torch.empty(6, device="cuda"), [2, 4], [3, 3], shard)
    begun = ["lane waits for own", "lane reaches 1", "on lane", "exchange", "own waits for 1 of lane", "lane reaches 2"]
    assert told == begun and transfer.found.shape == (6,)
    transfer.arrived()
    transfer.arrived()
    assert told == [*begun, "own waits for 2 of lane"]
    with FakeTensorMode():
        heads.begun(
            torch.empty(6, device="cuda"), [2, 4], [3, 3], shard
        )  # dropped, as by an error: waited for all the same
    assert told[-1] == "own waits for 4 of lane"


def test_the_exchange_is_an_operator_with_a_fake() -> None:
    """Its shapes are known without an exchange, and it passes torch's own checks of operators."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from flashmix.parallel.exchange import all_to_all

        group: Any = dist.group.WORLD
        shard = Packing.from_lengths([4]).shard(group)
        rows = torch.randn(4, 3)
        assert torch.equal(all_to_all(rows, [4], [4], shard), rows)
        checks = ("test_schema", "test_faketensor")
        operands = (rows, [4], [4], shard.group.group_name)
        torch.library.opcheck(torch.ops.flashmix.all_to_all.default, operands, test_utils=checks)
    finally:
        dist.destroy_process_group()
