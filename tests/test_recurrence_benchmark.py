"""The GPU benchmark of the recurrence, where it needs no GPU: its rows and bounds, what it calls wrong, and its files."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flashmix.gpu import device as gpu

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recurrence_rows")


@pytest.fixture
def benchmark(rows: Any) -> Any:
    """The program under a name of its own."""
    spec = importlib.util.spec_from_file_location("benchmark_of_recurrence", BENCHMARKS / "recurrence_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(rows: Any, rule: str) -> Any:
    grouped = rule in ("gated_delta_rule", "kda")
    return rows.Row(rule, 2, 40, 2, 4 if grouped else 2, 16, 8)


def test_bounds_are_those_that_are_published(rows: Any) -> None:
    """0.44 ms for 4 x 8192 x 16 x 64 is of products (164 kFLOP a value head and token), 0.13 for 8 x 4096 x 16 x 16 of bytes."""
    many, few = (rows.Row("gated_delta_rule", *sizes) for sizes in ((4, 8192, 16, 64), (8, 4096, 16, 16)))
    assert rows.flops(many) == 163_840 * 4 * 8192 * 64
    with torch.device("meta"):
        found = [rows.bounds(row, rows.tensors(row, "meta"))[0] for row in (many, few)]
    assert all(abs(ms - known) < 0.01 for ms, known in zip(found, (0.44, 0.13), strict=True))


@pytest.mark.parametrize(
    "rule",
    [*("gated_delta_rule", "kda", "gla", "simple_gla", "retention", "delta_rule", "rwkv7"), *("gsa", "abc", "oja")],
)
def test_a_group_alone_gives_what_it_gives_among_others(benchmark: Any, rows: Any, rule: str) -> None:
    row = small(rows, rule)
    x = rows.tensors(row, "cpu", torch.float32)
    do = torch.randn(2, 40, row.HV, 8)
    found = rows.gradients(lambda y: rows.ours(row, y, "portable"), x, do)
    errors = benchmark.errors(row, found, benchmark.reference(row, x, do))
    assert set(errors) == {"o", *("d" + name for name, t in x.items() if t.requires_grad)}
    assert benchmark.wrong(errors, {}) == []
    spoiled = {**found, "dv": found["dv"] * 1.1}
    assert benchmark.wrong(benchmark.errors(row, spoiled, benchmark.reference(row, x, do)), {}) == ["dv"]
    assert benchmark.wrong({"o": float("nan")}, {}) == ["o"]


def test_no_speed_up_over_a_wrong_result(benchmark: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` with a stand-in for the GPU: a peer that raises is a message, a wrong result has no ratio."""
    monkeypatch.setattr(rows.tensors, "__defaults__", ("cpu", torch.float32))
    monkeypatch.setattr(benchmark, "median", lambda run, milliseconds: 1.0 if run() is not None else 0.0)
    monkeypatch.setattr(benchmark, "peak", lambda run: 0.5)
    monkeypatch.setattr(benchmark, "ours", lambda row, x, impl="portable": rows.ours(row, x, "portable"))
    row, options = small(rows, "kda"), argparse.Namespace(no_peer=False, bounded=True, lift=True, forward=False)
    monkeypatch.setattr(benchmark, "peers", lambda row, x, bounded=False: rows.ours(row, x, "portable"))
    found = benchmark.measure(row, options)
    assert found["both_speedup"] == 1.0 and found["wrong"] == [] and found["fla bounded"]["both_ms"] == 1.0
    monkeypatch.setattr(
        benchmark, "sides", lambda row, options: {"flashmix": lambda x: rows.ours(row, x, "portable") * 2}
    )
    found = benchmark.measure(row, options)
    assert "o" in found["wrong"] and "both_speedup" not in found and "WRONG" in benchmark.line(found)

    def breaks(x: Any) -> Any:
        raise RuntimeError("not on this card")

    sides = {"flashmix": lambda x: rows.ours(row, x, "portable"), "fla": breaks}
    monkeypatch.setattr(benchmark, "sides", lambda row, options: sides)
    found = benchmark.measure(row, options)
    assert "not on this card" in found["fla"]["failed"]["forward"] and "not on this card" in benchmark.line(found)
    assert found["flashmix"]["both_ms"] == 1.0 and "both_speedup" not in found


