"""Faults of a run: one clear error, and nothing is lost."""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_cases import interrupt_after, losses, train_in_parts

from flashmix.train import checkpoint, session
from flashmix.train.folder import RunError, RunFolder, TrainConfig, written_whole


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
    trainer = session.begin(small, folder)
    trainer.train_step()
    trainer.save()
    damaged = DAMAGES[damage](folder.checkpoint.read_bytes())
    folder.checkpoint.write_bytes(damaged)
    metrics = folder.metrics.read_bytes()
    for use in (lambda: session.resume(folder, {}), lambda: session.load(folder)):
        with pytest.raises(RunError, match=r"the checkpoint .* is damaged") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert folder.checkpoint.read_bytes() == damaged and folder.metrics.read_bytes() == metrics


def test_a_missing_checkpoint_and_a_missing_run_say_so(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        session.resume(folder, {})
    session.begin(small, folder)
    with pytest.raises(RunError, match=r"cannot read the checkpoint .*: No such file"):
        session.resume(folder, {})
    with pytest.raises(RunError, match="already holds a run: continue it with --resume"):
        session.begin(small, folder)


@pytest.mark.parametrize("name", ["config", "documents", "tokens"])
def test_other_damaged_files_of_a_run_say_so(small: TrainConfig, tmp_path: Path, name: str) -> None:
    folder = train_in_parts(replace(small, steps=1), tmp_path / "run", [])
    path: Path = getattr(folder, name)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match=rf"{path.name} is damaged"):
        session.resume(folder, {})


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
    trainer = session.begin(small, folder)
    interrupt_after(trainer, 3)
    trainer.run()
    before = folder.checkpoint.read_bytes()
    trainer = session.resume(folder, {})
    small_disk(len(before) // 2)
    with pytest.raises(RunError, match=r"cannot write .*checkpoint.pt: File too large; .* is untouched") as caught:
        trainer.run()
    small_disk(resource.RLIM_INFINITY)
    assert "\n" not in str(caught.value)
    assert folder.checkpoint.read_bytes() == before and not list(folder.path.glob("*.partial"))
    assert session.resume(folder, {}).run()
    assert losses(folder) == losses(train_in_parts(small, tmp_path / "whole", []))


def test_a_full_disk_in_the_measurements_or_the_tokens_says_so(
    small: TrainConfig, tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = session.begin(small, folder)
    trainer.train_step()
    small_disk(20)
    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: File too large"):
        trainer.read_losses()
    with pytest.raises(RunError, match=r"cannot write .*tokens.bin: File too large"):
        session.begin(small, RunFolder(tmp_path / "other"))
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
    trainer = session.begin(small, folder)
    interrupt_after(trainer, 2)
    trainer.run()
    before = folder.checkpoint.read_bytes()
    trainer = session.resume(folder, {})
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
    trainer = session.begin(replace(small, save_every=1), folder)
    original = trainer.loss_of
    trainer.loss_of = lambda batch: original(batch) * (math.nan if trainer.step == 2 else 1)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the loss of step 3 is not finite"):
        trainer.run()
    assert checkpoint.load(folder.checkpoint).step == 2


BAD = {"steps": 0, "batch_tokens": 0, "seq_len": -1, "lr": 0.0, "held_out": 1.0, "threads": 0, "warmup": -1}
BAD |= {"final_lr": 2.0, "weight_decay": -0.1, "dtype": "float16"}


@pytest.mark.parametrize("name, value", [*BAD.items(), ("lr", math.nan)])
def test_settings_that_cannot_be_are_refused(small: TrainConfig, tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(RunError, match=f"^--{name.replace('_', '-')} must be"):
        session.begin(replace(small, **{name: value}), RunFolder(tmp_path / "run"))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
