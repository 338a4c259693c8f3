"""The folder of a run as a folder for transformers: `flashmix convert RUN OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmix.checkpoints import save
from flashmix.train import session
from flashmix.train.folder import RunError, RunFolder, read_json, write_json, written_whole
from flashmix.train.tokens import BYTES, Tokens


def export(run: RunFolder, out: Path) -> None:
    """Writes the model of a run's last checkpoint and its tokenizer.

    The tokenizer begins each text with the separator, as documents begin in training and prompts in `flashmix generate`. The model
    ends a text with it.

    Raises:
        ConversionError: the folder has files.
        RunError: the run cannot be read.
    """
    model, tokens = session.load(run, "cpu")
    save(model, out)
    tokenizer = tokenizer_of(tokens)
    with written_whole(out / "tokenizer.json") as file:
        file.write(tokenizer.to_str().encode())
    separator = tokenizer.id_to_token(tokens.separator)
    names = {"bos_token": separator, "eos_token": separator}
    write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    numbers = {"bos_token_id": tokens.separator, "eos_token_id": tokens.separator}
    write_json(out / "config.json", read_json(out / "config.json") | numbers)


def tokenizer_of(tokens: Tokens) -> Any:
    """The tokens of a run, with the separator, as a `Tokenizer` of the package tokenizers.

    Example:
        >>> tokenizer_of(Tokens()).encode("été").ids == [256, *"été".encode()]
        True
    """
    from tokenizers import AddedToken, Tokenizer, processors

    tokenizer = of_bytes() if tokens.definition is None else Tokenizer.from_str(tokens.definition)
    texts = ("<|document|>", *(f"<|document{number}|>" for number in range(2, 100)))
    separator = next(text for text in texts if tokenizer.token_to_id(text) is None)
    tokenizer.add_special_tokens([AddedToken(separator, special=True, normalized=False)])
    number = tokenizer.token_to_id(separator)
    if number != tokens.separator:
        raise RunError(f"the tokenizer's numbers have gaps: the separator must be {tokens.separator}, got {number}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{separator} $A", special_tokens=[(separator, number)]
    )
    return tokenizer


def of_bytes() -> Any:
    """A tokenizer whose tokens are the bytes of the text: GPT-2's letters for bytes, numbered by the bytes, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
    others = [byte for byte in range(BYTES) if byte not in own]
    letters = {chr(byte): byte for byte in own} | {chr(BYTES + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
