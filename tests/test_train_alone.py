"""A training command on its own: one process per folder, whole files, and what it says without a terminal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from samples import sample

from flashmix.train import cli, data, evaluate, progress, session
from flashmix.train.folder import LockedFolder, RunError, RunFolder, TrainConfig
from flashmix.train.progress import Progress, duration

ROOT = Path(__file__).resolve().parent.parent
HOLD = """
import sys, time
from flashmix.train.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.acquire()
print("locked", flush=True)
time.sleep(100)
"""


def command(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)


def train(out: Path, small: TrainConfig, *options: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """`flashmix train` with the settings of `small`, in a process of its own."""
    settings = {**small.to_dict(), "text": small.text[0], "sample": 0, "out": out}
    chosen = {name: value for name, value in settings.items() if value is not None and value is not False}
    words = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return command("-m", "flashmix.train.cli", "train", *words, *options, **pipes)


# Damaged texts.


def flip(path: Path, place: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_one_flipped_bit_of_the_tokens_is_noticed(small: TrainConfig, tmp_path: Path, place: int) -> None:
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1), folder).run()
    flip(folder.tokens, place)
    metrics = folder.metrics.read_bytes()
    with pytest.raises(
        RunError, match=r"tokens\.bin is damaged: its 16 MiB from byte 0 on have another checksum"
    ) as caught:
        session.resume(folder, {"steps": 2})
    assert "\n" not in str(caught.value) and folder.metrics.read_bytes() == metrics


def test_the_damaged_block_is_named(small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BLOCK", 1 << 10)
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1), folder).run()
    flip(folder.tokens, 2500)
    with pytest.raises(RunError, match=r"from byte 2048 on have another checksum than in checksums\.json"):
        data.verify(folder)
    folder.tokens.write_bytes(folder.tokens.read_bytes()[:2048])
    with pytest.raises(RunError, match=r"tokens\.bin is damaged: its .* from byte 2048 on"):
        data.verify(folder)


def test_a_digit_of_the_list_of_documents_is_noticed(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1), folder).run()
    listed = folder.documents.read_text()
    folder.documents.write_text(listed.replace('"start": 0', '"start": 1', 1))
    with pytest.raises(RunError, match=r"documents\.json is damaged"):
        session.resume(folder, {"steps": 2})


def test_a_run_without_checksums_gets_them(
    small: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1), folder).run()
    before = folder.checksums.read_bytes()
    folder.checksums.unlink()
    assert session.resume(folder, {"steps": 2}).run()
    assert "checksums.json is missing" in capsys.readouterr().err and folder.checksums.read_bytes() == before
    folder.checksums.write_text("{}")
    with pytest.raises(RunError, match=r"checksums\.json is damaged"):
        session.resume(folder, {"steps": 3})
    folder.tokens.unlink()
    with pytest.raises(RunError, match=r"cannot read .*tokens\.bin: No such file"):
        session.resume(folder, {"steps": 3})


# One process per folder.


def test_a_second_process_is_refused_until_the_first_one_dies(small: TrainConfig, tmp_path: Path) -> None:
    """Even by SIGKILL, which leaves the file of the lock behind."""
    folder = RunFolder(tmp_path / "run")
    session.begin(replace(small, steps=1), folder).run()
    folder.release()
    assert not folder.lock.exists()
    holder = command("-c", HOLD, str(folder.path))
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    with pytest.raises(RunError, match=rf"run is in use by process {holder.pid}: wait until it ends, or stop it"):
        session.resume(folder, {"steps": 2})
    with pytest.raises(RunError, match="is in use by process"):
        RunFolder(folder.path).create()
    session.load(folder)  # reading needs no lock
    holder.kill()
    holder.wait()
    assert folder.lock.read_text() == f"{holder.pid}\n"
    assert session.resume(folder, {"steps": 2}).run()


def test_two_commands_in_one_folder(small: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path / "run", replace(small, steps=100000, eval_every=100000, save_every=1))
    deadline = time.monotonic() + 100
    while not (tmp_path / "run" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)  # it need not train meanwhile
    for options in (["--resume", str(tmp_path / "run")], ["--text", small.text[0], "--out", str(tmp_path / "run")]):
        assert cli.main(["train", *options]) == 1
        said = capsys.readouterr().err
        assert f"run is in use by process {first.pid}" in said and len(said.splitlines()) == 1, said
    first.send_signal(signal.SIGCONT)
    first.terminate()
    _, error = first.communicate(timeout=100)
    assert first.returncode == 130, error
    assert not (tmp_path / "run" / "lock").exists()


def test_evaluations_are_locked_too(tmp_path: Path) -> None:
    first, second = (evaluate.EvalFolder(tmp_path / "eval") for _ in range(2))
    first.create()
    with pytest.raises(RunError, match=f"eval is in use by process {os.getpid()}"):
        second.create()
    first.release()
    second.create()


def test_a_lock_that_was_removed_while_it_was_awaited_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, its holder may end: then another file of the name may be locked already."""
    folder, other = (LockedFolder(tmp_path, "settings.json") for _ in range(2))
    before, calls = fcntl.flock, 0

    def flock(file: IO[str], flags: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            folder.lock.unlink()
            other.acquire()
        before(file, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match="is in use"):
        folder.acquire()
    other.release()
    folder.acquire()
    assert folder.lock.read_text() == f"{os.getpid()}\n"


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(file: IO[str], flags: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    LockedFolder(tmp_path, "settings.json").acquire()
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


# What it says.


def test_without_a_terminal_there_are_lines_with_the_time_left(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long a step takes: here each one takes several times as long as the lines are apart."""
    assert progress.INTERVAL < 60
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    trainer = session.begin(replace(small, steps=4), RunFolder(tmp_path / "run"))
    original = trainer.loss_of

    def slow(batch: data.Batch) -> torch.Tensor:
        time.sleep(0.2)
        return original(batch)

    trainer.loss_of = slow  # type: ignore[method-assign]
    assert trainer.run()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4 and lines[0] == "step 0 of 4, time left not known yet"
    assert any("step 2 of 4, loss " in line and line.endswith(" left") and ":" in line for line in lines)


def test_the_time_left_is_that_of_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Progress(total=100, done=90)
    monkeypatch.setattr(time, "monotonic", lambda: shown.start + 60)
    shown.update()
    shown.update()
    shown.show("recall deltanet", {"loss": "0.5"})
    assert shown.line() == "recall deltanet: step 92 of 100, loss 0.5, 4:00 left"
    assert [duration(seconds) for seconds in (0, 61, 3600)] == ["0:00", "1:01", "1:00:00"]


def test_a_closed_pipe_saves_the_run(small: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    process = train(folder.path, replace(small, eval_every=2, save_every=100))
    assert process.stdout is not None and b"parameters" in process.stdout.readline()
    process.stdout.close()
    _, error = process.communicate(timeout=100)
    assert process.returncode == 141 and error == b"", error
    assert session.resume(folder, {}).step >= 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_closed_while_it_trains_saves_the_steps_so_far(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = session.begin(replace(small, eval_every=3, save_every=100), folder)

    def closed(*arguments: Any, **options: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    if stream == "stdout":
        monkeypatch.setattr(Progress, "say", closed)
    else:
        monkeypatch.setattr(Progress, "line", closed)
        monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with pytest.raises(BrokenPipeError):
        trainer.run()
    assert trainer.saved_step == trainer.step > 0
    monkeypatch.undo()
    assert session.resume(folder, {}).run()


@pytest.mark.parametrize("columns", sample((0, 80), (0,)))
def test_a_terminal_without_columns_gets_lines(small: TrainConfig, tmp_path: Path, columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    process = train(tmp_path / "run", replace(small, steps=3), stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and b"bits per byte" in out, shown
    assert (b"3/3" in shown) == (columns == 80) and b"Traceback" not in shown
    assert columns or b"\r" not in shown.replace(b"\r\n", b"")


@pytest.mark.parametrize("name", ["$a_{$b", "\udcff", "a b"], ids=ascii)
def test_a_folder_may_have_any_name(
    small: TrainConfig, tmp_path: Path, name: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = [
        "--steps",
        "1",
        "--batch-tokens",
        "64",
        "--seq-len",
        "32",
        "--device",
        "cpu",
        "--sample",
        "5",
        "--eval-tokens",
        "64",
    ]
    out = tmp_path / name
    assert cli.main(["train", "--text", small.text[0], "--out", str(out), "--preset", "gla_nano", *words]) == 0
    assert RunFolder(out).loss_curve.exists() and os.fsencode(name) in capsysbinary.readouterr().out
