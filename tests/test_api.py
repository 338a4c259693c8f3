"""The public names, their signatures and the options of the commands, beside the recorded ones; the rule by which they may change.

`python tests/test_api.py` records them anew in tests/api.txt. Public is what the reference shows: the names of `MODULES` and the
documented methods and properties of their classes.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import flashmix
from flashmix.train.cli import main

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("api.txt")
MODULES = ("flashmix", "flashmix.layers", "flashmix.modules", "flashmix.models", "flashmix.hf", "flashmix.checkpoints")
THEIRS = ("flashmix.hf.FlashmixConfig",)  # whose constructor is transformers', another in each version
COMMANDS = ("train", "tokenizer", "tokenize", "generate", "eval", "convert", "doctor")


def described(name: str, value: object) -> str:
    """A line: the name, and how it is called; a class by its constructor."""
    if name in THEIRS:
        return name
    try:
        signature = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{name}: {type(value).__name__}"
    return f"{name}{re.sub(r' at 0x[0-9a-f]+', '', signature)}"


def methods(name: str, value: object) -> Iterator[str]:
    """The documented methods and properties that a class defines itself."""
    for own, member in sorted(vars(value).items()) if inspect.isclass(value) else ():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        shown = inspect.isfunction(function) or isinstance(member, (property, functools.cached_property))
        if shown and not own.startswith("_") and function.__doc__:
            yield described(f"{name}.{own}", function)


def options(command: str) -> list[str]:
    """The arguments of a command, as its help begins their lines."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="200"), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([command, "--help"])
    found = re.findall(r"^  (--?\w[^\n]*?|[A-Z]\w*)(?:  |$)", said.getvalue(), flags=re.MULTILINE)
    return [f"$ flashmix {command} {argument}" for argument in sorted(found) if argument != "-h, --help"]


@functools.cache
def public() -> dict[str, object]:
    """Every public name and what it is."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        found |= {f"{module_name}.{name}": getattr(module, name) for name in sorted(module.__all__)}
    return found


def public_api() -> list[str]:
    lines = []
    for name, value in public().items():
        lines += [described(name, value), *methods(name, value)]
    return lines + [line for command in COMMANDS for line in options(command)]


def test_the_public_names_are_the_recorded_ones() -> None:
    changed = list(
        difflib.unified_diff(RECORD.read_text().splitlines(), public_api(), "recorded", "now", n=0, lineterm="")
    )
    assert not changed, "say it in CHANGELOG.md, then python tests/test_api.py:\n" + "\n".join(changed)


def test_methods_and_options_are_recorded() -> None:
    recorded = RECORD.read_text().splitlines()
    for start in ("flashmix.Packing.from_lengths(", "flashmix.models.Decoder.forward(", "$ flashmix train --seq-len"):
        assert any(line.startswith(start) for line in recorded), start
    assert {line.split()[2] for line in recorded if line.startswith("$")} == set(COMMANDS)


# The rule of deprecation (CONTRIBUTING.md, "Stability"): a deprecated name says in which version it goes.
def breaches(names: Mapping[str, object], version: str, changelog: str) -> list[str]:
    """What is against the rule: a deprecated name that does not say until when, is past its time, or is not in the changelog."""
    announced = "".join(re.findall(r"^### Deprecated\n(.*?)(?=^##|\Z)", changelog, flags=re.DOTALL | re.MULTILINE))
    found = []
    for name, value in names.items():
        message = getattr(value, "__deprecated__", None)
        if message is None:
            continue
        until = re.search(r"removed in (\d+)\.(\d+)", message)
        if until is None:
            found.append(f"{name}: the message must say 'removed in X.Y', got {message!r}")
        elif tuple(map(int, version.split(".")[:2])) >= (int(until[1]), int(until[2])):
            found.append(f"{name}: its time is over ({message!r} at version {version})")
        if f"`{name.removeprefix('flashmix.')}`" not in announced:
            found.append(f"{name}: not under 'Deprecated' in CHANGELOG.md")
    return found


def test_deprecated_names_are_announced_and_removed_in_time() -> None:
    assert not breaches(public(), flashmix.__version__, (ROOT / "CHANGELOG.md").read_text())


@pytest.mark.parametrize(
    ("message", "version", "changelog", "wrong"),
    [
        ("use `new`; removed in 0.4", "0.3.1", "### Deprecated\n- `old`: use `new`.\n", None),
        ("use `new`; removed in 0.4", "0.4.0.dev0", "### Deprecated\n- `old`: use `new`.\n", "time is over"),
        ("use `new`", "0.3.1", "### Deprecated\n- `old`: use `new`.\n", "must say"),
        ("use `new`; removed in 0.4", "0.3.1", "### Changed\n- `old`\n", "not under 'Deprecated'"),
    ],
)
def test_the_rule_of_deprecation(message: str, version: str, changelog: str, wrong: str | None) -> None:
    found = breaches({"flashmix.old": SimpleNamespace(__deprecated__=message)}, version, changelog)
    assert found == [] if wrong is None else len(found) == 1 and wrong in found[0]


def test_a_deprecated_function_warns_and_is_known() -> None:
    deprecated = pytest.importorskip("typing_extensions").deprecated  # torch brings it

    @deprecated("use `new`; removed in 0.4")
    def old() -> int:
        return 1

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert old() == 1
    assert [w.category for w in seen] == [DeprecationWarning]
    assert len(breaches({"flashmix.old": old}, "0.3.0", "")) == 1


if __name__ == "__main__":
    RECORD.write_text("\n".join(public_api()) + "\n")
