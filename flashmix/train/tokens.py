"""Text to token numbers and back: bytes as they are, or a `tokenizers` file. One extra token separates documents."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashmix.train.folder import RunError, reason

BYTES = 256
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # how decoders write bytes that are not UTF-8, or not yet
CHARACTER = 4  # most bytes, and so most tokens, of one character
LONGEST = 16  # tokens that are waited for until they are taken for bytes that are no text


class Tokens:
    """The tokenizer of a run: `separator` is the number after the last ordinary token, `dtype` holds all numbers."""

    def __init__(self, tokenizer: Any | None = None) -> None:
        self.tokenizer = tokenizer
        self.definition: str | None = None if tokenizer is None else tokenizer.to_str()  # None: bytes
        self.separator: int = BYTES if tokenizer is None else tokenizer.get_vocab_size()
        self.vocabulary = self.separator + 1
        self.dtype = "uint16" if self.vocabulary <= 1 << 16 else "uint32"

    @classmethod
    def from_file(cls, path: Path | str) -> Tokens:
        """Reads a tokenizer in the JSON format of the `tokenizers` package."""
        try:
            definition = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not a text file"
            raise RunError(f"cannot read the tokenizer {path}: {why}") from error
        return cls.from_definition(definition, path)

    @classmethod
    def from_definition(cls, definition: str | None, name: Path | str = "the tokenizer") -> Tokens:
        """The tokens of a tokenizer's JSON, bytes if it is None; `name` is said in errors."""
        if definition is None:
            return cls()
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RunError(
                "--tokenizer must come with the package tokenizers, got none: pip install 'flashmix[train]'"
            ) from error
        try:
            return cls(Tokenizer.from_str(definition))
        except Exception as error:  # the package raises plain Exception for any fault in the file
            raise RunError(f"{name} is not a tokenizers file: {error}") from error

    def encode(self, text: bytes) -> Sequence[int]:
        if self.tokenizer is None:
            return text
        return self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        kept = [index for index in ids if index != self.separator]
        if self.tokenizer is None:
            return bytes(kept).decode(errors="replace")
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of tokens that come one by one, as soon as its characters are complete.

        Joined, the parts are `decode` of all tokens. The time per token does not depend on how many came before.
        """
        kept = (index for index in ids if index != self.separator)
        parts = self._text_of_bytes(kept) if self.tokenizer is None else self._text_of_tokenizer(kept)
        return (part for part in parts if part)

    @staticmethod
    def _text_of_bytes(ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for index in ids:
            yield decoder.decode(bytes([index]))
        yield decoder.decode(b"", final=True)

    def _text_of_tokenizer(self, ids: Iterable[int]) -> Iterator[str]:
        """Decodes the tokens since the text before last: a token's text may depend on the one before (its space, its bytes)."""
        context: list[int] = []
        new: list[int] = []
        for index in ids:
            new.append(index)
            shown, text = self.decode(context), self.decode(context + new)
            if not text.endswith(UNKNOWN):
                yield text[len(shown) :]
                context, new = new, []
            elif len(new) >= LONGEST:  # these are no characters, but the last tokens may still become one
                sure = new[:-CHARACTER]
                yield self.decode(context + sure)[len(shown) :]
                context, new = sure, new[-CHARACTER:]
        yield self.decode(context + new)[len(self.decode(context)) :]


def as_bytes(text: str) -> bytes:
    """The bytes of a text in UTF-8; those that were none, surrogates in `text`, as they were."""
    return text.encode(errors="surrogateescape")
