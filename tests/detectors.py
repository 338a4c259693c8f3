"""Detectors of long, repeated and badly named code, for the counts and laws of tests/counts.py.

Each takes sources, a dict from a file's name to its text, and returns the offenders, one a string: "file:line what". No detector
runs the code that it measures, except `undocumented`, which imports it.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

Sources = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef

FILE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 100
KERNEL_PARAMETERS = 10
POSITIONALS = 9
DUPLICATE_LINES = 6

# Tuples of an operator's inputs. An element of them is read by its name, not by a number.
OPERANDS = r"(tensors|inputs|operands|features|given|near_\w+)"

OP_FILES = {"__init__", "definition", "op", "call", "sharded", "portable", "triton_gpu", "gluon_hopper", "native"}
# What an op's folder holds besides: files, and folders that are ops themselves.
OP_EXTRAS = {
    "recurrence": {"segments", "step"},
    "attention": {"sdpa"},
    "losses": {"head", "parallel"},
    "rotary": {"scaling", "joined"},
    "scan": {"step"},
    "selective_scan": {"step", "extras"},
    "gated_product": {"linear"},
    "short_conv": {"joined"},
}
BACK_ENDS = {"portable", "triton_gpu", "gluon_hopper", "native"}


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def all_nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parse(text)))


def nodes(files: Sources, *kinds: type) -> Iterator[tuple[str, ast.AST]]:
    """Each node of these kinds, after the name of its file."""
    for name, text in files.items():
        for node in all_nodes(text):
            if isinstance(node, kinds):
                yield name, node


@cache
def comments(text: str) -> dict[int, str]:
    """The comment on each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


# Sizes


def lines_over(files: Sources, most: int = FILE_LINES) -> list[str]:
    """Files of more than `most` lines."""
    lengths = {name: len(text.splitlines()) for name, text in files.items()}
    return [f"{name} has {length} lines" for name, length in lengths.items() if length > most]


def is_jitted(function: Function) -> bool:
    """True for a function decorated with triton.jit or gluon.jit, alone or under other decorators."""
    called = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(ast.unparse(d).split(".")[-1] == "jit" for d in called)


def jitted(files: Sources) -> list[tuple[str, Function]]:
    return [(name, f) for name, f in nodes(files, ast.FunctionDef) if isinstance(f, Function) and is_jitted(f)]


def kernels(files: Sources) -> list[tuple[str, Function]]:
    """Jitted functions that the host launches; their names end in `_kernel`. The other jitted functions are device functions."""
    return [(name, f) for name, f in jitted(files) if f.name.endswith("_kernel")]


def parameter_count(function: Function) -> int:
    a = function.args
    return len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)


def wide_kernels(files: Sources, most: int = KERNEL_PARAMETERS) -> list[str]:
    """Kernels of more than `most` parameters; tensors that TMA moves (`x_d`) cannot be in structs and do not count."""
    found = [
        (name, f, parameter_count(f) - sum(a.arg.endswith("_d") for a in f.args.args)) for name, f in kernels(files)
    ]
    return [f"{name}:{f.lineno} {f.name} has {n} parameters" for name, f, n in found if n > most]


def length_without_docstring(function: Function) -> int:
    """Lines from `def` to the end, without those of the docstring. Decorators do not count."""
    length = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return length


