"""Training at sizes of one's own: mixers by name, other weights to begin with, Muon, what is kept of checkpoints, and the log."""

import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from train_cases import losses, train_in_parts

from flashmix import checkpoints
from flashmix.models import Decoder, preset
from flashmix.train import checkpoint, session
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.optimizer import Updates
from flashmix.train.sizes import initial_model, model_config
from flashmix.train.speed import peak_of, work_of


def test_a_pattern_of_mixers_is_repeated_up_to_the_layers() -> None:
    config = TrainConfig(
        width=64, layers=6, heads=2, mixers="2*gated_deltanet(value_heads=4)+attention(window=8)", mlp_width=80
    )
    found = model_config(config, 300)
    assert [layer.mixer for layer in found.layers] == 2 * ["gated_deltanet", "gated_deltanet", "attention"]
    assert found.layers[0].options == {"heads": 2, "value_heads": 4} and found.layers[2].options["window"] == 8
    assert (found.width, found.mlp_width, found.vocab_size) == (64, 80, 300)
    assert Decoder(model_config(TrainConfig(preset="hybrid_nano", heads=2), 256)).config.layers[0].options == {
        "heads": 2
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixers": "gla+foo"}, "--mixers: must be MIXERs like .* got 'foo'"),
        ({"mixers": "gla(window=3)"}, "--mixers: .*window is not an option of gla"),
        ({"preset": "foo"}, "--preset: name must be one of"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(settings: dict[str, str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        model_config(TrainConfig(**settings), 256)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_from": "run", "width": 64}, "--init-from has its sizes: leave --width away"),
        ({"data": "tokens", "tokenizer": "file"}, "--data has its text and its tokenizer"),
        ({"optimizer": "sgd"}, "--optimizer must be adamw or muon, got sgd"),
        ({"keep": 0}, "--keep must be at least 1, got 0"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        TrainConfig(**settings).check()  # type: ignore[arg-type]


def test_a_run_begins_with_other_weights(small: TrainConfig, tmp_path: Path) -> None:
    first = session.begin(replace(small, steps=1), RunFolder(tmp_path / "first"))
    assert first.run()
    again = session.begin(replace(small, init_from=str(tmp_path / "first")), RunFolder(tmp_path / "again"))
    checkpoints.save(first.model, tmp_path / "folder")
    converted = initial_model(replace(small, init_from=str(tmp_path / "folder")), 257)
    for model in (again.model, converted):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.model.parameters(), strict=True))
    larger = initial_model(replace(small, init_from=str(tmp_path / "folder")), 300)
    weight = first.model.embedding.weight
    assert torch.equal(larger.embedding.weight[:257], weight)
    assert torch.equal(larger.embedding.weight[299], weight.mean(0))
    with pytest.raises(RunError, match=r"--init-from must be a run or a converted checkpoint, got .*nowhere"):
        initial_model(replace(small, init_from=str(tmp_path / "nowhere")), 257)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon_updates_the_matrices_of_blocks_and_a_run_resumes_bit_for_bit(small: TrainConfig, tmp_path: Path) -> None:
    config = replace(small, steps=4, optimizer="muon", dtype="bfloat16", keep=2, save_every=1)
    whole, parts = train_in_parts(config, tmp_path / "whole", []), train_in_parts(config, tmp_path / "parts", [2])
    assert losses(parts) == losses(whole)
    states = [checkpoint.load(folder.checkpoint) for folder in (whole, parts)]
    assert all(torch.equal(states[0].model[name], states[1].model[name]) for name in states[0].model)
    model = Decoder(preset("hybrid_nano"))
    updates = Updates(model, config)
    muon = {id(p) for group in updates.optimizers["muon"].param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    assert "blocks.0.mlp.down.weight" in names and not any("embedding" in n or "head.weight" in n for n in names)
    assert checkpoint.earlier_steps(whole) == [3, 4]
    assert checkpoint.load(checkpoint.find(whole, "3")).step == 3
    with pytest.raises(RunError, match=r"--checkpoint must be last or best or 3 or 4 of .*, got 1"):
        checkpoint.find(whole, "1")


def test_the_best_weights_are_kept(small: TrainConfig, tmp_path: Path) -> None:
    trainer = session.begin(small, RunFolder(tmp_path / "run"))
    trainer.save_best(2.0)
    trainer.train_step()
    trainer.save_best(3.0)
    assert checkpoint.load(trainer.folder.best).step == 0
    trainer.save_best(1.0)
    assert checkpoint.load(trainer.folder.best).step == 1
    trainer.save()
    model, _ = session.load(trainer.folder, "cpu", "best")
    assert torch.equal(model.embedding.weight, trainer.model.embedding.weight)


def test_measurements_go_to_tensorboard(small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, path: str) -> None:
            assert path == str(tmp_path / "run" / "tensorboard")

        def add_scalar(self, *row: object) -> None:
            written.append(row)  # type: ignore[arg-type]

        def flush(self) -> None: ...

    package = types.ModuleType("torch.utils.tensorboard")
    package.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    trainer = session.begin(replace(small, steps=2, log="tensorboard", eval_every=2), RunFolder(tmp_path / "run"))
    assert trainer.run()
    rows = trainer.folder.read_metrics()
    assert [("loss", row["loss"], row["step"]) for row in rows if "loss" in row] == [
        w for w in written if w[0] == "loss"
    ]
    assert "held_out_perplexity" in {name for name, _, _ in written}


def test_measurements_go_to_weights_and_biases(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[dict[str, float], int]] = []
    begun: dict[str, str] = {}

    def init(**options: str) -> types.SimpleNamespace:
        begun.update(options)
        return types.SimpleNamespace(log=lambda values, step: written.append((values, step)))

    package = types.ModuleType("wandb")
    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    trainer = session.begin(replace(small, steps=2, log="wandb", eval_every=2), RunFolder(tmp_path / "run"))
    assert trainer.run()
    rows = trainer.folder.read_metrics()
    assert [{"step": step, **values} for values, step in written] == rows and "held_out_perplexity" in rows[-1]
    assert begun == {"name": "run", "dir": str(tmp_path / "run"), "id": "run", "resume": "allow"}


@pytest.mark.whole
def test_a_compiled_run_with_checkpointed_activations_takes_the_same_steps(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append("graph")
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    config = replace(small, steps=2, optimizer="adamw")
    plain = train_in_parts(config, tmp_path / "plain", [])
    other = train_in_parts(replace(config, compile=True, checkpoint_activations=True), tmp_path / "compiled", [])
    rounding = 4 * torch.finfo(torch.float32).eps  # MKL's products depend on where operands lie, on an EPYC
    assert losses(other) == pytest.approx(losses(plain), rel=rounding) and compiled


def test_a_log_needs_its_package(small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="--log wandb must come with its package: pip install wandb"):
        session.begin(replace(small, log="wandb"), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()  # no text was read


def test_a_run_without_a_checkpoint_begins_no_other(small: TrainConfig, tmp_path: Path) -> None:
    session.begin(small, RunFolder(tmp_path / "run"))
    with pytest.raises(RunError, match=r"--init-from must be a run with a checkpoint, got .*run, which has none yet"):
        session.begin(replace(small, init_from=str(tmp_path / "run")), RunFolder(tmp_path / "tuned"))


def test_work_of_a_step() -> None:
    model = Decoder(preset("transformer_nano"))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    assert work_of(model, 0.0) == 6.0 * matrices
    windowed = Decoder(preset("hybrid_nano"))  # one of four layers, of 4 tokens
    assert work_of(windowed, 1000.0) == work_of(windowed, 8.0)
    assert peak_of(torch.device("cpu")) is None
