"""Training: the loop, and that a run resumes bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rowwise_cases import nothing_waits
from samples import sample
from train_cases import SMALL, losses, train_in_parts

from flashmix.models import Decoder, preset
from flashmix.train import checkpoint, session
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.loop import learning_rate
from flashmix.train.optimizer import make_optimizer
from flashmix.train.plot import running_mean

CPU = torch.device("cpu")


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    config = TrainConfig(lr=2.0, final_lr=0.1, warmup=4, steps=104)
    rates = [learning_rate(step, config) for step in range(105)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 / 2)) and rates[104] == pytest.approx(0.2)
    assert all(later <= earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(0, TrainConfig(warmup=0, lr=1.0)) == 1.0


def test_only_matrices_decay() -> None:
    model = Decoder(preset("hybrid_nano"))
    groups = make_optimizer(model, SMALL).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for group in groups:
        assert all((parameter.dim() >= 2) or group["weight_decay"] == 0 for parameter in group["params"])
    assert {group["weight_decay"] for group in groups} == {0.0, SMALL.weight_decay}


def test_a_run_learns_and_leaves_everything_in_its_folder(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    config = replace(small, steps=40, lr=0.02, eval_every=20, save_every=20)
    trainer = session.begin(config, folder)
    assert trainer.run()
    assert losses(folder)[-1] < 0.7 * losses(folder)[0]
    rows = folder.read_metrics()
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [20, 40]
    assert folder.loss_curve.read_bytes().startswith(b"\x89PNG")
    assert folder.read_config()["train"]["lr"] == 0.02
    assert not list(folder.path.glob("*.partial"))


def test_the_default_settings_take_steps(tmp_path: Path) -> None:
    source = Path(json.__file__).parent
    config = TrainConfig(
        text=(str(source),), device="cpu", threads=1, steps=2, held_out=0.2, eval_tokens=2048, warmup=0
    )
    trainer = session.begin(config, RunFolder(tmp_path / "run"))
    mixers = {layer.mixer: layer.options.get("window") for layer in trainer.model.config.layers}
    assert set(mixers) == {"gated_deltanet", "attention"} and mixers["attention"] is not None
    assert trainer.run()
    assert losses(trainer.folder)[1] < losses(trainer.folder)[0]


def test_held_out_loss_is_the_mean_over_the_held_out_tokens(small: TrainConfig, tmp_path: Path) -> None:
    trainer = session.begin(replace(small, eval_tokens=10**6), RunFolder(tmp_path / "run"))
    trainer.measure_held_out()
    stream, model = trainer.held_out, trainer.model
    each, total = trainer.config.batch_tokens, stream.total
    batches = [stream.batch(first, min(each, total - first), CPU) for first in range(0, total, each)]
    with torch.no_grad():
        sums = [model(b.inputs, cu_seqlens=b.packing, targets=b.targets, reduction="sum").double() for b in batches]
    measured = torch.tensor(trainer.folder.read_metrics()[-1]["held_out_loss"])
    torch.testing.assert_close(measured, (sum(sums) / total).float())
    assert model.training


def test_a_bfloat16_model_trains_float32_weights(small: TrainConfig, tmp_path: Path) -> None:
    trainer = session.begin(replace(small, dtype="bfloat16", steps=30, lr=0.02), RunFolder(tmp_path / "run"))
    assert trainer.run()
    assert losses(trainer.folder)[-1] < 0.8 * losses(trainer.folder)[0]
    of = {name.rsplit(".", 1)[-1]: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    assert {name for name, dtype in of.items() if dtype == torch.float32} == {"A_log", "dt_bias"}  # rates of decays
    assert of["weight"] == torch.bfloat16
    saved = checkpoint.load(trainer.folder.checkpoint).model
    assert all(weight.dtype == torch.float32 for weight in saved.values())
    weights = [weight for name, weight in saved.items() if name.endswith("weight")]
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights)


@pytest.mark.parametrize("stops", sample([[4], [3], [1, 6]], [[1, 6]]), ids=str)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(small: TrainConfig, tmp_path: Path, stops: list[int]) -> None:
    whole = train_in_parts(small, tmp_path / "whole", [])
    parts = train_in_parts(small, tmp_path / "parts", stops)
    assert losses(parts) == losses(whole) and len(losses(parts)) == small.steps
    a, b = (checkpoint.load(folder.checkpoint) for folder in (whole, parts))
    assert a.position == b.position == small.steps * small.batch_tokens
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    held = [[row for row in f.read_metrics() if "held_out_loss" in row] for f in (whole, parts)]
    assert held[0][-1] == held[1][-1]


def test_two_runs_of_one_seed_agree_and_of_two_seeds_do_not(small: TrainConfig, tmp_path: Path) -> None:
    first, same, other = (
        losses(train_in_parts(replace(small, seed=seed, steps=3), tmp_path / name, []))
        for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert first == same != other


def test_measurements_after_the_checkpoint_are_measured_again(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = session.begin(small, folder)
    for _ in range(4):
        trainer.train_step()
    trainer.save()
    for _ in range(2):  # a crash: two more steps in the measurements, and half a line
        trainer.train_step()
    trainer.read_losses()
    before = losses(folder)
    with folder.metrics.open("a") as file:
        file.write('{"step": 7, "lo')
    resumed = session.resume(folder, {})
    assert [row["step"] for row in folder.read_metrics()] == [1, 2, 3, 4]
    assert resumed.run()
    assert losses(folder)[:6] == before and len(losses(folder)) == small.steps


def test_a_run_may_go_on_for_longer_but_not_become_another(small: TrainConfig, tmp_path: Path) -> None:
    folder = train_in_parts(small, tmp_path / "run", [])
    with pytest.raises(RunError, match=r"--lr belongs to the run and stays 0\.\d+ when it is resumed, got 9\.0"):
        session.resume(folder, {"lr": 9.0})
    trainer = session.resume(folder, {"steps": 10, "lr": small.lr})
    assert trainer.run() and len(losses(folder)) == 10
    assert folder.read_config()["train"]["steps"] == 10


def test_running_mean_starts_without_a_pull() -> None:
    assert running_mean([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert running_mean([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loop_itself_does_not_wait_for_a_gpu(small: TrainConfig, tmp_path: Path) -> None:
    """Whatever a model's ops do, batches, clipping and the optimiser leave the host free until the losses are read."""
    trainer = session.begin(replace(small, device="cuda"), RunFolder(tmp_path / "run"))
    weight = trainer.model.embedding.weight
    trainer.loss_of = lambda batch: weight[batch.inputs].square().mean() + weight[batch.targets].mean()  # type: ignore[method-assign]
    trainer.train_step()
    with nothing_waits():
        trainer.train_step()
    assert trainer.read_losses()
