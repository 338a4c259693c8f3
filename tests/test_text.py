"""`flashmix generate`: text as it comes, in linear time; several prompts, stop strings, conversations, bytes, closed pipes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample
from train_cases import SMALL

import flashmix
from flashmix.models import Decoder, preset
from flashmix.train import cli, session, text
from flashmix.train.folder import RunError, RunFolder
from flashmix.train.text import Conversation, Options, until, write_text
from flashmix.train.tokens import LONGEST, Tokens

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run of two steps."""
    path = tmp_path_factory.mktemp("generate")
    (path / "a.txt").write_text("one and two\n" * 40)
    (path / "b.txt").write_text("two and three\n" * 40)
    config = session.replace(SMALL, text=(str(path / "a.txt"), str(path / "b.txt")), steps=2)
    folder = RunFolder(path / "run")
    session.begin(config, folder).run()
    folder.release()
    return str(folder.path)


def generate(run: str, *options: str) -> list[str]:
    return ["generate", run, "--device", "cpu", "--tokens", "20", *options]


def in_a_process(arguments: list[Any], **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "flashmix.train.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# Tokens to text.


def joined(tokens: Tokens, ids: list[int]) -> str:
    parts = list(tokens.text(iter(ids)))
    assert all(parts), "an empty part"
    return "".join(parts)


BYTES = [
    "aé𝔸".encode() + b"\xff",
    b"\xff" * 50,
    "é".encode() * 5 + b"\xe2\x82",
    b"\xc3(" + "€".encode(),
    bytes(range(256)) * 2,
    UNKNOWN.encode() * 40 + b"x",
]


@pytest.mark.parametrize("contents", BYTES)
def test_text_as_it_comes_is_the_text(contents: bytes) -> None:
    assert joined(Tokens(), [*contents[:3], 256, *contents[3:]]) == contents.decode(errors="replace")


def test_a_character_comes_once_its_bytes_are_there() -> None:
    given: list[int] = []

    def bytes_of(contents: bytes) -> Iterator[int]:
        for index in contents:
            given.append(index)
            yield index

    found = [(part, len(given)) for part in Tokens().text(bytes_of("aé𝔸".encode()))]
    assert found == [("a", 1), ("é", 3), ("𝔸", 7)]


def byte_level() -> Tokens:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["one and two, naïve 𝔸 and €\n"] * 3, trainer)
    return Tokens(tokenizer)


def spaced() -> Tokens:
    """Words with their spaces before them; the first one's is not written."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return Tokens(tokenizer)


@pytest.mark.parametrize("contents", [*BYTES, "one and two, naïve 𝔸𝔸𝔸 and €\n".encode() * 5])
def test_text_of_a_tokenizer_as_it_comes_is_the_text(contents: bytes) -> None:
    tokens = byte_level()
    assert tokens.decode(each_byte(tokens, contents)) == contents.decode(errors="replace")
    for ids in (each_byte(tokens, contents), list(tokens.encode(contents))):
        assert joined(tokens, ids) == tokens.decode(ids)


def each_byte(tokens: Tokens, contents: bytes) -> list[int]:
    """One token for each byte."""
    if tokens.tokenizer is None:
        return list(contents)
    # In byte-level tokenizers printable bytes stand for themselves, the others are the letters from 256 on.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    return [tokens.tokenizer.token_to_id(letters[byte]) for byte in contents]


def test_the_space_before_a_word_is_kept() -> None:
    tokens = spaced()
    for ids in ([0, 1, 2, 1], [0, tokens.separator, 1], [1], []):
        assert joined(tokens, ids) == tokens.decode(ids)
    assert tokens.decode([0, 1, 2]) == "one twos"


@pytest.mark.parametrize("contents", [b"one and two " * 400, b"\xff" * 4000], ids=["text", "no text"])
@pytest.mark.parametrize("make", [Tokens, byte_level])
def test_a_token_is_decoded_a_few_times_however_long_the_text(
    make: Callable[[], Tokens], contents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, seen = make(), 0
    before = Tokens.decode

    def counted(self: Tokens, ids: Any) -> str:
        nonlocal seen
        seen += len(ids)
        return before(self, ids)

    ids = each_byte(tokens, contents)
    monkeypatch.setattr(Tokens, "decode", counted)
    list(tokens.text(ids))
    assert seen <= 4 * LONGEST * len(ids)


def test_write_text_decodes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: `write_text` of n tokens decodes a number of tokens that is a multiple of n, not of n squared."""
    monkeypatch.setattr(text, "stream", lambda *a, **k: (torch.tensor([97]) for _ in range(5000)))
    seen = 0
    before = Tokens.decode

    def counted(self: Tokens, ids: Any) -> str:
        nonlocal seen
        seen += len(list(ids))
        return before(self, ids)

    monkeypatch.setattr(Tokens, "decode", counted)
    model = Decoder(preset("gla_nano", vocab_size=257))
    assert "".join(write_text(model, Tokens(), "", Options(tokens=5000))) == "a" * 5000
    assert seen <= 4 * 5000


