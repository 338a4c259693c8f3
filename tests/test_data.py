"""What training reads: which files, which of them are held out, and how documents become batches."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from flashmix.models import Decoder, preset
from flashmix.train import data
from flashmix.train.data import Stream
from flashmix.train.folder import RunError, RunFolder
from flashmix.train.tokens import Tokens

CPU = torch.device("cpu")


def corpus_of(texts: Path, tmp_path: Path, fraction: float = 0.2) -> data.Corpus:
    folder = RunFolder(tmp_path / "corpus")
    folder.create()
    return data.prepare([str(texts)], fraction, Tokens(), folder)


# What is read.


def test_standard_library_is_read_without_tests_and_in_a_fixed_order() -> None:
    files = data.find_files([])
    assert files == data.find_files([]) and len(files) > 200
    assert all(path.suffix == ".py" for path in files)
    assert not any(part in data.NOT_LIBRARY for path in files for part in path.parts[-3:])
    assert any(path.name == "textwrap.py" for path in files)


def test_a_folder_of_tokens_is_no_folder_of_texts(texts: Path, tmp_path: Path) -> None:
    corpus_of(texts, tmp_path)
    with pytest.raises(RunError, match="holds tokens, not texts: `flashmix train --data"):
        data.find_files([str(tmp_path / "corpus")])


def test_documents_are_whole_files_without_repeats_empties_and_binaries(texts: Path) -> None:
    (texts / "copy.txt").write_bytes((texts / "3.txt").read_bytes())
    (texts / "empty.txt").write_text("")
    (texts / "binary.bin").write_bytes(b"\x7fELF\0\0")
    (texts / ".hidden").write_text("hidden")
    (texts / "test").mkdir()
    (texts / "test" / "kept.txt").write_text("a user's own folder of this name is read")
    names = [Path(name).name for name, _, _ in data.read_documents([str(texts)])]
    assert names == [
        "0.txt",
        "1.txt",
        "2.txt",
        "3.txt",
        "4.txt",
        "5.txt",
        "6.txt",
        "7.txt",
        "8.txt",
        "9.txt",
        "kept.txt",
    ]
    named = [name for name, _, _ in data.read_documents([str(texts / "binary.bin")])]
    assert named == [str(texts / "binary.bin")], "a file that is named is read, whatever is in it"


def test_held_out_documents_depend_on_contents_not_on_names(texts: Path, tmp_path: Path) -> None:
    first = corpus_of(texts, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for index, path in enumerate(sorted(texts.iterdir(), reverse=True)):
        (other / f"renamed_{index}").write_bytes(path.read_bytes())
    second = corpus_of(other, tmp_path / "again")

    def held(corpus: data.Corpus) -> set[bytes]:
        return {Path(document.name).read_bytes() for document in corpus.split(held_out=True)}

    assert held(first) == held(second) and held(first)
    fraction = sum(d.bytes for d in first.split(True)) / sum(d.bytes for d in first.documents)
    assert 0 < fraction <= 0.2


def test_one_document_is_cut_and_two_give_one_away(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_bytes(bytes(range(32, 127)) * 10)
    start, end = corpus_of(text, tmp_path).documents
    assert (start.held_out, end.held_out) == (False, True)
    assert start.bytes + end.bytes == 950 and start.tokens + end.tokens == 951 and end.start == start.tokens
    assert data.choose_held_out([b"b", b"a"], [500, 400], 0.1) == {1}


# How it is batched.


def test_an_epoch_reads_every_token_once_and_no_sequence_crosses_a_document(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    documents = corpus.split(held_out=False)
    stream = Stream(corpus, documents, 64, seed=3)
    owner = {place: d.name for d in documents for place in range(d.start, d.start + d.tokens)}
    for epoch in range(2):
        pieces = list(stream._pieces(epoch * stream.total, stream.total))
        places = [place for start, length in pieces for place in range(start, start + length)]
        assert sorted(places) == sorted(owner)
        assert all(len({owner[p] for p in range(s, s + n)}) == 1 and n <= 64 for s, n in pieces)
    first, second = (list(stream._pieces(epoch * stream.total, stream.total)) for epoch in (0, 1))
    assert first != second, "the second epoch has the order of the first"


def test_a_batch_is_a_function_of_its_position(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    used, fresh = (Stream(corpus, corpus.split(False), 64, seed=3) for _ in range(2))
    for position in (0, 150, 5000, 300):
        a, b = used.batch(position, 150, CPU), fresh.batch(position, 150, CPU)
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.packing.cu_seqlens, b.packing.cu_seqlens)
        fresh = Stream(corpus, corpus.split(False), 64, seed=3)
    assert not torch.equal(
        used.batch(0, 150, CPU).inputs, Stream(corpus, corpus.split(False), 64, 4).batch(0, 150, CPU).inputs
    )


def test_targets_are_the_next_tokens_of_the_same_document(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    stream = Stream(corpus, corpus.split(False), 64, seed=0)
    whole = b"|".join(Path(d.name).read_bytes() for d in corpus.documents)
    batch = stream.batch(0, 400, CPU)
    bounds = batch.packing.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == 400 and batch.inputs.shape == batch.targets.shape == (1, 400)
    for begin, end in pairwise(bounds):
        inputs, targets = batch.inputs[0, begin:end].tolist(), batch.targets[0, begin:end].tolist()
        assert inputs[1:] == targets[:-1]
        assert 256 not in inputs[1:], "a separator only starts a sequence"
        text = bytes(token for token in [*inputs[:1], *targets] if token != 256)
        assert text in whole


def test_packed_documents_do_not_see_each_other(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    batch = Stream(corpus, corpus.split(False), 64, seed=0).batch(0, 300, CPU)
    torch.manual_seed(0)
    model = Decoder(preset("hybrid_nano", vocab_size=257)).double()
    packed = model(batch.inputs, cu_seqlens=batch.packing, targets=batch.targets, reduction="none")[0]
    bounds = batch.packing.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        alone = model(batch.inputs[:, begin:end], targets=batch.targets[:, begin:end], reduction="none")[0]
        error = (packed[begin:end] - alone).abs().max() / alone.abs().max()
        assert error <= 64 * torch.finfo(torch.float64).eps


def test_bits_per_byte_counts_the_bytes_of_the_text(texts: Path, tmp_path: Path) -> None:
    corpus = corpus_of(texts, tmp_path)
    stream = Stream(corpus, corpus.split(True), 64, seed=0)
    size = sum(Path(d.name).stat().st_size for d in corpus.split(True))
    tokens = size + len(corpus.split(True))
    assert stream.total == tokens and stream.bytes == size
    assert abs(stream.bits_per_byte(math.log(2)) - tokens / size) <= math.ulp(tokens / size)


def test_tokens_go_there_and_back() -> None:
    tokens = Tokens()
    text = "naïve 𝔸 \0 text".encode()
    assert tokens.decode([tokens.separator, *tokens.encode(text), tokens.separator]) == text.decode()
    assert tokens.vocabulary == 257 and np.iinfo(tokens.dtype).max >= 256