def long_functions(files: Sources) -> list[str]:
    """Functions of more than 60 lines, jitted ones of more than 100."""
    found = []
    for name, f in nodes(files, ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(f, Function)
        length = length_without_docstring(f)
        if length > (KERNEL_LINES if is_jitted(f) else FUNCTION_LINES):
            found.append(f"{name}:{f.lineno} {f.name} has {length} lines")
    return found


def positional_calls(files: Sources, most: int = POSITIONALS) -> list[str]:
    """Calls with more than `most` positional arguments; `*rest` counts as one."""
    calls = [(name, call) for name, call in nodes(files, ast.Call) if isinstance(call, ast.Call)]
    return [
        f"{name}:{call.lineno} {ast.unparse(call.func)} takes {len(call.args)} positional arguments"
        for name, call in calls
        if len(call.args) > most
    ]


# Names


def is_integer(node: ast.AST | None) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def numbered_elements(files: Sources, names: str = OPERANDS) -> list[str]:
    """Lines on which a tuple with one of these names is indexed or sliced by an integer literal: `tensors[7]`, `x.inputs[:9]`."""
    found: dict[tuple[str, int], str] = {}
    for name, node in nodes(files, ast.Subscript):
        assert isinstance(node, ast.Subscript)
        value, index = node.value, node.slice
        tuple_name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
        by_number = (
            is_integer(index.lower) or is_integer(index.upper) if isinstance(index, ast.Slice) else is_integer(index)
        )
        if by_number and re.fullmatch(names, tuple_name):
            found.setdefault((name, node.lineno), f"{name}:{node.lineno} {ast.unparse(node)}")
    return list(found.values())


def repeated_classes(files: Sources) -> list[str]:
    """Class names that are defined in two files or more."""
    homes = defaultdict(set)
    for name, node in nodes(files, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        homes[node.name].add(name)
    return [f"{name} is defined in {', '.join(sorted(at))}" for name, at in sorted(homes.items()) if len(at) > 1]


def private_imports(files: Sources) -> list[str]:
    """Private names of one file that another file of the package uses: `from flashmix.x import _y`, and `x._y` on an imported `x`.

    A module whose own name is private (`flashmix._gpu`) may be imported.
    """
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    found = []

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__")

    for name, text in files.items():
        aliases = set()
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == "flashmix"):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in modules:
                        aliases.add(alias.asname or alias.name)
                    elif is_private(alias.name):
                        found.append(f"{name}:{node.lineno} from {node.module} import {alias.name}")
            elif isinstance(node, ast.Import):
                aliases |= {alias.asname for alias in node.names if alias.asname and alias.name in modules}
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                attribute = ast.unparse(node)
                if is_private(node.attr) and not any(module.endswith("." + attribute) for module in modules):
                    found.append(f"{name}:{node.lineno} {attribute}")
    return found


def foreign_part(parts: list[str]) -> int | None:
    """Which part of a path below ops/ is not a name of an op's folder; `parts` ends with the file's stem. None if all are."""
    if len(parts) == 1:
        return None if parts == ["__init__"] else 0
    op = parts[0]
    for place, part in enumerate(parts[1:], 1):
        if part in BACK_ENDS:
            return None  # an implementation names its own files
        if part in OP_EXTRAS.get(op, ()):
            op = part
        elif part not in OP_FILES:
            return place
    return None


def foreign_op_files(files: Sources) -> list[str]:
    """Files and folders of ops/<name>/ that are neither in the set which all ops share nor listed as the op's own; loose files."""
    found = set()
    for path in map(Path, files):
        if path.parts[:2] == ("flashmix", "ops"):
            place = foreign_part([*path.parts[2:-1], path.stem])
            found |= set() if place is None else {"/".join(path.parts[: place + 3])}
    return [f"{name} is not a name of an op's folder" for name in sorted(found)]


# Words


def what_headlines(files: Sources) -> list[str]:
    """Module docstrings whose headline begins with "What" instead of naming a thing."""
    docs = {name: ast.get_docstring(parse(text)) or "" for name, text in files.items()}
    return [f"{name} begins: {doc.splitlines()[0]}" for name, doc in docs.items() if re.match(r"What\b", doc)]


def undocumented(packages: list[str]) -> list[str]:
    """Public functions and classes of these packages, by their `__all__`, that have no docstring of their own."""
    found = []
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            doc = thing.__doc__ if callable(thing) else "a constant"
            if not doc or doc.startswith(f"{name}("):  # a dataclass writes its own signature there
                found.append(f"{package}.{name}")
    return found


def fmt_skips(files: Sources) -> list[str]:
    """Lines with a comment that turns the formatter off."""
    return [
        f"{n}:{line} {c}"
        for n, t in files.items()
        if "fmt: skip" in t
        for line, c in comments(t).items()
        if "fmt: skip" in c
    ]


def naming_files(files: Sources, word: str) -> list[str]:
    """Files that contain a word, in any case."""
    return [name for name, text in files.items() if word.lower() in text.lower()]


LOADS = re.compile(r"_?load(_\w+)?")


def is_tile_load(call: ast.AST) -> bool:
    """True for `load_rows(…)`, `descriptor.load(…)`, a masked `tl.load(…)` and one of addresses that a function makes.

    The other loads without a mask, `tl.load(cu_seqlens + n)`, are of one number.
    """
    if not isinstance(call, ast.Call):
        return False
    name = ast.unparse(call.func)
    if not LOADS.fullmatch(name.split(".")[-1]):
        return False
    if name not in ("tl.load", "gl.load"):
        return True
    if len(call.args) > 1 or any(k.arg in ("mask", "boundary_check") for k in call.keywords):
        return True
    made = [ast.unparse(inner.func) for inner in ast.walk(call.args[0]) if isinstance(inner, ast.Call)]
    return any("." not in name or name.endswith(".arange") for name in made)


def unshaped_loads(files: Sources) -> list[str]:
    """Statements of jitted functions that load a tile and have no comment with its shape, `# [rows, K]`, on any of their lines.

    A `return` may do without where the docstring has the shape.
    """
    found = []
    for name, function in jitted(files):
        shapes = {line for line, comment in comments(files[name]).items() if re.match(r"#.*\[", comment)}
        documented = "[" in (ast.get_docstring(function) or "")
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
                continue
            if isinstance(node, ast.Return) and documented:
                continue
            loads = any(is_tile_load(inner) for inner in ast.walk(node))
            if loads and not shapes & set(range(node.lineno, (node.end_lineno or 0) + 1)):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)[:60]}")
    return found