# Stop strings.


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "whole, stops, wanted",
    [
        ("one. two", ("two",), "one. "),
        ("aab", ("ab",), "a"),
        ("abababc", ("abc", "zz"), "abab"),
        ("text", ("more", "longer"), "text"),
        ("an end th", ("the",), "an end th"),
        ("stop", ("stop",), ""),
        ("xyz", ("yz", "xyzz", "y"), "x"),
    ],
)
def test_a_text_ends_before_its_first_stop_string(cut: int, whole: str, stops: tuple[str, ...], wanted: str) -> None:
    parts = (whole[i : i + cut] for i in range(0, len(whole), cut))
    found = list(until(parts, stops))
    assert "".join(found) == wanted and all(found)


def test_a_stop_string_ends_the_command_early(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(generate(run, "--prompt", "one")) == 0
    whole = capsys.readouterr().out.removeprefix("one").removesuffix("\n")
    stop = whole[4:6]
    assert cli.main(generate(run, "--prompt", "one", "--stop", "never there", "--stop", stop)) == 0
    assert capsys.readouterr().out == "one" + whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_a_stop_string_that_cannot_be_is_refused(run: str, capsys: pytest.CaptureFixture[str], stop: str) -> None:
    assert cli.main(generate(run, "--stop", stop)) == 1
    assert "--stop must be text in UTF-8 of at least one character" in capsys.readouterr().err


# Several prompts, and conversations.


def test_several_prompts_are_continued_as_each_one_alone(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = []
    for prompt in ("one", "two and"):
        assert cli.main(generate(run, "--prompt", prompt)) == 0
        alone.append(capsys.readouterr().out)
    assert cli.main(generate(run, "--prompt", "one", "--prompt", "two and")) == 0
    assert capsys.readouterr().out == "---\n".join(alone)


def converse(run: str, monkeypatch: pytest.MonkeyPatch, lines: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return cli.main(generate(run, "--interactive", "--temperature", "0", *options))


class Letters(Tokens):
    """A letter for each of the 256 bytes, so that what an untrained model writes can be given to it again."""

    def encode(self, text: bytes) -> bytes:
        return text.decode().encode("latin-1")

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        return (chr(index) for index in ids)


def test_a_conversation_continues_all_that_was_said(run: str) -> None:
    """Each answer is what one prompt of the whole text before it would give."""
    model, tokens = session.load(RunFolder(run), "cpu")[0], Letters()
    options = Options(tokens=12, temperature=0)
    talk, said = Conversation(model, tokens, options), ""
    for line in ("Begin: one\n", "and two", ""):
        talk.add(line)
        said += line
        answer = "".join(talk.answer())
        assert answer == "".join(write_text(model, tokens, said, options)) and len(answer) == 12
        said += answer


def test_each_line_of_stdin_is_answered(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(run, monkeypatch, "one\nand two", "--prompt", "Begin: ") == 0
    model, tokens = session.load(RunFolder(run), "cpu")
    talk, wanted = Conversation(model, tokens, Options(tokens=20, temperature=0)), "Begin: "
    for said in ("Begin: one\n", "and two"):
        talk.add(said)
        wanted += "".join(talk.answer()) + "\n"
    assert capsys.readouterr().out == wanted


def test_a_conversation_reads_each_token_once(run: str) -> None:
    """Its time per token does not grow: a turn runs the new tokens alone."""
    model, tokens = session.load(RunFolder(run), "cpu")
    seen, before = [], model.hidden

    def counted(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return before(ids, **options)

    model.hidden = counted  # type: ignore[method-assign]
    talk = Conversation(model, tokens, Options(tokens=7, temperature=0))
    for turn in range(3):
        talk.add("some words\n")
        list(talk.answer())
        assert seen == [11 + 1, *[1] * 6], turn  # the separator, or the last token of the answer before
        seen.clear()


def test_a_conversation_that_a_stop_string_ends_goes_on(run: str) -> None:
    model, tokens = session.load(RunFolder(run), "cpu")
    whole = "".join(Conversation(model, tokens, Options(tokens=9)).answer())
    talk = Conversation(model, tokens, Options(tokens=9, stop=(whole[3],)))
    first = "".join(talk.answer())
    assert first == whole[: whole.index(whole[3])] and len(talk.unread) == 1
    talk.add("x")
    assert len("".join(talk.answer())) <= 9


@pytest.mark.parametrize(
    "options, message",
    [
        (["--draft", "RUN"], "--interactive keeps one model's cache: leave --draft away"),
        (["--prompt", "a", "--prompt", "b"], "--interactive must have at most one --prompt, got 2"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(
    run: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    options = [run if option == "RUN" else option for option in options]
    assert cli.main(generate(run, "--interactive", *options)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [Options(temperature=-1.0), Options(top_k=0)], ids=str)
def test_options_out_of_range_are_refused(options: Options) -> None:
    model = Decoder(preset("gla_nano", vocab_size=257))
    for write in (lambda: write_text(model, Tokens(), "", options), Conversation(model, Tokens(), options).answer):
        with pytest.raises(RunError, match="must be between"):
            write()


# The process: bytes, pipes, the version.


@pytest.mark.parametrize("interactive", sample((False, True), (True,)))
def test_any_bytes_are_read_and_printed_as_they_are(run: str, interactive: bool) -> None:
    prompt, more = b"one \xff\xfe two \xc3", ["--interactive"] * interactive
    process = in_a_process([*generate(run), *more, "--prompt", prompt])
    out, error = process.communicate(b"\xff\xff\n" if interactive else b"", timeout=100)
    assert process.returncode == 0 and out.startswith(prompt), error


def test_a_model_reads_the_bytes_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []

    def noted(model: Decoder, ids: torch.Tensor, *rest: Any, **options: Any) -> Iterator[torch.Tensor]:
        read.append(ids)
        return iter(())

    monkeypatch.setattr(text, "stream", noted)
    list(write_text(Decoder(preset("gla_nano", vocab_size=257)), Tokens(), os.fsdecode(b"\xff\xc3("), Options()))
    assert read[0].tolist() == [[256, 0xFF, 0xC3, 0x28]]


@pytest.mark.parametrize("command", sample(("generate", "doctor"), ("doctor",)))
def test_a_closed_pipe_ends_quietly(run: str, command: str) -> None:
    arguments = {"generate": generate(run), "doctor": ["doctor"]}[command]
    process = in_a_process(arguments)
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=100)
    assert process.returncode == 141 and error == b"", error


def test_characters_that_stdout_lacks_are_question_marks(run: str) -> None:
    process = in_a_process(generate(run, "--prompt", "naïve"), PYTHONIOENCODING="ascii")
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0 and out.startswith(b"na?ve"), error


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"flashmix {flashmix.__version__}\n"
