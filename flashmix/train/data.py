"""Text files to packed batches: each file is a document, no document sees another one, and some are held out.

The tokens of a run lie in one file. A separator starts each document (and ends the one before):

    <sep> d0 d0 d0 <sep> d1 d1 <sep>

so the targets of a document are its inputs shifted by one token, and its last target is the separator.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.train.dataset import Dataset, Spans
from flashmix.train.folder import RunError, RunFolder, read_json, reason, write_json, written_whole
from flashmix.train.tokens import Tokens

# Folders that are not source of the standard library: its tests, installed packages, generated tables.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
IGNORED = -100  # a target that the loss does not count
BLOCK = 1 << 24  # bytes that have a checksum of their own


@dataclass(frozen=True)
class Document:
    """One file of the corpus: its name, its first token, its length in tokens (separator included) and in bytes."""

    name: str
    start: int
    tokens: int
    bytes: int
    held_out: bool


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run and the documents that they make up."""

    tokens: np.ndarray
    documents: list[Document]
    mask: np.ndarray | None = None  # all tokens count

    def split(self, held_out: bool) -> list[Document]:
        return [document for document in self.documents if document.held_out == held_out]


@dataclass(frozen=True)
class Batch:
    """Consecutive tokens of a stream: inputs and targets `[1, tokens]`, and the boundaries of its sequences."""

    inputs: Tensor
    targets: Tensor
    packing: Packing

    @classmethod
    def on(cls, device: torch.device, inputs: np.ndarray, targets: np.ndarray, lengths: Sequence[int]) -> Batch:
        """Moves a batch to `device` without waiting for it."""
        boundaries = np.concatenate([[0], np.cumsum(lengths)])

        def move(values: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(values.astype(np.int64))
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        packing = Packing(move(boundaries), len(inputs), host=boundaries.tolist())
        return cls(move(inputs)[None], move(targets)[None], packing)

    def over(self, group: Any, order: str) -> Batch:
        """This rank's part of the batch."""
        shard = self.packing.shard(group, order=order)
        return Batch(shard.take(self.inputs), shard.take(self.targets), shard)


class Stream:
    """The windows of some documents, at most `seq_len` tokens each, end to end in an order that is shuffled anew each epoch.

    The batch at a position depends on the position alone, not on what was read before, so a checkpoint keeps only the position.
    """

    def __init__(self, corpus: Corpus | Dataset, documents: list[Document] | Spans, seq_len: int, seed: int) -> None:
        spans = documents if isinstance(documents, Spans) else Spans.of(documents)
        self.starts, self.lengths = spans.windows(seq_len)
        self.mask = corpus.mask
        self.tokens = corpus.tokens
        self.total = int(self.lengths.sum())
        self.bytes = int(spans.bytes.sum())
        self.seed = seed
        self._epoch = -1

    @property
    def mean_length(self) -> float:
        """Of the sequences, in tokens, as a token sees it: long ones count by their tokens."""
        return float(np.square(self.lengths, dtype=np.float64).sum()) / self.total

    def bits_per_byte(self, loss: float) -> float:
        """`loss` (nats per token) in bits per byte of the texts; the separator's bits count, its byte does not."""
        return loss / math.log(2) * self.total / self.bytes

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))
            self._ends = np.cumsum(self.lengths[self._order])
            self._epoch = epoch

    def _pieces(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """First token and length of each sequence in the `count` tokens from `position` on."""
        while count:
            epoch, offset = divmod(position, self.total)
            self._shuffle(epoch)
            index = int(np.searchsorted(self._ends, offset, side="right"))
            left = int(self._ends[index]) - offset
            window = self._order[index]
            start = int(self.starts[window] + self.lengths[window]) - left
            length = min(left, count)
            yield start, length
            position, count = position + length, count - length

    def counted(self, position: int, count: int) -> int:
        """How many of the targets from `position` on the loss counts."""
        if self.mask is None:
            return count
        return sum(int(self.mask[s + 1 : s + length + 1].sum()) for s, length in self._pieces(position, count))

    def batch(self, position: int, count: int, device: torch.device) -> Batch:
        pieces = list(self._pieces(position, count))
        inputs = np.concatenate([self.tokens[start : start + length] for start, length in pieces])
        targets = np.concatenate([self.tokens[start + 1 : start + length + 1] for start, length in pieces])
        if self.mask is not None:
            counts = np.concatenate([self.mask[start + 1 : start + length + 1] for start, length in pieces])
            targets = np.where(counts, targets.astype(np.int64), IGNORED)
        return Batch.on(device, inputs, targets, [length for _, length in pieces])


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files behind `paths` in a fixed order: a file is itself, a folder is all files in it except hidden ones.

    Without paths: the `.py` files of the running Python's own standard library. Raises RunError: a folder holds tokens in place of texts.
    """
    if not paths:
        library = _walk(Path(sysconfig.get_path("stdlib")), leave_out=NOT_LIBRARY)
        return [path for path in library if path.suffix == ".py"]
    files: list[Path] = []
    for path in map(Path, paths):
        if (path / "tokens.bin").is_file():
            raise RunError(
                f"{path} holds tokens, not texts: `flashmix train --data {path}` takes what `flashmix tokenize` has written"
            )
        files += _walk(path) if path.is_dir() else [path]
    return files


def _walk(folder: Path, leave_out: Collection[str] = ()) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise RunError(f"cannot read {error.filename}: {reason(error)}") from error

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)


def read_documents(paths: Sequence[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Name, contents and hash of each document; empty files, binary files inside folders and repeats are left out."""
    named = {Path(path) for path in paths}
    seen: set[bytes] = set()
    for path in find_files(paths):
        try:
            contents = path.read_bytes()
        except OSError as error:
            raise RunError(f"cannot read {path}: {reason(error)}") from error
        digest = hashlib.sha256(contents).digest()
        binary = b"\0" in contents[:4096] and path not in named
        if contents and not binary and digest not in seen:
            seen.add(digest)
            yield str(path), contents, digest


def choose_held_out(digests: Sequence[bytes], sizes: Sequence[int], fraction: float) -> set[int]:
    """Which documents are held out: in the order of their hashes, those that still fit into `fraction` of all bytes.

    The choice depends on the contents alone, not on names or folders. If none fits, it is the smallest document.
    """
    room = fraction * sum(sizes)
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda i: digests[i]):
        if sizes[index] <= room:
            room -= sizes[index]
            chosen.add(index)
    return chosen or {min(range(len(sizes)), key=lambda i: (sizes[i], digests[i]))}


