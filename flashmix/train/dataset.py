"""Documents as columns of numbers, and the corpus of a folder that `flashmix tokenize` has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmix.train.folder import RunError, read_json, reason
from flashmix.train.tokenize import DatasetFolder
from flashmix.train.tokens import Tokens


@dataclass(frozen=True)
class Spans:
    """Documents by their first token, their length in tokens (separator included) and in bytes; int64 arrays `[documents]`."""

    start: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(cls, documents: Sequence[Any]) -> Spans:
        """Of a list of documents with these attributes."""
        names = ("start", "tokens", "bytes")
        return cls(*(np.array([getattr(d, name) for d in documents], dtype=np.int64) for name in names))

    def windows(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """First tokens and lengths of the windows of at most `seq_len` tokens that the documents are cut into."""
        counts = -(-self.tokens // seq_len)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        offsets = (np.arange(counts.sum()) - first) * seq_len
        starts = np.repeat(self.start, counts) + offsets
        return starts, np.minimum(np.repeat(self.start + self.tokens, counts) - starts, seq_len)


@dataclass(frozen=True)
class Dataset:
    """The tokens of a folder and their documents, some held out; `mask` is 1 where the loss counts a token, None if all count."""

    tokens: np.ndarray
    spans: Spans
    held_out: np.ndarray
    mask: np.ndarray | None = None

    def split(self, held_out: bool) -> Spans:
        chosen = self.held_out == held_out
        return Spans(self.spans.start[chosen], self.spans.tokens[chosen], self.spans.bytes[chosen])


def open_dataset(path: str, fraction: float, plan: str | None = None) -> tuple[Dataset, Tokens, str]:
    """The dataset in a folder with `fraction` of its bytes held out, its tokens, and the hash of what it was made of.

    Raises RunError: the folder has none, is damaged, or was made of something else than `plan` says.
    """
    folder = DatasetFolder(path)
    if not folder.settings.exists():
        more = ": it is not finished, give the command again" if folder.progress.exists() else ""
        raise RunError(f"--data must be a folder that `flashmix tokenize` has written, got {path}{more}")
    about = read_json(folder.settings)
    if plan is not None and about.get("plan") != plan:
        raise RunError(f"{path} has other tokens than those that the run began with")
    tokens = Tokens.from_file(folder.tokenizer) if folder.tokenizer.exists() else Tokens()
    try:
        table = np.fromfile(folder.documents, dtype=np.int64).reshape(-1, 3)
        ids = np.memmap(folder.tokens, dtype=tokens.dtype, mode="r")
        mask = np.memmap(folder.mask, dtype=np.uint8, mode="r") if about["masked"] else None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"cannot read {path}: {why}") from error
    lengths = table[:, 0]
    if not len(ids) == int(lengths.sum()) + 1 == about["tokens"] or (mask is not None and len(mask) != len(ids)):
        raise RunError(f"{path} is damaged: it must hold {about['tokens']} tokens, got {len(ids)}")
    spans = Spans(np.cumsum(lengths) - lengths, lengths.copy(), table[:, 1].copy())
    if len(lengths) == 1:
        spans = cut_in_two(spans, fraction)
        return Dataset(ids, spans, np.array([False, True]), mask), tokens, about["plan"]
    return Dataset(ids, spans, held_out(table[:, 2], spans.bytes, fraction), mask), tokens, about["plan"]


def cut_in_two(spans: Spans, fraction: float) -> Spans:
    """Two documents of one: its last `fraction` is to be held out."""
    length, size = int(spans.tokens.sum()), int(spans.bytes.sum())
    kept = min(max(1, int(length * (1 - fraction))), length - 1)
    bytes_kept = min(max(1, round(size * kept / length)), size - 1)
    if length < 2 or size < 2:
        raise RunError(f"the text is too small to hold some of it out: {size} byte(s) in one document")
    return Spans(np.array([0, kept]), np.array([kept, length - kept]), np.array([bytes_kept, size - bytes_kept]))


def held_out(digests: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out: in the order of their hashes, the first that make up `fraction` of all bytes, at least one."""
    order = np.argsort(digests, kind="stable")
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[order] = np.cumsum(sizes[order]) <= fraction * sizes.sum()
    if not chosen.any():
        chosen[np.argmin(sizes)] = True
    return chosen
