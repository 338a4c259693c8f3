"""Counts of the package beside their goals, and the laws that tests/test_counts.py makes of them. `make counts` prints the table."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from detectors import (
    Sources,
    duplicates,
    fmt_skips,
    foreign_op_files,
    jitted,
    kernels,
    lines_over,
    literal_tolerances,
    long_functions,
    naming_files,
    nodes,
    numbered_elements,
    parameter_count,
    positional_calls,
    private_imports,
    repeated_classes,
    undocumented,
    unshaped_loads,
    what_headlines,
    wide_kernels,
)

ROOT = Path(__file__).resolve().parent.parent
Row = tuple[str, float, str]
Law = tuple[Callable[[], list[str]], int]

FMT_SKIPS = 30
DUPLICATES = 40
DOCUMENTED = ["flashmix", "flashmix.layers", "flashmix.modules", "flashmix.models"]
# Tuples of what an operator returns, saves and is told; no law yet.
RESULTS = r"(options|kept|grads|gradients|results|numbers)"


def sources(*folders: str, endings: tuple[str, ...] = (".py",)) -> Sources:
    """The texts of all files below these folders of the repository, by their names relative to its root."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings)
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def sizes(package: Sources) -> list[Row]:
    """How much there is, and how much of it in one place."""
    lengths = [len(text.splitlines()) for text in package.values()]
    launched = [parameter_count(f) for _, f in kernels(package)]
    positionals = [len(call.args) for _, call in nodes(package, ast.Call) if isinstance(call, ast.Call)]
    return [
        ("Python lines", sum(lengths), "22500"),
        ("files", len(lengths), ""),
        ("lines of a file, median", median(lengths), ""),
        ("kernels", len(launched), ""),
        ("device functions", len(jitted(package)) - len(launched), ""),
        ("parameters of a kernel, median", median(launched), "<= 6"),
        ("parameters of a kernel, max", max(launched), "<= 10"),
        ("positional arguments of a call, max", max(positionals), "<= 9"),
    ]


def texts() -> Sources:
    """Sources and documents, without this file, which names the word, and the recorded cases, which name no list of another checkout."""
    found = sources("flashmix", "tests", "docs", endings=(".py", ".md"))
    found |= {name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")}
    return {name: text for name, text in found.items() if not name.startswith(("tests/counts", "tests/recorded_"))}


def laws() -> dict[str, Law]:
    """Each law: the offenders, and how many there may be."""
    package, native = sources("flashmix"), sources("flashmix", endings=(".c", ".h"))
    gpu = {name: text for name, text in package.items() if {"triton_gpu", "gluon_hopper"} & set(Path(name).parts)}
    return {
        "files over 400 lines": (lambda: lines_over(package), 0),
        "C files over 400 lines": (lambda: lines_over(native), 0),
        "functions over 60 lines (jitted: 100)": (lambda: long_functions(package), 0),
        "kernels over 10 parameters": (lambda: wide_kernels(package), 0),
        "calls with over 9 positional arguments": (lambda: positional_calls(package), 0),
        "operands by number": (lambda: numbered_elements(package), 0),
        "class names in two or more files": (lambda: repeated_classes(package), 0),
        "foreign names in folders of ops": (lambda: foreign_op_files(package | native), 0),
        "private names of another file": (lambda: private_imports(package), 0),
        'headlines with "What"': (lambda: what_headlines(package), 0),
        "loaded tiles without shape in triton_gpu": (lambda: unshaped_loads(gpu), 0),
        "public names without docstring": (lambda: undocumented(DOCUMENTED), 0),
        "literal tolerances in tests": (lambda: literal_tolerances(sources("tests")), 0),
        "fmt: skip": (lambda: fmt_skips(sources("flashmix", "tests", "benchmarks")), FMT_SKIPS),
        "duplicate pairs of six or more lines": (lambda: duplicates(package | native), DUPLICATES),
    }


def table() -> list[Row]:
    """Each count: its name, its value, its goal. The last are no laws."""
    package = sources("flashmix")
    return [
        *sizes(package),
        *((name, len(find()), f"<= {most}" if most else "0") for name, (find, most) in laws().items()),
        ("files that name Comba", len(naming_files(texts(), "Comba")), "<= 4"),
        ("results, gradients, options by number", len(numbered_elements(package, RESULTS)), ""),
        ("loaded tiles without shape, all kernels", len(unshaped_loads(package)), ""),
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for what, value, goal in table():
        print(f"{what:<42} {value:>8} {goal:>8}")
