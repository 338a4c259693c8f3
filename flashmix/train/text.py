"""Text from the model of a run: one prompt, or a conversation; the time per token does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.models import Acceptance, Decoder, stream, stream_speculatively
from flashmix.train.folder import RunError
from flashmix.train.tokens import Tokens, as_bytes


@dataclass(frozen=True)
class Options:
    """How text is written: the options of `flashmix.models.generate`, the seed, and the strings that end a text.

    Attributes:
        tokens: most tokens to add.
        stop: strings; a text ends before the first of them that the model writes.
    """

    tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises RunError for a stop string that cannot be."""
        for text in self.stop:
            if not text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise RunError(f"--stop must be text in UTF-8 of at least one character, got {text!r}")

    def sampling(self, model: Decoder, tokens: Tokens) -> dict[str, Any]:
        """The keyword arguments of `generate` and its relatives."""
        generator = torch.Generator(device_of(model)).manual_seed(self.seed)
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stop": tokens.separator,
            "generator": generator,
        }


@dataclass(frozen=True)
class Draft:
    """A smaller model that drafts `tokens` tokens at a time; `acceptance` counts those that are kept."""

    model: Decoder
    tokens: int
    acceptance: Acceptance


def write_text(
    model: Decoder, tokens: Tokens, prompt: str, options: Options, draft: Draft | None = None
) -> Iterator[str]:
    """Continues `prompt` as the model was trained to read it, behind a separator; yields text as it is sure of it.

    Ends after `options.tokens` tokens, before a stop string, or where the model ends the document. A `draft` changes the speed, not
    the distribution of the text. Bytes of the prompt that are not UTF-8 (surrogates, as in `sys.argv`) are read as the bytes they are.

    Raises RunError: an option is out of its range.
    """
    options.check()
    ids = row([tokens.separator, *tokens.encode(as_bytes(prompt))], model)
    sampling = options.sampling(model, tokens)
    try:
        if draft is None:
            steps = stream(model, ids, options.tokens, **sampling)
        else:
            sampling |= {"draft_tokens": draft.tokens, "acceptance": draft.acceptance}
            steps = stream_speculatively(model, draft.model, ids, options.tokens, **sampling)
    except ValueError as error:
        raise RunError(str(error)) from error
    return until(tokens.text(int(token) for token in steps), options.stop)


class Conversation:
    """A text that a user and a model write in turns: what was read and written stays in the model's cache."""

    def __init__(self, model: Decoder, tokens: Tokens, options: Options) -> None:
        options.check()
        self.model, self.tokens, self.options = model, tokens, options
        self.cache = model.new_cache()
        self.sampling = options.sampling(model, tokens)
        self.unread = [tokens.separator]  # what the model has not read yet

    def add(self, text: str) -> None:
        """Appends the user's text, which the model reads before its next answer."""
        self.unread += self.tokens.encode(as_bytes(text))

    def answer(self) -> Iterator[str]:
        """The model's next text, with an end as that of `write_text`. Raises RunError: an option is out of its range."""
        try:
            ids = row(self.unread, self.model)
            steps = stream(self.model, ids, self.options.tokens, cache=self.cache, **self.sampling)
        except ValueError as error:
            raise RunError(str(error)) from error
        return until(self.tokens.text(self._noted(steps)), self.options.stop)

    def _noted(self, steps: Iterator[Tensor]) -> Iterator[int]:
        for token in steps:
            self.unread = [int(token)]  # the cache has all but the last token
            yield int(token)


def until(parts: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """The text up to the first of the strings `stops`; what may be the beginning of one is held back until it is decided.

    Example:
        >>> list(until(iter(["one, t", "wo. thr", "ee"]), ["two.", "three"]))
        ['one, ']
    """
    held = ""
    for part in parts:
        held += part
        ends = [place for stop in stops if (place := held.find(stop)) >= 0]
        if ends:
            if min(ends):
                yield held[: min(ends)]
            return
        sure = len(held) - max((_begun(held, stop) for stop in stops), default=0)
        if sure:
            yield held[:sure]
            held = held[sure:]
    if held:
        yield held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def row(ids: Sequence[int], model: Decoder) -> Tensor:
    """`[1, T]`: token numbers on the model's device."""
    return torch.tensor([list(ids)], device=device_of(model))


def device_of(model: Decoder) -> torch.device:
    return model.embedding.weight.device