def cut_in_two(document: Document, fraction: float) -> list[Document]:
    """Two documents of one: its last `fraction` is held out."""
    kept = int(document.tokens * (1 - fraction))
    bytes_kept = round(document.bytes * kept / document.tokens)
    if not 0 < bytes_kept < document.bytes:
        raise RunError(f"the text is too small to hold some of it out: {document.bytes} byte(s) in one document")
    end = Document(document.name, kept, document.tokens - kept, document.bytes - bytes_kept, held_out=True)
    return [replace(document, tokens=kept, bytes=bytes_kept), end]


def hold_out(documents: list[Document], digests: Sequence[bytes], fraction: float) -> list[Document]:
    """The documents, some of them marked as held out; a single document is cut in two."""
    if len(documents) == 1:
        return cut_in_two(documents[0], fraction)
    chosen = choose_held_out(digests, [document.bytes for document in documents], fraction)
    return [replace(document, held_out=index in chosen) for index, document in enumerate(documents)]


def prepare(paths: Sequence[str], fraction: float, tokens: Tokens, folder: RunFolder) -> Corpus:
    """Reads the texts, writes their tokens into the run folder, chooses what is held out, and opens the result."""
    documents: list[Document] = []
    digests: list[bytes] = []
    start = 0
    with written_whole(folder.tokens) as file:
        for name, contents, digest in read_documents(paths):
            ids = np.asarray([tokens.separator, *tokens.encode(contents)], dtype=tokens.dtype)
            file.write(ids.tobytes())
            documents.append(Document(name, start, len(ids), len(contents), held_out=False))
            digests.append(digest)
            start += len(ids)
        if not documents:
            raise RunError(f"no text found in {', '.join(paths) or 'the standard library of this Python'}")
        file.write(np.asarray([tokens.separator], dtype=tokens.dtype).tobytes())
        documents = hold_out(documents, digests, fraction)
    write_json(folder.documents, [asdict(document) for document in documents])
    write_json(folder.checksums, checksums(folder))
    return open_corpus(folder, tokens)


def checksums(folder: RunFolder) -> dict[str, list[str]]:
    """The SHA-256 of each block of 16 MiB of the tokens and of the list of documents; the blocks are hashed in parallel."""
    with ThreadPoolExecutor() as pool:
        return {path.name: list(pool.map(hash_block, *_blocks(path))) for path in (folder.tokens, folder.documents)}


def _blocks(path: Path) -> tuple[list[Path], range]:
    starts = range(0, path.stat().st_size, BLOCK)
    return [path] * len(starts), starts


def hash_block(path: Path, start: int) -> str:
    """The SHA-256 of the block of a file that begins at byte `start`."""
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(BLOCK)).hexdigest()


def verify(folder: RunFolder) -> None:
    """Raises RunError: the tokens or the list of documents are not those that `prepare` wrote."""
    try:
        present = checksums(folder)
    except OSError as error:
        raise RunError(f"cannot read {error.filename or folder.tokens}: {reason(error)}") from error
    if not folder.checksums.exists():  # a run of a version that had none
        print(f"flashmix: {folder.checksums} is missing: it is made of the files as they are now", file=sys.stderr)
        write_json(folder.checksums, present)
        return
    wanted = read_json(folder.checksums)
    for name, found in present.items():
        if not isinstance(wanted, dict) or not isinstance(wanted.get(name), list):
            raise RunError(f"{folder.checksums} is damaged: it must hold the checksums of {name}")
        for index, (old, new) in enumerate(zip_longest(wanted[name], found)):
            if old != new:
                place = f"its {BLOCK >> 20} MiB from byte {index * BLOCK} on have another checksum than in"
                raise RunError(f"{folder.path / name} is damaged: {place} {folder.checksums.name}")


def open_corpus(folder: RunFolder, tokens: Tokens) -> Corpus:
    """The corpus that `prepare` wrote into the run folder; the tokens are memory-mapped.

    Raises RunError: the files are missing or do not fit together.
    """
    try:
        documents = [Document(**entry) for entry in read_json(folder.documents)]
        expected = (documents[-1].start + documents[-1].tokens + 1) * np.dtype(tokens.dtype).itemsize
        size = folder.tokens.stat().st_size
    except OSError as error:
        raise RunError(f"cannot read {folder.tokens}: {reason(error)}") from error
    except (TypeError, IndexError) as error:
        raise RunError(f"{folder.documents} is damaged: {error}") from error
    if size != expected:
        raise RunError(f"{folder.tokens} is damaged: it must hold {expected} bytes, got {size}")
    return Corpus(np.memmap(folder.tokens, dtype=tokens.dtype, mode="r"), documents)