def numbers_in(node: ast.AST) -> list[float]:
    """The number literals of an expression that are not zero."""
    constants = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
    return [value for value in constants if isinstance(value, int | float) and value and value is not True]


def literal_tolerances(files: Sources) -> list[str]:
    """Tolerances of tests that are numbers: rtol, atol, rel and abs of comparisons, and bounds below 0.01, as in `error < 1e-6`.

    A multiple of a dtype's eps is no such number.
    """
    found = []
    for name, node in nodes(files, ast.Call, ast.Compare):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            close = called in ("assert_close", "allclose", "isclose", "approx")
            tolerances = [
                k.value for k in node.keywords if k.arg in ("rtol", "atol", "rel", "abs", "rel_tol", "abs_tol")
            ]
            literal = close and any(numbers_in(value) and "eps" not in ast.unparse(value) for value in tolerances)
        else:
            assert isinstance(node, ast.Compare)
            sides = [node.left, *node.comparators]
            bounds = [sides[i + 1] for i, op in enumerate(node.ops) if isinstance(op, ast.Lt | ast.LtE)]
            bounds += [sides[i] for i, op in enumerate(node.ops) if isinstance(op, ast.Gt | ast.GtE)]
            literal = any(0 < abs(value) < 0.01 for bound in bounds for value in numbers_in(bound))
        if literal:
            found.append(f"{name}:{node.lineno} {ast.unparse(node)[:80]}")
    return found


# Duplicates

PASSED_ON = re.compile(r"((\w+) = \2( ,( |$)|$))+")


def declared(text: str) -> set[int]:
    """The lines of a Python file that only say a signature: parameters of a `def` below its first line, fields of a class."""
    lines: set[int] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, Function):
            lines |= set(range(node.lineno + 1, node.body[0].lineno))
        elif isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            lines |= {line for field in fields for line in range(field.lineno, (field.end_lineno or 0) + 1)}
    return lines


def python_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a file as its tokens, without comments, imports, signatures and lines of punctuation only; docstrings stay.

    A signature is what `declared` finds and a line of arguments passed on by their own names, `k=k, v=v,`: Python has no way to say
    the parameters of two functions once. The line of the `def` itself and the bodies count.
    """
    signatures = declared(text)
    rows: dict[int, list[str]] = defaultdict(list)
    is_start, is_import = True, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            is_start = True
        elif token.type != tokenize.COMMENT and token.string.strip():
            is_import = token.string in ("import", "from") if is_start else is_import
            is_start = False
            for place, line in enumerate(token.string.splitlines() if not is_import else ()):
                rows[token.start[0] + place].append(line.strip())
    lines = [(number, " ".join(parts)) for number, parts in sorted(rows.items())]
    lines = [(number, line) for number, line in lines if number not in signatures and not PASSED_ON.fullmatch(line)]
    return [(number, line) for number, line in lines if re.search(r"\w", line)]


def c_lines(text: str) -> list[tuple[int, str]]:
    """The same for C."""
    blank = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    rows = [(i, " ".join(line.split("//")[0].split())) for i, line in enumerate(blank.splitlines(), 1)]
    return [(i, line) for i, line in rows if re.search(r"\w", line) and not line.startswith("#include")]


def duplicates(files: Sources, least: int = DUPLICATE_LINES) -> list[str]:
    """Pairs of places that share a run of `least` or more equal lines, each at its full length, the longest first."""
    lines = {name: python_lines(text) if name.endswith(".py") else c_lines(text) for name, text in files.items()}
    places = defaultdict(list)
    for name, rows in lines.items():
        for i in range(len(rows) - least + 1):
            places[tuple(line for _, line in rows[i : i + least])].append((name, i))
    shared = {pair for at in places.values() for pair in combinations(at, 2)}
    shared = {((f, i), (g, j)) for (f, i), (g, j) in shared if f != g or j - i >= least}
    runs = []
    for (f, i), (g, j) in shared:
        if ((f, i - 1), (g, j - 1)) not in shared:
            more = next(n for n in range(1, len(lines[f]) + 1) if ((f, i + n), (g, j + n)) not in shared)
            ends = (f"{name}:{lines[name][at][0]}" for name, at in ((f, i), (g, j)))
            runs.append((least + more - 1, " ~ ".join(ends)))
    return [f"{where} ({length} lines)" for length, where in sorted(runs, key=lambda run: (-run[0], run[1]))]
