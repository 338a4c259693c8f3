"""One run, one folder: its settings, tokens, measurements, loss curve and checkpoint, each complete or absent.

One process at a time writes into a folder: it holds a lock of the operating system, which ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, cast

DTYPES = ("float32", "bfloat16", "float64")
OPTIMIZERS = ("adamw", "muon")
LOGS = ("tensorboard", "wandb")


class RunError(Exception):
    """An error that the user can correct; the command line prints it as one line."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run, as the command line takes them and `config.json` keeps them.

    `text` empty means the source of Python's own standard library. Token counts are in tokens, `eval_every` and
    `save_every` in steps, `held_out` and `final_lr` are fractions (of the corpus, of `lr`). A step is `rows` packed rows, shared by the
    data ranks; `context` ranks share each row. `threads` None is torch's choice, `device` None is a GPU if there is one; the run keeps
    the values that were chosen. `width`, `layers`, `heads`, `mixers` and `mlp_width` None are those of the preset.
    """

    text: tuple[str, ...] = ()
    data: str | None = None
    tokenizer: str | None = None
    preset: str = "hybrid_tiny"
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    mixers: str | None = None
    mlp_width: int | None = None
    tied: bool = False
    init_from: str | None = None
    steps: int = 1000
    batch_tokens: int = 1024
    rows: int = 1
    context: int = 1
    seq_len: int = 512
    optimizer: str = "adamw"
    lr: float = 4e-3
    final_lr: float = 0.05
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    held_out: float = 0.015
    eval_tokens: int = 262144
    eval_every: int = 400
    save_every: int = 400
    keep: int = 1
    log_every: int = 10
    log: str | None = None
    seed: int = 0
    threads: int | None = None
    device: str | None = None
    dtype: str = "float32"
    compile: bool = False
    checkpoint_activations: bool = False

    def check(self) -> None:
        """Raises RunError for a setting that cannot be."""
        least = {"steps": 1, "batch_tokens": 1, "seq_len": 1, "eval_tokens": 1, "eval_every": 1, "save_every": 1}
        least |= {"log_every": 1, "threads": 1, "warmup": 0, "weight_decay": 0, "rows": 1, "context": 1}
        least |= {"width": 1, "layers": 1, "heads": 1, "mlp_width": 1, "keep": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise RunError(f"{_option(name)} must be at least {bound}, got {value}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise RunError(f"{_option(name)} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise RunError(f"--held-out must be between 0 and 1, got {self.held_out}")
        if not 0 <= self.final_lr <= 1:
            raise RunError(f"--final-lr must be between 0 and 1, got {self.final_lr}")
        for name, allowed in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("log", LOGS)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                start = ", ".join(allowed[:-1])
                raise RunError(f"{_option(name)} must be {start} or {allowed[-1]}, got {value}")
        if self.data is not None and (self.text or self.tokenizer):
            raise RunError("--data has its text and its tokenizer: leave --text and --tokenizer away")
        given = [
            name for name in ("width", "layers", "heads", "mixers", "mlp_width") if getattr(self, name) is not None
        ]
        if self.init_from is not None and (given or self.tied):
            raise RunError(f"--init-from has its sizes: leave {_option(next(iter(given), 'tied'))} away")
        if self.batch_tokens % self.rows:
            raise RunError(f"--rows must divide the {self.batch_tokens} --batch-tokens, got {self.rows}")

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> TrainConfig:
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise RunError(f"config.json has settings that this version does not know: {', '.join(unknown)}")
        return cls(**{**settings, "text": tuple(settings.get("text", ()))})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


class LockedFolder:
    """A folder that one process at a time writes: the file `lock` in it holds the number of that process.

    The lock is the operating system's, on that file; the file alone locks nothing, so that one left behind by a killed process is
    taken over.

    Args:
        path: the folder.
        settings: the name of the file that is there once the folder is in use.
    """

    kind = "run"
    name = "run folder"
    resumes = True  # whether a command has --resume for it

    def __init__(self, path: str | Path, settings: str) -> None:
        self.path = Path(path)
        self.settings = self.path / settings
        self.lock = self.path / "lock"
        self._locked: IO[str] | None = None

    def create(self) -> None:
        """Makes the folder and locks it; refuses one that is already in use, so that nothing is ever written over."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the {self.name} {self.path}: {reason(error)}") from error
        self.acquire()
        if self.settings.exists():
            self.release()
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise RunError(
                f"{self.path} already holds {article} {self.kind}: "
                f"{f'continue it with --resume {self.path}, or ' * self.resumes}choose another --out"
            )

    def check_used(self) -> None:
        """Raises RunError: nothing was begun in this folder."""
        if not self.settings.exists():
            raise RunError(f"{self.path} holds no {self.kind} (there is no {self.settings.name} in it)")

    def acquire(self) -> None:
        """Locks the folder, unless this object has done so already.

        Raises RunError: another process has locked it, or it cannot be written.
        """
        while self._locked is None:
            try:
                file = self.lock.open("a+")
            except OSError as error:
                raise RunError(f"cannot write {self.lock}: {reason(error)}") from error
            self._lock_now(file)
            if _is_at(file, self.lock):
                self._locked = file
                self._write_process(file)
            else:  # whoever had the lock has removed the file since it was opened
                file.close()

    def _lock_now(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            number = file.read().strip()
            file.close()
            holder = f"process {number}" if number else "another process"
            raise RunError(f"{self.path} is in use by {holder}: wait until it ends, or stop it") from error
        except OSError as error:  # some network file systems have no locks
            print(f"flashmix: {self.path} cannot be locked ({reason(error)}): let one process use it", file=sys.stderr)

    def _write_process(self, file: IO[str]) -> None:
        with contextlib.suppress(OSError):  # on a full disk it stays empty
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()

    def release(self) -> None:
        """Unlocks the folder and removes the file of the lock."""
        if self._locked is not None:
            with contextlib.suppress(OSError):
                self.lock.unlink()
            with contextlib.suppress(OSError):
                self._locked.close()
            self._locked = None


class RunFolder(LockedFolder):
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "config.json")
        self.config = self.settings
        self.metrics = self.path / "metrics.jsonl"
        self.loss_curve = self.path / "loss.png"
        self.checkpoint = self.path / "checkpoint.pt"
        self.best = self.path / "best.pt"  # its weights had the least held-out loss
        self.earlier = self.path / "checkpoints"  # the last ones of one process
        self.shards = self.path / "checkpoint"  # of several ranks
        self.tokens = self.path / "tokens.bin"
        self.documents = self.path / "documents.json"
        self.checksums = self.path / "checksums.json"
        self.tokenizer = self.path / "tokenizer.json"

    def read_config(self) -> dict[str, Any]:
        self.check_used()
        config = read_json(self.config)
        if not isinstance(config, dict) or not {"train", "model"} <= set(config):
            raise RunError(f"{self.config} is damaged: it must hold the settings 'train' and 'model'")
        return config

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        try:
            with self.metrics.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {reason(error)}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows so far; a last line cut short by a crash is left out."""
        rows = []
        if self.metrics.exists():
            for line in self.metrics.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
        return rows

    def forget_metrics_after(self, step: int) -> None:
        """Drops the rows of later steps, which a resumed run writes again."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        with written_whole(self.metrics) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the open file is the one that lies at `path` now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def reason(error: OSError) -> str:
    """Why the operating system refused, in its own words ("No space left on device")."""
    return error.strerror or str(error)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def write_json(path: Path, value: Any) -> None:
    with written_whole(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


class WholeFile:
    """A file for writing that keeps the operating system's error: torch.save raises a vaguer one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.refusal = self.refusal or error
            raise

    def flush(self) -> None:
        self.file.flush()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name only once it is complete and on the disk; until then the old one stays.

    Raises RunError: the disk is full or refuses; the unfinished file is removed and the old one untouched.
    """
    partial = path.with_name(path.name + ".partial")
    file = None
    try:
        with partial.open("wb") as opened:
            file = WholeFile(opened)
            yield cast("IO[bytes]", file)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        refusal = error if isinstance(error, OSError) else file.refusal if file else None
        if refusal is not None:
            kept = f"; the {path.name} from before is untouched" if path.exists() else ""
            raise RunError(f"cannot write {path}: {reason(refusal)}{kept}") from error
        raise
