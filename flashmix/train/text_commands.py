"""The commands `flashmix tokenize` and `flashmix tokenizer`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flashmix.train.folder import RunError, written_whole
from flashmix.train.progress import Progress
from flashmix.train.sources import Fields, documents_of, jobs_of, template_of
from flashmix.train.tokenize import DatasetFolder, tokenize

MEGABYTE = 1_000_000


def tokenize_command(arguments: argparse.Namespace) -> int:
    """Progress is in megabytes of text."""
    from flashmix.train.data import find_files

    files = find_files(arguments.text)
    template = template_of(arguments.template, arguments.tokenizer)
    fields = Fields(arguments.text_field, arguments.messages_field, template)
    folder = DatasetFolder(arguments.out)
    workers = arguments.workers or len(os.sched_getaffinity(0))
    if workers < 1:
        raise RunError(f"--workers must be at least 1, got {workers}")
    start, done, made = time.perf_counter(), 0, 0
    total = sum(job.size for job in jobs_of(files)) // MEGABYTE
    try:
        with Progress(total) as progress:

            def advance(size: int, share: float) -> None:
                nonlocal done, made
                before, done = done // MEGABYTE, done + size
                made += int(size * share)
                progress.show(details={"MB/s": f"{made / MEGABYTE / (time.perf_counter() - start):.1f}"})
                for _ in range(done // MEGABYTE - before):
                    progress.update()

            about = tokenize(files, folder, arguments.tokenizer, fields, workers, advance)
    finally:
        folder.release()
    spent = time.perf_counter() - start
    print(f"{about['documents']:,} documents, {about['tokens']:,} tokens of {about['bytes']:,} bytes in {folder.path}")
    print(f"{made / MEGABYTE / spent:.1f} MB/s; train on it: flashmix train --data {folder.path}")
    return 0


def tokenizer_command(arguments: argparse.Namespace) -> int:
    """A byte-level BPE with GPT-2's words."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise RunError(
            "flashmix tokenizer must come with the package tokenizers: pip install 'flashmix[train]'"
        ) from error
    if not 257 <= arguments.vocabulary <= 1 << 24:
        raise RunError(f"--vocabulary must be between 257 and {1 << 24}, got {arguments.vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in arguments.special]
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sampled(arguments.text, arguments.bytes), trainer)
    with written_whole(Path(arguments.out)) as file:
        file.write(tokenizer.to_str().encode())
    print(f"{tokenizer.get_vocab_size():,} tokens in {arguments.out}")
    return 0


def sampled(paths: list[str], most: int) -> Iterator[str]:
    """Documents of at most `most` bytes in all, from jobs evenly spread over the files. Raises RunError: there is no text."""
    from flashmix.train.data import find_files

    jobs = jobs_of(find_files(paths))
    total = sum(job.size for job in jobs)
    step, read = max(1.0, total / most), 0
    for index in range(int(len(jobs) / step) + 1):
        place = int(index * step)
        for document in documents_of(jobs[place], Fields()) if place < len(jobs) else ():
            text = document.decode(errors="replace") if isinstance(document, bytes) else "".join(t for t, _ in document)
            read += len(text)
            yield text
            if read >= most:
                return
    if not read:
        raise RunError(f"no text found in {', '.join(paths)}")
