"""`flashmix tokenize`: the same tokens as the tokenizer's own, cut files, going on after a stop, conversations, and training on them."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashmix.train import cli, data, session, sources, tokenize
from flashmix.train.data import Stream
from flashmix.train.dataset import Spans, held_out, open_dataset
from flashmix.train.encode import GPT2, Encoder, ascii_pattern
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.native import binding
from flashmix.train.sources import CHATML, Fields, conversation, jobs_of
from flashmix.train.tokenize import DatasetFolder
from flashmix.train.tokens import Tokens

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4!"}]
CHAT = [{"role": "system", "content": "Add."}, *CHAT, *CHAT]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained tokenizer with two special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("def it's(): return 12 + the  words \n\n\tx" * 20 + Path(__file__).read_text())
    special = ["--special", "<|im_start|>", "--special", "<|im_end|>"]
    assert cli.main(["tokenizer", str(folder), "--out", str(folder / "t.json"), "--vocabulary", "320", *special]) == 0
    return str(folder / "t.json")


@pytest.mark.parametrize(
    "text",
    [
        "it's we'll DON'T 'sx  a\n\n  b\t\tc \r\n d_e[f]  ",
        "\n\n\n",
        "  ",
        "",
        "é",
        "naïve words\nplain it's\n  ² x Ⅷ\n\nlast\n",
        "a<|im_end|>b <|im_start|>",
        "x\ny\n\n z\u00a0w\u2028v\x0bu\x1ct",
        "é's  naïve's ²x\n\n  ünder\té\x1c \n(«quoted»)  a1Ⅷ\r\nend's é ",
        "plain é\n line\n\u3000far é  \n near's é\n",
    ],
)
def test_words_that_are_looked_up_have_the_tokens_of_the_tokenizer(text: str, tokenizer: str) -> None:
    tokens = Tokens.from_file(tokenizer)
    encoder = Encoder(tokens)
    assert encoder.words is not None and (encoder.table is None) == (binding.missing() is not None)
    for table in {encoder.table, None}:
        encoder.table = table
        assert encoder.encode(text.encode()).tolist() == list(tokens.encode(text.encode()))


PARTS = [
    "a",
    "B9",
    "1",
    "2.",
    "'",
    "'s",
    "'ll",
    "'x",
    "_",
    "é",
    "ß²",
    "Ⅷ",
    "中",
    "—",
    "😀",
    "<|im_start|>",
    "<|im_end|>",
]
PARTS += [" ", "  ", "\n", "x\n", "\t", "\r", "\x1c", "\x0b", "\x00", "\x85", "\u00a0", "\u3000", "\u2028"]


@pytest.mark.skipif(binding.missing() is not None, reason="the C was not compiled")
@pytest.mark.parametrize("at_once", [1, 7, 1 << 16])
@pytest.mark.parametrize("most", [3, 1 << 20])
def test_words_in_c_of_random_texts(at_once: int, most: int, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "AT_ONCE", at_once)
    monkeypatch.setattr(binding, "MOST_WORDS", most)
    tokens, draw = Tokens.from_file(tokenizer), random.Random(at_once)
    encoder = Encoder(tokens)
    for index in range(150):
        kinds = PARTS[:: draw.choice([1, 1, 2, 3])] + [" "] * draw.choice([0, 5])
        text = "".join(draw.choices(kinds, k=draw.choice([1, 5, 40]))).encode() + b"\xff\xe3\x80" * (index % 9 == 0)
        assert encoder.encode(text).tolist() == list(tokens.encode(text)), text
    assert encoder.table is not None and (encoder.table.learned > 50) == (most > 3)


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_change_the_text_beside_them(option: str, tokenizer: str) -> None:
    definition = json.loads(Path(tokenizer).read_text())
    definition["added_tokens"][0][option] = True
    tokens = Tokens.from_definition(json.dumps(definition))
    text = b"a \n <|im_start|> \n b\n<|im_start|>\nend<|im_start|>"
    assert Encoder(tokens).encode(text).tolist() == list(tokens.encode(text))


def test_words_of_another_pattern_are_looked_up_in_ascii_alone(tokenizer: str) -> None:
    definition = json.loads(Path(tokenizer).read_text())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    tokens = Tokens.from_definition(json.dumps(definition))
    encoder = Encoder(tokens)
    assert encoder.words is not None and encoder.runs is None
    for text in (b"a!\nb  12345\r\n\n(c)", "é!\nb  12345\r\n\n(c)\n".encode()):
        assert encoder.encode(text).tolist() == list(tokens.encode(text))


def test_a_pattern_that_is_not_known_is_left_to_the_tokenizer(tokenizer: str) -> None:
    definition = json.loads(Path(tokenizer).read_text())
    definition["normalizer"] = {"type": "Lowercase"}
    encoder = Encoder(Tokens.from_definition(json.dumps(definition)))
    assert encoder.words is None and encoder.encode(b"THE").tolist() == encoder.encode(b"the").tolist()
    assert ascii_pattern(GPT2) is not None and ascii_pattern(r"(?<bad") is None


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A file of JSON lines and a text, both of several jobs."""
    monkeypatch.setattr(sources, "PIECE", 100)
    rows = [{"text": f"document {i}: {'é' * (i % 5)} it's {i * i}"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    (tmp_path / "b.txt").write_text("".join(f"line {i} of a long text\n" for i in range(20)))
    (tmp_path / "c.txt").write_text("short")
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")]


def made(files: list[Path], out: Path, tokenizer: str | None = None) -> dict[str, Any]:
    folder = DatasetFolder(out)
    try:
        return tokenize.tokenize(files, folder, tokenizer, Fields(), 1)
    finally:
        folder.release()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_cut_at_line_ends_and_nothing_is_lost(lines: list[Path], tmp_path: Path) -> None:
    assert len(jobs_of(lines)) > 10
    about = made(lines, tmp_path / "out")
    ids = np.fromfile(tmp_path / "out" / "tokens.bin", dtype=np.uint16)
    assert len(ids) == about["tokens"] and not (tmp_path / "out" / "progress.json").exists()
    texts = [bytes(part.astype(np.uint8)[1:]) for part in np.split(ids, np.flatnonzero(ids == 256))[1:-1]]
    assert texts[:30] == [json.loads(line)["text"].encode() for line in lines[0].read_bytes().splitlines()]
    assert b"".join(texts[30:-1]) == lines[1].read_bytes() and texts[-1] == b"short"
    assert all(text.endswith(b"\n") for text in texts[30:-1]) and about["documents"] == len(texts)


def test_the_same_command_goes_on_after_a_stop(
    lines: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SAVE_EVERY", 2)
    made(lines, tmp_path / "whole")
    original, count = tokenize.Writer.add, 0

    def add(self: tokenize.Writer, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        original(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenize.Writer, "add", add)
        made(lines, tmp_path / "parts")
    assert json.loads((tmp_path / "parts" / "progress.json").read_text())["done"] == 4
    with pytest.raises(RunError, match="it is not finished, give the command again"):
        open_dataset(str(tmp_path / "parts"), 0.1)
    with pytest.raises(RunError, match="holds the beginning of other tokens"):
        made(lines[:1], tmp_path / "parts")
    made(lines, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    with pytest.raises(RunError, match="already holds a folder of tokens: choose another --out"):
        made(lines, tmp_path / "parts")


@pytest.mark.whole
def test_several_processes_write_the_same(lines: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(lines, tmp_path / "one")
    monkeypatch.setattr(tokenize, "ALONE", 0)
    folder = DatasetFolder(tmp_path / "two")
    tokenize.tokenize(lines, folder, None, Fields(), 2)
    folder.release()
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_run_on_a_folder_of_tokens(lines: list[Path], tmp_path: Path, small: TrainConfig, tokenizer: str) -> None:
    made(lines, tmp_path / "tokens", tokenizer)
    config = replace(small, text=(), data=str(tmp_path / "tokens"), steps=3)
    trainer = session.begin(config, RunFolder(tmp_path / "run"))
    assert trainer.training.bytes + trainer.held_out.bytes == open_dataset(config.data or "", 0.1)[0].spans.bytes.sum()
    assert trainer.run()
    trainer.folder.release()
    again = session.resume(RunFolder(tmp_path / "run"), {"steps": 4})
    assert again.step == 3 and again.run()
    again.folder.release()
    (tmp_path / "tokens" / "dataset.json").write_text(
        (tmp_path / "tokens" / "dataset.json").read_text().replace('"plan": "', '"plan": "0')
    )
    with pytest.raises(RunError, match="has other tokens than those that the run began with"):
        session.resume(RunFolder(tmp_path / "run"), {"steps": 5})


def test_windows_of_columns_are_those_of_a_loop() -> None:
    spans = Spans(np.array([0, 5, 6, 30]), np.array([5, 1, 24, 8]), np.ones(4))
    expected = [(s + i, min(8, n - i)) for s, n in zip(spans.start, spans.tokens, strict=True) for i in range(0, n, 8)]
    assert list(zip(*(x.tolist() for x in spans.windows(8)), strict=True)) == expected
    chosen = held_out(np.array([3, 1, 2, 0]), np.array([10, 20, 30, 40]), 0.61)
    assert chosen.tolist() == [False, True, False, True]


# Conversations.


def test_the_assistants_words_count_and_the_prompt_for_them_does_not() -> None:
    parts = conversation(CHAT, "", CHATML)
    assert [text for text, counts in parts if counts] == 2 * ["4!<|im_end|>\n"]
    assert parts[-2] == ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False)
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # it has no prompt of its own
    assert [text for text, counts in conversation(CHAT, "", plain) if counts] == 2 * ["assistant: 4!\n"]


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([{"role": "user"}], CHATML, "must have messages with role and content"),
        (CHAT, "{{ messages[-1].content }}", "the chat template must only add to what it wrote"),
        (CHAT, "{{ raise_exception('no') }}", "the chat template cannot write these messages: no"),
        (CHAT, "{% if %}", "the chat template cannot write these messages"),
    ],
    ids=range(4),
)
def test_conversations_that_cannot_be_written(messages: list[dict[str, str]], template: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        conversation(messages, "file", template)


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"{", "has a line that is not JSON"), (b'{"body": 1}', "must have text or messages in each line")],
    ids=str,
)
def test_lines_that_are_no_documents(line: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(RunError, match=message):
        made([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.fixture
def chats(tmp_path: Path, tokenizer: str) -> str:
    with (tmp_path / "chat.jsonl").open("w") as file:
        for i in range(12):
            said = [{**m, "content": m["content"].replace("2", str(i))} for m in CHAT]
            file.write(json.dumps({"messages": said}) + "\n")
    assert made([tmp_path / "chat.jsonl"], tmp_path / "chats", tokenizer)["masked"]
    return str(tmp_path / "chats")


def test_the_loss_is_the_mean_over_the_tokens_that_count(chats: str, small: TrainConfig, tmp_path: Path) -> None:
    dataset, tokens, _ = open_dataset(chats, 0.2)
    assert dataset.mask is not None
    counted = [int(i) for i, mask in zip(dataset.tokens, dataset.mask, strict=True) if mask]
    assert tokens.decode(counted) == 24 * "4!<|im_end|>\n"
    for rows in (1, 2):
        config = replace(small, text=(), data=chats, rows=rows)
        trainer = session.begin(config, RunFolder(tmp_path / f"run{rows}"))
        size = config.batch_tokens // rows
        batches = [trainer.batch(trainer.training, index * size, size) for index in range(rows)]
        with torch.no_grad():
            total = sum(trainer.loss(batch, reduction="sum") for batch in batches)
        trainer.train_step()
        found = torch.stack([loss for loss, _ in trainer.unread])
        torch.testing.assert_close(found, (total / sum(int((b.targets != -100).sum()) for b in batches)).view(1))
    stream = Stream(dataset, dataset.split(False), 64, 0)
    batch = stream.batch(10, 100, torch.device("cpu"))
    assert stream.counted(10, 100) == int((batch.targets != data.IGNORED).sum()) < 100


# Parquet.


class Rows:
    """Stands for a Parquet file of two groups."""

    def __init__(self, path: str) -> None:
        if "bad" in str(path):
            raise OSError("no Parquet magic bytes")
        self.metadata = type("Metadata", (), {"num_row_groups": 2})
        self.schema_arrow = type("Schema", (), {"names": ["id", "text"]})

    def iter_batches(self, size: int, row_groups: list[int], columns: list[str]) -> Iterator[Any]:
        assert columns == ["text"]
        rows = [{"text": f"row {i} of {row_groups}"} for i in range(3)]
        yield type("Batch", (), {"to_pylist": lambda self: rows})()


def test_parquet_by_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "pyarrow": type("A", (), {"ArrowException": ValueError}),
        "pyarrow.parquet": type("P", (), {"ParquetFile": Rows}),
    }
    for name in ("a", "bad"):
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1")

    def load(name: str) -> Any:
        if name not in files:
            raise ImportError
        return files[name]

    monkeypatch.setattr(sources.importlib, "import_module", load)
    assert made([tmp_path / "a.parquet"], tmp_path / "out")["documents"] == 6
    with pytest.raises(RunError, match=r"cannot read .*bad\.parquet: no Parquet magic bytes"):
        made([tmp_path / "bad.parquet"], tmp_path / "out2")
    files.clear()
    with pytest.raises(RunError, match=r"takes the package pyarrow: pip install 'flashmix\[parquet\]'"):
        made([tmp_path / "a.parquet"], tmp_path / "out2")
