"""Training: what is read and held out, that a run resumes bit for bit, and that no fault loses a checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from flashmix.models import Decoder, preset
from flashmix.train import checkpoint, data, runs
from flashmix.train.data import Stream
from flashmix.train.loop import Trainer, learning_rate, make_optimizer
from flashmix.train.plot import running_mean
from flashmix.train.run_folder import RunError, RunFolder, TrainConfig, written_whole
from flashmix.train.tokens import Tokens

SMALL = TrainConfig(
    preset="hybrid_nano", steps=8, batch_tokens=192, seq_len=64, warmup=2, held_out=0.2, eval_tokens=256,
    eval_every=4, save_every=4, log_every=1, threads=1, device="cpu",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of ten documents of 60 to 330 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(10):
        lines = [f"line {line} of document {index}: {'abc' * (line % 3)}" for line in range(2 + index)]
        (folder / f"{index}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def small(texts: Path) -> TrainConfig:
    return replace(SMALL, text=(str(texts),))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def corpus_of(texts: Path, tmp_path: Path, fraction: float = 0.2) -> data.Corpus:
    folder = RunFolder(tmp_path / "corpus")
    folder.create()
    return data.prepare([str(texts)], fraction, Tokens(), folder)


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


# What is read.


def test_standard_library_is_read_without_tests_and_in_a_fixed_order() -> None:
    files = data.find_files([])
    assert files == data.find_files([]) and len(files) > 200
    assert all(path.suffix == ".py" for path in files)
    assert not any(part in data.NOT_LIBRARY for path in files for part in path.parts[-3:])
    assert any(path.name == "textwrap.py" for path in files)


def test_documents_are_whole_files_without_repeats_empties_and_binaries(texts: Path) -> None:
    (texts / "copy.txt").write_bytes((texts / "3.txt").read_bytes())
    (texts / "empty.txt").write_text("")
    (texts / "binary.bin").write_bytes(b"\x7fELF\0\0")
    (texts / ".hidden").write_text("hidden")
    (texts / "test").mkdir()
    (texts / "test" / "kept.txt").write_text("a user's own folder of this name is read")
    names = [Path(name).name for name, _, _ in data.read_documents([str(texts)])]
    assert names == [
        "0.txt",
        "1.txt",
        "2.txt",
        "3.txt",
        "4.txt",
        "5.txt",
        "6.txt",
        "7.txt",
        "8.txt",
        "9.txt",
        "kept.txt",
    ]
    named = [name for name, _, _ in data.read_documents([str(texts / "binary.bin")])]
    assert named == [str(texts / "binary.bin")], "a file that is named is read, whatever is in it"


def test_held_out_documents_depend_on_contents_not_on_names(texts: Path, tmp_path: Path) -> None:
    first = corpus_of(texts, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for index, path in enumerate(sorted(texts.iterdir(), reverse=True)):
        (other / f"renamed_{index}").write_bytes(path.read_bytes())
    second = corpus_of(other, tmp_path / "again")

    def held(corpus: data.Corpus) -> set[bytes]:
        return {Path(document.name).read_bytes() for document in corpus.split(held_out=True)}

    assert held(first) == held(second) and held(first)
    fraction = sum(d.bytes for d in first.split(True)) / sum(d.bytes for d in first.documents)
    assert 0 < fraction <= 0.2


def test_one_document_is_cut_and_two_give_one_away(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_bytes(bytes(range(32, 127)) * 10)
    start, end = corpus_of(text, tmp_path).documents
    assert (start.held_out, end.held_out) == (False, True)
    assert start.bytes + end.bytes == 950 and start.tokens + end.tokens == 951 and end.start == start.tokens
    assert data.choose_held_out([b"b", b"a"], [500, 400], 0.1) == {1}


# How it is batched.


def test_an_epoch_reads_every_token_once_and_no_sequence_crosses_a_document(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    documents = corpus.split(held_out=False)
    stream = Stream(corpus, documents, 64, seed=3)
    owner = {place: d.name for d in documents for place in range(d.start, d.start + d.tokens)}
    for epoch in range(2):
        pieces = list(stream._pieces(epoch * stream.total, stream.total))
        places = [place for start, length in pieces for place in range(start, start + length)]
        assert sorted(places) == sorted(owner)
        assert all(len({owner[p] for p in range(s, s + n)}) == 1 and n <= 64 for s, n in pieces)
    first, second = (list(stream._pieces(epoch * stream.total, stream.total)) for epoch in (0, 1))
    assert first != second, "the second epoch has the order of the first"


def test_a_batch_is_a_function_of_its_position(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    used, fresh = (Stream(corpus, corpus.split(False), 64, seed=3) for _ in range(2))
    for position in (0, 150, 5000, 300):
        a, b = used.batch(position, 150, CPU), fresh.batch(position, 150, CPU)
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.packing.cu_seqlens, b.packing.cu_seqlens)
        fresh = Stream(corpus, corpus.split(False), 64, seed=3)
    assert not torch.equal(
        used.batch(0, 150, CPU).inputs, Stream(corpus, corpus.split(False), 64, 4).batch(0, 150, CPU).inputs
    )


def test_targets_are_the_next_tokens_of_the_same_document(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    stream = Stream(corpus, corpus.split(False), 64, seed=0)
    whole = b"|".join(Path(d.name).read_bytes() for d in corpus.documents)
    batch = stream.batch(0, 400, CPU)
    bounds = batch.packing.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == 400 and batch.inputs.shape == batch.targets.shape == (1, 400)
    for begin, end in pairwise(bounds):
        inputs, targets = batch.inputs[0, begin:end].tolist(), batch.targets[0, begin:end].tolist()
        assert inputs[1:] == targets[:-1]
        assert 256 not in inputs[1:], "a separator only starts a sequence"
        text = bytes(token for token in [*inputs[:1], *targets] if token != 256)
        assert text in whole


def test_packed_documents_do_not_see_each_other(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    batch = Stream(corpus, corpus.split(False), 64, seed=0).batch(0, 300, CPU)
    torch.manual_seed(0)
    model = Decoder(preset("hybrid_nano", vocab_size=257)).double()
    packed = model(batch.inputs, cu_seqlens=batch.packing, targets=batch.targets, reduction="none")[0]
    bounds = batch.packing.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        alone = model(batch.inputs[:, begin:end], targets=batch.targets[:, begin:end], reduction="none")[0]
        error = (packed[begin:end] - alone).abs().max() / alone.abs().max()
        assert error <= 64 * torch.finfo(torch.float64).eps


def test_bits_per_byte_counts_the_bytes_of_the_text(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    stream = Stream(corpus, corpus.split(True), 64, seed=0)
    size = sum(Path(d.name).stat().st_size for d in corpus.split(True))
    tokens = size + len(corpus.split(True))
    assert stream.total == tokens and stream.bytes == size
    assert stream.bits_per_byte(math.log(2)) == pytest.approx(tokens / size, rel=1e-15)


def test_tokens_go_there_and_back() -> None:
    tokens = Tokens()
    text = "naïve 𝔸 \0 text".encode()
    assert tokens.decode([tokens.separator, *tokens.encode(text), tokens.separator]) == text.decode()
    assert tokens.vocabulary == 257 and np.iinfo(tokens.dtype).max >= 256


# The loop.


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
    trainer = runs.begin(config, folder)
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
    trainer = runs.begin(config, RunFolder(tmp_path / "run"))
    mixers = {layer.mixer: layer.options.get("window") for layer in trainer.model.config.layers}
    assert set(mixers) == {"gated_deltanet", "attention"} and mixers["attention"] is not None
    assert trainer.run()
    assert losses(trainer.folder)[1] < losses(trainer.folder)[0]


def test_held_out_loss_is_the_mean_over_the_held_out_tokens(small: TrainConfig, tmp_path: Path) -> None:
    trainer = runs.begin(replace(small, eval_tokens=10**6), RunFolder(tmp_path / "run"))
    trainer.measure_held_out()
    stream, model = trainer.held_out, trainer.model
    batch = stream.batch(0, stream.total, CPU)
    with torch.no_grad():
        whole = model(batch.inputs, cu_seqlens=batch.packing, targets=batch.targets).item()
    measured = trainer.folder.read_metrics()[-1]["held_out_loss"]
    # The batches cut some sequences where the whole does not, so the two agree closely but not to rounding.
    assert measured == pytest.approx(whole, rel=1e-2)
    assert model.training


def test_bfloat16_products_train_float32_weights(small: TrainConfig, tmp_path: Path) -> None:
    trainer = runs.begin(replace(small, dtype="bfloat16", steps=30, lr=0.02), RunFolder(tmp_path / "run"))
    assert trainer.run()
    assert losses(trainer.folder)[-1] < 0.8 * losses(trainer.folder)[0]
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


def train_in_parts(config: TrainConfig, path: Path, stops: list[int]) -> RunFolder:
    """Trains, stopped after each of `stops` steps and resumed from the disk."""
    folder = RunFolder(path)
    trainer = runs.begin(config, folder)
    for stop in stops:
        interrupt_after(trainer, stop)
        assert not trainer.run() and trainer.step == stop
        torch.randn(5)  # other use of the random generator in between
        trainer = runs.resume(folder, {})
        assert trainer.step == stop
    assert trainer.run()
    return folder


def interrupt_after(trainer: Trainer, step: int) -> None:
    """Sends Ctrl-C in the middle of step `step`."""
    original = trainer.loss_of

    def loss_of(batch: data.Batch) -> torch.Tensor:
        if trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(batch)

    trainer.loss_of = loss_of  # type: ignore[method-assign]


@pytest.mark.parametrize("stops", [[4], [3], [1, 6]], ids=str)
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
    trainer = runs.begin(small, folder)
    for _ in range(4):
        trainer.train_step()
    trainer.save()
    for _ in range(2):  # a crash: two more steps in the measurements, and half a line
        trainer.train_step()
    trainer.read_losses()
    before = losses(folder)
    with folder.metrics.open("a") as file:
        file.write('{"step": 7, "lo')
    resumed = runs.resume(folder, {})
    assert [row["step"] for row in folder.read_metrics()] == [1, 2, 3, 4]
    assert resumed.run()
    assert losses(folder)[:6] == before and len(losses(folder)) == small.steps


def test_a_run_may_go_on_for_longer_but_not_become_another(small: TrainConfig, tmp_path: Path) -> None:
    folder = train_in_parts(small, tmp_path / "run", [])
    with pytest.raises(RunError, match=r"--lr belongs to the run and stays 0\.\d+ when it is resumed, got 9\.0"):
        runs.resume(folder, {"lr": 9.0})
    trainer = runs.resume(folder, {"steps": 10, "lr": small.lr})
    assert trainer.run() and len(losses(folder)) == 10
    assert folder.read_config()["train"]["steps"] == 10


# Faults: one clear error, and nothing is lost.


def damage_bit(contents: bytes) -> bytes:
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda contents: b"",
    "cut short": lambda contents: contents[: len(contents) // 2],
    "one bit": damage_bit,
    "another file": lambda contents: b"this is not a checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_noticed_and_left_alone(small: TrainConfig, tmp_path: Path, damage: str) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = runs.begin(small, folder)
    trainer.train_step()
    trainer.save()
    damaged = DAMAGES[damage](folder.checkpoint.read_bytes())
    folder.checkpoint.write_bytes(damaged)
    metrics = folder.metrics.read_bytes()
    for use in (lambda: runs.resume(folder, {}), lambda: runs.load(folder)):
        with pytest.raises(RunError, match=r"the checkpoint .* is damaged") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert folder.checkpoint.read_bytes() == damaged and folder.metrics.read_bytes() == metrics


def test_a_missing_checkpoint_and_a_missing_run_say_so(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        runs.resume(folder, {})
    runs.begin(small, folder)
    with pytest.raises(RunError, match=r"cannot read the checkpoint .*: No such file"):
        runs.resume(folder, {})
    with pytest.raises(RunError, match="already holds a run: continue it with --resume"):
        runs.begin(small, folder)


@pytest.mark.parametrize("name", ["config", "documents", "tokens"])
def test_other_damaged_files_of_a_run_say_so(small: TrainConfig, tmp_path: Path, name: str) -> None:
    folder = train_in_parts(replace(small, steps=1), tmp_path / "run", [])
    path: Path = getattr(folder, name)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match=rf"{path.name} is damaged"):
        runs.resume(folder, {})


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """Limits how large a file may grow: the operating system then refuses the write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_last_checkpoint(
    small: TrainConfig, tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = runs.begin(small, folder)
    interrupt_after(trainer, 3)
    trainer.run()
    before = folder.checkpoint.read_bytes()
    trainer = runs.resume(folder, {})
    small_disk(len(before) // 2)
    with pytest.raises(RunError, match=r"cannot write .*checkpoint.pt: File too large; .* is untouched") as caught:
        trainer.run()
    small_disk(resource.RLIM_INFINITY)
    assert "\n" not in str(caught.value)
    assert folder.checkpoint.read_bytes() == before and not list(folder.path.glob("*.partial"))
    assert runs.resume(folder, {}).run()
    assert losses(folder) == losses(train_in_parts(small, tmp_path / "whole", []))


def test_a_full_disk_in_the_measurements_or_the_tokens_says_so(
    small: TrainConfig, tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = runs.begin(small, folder)
    trainer.train_step()
    small_disk(20)
    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: File too large"):
        trainer.read_losses()
    with pytest.raises(RunError, match=r"cannot write .*tokens.bin: File too large"):
        runs.begin(small, RunFolder(tmp_path / "other"))
    small_disk(resource.RLIM_INFINITY)
    assert not (tmp_path / "other").exists(), "an empty run folder stays behind"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with written_whole(path) as file:
        file.write(b"first")
    for fault in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()):

        def fail(number: int, fault: BaseException = fault) -> None:
            raise fault

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            wanted = RunError if isinstance(fault, OSError) else KeyboardInterrupt
            with pytest.raises(wanted) as caught, written_whole(path) as file:
                file.write(b"second")
        if wanted is RunError:
            assert "No space left on device" in str(caught.value)
        assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_the_second_interrupt_stops_at_once_and_keeps_the_checkpoint(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = runs.begin(small, folder)
    interrupt_after(trainer, 2)
    trainer.run()
    before = folder.checkpoint.read_bytes()
    trainer = runs.resume(folder, {})
    interrupt_after(trainer, 3)
    real_save = torch.save

    def save_and_interrupt(state: object, file: object) -> None:
        real_save(state, file)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch, "save", save_and_interrupt)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert folder.checkpoint.read_bytes() == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = runs.begin(replace(small, save_every=1), folder)
    original = trainer.loss_of
    trainer.loss_of = lambda batch: original(batch) * (math.nan if trainer.step == 2 else 1)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the loss of step 3 is not finite"):
        trainer.run()
    assert checkpoint.load(folder.checkpoint).step == 2


@pytest.mark.parametrize(
    "setting",
    [{"steps": 0}, {"batch_tokens": 0}, {"seq_len": -1}, {"lr": 0.0}, {"lr": math.nan}, {"held_out": 1.0},
     {"threads": 0}, {"warmup": -1}, {"final_lr": 2.0}, {"weight_decay": -0.1}, {"dtype": "float16"}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(small: TrainConfig, tmp_path: Path, setting: dict[str, object]) -> None:
    (name,) = setting
    with pytest.raises(RunError, match=f"^--{name.replace('_', '-')} must be"):
        runs.begin(replace(small, **setting), RunFolder(tmp_path / "run"))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_running_mean_starts_without_a_pull() -> None:
    assert running_mean([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert running_mean([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loop_itself_does_not_wait_for_a_gpu(small: TrainConfig, tmp_path: Path) -> None:
    """Whatever a model's ops do, batches, clipping and the optimiser leave the host free until the losses are read."""
    trainer = runs.begin(replace(small, device="cuda"), RunFolder(tmp_path / "run"))
    weight = trainer.model.embedding.weight
    trainer.loss_of = lambda batch: weight[batch.inputs].square().mean() + weight[batch.targets].mean()  # type: ignore[method-assign]
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.read_losses()
