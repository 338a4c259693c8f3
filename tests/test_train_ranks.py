"""`flashmix train` over several ranks: gloo processes on the CPU that train the model that one process trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from train_cases import losses

from flashmix.models import Decoder, DecoderConfig, LayerConfig
from flashmix.train import session, shards
from flashmix.train.cli import main
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.optimizer import Updates
from flashmix.train.ranks import Ranks, shard_parameters

CLOSE = 1e-10  # of losses near 5, in float64
STEPS = 4


def of_ranks(config: TrainConfig) -> TrainConfig:
    """The same run in float64, its steps in four rows, its learning rate free of their number."""
    return replace(config, rows=4, dtype="float64", steps=STEPS, final_lr=1.0, eval_every=2, save_every=2)


def work(rank: int, count: int, jobs: list[tuple[str, TrainConfig, str]]) -> None:
    """One rank: the jobs begin a run in a folder, or resume the one that is there."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{jobs[0][0]}.meet{count}", rank=rank, world_size=count)
    for path, config, how in jobs:
        ranks, folder = Ranks.of_environment(), RunFolder(path)
        if how == "resume":
            trainer = session.resume(folder, {"steps": config.steps, "context": config.context}, ranks)
        else:
            trainer = session.begin(config, folder, ranks)
        if how == "stop" and rank == count - 1:  # one rank is asked to, and all do
            before = trainer.loss_of

            def loss_of(batch: Any, trainer: Any = trainer, before: Any = before) -> Any:
                if trainer.step == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return before(batch)

            trainer.loss_of = loss_of  # type: ignore[method-assign]
        assert trainer.run() == (how != "stop")
        folder.release()
    dist.barrier()
    dist.destroy_process_group()


def together(count: int, *jobs: tuple[Path, TrainConfig, str]) -> None:
    processes.together(work, (count, [(str(path), *rest) for path, *rest in jobs]), count)


def alone(config: TrainConfig, path: Path) -> list[float]:
    folder = RunFolder(path)
    assert session.begin(config, folder).run()
    folder.release()
    return losses(folder)


def assert_close(have: list[float], want: list[float]) -> None:
    assert len(have) == len(want)
    assert all(abs(a - b) <= CLOSE * abs(b) for a, b in zip(have, want, strict=True)), (have, want)


def test_two_ranks_train_the_model_of_one(small: TrainConfig, tmp_path: Path) -> None:
    """As data ranks, as ranks of a row, stopped and resumed by one process, which reads their checkpoint; a flipped bit is found."""
    config = of_ranks(small)
    want = alone(config, tmp_path / "one")
    data, context, stopped = (RunFolder(tmp_path / name) for name in ("data", "context", "stopped"))
    jobs = [
        (data.path, config, "begin"),
        (context.path, replace(config, context=2), "begin"),
        (stopped.path, config, "stop"),
    ]
    together(2, *jobs)
    for folder in (data, context):
        assert_close(losses(folder), want)
        held = [
            [row["held_out_loss"] for row in f.read_metrics() if "held_out_loss" in row]
            for f in (folder, RunFolder(tmp_path / "one"))
        ]
        assert_close(*held)
        assert [path.name for path in sorted(folder.shards.iterdir())] == ["step-2", "step-4"]
    assert len(losses(stopped)) == 3  # asked for in the second step, agreed in it, read in the third

    trainer = session.resume(stopped, {"context": 1})
    assert trainer.step == 3 and trainer.run()
    assert_close(losses(stopped), want)
    assert stopped.checkpoint.exists() and shards.newest(stopped) is None
    model, _ = session.load(data, "cpu")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert main(["convert", str(data.path), str(tmp_path / "exported")]) == 0

    newest = shards.newest(data)
    assert newest is not None
    part = next(newest.glob("__1_*"))
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    part.write_bytes(damaged)
    with pytest.raises(RunError, match=f"{part.name} is damaged"):
        session.load(data, "cpu")


@pytest.mark.whole
@pytest.mark.parametrize("count", [1, 3, 4])
def test_what_two_ranks_wrote_is_read_by_others(small: TrainConfig, tmp_path: Path, count: int) -> None:
    config = replace(of_ranks(small), rows=12)
    longer = replace(config, steps=STEPS + 2)
    want = alone(longer, tmp_path / "one")
    together(2, (tmp_path / "run", config, "begin"))
    together(count, (tmp_path / "run", longer, "resume"))
    assert_close(losses(RunFolder(tmp_path / "run")), want)
    together(2, (tmp_path / "same", config, "begin"))
    assert losses(RunFolder(tmp_path / "same")) == losses(RunFolder(tmp_path / "run"))[:STEPS]


