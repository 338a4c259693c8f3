"""Documents in files: texts, JSON lines and Parquet, of text or of conversations, cut into jobs that fit into memory.

A file is a document, unless it ends in .jsonl or .ndjson (a document a line) or .parquet (a document a row); a text file of more than
`PIECE` bytes is cut at line ends into several. A document is a list of (text, counts) parts: whether the loss counts its tokens.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashmix.train.folder import RunError, reason

PIECE = 8 << 20  # bytes of a job, about
LINES, ROWS = (".jsonl", ".ndjson"), (".parquet",)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Parts = list[tuple[str, bool]]


@dataclass(frozen=True)
class Fields:
    """Where the documents of lines and rows are: the name of the text, or of the messages, and the template that these are written by."""

    text: str = "text"
    messages: str = "messages"
    template: str = CHATML


@dataclass(frozen=True)
class Job:
    """Some documents: whole files, or the part of one file from `start` to `end` (bytes, or row groups)."""

    files: tuple[str, ...]
    kind: str  # "files", "text", "lines" or "rows"
    start: int = 0
    end: int = 0
    size: int = field(default=0, compare=False)  # bytes


def jobs_of(files: Sequence[Path]) -> list[Job]:
    """The files as jobs, in their order. Raises RunError: a file cannot be read."""
    jobs: list[Job] = []
    small: list[str] = []
    total = 0

    def flush() -> None:
        nonlocal small, total
        if small:
            jobs.append(Job(tuple(small), "files", size=total))
        small, total = [], 0

    for path in files:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise RunError(f"cannot read {path}: {reason(error)}") from error
        if path.suffix in ROWS:
            flush()
            groups = parquet(path).metadata.num_row_groups
            jobs += [Job((str(path),), "rows", group, group + 1, size // max(1, groups)) for group in range(groups)]
        elif path.suffix in LINES or size > 2 * PIECE:
            flush()
            kind = "lines" if path.suffix in LINES else "text"
            starts = range(0, size, PIECE)
            jobs += [Job((str(path),), kind, s, min(size, s + PIECE), min(size, s + PIECE) - s) for s in starts]
        else:
            small.append(str(path))
            total += size
            if total > PIECE:
                flush()
    flush()
    return jobs


def parquet(path: Path | str) -> Any:
    """A Parquet file. Raises RunError: pyarrow is not installed, or the file is none."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        library: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RunError(f"{path} takes the package pyarrow: pip install 'flashmix[parquet]'") from error
    try:
        return library.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise RunError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def lines_of(path: str, start: int, end: int) -> bytes:
    """The lines that begin from byte `start` on and before byte `end`."""
    with open(path, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        begin = file.tell()
        if begin >= end:
            return b""
        text = file.read(end - begin)
        return text if text.endswith(b"\n") else text + file.readline()


def documents_of(job: Job, fields: Fields) -> Iterator[Parts | bytes]:
    """The documents of a job: the bytes of a text, or the parts of a line or row. Raises RunError: one cannot be read."""
    try:
        if job.kind == "rows":
            yield from rows_of(job, fields)
            return
        for name in job.files:
            text = Path(name).read_bytes() if job.kind == "files" else lines_of(name, job.start, job.end)
            if job.kind == "lines":
                yield from (parts_of(line, name, fields) for line in text.splitlines() if line.strip())
            elif text and (job.kind == "text" or b"\0" not in text[:4096]):
                yield text
    except OSError as error:
        raise RunError(f"cannot read {error.filename or job.files}: {reason(error)}") from error


def rows_of(job: Job, fields: Fields) -> Iterator[Parts]:
    for name in job.files:
        file = parquet(name)
        columns = [column for column in (fields.messages, fields.text) if column in file.schema_arrow.names][:1]
        if not columns:
            raise RunError(f"{name} must have a column {fields.text} or {fields.messages}, got none of them")
        for group in range(job.start, job.end):
            for batch in file.iter_batches(256, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    yield parts(row, name, fields)


def parts_of(line: bytes, name: str, fields: Fields) -> Parts:
    """The document of a line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RunError(f"{name} has a line that is not JSON: {error}") from error
    return parts(row, name, fields)


def parts(row: Any, name: str, fields: Fields) -> Parts:
    """The document of a line or row: a text that counts, or messages of which the assistant's count."""
    if isinstance(row, dict) and isinstance(row.get(fields.messages), list):
        return conversation(row[fields.messages], name, fields.template)
    if isinstance(row, dict) and isinstance(row.get(fields.text), str):
        return [(row[fields.text], True)]
    raise RunError(f"{name} must have {fields.text} or {fields.messages} in each line, got {str(row)[:60]}")


def conversation(messages: Iterable[dict[str, str]], name: str, template: str) -> Parts:
    """Messages as the template writes them; what it adds with an assistant's message counts, after the prompt for it.

    Example:
        >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> conversation(chat, "", CHATML)[1]
        ('4<|im_end|>\\n', True)
    """
    found: Parts = []
    said: list[dict[str, str]] = []
    written = ""
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise RunError(f"{name} must have messages with role and content, got {str(message)[:60]}")
        counts = message["role"] == "assistant"
        if counts:
            prompt = rendered(template, said, True)
            if prompt.startswith(written):
                found.append((prompt[len(written) :], False))
                written = prompt
        said.append(message)
        text = rendered(template, said, False)
        if not text.startswith(written):
            raise RunError(
                f"the chat template must only add to what it wrote for fewer messages; at {str(message)[:60]}"
            )
        found.append((text[len(written) :], counts))
        written = text
    joined: Parts = []
    for text, counts in found:
        if joined and joined[-1][1] == counts:
            text = joined.pop()[0] + text
        joined.append((text, counts))
    return joined


COMPILED: dict[str, Any] = {}


def rendered(template: str, messages: list[dict[str, str]], prompt: bool) -> str:
    """The messages as a template of Jinja writes them."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    try:
        if template not in COMPILED:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = refuse
            COMPILED[template] = environment.from_string(template)
        text: str = COMPILED[template].render(
            messages=messages, add_generation_prompt=prompt, bos_token="", eos_token=""
        )
        return text
    except TemplateError as error:
        raise RunError(f"the chat template cannot write these messages: {error}") from error


def template_of(path: str | None, tokenizer: str | None) -> str:
    """The template in a file (Jinja, or JSON with `chat_template`), that beside a tokenizer, or ChatML."""
    places = [Path(path)] if path else []
    if tokenizer and not path:
        folder = Path(tokenizer).parent
        places = [p for p in (folder / "chat_template.jinja", folder / "tokenizer_config.json") if p.exists()]
    for place in places:
        try:
            text = place.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"cannot read the chat template {place}: {error}") from error
        if place.suffix != ".json":
            return text
        found = json.loads(text).get("chat_template")
        if isinstance(found, str):
            return found
    return CHATML
