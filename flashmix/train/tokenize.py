"""`flashmix tokenize`: text of any size to a folder of tokens that runs read from the disk, by several processes.

The folder holds `tokens.bin` (all tokens; a separator starts each document, as in a run), `documents.bin` (of each document its
tokens, its bytes and 8 bytes of its hash, int64), `mask.bin` where some tokens do not count (a byte a token), the tokenizer and, when all
is done, `dataset.json`. Until then `progress.json` says how far it is: the same command goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from flashmix.train.encode import Encoder
from flashmix.train.folder import LockedFolder, RunError, read_json, reason, write_json, written_whole
from flashmix.train.sources import Fields, Job, documents_of, jobs_of
from flashmix.train.tokens import Tokens

SAVE_EVERY = 16  # jobs
ALONE = 4 << 20  # bytes of text below which one process does it


class DatasetFolder(LockedFolder):
    """The files of a folder of tokens."""

    kind = "folder of tokens"
    name = "folder"
    resumes = False

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "dataset.json")
        self.tokens = self.path / "tokens.bin"
        self.documents = self.path / "documents.bin"
        self.mask = self.path / "mask.bin"
        self.tokenizer = self.path / "tokenizer.json"
        self.progress = self.path / "progress.json"


@dataclass(frozen=True)
class Encoded:
    """What a job makes: tokens, the table of documents, and the mask, None where all tokens count."""

    tokens: bytes
    documents: bytes
    mask: bytes | None


class Worker:
    """Encodes jobs; one in each process."""

    its: Worker

    def __init__(self, definition: str | None, fields: Fields) -> None:
        self.tokens, self.fields = Tokens.from_definition(definition), fields
        self.encoder = Encoder(self.tokens)

    @classmethod
    def start(cls, definition: str | None, fields: Fields) -> None:
        cls.its = cls(definition, fields)

    @classmethod
    def run(cls, job: Job) -> Encoded:
        return cls.its.encoded(job)

    def encoded(self, job: Job) -> Encoded:
        separator = np.asarray([self.tokens.separator], dtype=self.tokens.dtype)
        tokens, counting, table = [], [], []  # `counting`: whether each of `tokens` counts
        for document in documents_of(job, self.fields):
            parts = [(document, True)] if isinstance(document, bytes) else document
            digest, size, length = hashlib.sha256(), 0, 1
            tokens.append(separator)
            counting.append(True)
            for text, counts in parts:
                raw = text if isinstance(text, bytes) else text.encode(errors="replace")
                ids = self.encoder.encode(raw) if isinstance(text, bytes) else self.encoder.encode_text(text)
                digest.update(raw)
                size, length = size + len(raw), length + len(ids)
                tokens.append(ids)
                counting.append(counts)
            table.append((length, size, int.from_bytes(digest.digest()[:8], "little", signed=True)))
        masked = not all(counting)
        return Encoded(
            b"".join(part.data for part in tokens),
            np.asarray(table, dtype=np.int64).reshape(-1, 3).tobytes(),
            np.repeat(np.array(counting, dtype=np.uint8), [len(part) for part in tokens]).tobytes() if masked else None,
        )


class Writer:
    """Appends what jobs make to the files of a folder, and remembers how far they are whole."""

    def __init__(self, folder: DatasetFolder, plan: str) -> None:
        self.folder, self.plan = folder, plan
        self.done, self.sizes, self.masked = 0, {"tokens": 0, "documents": 0, "mask": 0}, False
        if folder.progress.exists():
            before = read_json(folder.progress)
            if before.get("plan") != plan:
                raise RunError(
                    f"{folder.path} holds the beginning of other tokens: other texts or another tokenizer; choose another --out"
                )
            self.done, self.sizes, self.masked = before["done"], before["sizes"], before["masked"]
        self.files = {name: self._opened(name) for name in self.sizes}

    def _opened(self, name: str) -> Any:
        try:
            file = (self.folder.path / f"{name}.bin").open("ab")
            file.truncate(self.sizes[name])
        except OSError as error:
            raise RunError(f"cannot write {self.folder.path / name}.bin: {reason(error)}") from error
        return file

    def add(self, found: Encoded, itemsize: int) -> None:
        """Raises RunError: the disk is full."""
        if found.mask is not None and not self.masked:
            self._write("mask", b"\1" * (self.sizes["tokens"] // itemsize))  # all of before count
            self.masked = True
        self._write("tokens", found.tokens)
        self._write("documents", found.documents)
        if self.masked:
            self._write("mask", found.mask or b"\1" * (len(found.tokens) // itemsize))
        self.done += 1
        if self.done % SAVE_EVERY == 0:
            self.save()

    def _write(self, name: str, data: bytes) -> None:
        try:
            self.files[name].write(data)
        except OSError as error:
            raise RunError(f"cannot write {self.folder.path / name}.bin: {reason(error)}") from error
        self.sizes[name] += len(data)

    def save(self) -> None:
        """What is written so far is on the disk before `progress.json` says so."""
        try:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.folder.path}: {reason(error)}") from error
        state = {"plan": self.plan, "done": self.done, "sizes": self.sizes, "masked": self.masked}
        write_json(self.folder.progress, state)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def plan_of(jobs: list[Job], definition: str | None, fields: Fields) -> str:
    """A hash of all that the tokens follow from: the files with their sizes and times, the tokenizer, the fields."""
    files = sorted({name for job in jobs for name in job.files})
    stats = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in files]
    said = json.dumps([stats, [asdict(job) for job in jobs], definition, asdict(fields)])
    return hashlib.sha256(said.encode()).hexdigest()


def encoded_in_order(jobs: list[Job], definition: str | None, fields: Fields, workers: int) -> Iterator[Encoded]:
    """What the jobs make, in their order; by this process alone, or by several with at most two jobs each on their way."""
    if workers < 2 or sum(job.size for job in jobs) < ALONE:
        worker = Worker(definition, fields)
        yield from map(worker.encoded, jobs)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, Worker.start, (definition, fields)) as pool:
        coming: deque[Future[Encoded]] = deque()
        try:
            for job in jobs:
                coming.append(pool.submit(Worker.run, job))
                if len(coming) > 2 * workers:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tokenize(
    files: list[Path], folder: DatasetFolder, tokenizer: str | None, fields: Fields, workers: int, progress: Any = None
) -> dict[str, Any]:
    """Writes the tokens of the files into the folder, or goes on with it; returns what `dataset.json` says."""
    tokens = Tokens.from_file(tokenizer) if tokenizer else Tokens()
    jobs = jobs_of(files)
    if not jobs:
        raise RunError("no text found")
    folder.create()
    writer = Writer(folder, plan_of(jobs, tokens.definition, fields))
    itemsize = np.dtype(tokens.dtype).itemsize
    try:
        for job in jobs[: writer.done]:
            progress and progress(job.size, 0.0)
        left = jobs[writer.done :]
        for job, found in zip(left, encoded_in_order(left, tokens.definition, fields, workers), strict=True):
            writer.add(found, itemsize)
            progress and progress(job.size, 1.0)
        writer.save()
        return finish(folder, writer, tokens)
    finally:
        writer.close()


def finish(folder: DatasetFolder, writer: Writer, tokens: Tokens) -> dict[str, Any]:
    """Writes the last separator, the tokenizer and `dataset.json`."""
    itemsize, count = np.dtype(tokens.dtype).itemsize, writer.sizes["documents"] // 24
    if not count:
        raise RunError("no text found")
    writer._write("tokens", np.asarray([tokens.separator], dtype=tokens.dtype).tobytes())
    if writer.masked:
        writer._write("mask", b"\1")
    for file in writer.files.values():
        file.flush()
        os.fsync(file.fileno())
    if not writer.masked:
        folder.mask.unlink()
    if tokens.definition is not None:
        with written_whole(folder.tokenizer) as file:
            file.write(tokens.definition.encode())
    table = np.memmap(folder.documents, dtype=np.int64, mode="r").reshape(-1, 3)
    about = {
        "documents": count,
        "tokens": writer.sizes["tokens"] // itemsize,
        "bytes": int(table[:, 1].sum()),
        "vocabulary": tokens.vocabulary,
        "masked": writer.masked,
        "plan": writer.plan,
    }
    write_json(folder.settings, about)
    folder.progress.unlink(missing_ok=True)
    return about
