"""Fast encoding of text for byte-level BPE tokenizers: words are cut and looked up; only new ones are encoded.

It is exact. GPT-2's words are cut in C where the library is there, others and without it by Python's `re`. Text with added tokens, and
tokenizers whose words cannot be cut so, are encoded by the tokenizer itself. Outside ASCII, where Python's classes of characters differ,
GPT-2's words are cut at spaces alone: what is between them, with one space before, is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any

import numpy as np

from flashmix.train.native.binding import WordTable, missing
from flashmix.train.tokens import Tokens

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MOST = 1 << 20  # words that are remembered
LINE = re.compile(r"(?<=\S)(?=\n)")  # always the end of a word of GPT-2: none has a newline after something else
CACHED = 1 << 16  # characters whose words a CPU's cache holds
SPACES = r"\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # outside ASCII
FAR_SPACE = re.compile(f"[{SPACES}]")
FAR_BYTES = (
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80"  # `SPACES` in UTF-8
)
LINE_BYTES = re.compile(rb"(?<=[!-~])(?=\n)")
RUN = r" ?[^ \t\n\r\f\v]*[^\x00-\x7f][^ \t\n\r\f\v]*"  # between spaces, where there is none of `SPACES`
SAMPLE = "It's 1234 of them,\n\n  don't we'll  say;\tx_y = f(a[0])  # note\r\n\n   end ABC DEF'S 12 345\n" * 2


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """A tokenizer's pattern for ASCII text; None where Python's `re` does not know it.

    Example:
        >>> ascii_pattern(GPT2).findall("we've 12 x")
        ['we', "'ve", ' 12', ' x']
    """
    found, inside = [], False
    for part in re.split(r"(\\p\{L\}|\\p\{N\}|\\.|\[|\])", pattern):
        if part in ("[", "]"):
            inside = part == "["
        letters = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}.get(part)
        found.append(part if letters is None else letters if inside else f"[{letters}]")
    try:
        return re.compile("".join(found), re.ASCII)
    except re.error:
        return None


def words_of(definition: str) -> re.Pattern[str] | None:
    """How a tokenizer (its JSON) cuts ASCII text into words that it encodes one by one; None where that is not known."""
    parts: dict[str, Any] = json.loads(definition)
    before, model = parts.get("pre_tokenizer") or {}, parts["model"]
    if model["type"] != "BPE" or model.get("dropout") or parts.get("normalizer") is not None:
        return None
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    if kinds == ["ByteLevel"] and steps[-1].get("use_regex", True):
        return ascii_pattern(GPT2)
    if kinds == ["Split", "ByteLevel"] and not steps[-1].get("use_regex", True):
        split, *_ = steps
        pattern = split["pattern"].get("Regex")
        if pattern is not None and split["behavior"] == "Isolated" and not split.get("invert"):
            return ascii_pattern(pattern)
    return None


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about `CACHED` characters, cut where `LINE` finds a place."""
    start = 0
    while len(text) - start > CACHED:
        found = LINE.search(text, start + CACHED)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def hard_lines(text: bytes, hard: re.Pattern[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The text in parts: lines in which `hard` is found (True), and what is between them; cut where `LINE_BYTES` finds a place.

    Example:
        >>> list(hard_lines(b"a\\nb-c\\nd", re.compile(b"-")))
        [(False, b'a'), (True, b'\\nb-c'), (False, b'\\nd')]
    """
    done = 0
    for found in hard.finditer(text):
        if found.start() < done:
            continue
        start = text.rfind(b"\n", done, found.start())
        while start > done and not b"!" <= text[start - 1 : start] <= b"~":
            start = text.rfind(b"\n", done, start)
        start, after = max(start, done), LINE_BYTES.search(text, found.end())
        end = after.start() if after else len(text)
        if start > done:
            yield False, text[done:start]
        yield True, text[start:end]
        done = end
    if done < len(text) or not text:
        yield False, text[done:]


class Encoder:
    """Encodes texts to arrays of token numbers, as `Tokens.encode` does.

    Args:
        tokens: the tokenizer of a run.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.words = None if tokens.definition is None else words_of(tokens.definition)
        self.runs: re.Pattern[str] | None = None  # the same of any text without `SPACES`
        self.known: dict[str, list[int]] = {}
        added = [] if tokens.definition is None else json.loads(tokens.definition).get("added_tokens", ())
        self.added: list[str] = [token["content"] for token in added]
        changes = ("lstrip", "rstrip", "single_word")  # of the text beside an added token, or only beside some text
        self.plain = not any(token.get(name) for token in added for name in changes) and not any(
            "\n" in content for content in self.added
        )
        if self.words is not None and self._looked_up(SAMPLE, self.words) != self._exact(SAMPLE):
            self.words = None
        own = ascii_pattern(GPT2)
        if self.words is not None and own is not None and self.words.pattern == own.pattern:
            self.runs = re.compile(f"{RUN}|{own.pattern}", re.ASCII)
        self.table = None if self.runs is None or missing() is not None else WordTable(tokens.dtype, self._encoded)
        self.added_bytes = [token.encode() for token in self.added]
        self.hard = re.compile(
            b"|".join([FAR_BYTES, *map(re.escape, self.added_bytes)])
        )  # its lines are not for the table

    def encode(self, text: bytes) -> np.ndarray:
        if self.tokens.definition is None:
            return np.frombuffer(text, dtype=np.uint8).astype(self.tokens.dtype)
        if self.table is not None:
            found = self._by_table(text)
            if found is not None:
                return found
        return self._array(self._ids_of(text.decode(errors="replace")))

    def encode_text(self, text: str) -> np.ndarray:
        """The same of a string."""
        if self.tokens.definition is None or self.table is not None:
            return self.encode(text.encode(errors="replace"))
        return self._array(self._ids_of(text))

    def _array(self, ids: list[int]) -> np.ndarray:
        return np.fromiter(ids, dtype=self.tokens.dtype, count=len(ids))

    def _by_table(self, text: bytes) -> np.ndarray | None:
        """The tokens by the table in C, but for lines with added tokens or `SPACES`; None where it cannot be."""
        assert self.table is not None
        special = any(token in text for token in self.added_bytes)
        if special and not self.plain:
            return None
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                text = text.decode(errors="replace").encode()
        elif not special:
            return self.table.encode(text)
        found = [
            self._array(self._exact(part.decode())) if hard else self.table.encode(part)
            for hard, part in hard_lines(text, self.hard)
        ]
        whole = [part for part in found if part is not None]
        return np.concatenate(whole) if len(whole) == len(found) else None

    def _ids_of(self, text: str) -> list[int]:
        if self.words is None or any(token in text for token in self.added):
            return self._exact(text)
        if self.runs is None:
            return self._looked_up(text, self.words) if text.isascii() else self._exact(text)
        found: list[int] = []
        for piece in pieces(text):
            if piece.isascii():
                found += self._looked_up(piece, self.words)
            elif FAR_SPACE.search(piece) is None:
                found += self._looked_up(piece, self.runs)
            else:
                found += chain.from_iterable(self._by_lines(piece, self.runs))
        return found

    def _by_lines(self, text: str, runs: re.Pattern[str]) -> Iterator[list[int]]:
        """Runs of lines, those without `SPACES` looked up."""
        for far, lines in groupby(LINE.split(text), lambda line: FAR_SPACE.search(line) is not None):
            part = "".join(lines)
            yield self._exact(part) if far else self._looked_up(part, runs)

    def _looked_up(self, text: str, pattern: re.Pattern[str]) -> list[int]:
        words = pattern.findall(text)
        known = self.known
        different = set(words)
        if not different <= known.keys():
            if len(known) > MOST:
                known.clear()
            new = [word for word in different if word not in known]
            known.update(zip(new, self._encoded(new), strict=True))
        return list(chain.from_iterable(map(known.__getitem__, words)))

    def _encoded(self, words: list[str]) -> list[list[int]]:
        """The tokens of each word, by the tokenizer."""
        found: list[Any] = self.tokens.tokenizer.encode_batch_fast(words, add_special_tokens=False)  # type: ignore[union-attr]
        return [each.ids for each in found]

    def _exact(self, text: str) -> list[int]:
        found: list[int] = self.tokens.tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[union-attr]
        return found