def test_rows_are_chosen_by_name(benchmark: Any, rows: Any) -> None:
    assert benchmark.chosen("kda:1,gla") == [rows.Row("kda", 1, 32768, 16, 16), *benchmark.chosen("gla")]
    assert benchmark.chosen("") == list(rows.ROWS) and len(set(rows.ROWS)) == 29
    for name, text in (("nothing", "no rule nothing"), ("gla:2", "gla has rows 0 to 1, got 2")):
        with pytest.raises(SystemExit, match=text):
            benchmark.chosen(name)


def test_parts_are_joined(benchmark: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that had no time in one part come from another; what was measured on other versions is refused."""
    made = dict(vars(rows.Row("gla", 8, 4096, 16, 16)))
    about = {"gpu": "a card", "torch": "2", "triton": "3"}
    parts = [[{**made, "failed": "once"}], [{**made, "failed": "twice"}], [{**made, "skipped": "no time left"}]]
    files = [tmp_path / f"{i}.json" for i in range(4)]
    for file, part in zip(files, parts, strict=False):
        file.write_text(json.dumps({"measured_on": about, "rows": part}))
    command = ["", "--out", str(tmp_path / "out"), "--merge"]
    monkeypatch.setattr(sys, "argv", [*command, *map(str, files[:3])])
    benchmark.main()
    (joined,) = (tmp_path / "out").iterdir()
    found = json.loads(joined.read_text())
    assert found["rows"] == [{**made, "failed": "once"}] and found["measured_on"]["gpu"] == "a card"
    files[3].write_text(json.dumps({"measured_on": {**about, "triton": "4"}, "rows": []}))
    monkeypatch.setattr(sys, "argv", [*command, str(files[0]), str(files[3])])
    with pytest.raises(SystemExit, match="parts differ"):
        benchmark.main()


def test_rows_past_the_time_are_named(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(row: Any, options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(benchmark, "measure", fails)
    monkeypatch.setattr(sys, "argv", ["", "--only", "gla", "--out", str(tmp_path)])
    benchmark.main()
    monkeypatch.setattr(sys, "argv", ["", "--only", "gla:0", "--seconds", "1e-9", "--out", str(tmp_path)])
    benchmark.main()
    printed = capsys.readouterr().out
    assert printed.count("RuntimeError: out of memory") == 2 and "no time left" in printed


def test_every_kernel_of_the_table_has_candidates_that_are_measured(
    rows: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With a stand-in for the GPU: the table's own tiles first, then candidates; one that does not fit is a message."""
    pytest.importorskip("triton")
    table = importlib.import_module("recurrence_gpu_table")
    monkeypatch.setattr(table, "tensors", lambda row: rows.tensors(small(rows, row.rule), "cpu", torch.float32))
    monkeypatch.setattr(table, "ours", lambda row, x: rows.ours(row, x, "portable"))
    monkeypatch.setattr(table, "kernel_times", lambda run: {"decay_sums_kernel": 0.5, "other": 9.0})
    found = table.table("channel_decay", None)
    candidates = table.CANDIDATES["channel_decay"]
    assert (
        len(found) == 1 + len(candidates.tiles)
        and found[0]["table"]
        and found[1]["tiles"] == {"decay": candidates.tiles[0][0]}
    )
    assert all(row["ms"] == 0.5 and row["apart"] == 0.0 for row in found)

    def does_not_fit(run: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(table, "kernel_times", does_not_fit)
    assert all("out of resources" in row["failed"] for row in table.table("channel_decay", None))
    assert all("skipped" in row for row in table.table("channel_decay", 1e-9))
    assert "channel_decay       *" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no candidates for nothing"):
        table.table("nothing", None)


def test_candidates_fit_the_fields_of_the_table(rows: Any) -> None:
    """Each field gets what it holds now: the same sizes of a tile, or a number."""
    pytest.importorskip("triton")
    table = importlib.import_module("recurrence_gpu_table")
    calls = importlib.import_module("flashmix.ops.recurrence.call")
    tables = importlib.import_module("flashmix.ops.recurrence.triton_gpu.table")
    for candidates in table.CANDIDATES.values():
        row = candidates.row
        channel = rows.RULES[row.rule].gate in ("channel", "slot")
        decay = calls.Decay.CHANNEL if channel else calls.Decay.TOKEN
        rule = {"rwkv7": calls.Rule.DPLR, "gsa": calls.Rule.LINEAR}.get(row.rule, calls.Rule.TIED)
        assert candidates.fields and candidates.tiles
        call = call_of(calls, row)
        assert call.rule is rule and call.decay is decay
        kind = tables.Kind(rule, decay, call.K, call.V, call.v.dtype, gpu.target(call.v.device))
        own = tables.tiles(kind, tables.segments_of(call, kind), "highest")
        for values in candidates.tiles:
            for field, value in zip(candidates.fields, values, strict=True):
                was = getattr(own, field)
                assert isinstance(value, dict) == isinstance(was, tables.Tile)
                if isinstance(value, dict):
                    sizes = {"BK", "BV"} if was.BV else {"BK"}
                    assert set(value) == {*sizes, "warps", "stages"}, (field, value, was)


def call_of(calls: Any, row: Any) -> Any:
    """The call of a row, on a GPU that need not be there."""
    with torch.device("meta"):
        benchmark = importlib.import_module("recurrence_rows")
        x = benchmark.tensors(row, "meta")
    operands = (x["q"], x["k"], x["v"], x.get("a"), x.get("b"), x.get("beta"), x["g"], None)
    return calls.RecurrenceCall(*operands, None, 1.0, False, False)


@pytest.fixture
def hopper(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The other program, which imports from the first; a file of the tests has that one's name."""
    monkeypatch.setitem(sys.modules, "recurrence_gpu", benchmark)
    return importlib.import_module("recurrence_hopper")


def test_peers_of_a_row(hopper: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashQLA has 128 channels of the gated delta rule alone; FLA's refused backward is named as such."""
    peers = importlib.import_module("recurrence_peers")
    there = {"flash_qla": True, "tilelang": True}
    monkeypatch.setattr(peers, "installed", there.get)
    monkeypatch.setattr(hopper, "installed", there.get)
    options = argparse.Namespace(no_triton=True, no_peer=False, fla="gated_delta_rule:0")
    of = {row: list(hopper.sides(row, options)) for row in hopper.ROWS}
    gated = [row for row in of if row.rule == "gated_delta_rule"]
    assert of[gated[0]] == ["flashmix", "flashqla", "fla"] and of[gated[1]] == ["flashmix", "flashqla"]
    assert all(of[row] == ["flashmix"] for row in of if row.K != 128 or row not in gated)
    there["tilelang"] = False
    assert hopper.fla_name(gated[0]) == hopper.fla_name(rows.Row("simple_gla", 1, 64, 1, 1)) == "fla lifted"
    assert hopper.fla_name(rows.Row("kda", 1, 64, 1, 1)) == "fla"


def test_a_peer_that_compiles_for_long_is_stopped(hopper: Any) -> None:
    with pytest.raises(TimeoutError, match="within 1 s"), hopper.within(1):
        while True:
            time.sleep(0.01)
    with hopper.within(1):
        pass
    time.sleep(1.2)  # no alarm is left


@pytest.mark.parametrize(
    "share, compiled, left", [((0, 2), [16, 64], 16), ((1, 2), [32, 128], 128), ((7, 9), [16], 16)]
)
def test_shares_of_a_tuner_compile_all_candidates_and_measure_none(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, share: Any, compiled: list[int], left: int
) -> None:
    """Each with `warmup=True` in place of the launch's own; one that fails, or has too much shared memory, is not the one that runs."""
    triton = pytest.importorskip("triton")
    driver = types.SimpleNamespace(get_benchmarker=lambda: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    tuner = triton.runtime.autotuner.Autotuner
    monkeypatch.setattr(tuner, "prune_configs", tuner.prune_configs)  # what the patch below leaves is undone
    seen = []

    def run(*arguments: Any, **given: Any) -> Any:
        seen.append((arguments, given))
        if given["BLOCK"] == 32:
            raise RuntimeError("does not compile")
        return types.SimpleNamespace(metadata=types.SimpleNamespace(shared=1 << (20 if given["BLOCK"] == 64 else 10)))

    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (16, 32, 64, 128)]
    own = types.SimpleNamespace(
        configs=configs, early_config_prune=None, perf_model=None, nargs={"x": 1}, fn=types.SimpleNamespace(run=run)
    )
    hopper.quick_tuning(10, share)
    (config,) = tuner.prune_configs(own, {"grid": (1,), "warmup": False})
    assert config.kwargs == {"BLOCK": left}
    assert [given["BLOCK"] for _, given in seen] == compiled
    assert all(arguments == (1,) and given["warmup"] and given["grid"] == (1,) for arguments, given in seen)
    mock.patch.stopall()