@pytest.mark.whole
def test_a_run_of_one_process_goes_on_over_two_ranks(small: TrainConfig, tmp_path: Path) -> None:
    config = of_ranks(small)
    longer = replace(config, steps=STEPS + 2)
    want = alone(longer, tmp_path / "one")
    alone(config, tmp_path / "run")
    together(2, (tmp_path / "run", replace(longer, context=2), "resume"))
    assert_close(losses(RunFolder(tmp_path / "run")), want)


def torchrun(*arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    where = f"--rdzv-endpoint=localhost:{29500 + os.getpid() % 1000}"
    return subprocess.Popen([*command, "--rdzv-backend=c10d", where, "-m", "flashmix", "train", *arguments], **options)


@pytest.mark.whole
def test_a_killed_rank_ends_the_others_and_torchrun_goes_on(small: TrainConfig, tmp_path: Path) -> None:
    """A SIGKILL at any time, during a save as well: the run goes on from the last whole checkpoint."""
    config = replace(of_ranks(small), steps=12, save_every=1)
    want = alone(config, tmp_path / "one")
    options = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in config.to_dict().items()
        if name != "text" and value is not None and not isinstance(value, bool)
    ]
    run = RunFolder(tmp_path / "run")
    process = torchrun("--out", str(run.path), "--sample=0", "--text", *config.text, *options, restarts=3)
    try:
        for place in (2, 5):
            deadline = time.monotonic() + 200
            while not (found := shards.newest(run)) or shards.step_of(found) < place:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            os.kill(worker_of(process.pid), signal.SIGKILL)
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    assert_close(losses(run), want)


def worker_of(parent: int) -> int:
    """The last child of a process: a rank."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(found[-1])


RATES = (
    ".A_log",
    ".dt_bias",
    ".decay.weight",
    ".step_bias.weight",
)  # ends of the names of what says how fast states decay


def model_with_rates() -> Decoder:
    torch.manual_seed(0)
    mixers = ["gated_deltanet", "mamba2", "kda", "mamba3", "rg_lru"]
    layers = [LayerConfig(name, {"heads": 2} | ({"lower": -5.0} if name == "kda" else {})) for name in mixers]
    layers += [LayerConfig("mamba", {}), LayerConfig("rwkv4", {})]
    return Decoder(DecoderConfig(vocab_size=11, width=16, layers=layers), checkpoint_activations=True)


def test_rates_of_decays_stay_float32_in_one_process(small: TrainConfig) -> None:
    """Other weights become bfloat16 ones over float32 masters; the rates are updated themselves."""
    model = model_with_rates()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    updates = Updates(model, small, masters=True)
    tokens = torch.randint(11, (1, 12))
    model(tokens, targets=tokens).backward()
    updates.step(0.01, 1.0)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if name.endswith(RATES) else torch.bfloat16), name
        assert not torch.equal(updates.weights()[name], before[name]), name
    updates.load(before, updates.state())
    assert all(torch.equal(p, before[name].to(p.dtype)) for name, p in model.named_parameters())


def test_rates_of_decays_stay_float32_where_weights_are_cast() -> None:
    """In bfloat16 a rate `exp(A_log)` would be off by up to 0.8 %, a step of 0.01 by 1.6 %, for all tokens alike."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = model_with_rates()
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        shard_parameters(model, init_device_mesh("cpu", (1,)), True)
        seen: dict[str, torch.Tensor] = {}

        def look(name: str, module: Any) -> None:
            seen.update({f"{name}.{n}": p.detach().clone() for n, p in module.named_parameters()})

        for name, module in model.named_modules():
            if name.endswith("mixer"):
                module.register_forward_hook(lambda module, x, y, name=name: look(name, module))
        tokens = torch.randint(11, (1, 12))
        model(tokens, targets=tokens).backward()
    finally:
        dist.destroy_process_group()
    rates = [name for name in seen if name.endswith(RATES)]
    assert len(rates) == 11
    for name, p in seen.items():
        assert p.dtype == (torch.float32 if name in rates else torch.bfloat16), name
        assert torch.equal(p, masters[name].to(p.dtype)), name
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32, name


@pytest.mark.parametrize(
    "count, change, words",
    [
        (1, {"context": 2}, "--context 2 takes several ranks: start the run with torchrun"),
        (4, {"context": 3}, "--context must divide the 4 ranks, got 3"),
        (4, {"context": 2, "rows": 3}, "--rows must be a multiple of the 2 data ranks, got 3"),
        (2, {"rows": 2, "device": "cuda:1"}, "--device must be cpu or cuda under torchrun"),
    ],
)
def test_settings_that_do_not_fit_the_ranks(count: int, change: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        Ranks(count=count).check(replace(TrainConfig(), **change))


def test_rows_belong_to_the_run(small: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--rows must divide the 192 --batch-tokens, got 7"):
        replace(small, rows=7).check()
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1, rows=2), folder).run()
    with pytest.raises(RunError, match="--rows belongs to the run and stays 2"):
        session.resume(folder, {"rows": 4})
