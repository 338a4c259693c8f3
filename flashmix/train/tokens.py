"""Text to token numbers and back: bytes as they are, or a `tokenizers` file. One extra token separates documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flashmix.train.folder import RunError, reason

BYTES = 256


class Tokens:
    """How a run turns bytes into tokens: `separator` comes after the last ordinary token, `dtype` holds them all."""

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
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RunError(
                "--tokenizer must come with the package tokenizers, got none: pip install 'flashmix[train]'"
            ) from error
        try:
            definition = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not a text file"
            raise RunError(f"cannot read the tokenizer {path}: {why}") from error
        try:
            return cls(Tokenizer.from_str(definition))
        except Exception as error:  # the package raises plain Exception for any fault in the file
            raise RunError(f"{path} is not a tokenizers file: {error}") from error

    def encode(self, text: bytes) -> Sequence[int]:
        if self.tokenizer is None:
            return text
        return self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        kept = [index for index in ids if index != self.separator]
        if self.tokenizer is None:
            return bytes(kept).decode(errors="replace")
        return self.tokenizer.decode(kept, skip_special_tokens=False)
