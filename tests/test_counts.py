"""The laws of size, repetition and naming: each detector finds what it is for, and the package has none of it."""

from __future__ import annotations

import sys
import types

import detectors
import pytest
from counts import laws

# The laws that do not hold yet, with how often each is broken today. A law that holds is taken out: its test says so by failing.
NOT_YET: dict[str, int] = {}
LAWS = laws()


def law(name: str) -> object:
    """A law as a test case, expected to fail while it is in NOT_YET, and only by its assertion."""
    number = NOT_YET.get(name)
    reason = f"broken {number} times; issue 13"
    marks = [] if number is None else [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)]
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [law(name) for name in LAWS])
def test_law_holds(name: str) -> None:
    find, most = LAWS[name]
    offenders = find()
    assert len(offenders) <= most, f"{name}: {len(offenders)}, at most {most}\n" + "\n".join(offenders)


def test_files_over_400_lines_are_found() -> None:
    files = {"short.py": "x\n" * 400, "long.h": "x\n" * 401}
    assert detectors.lines_over(files) == ["long.h has 401 lines"]


def function(name: str, lines: int, head: str = "", docstring: str = "") -> str:
    """A function of as many lines, from `def` on and without the docstring."""
    return f"{head}def {name}():\n{docstring}" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    "jit", ["@triton.jit\n", "@gluon.jit\n", "@with_sound_ptxas\n@triton.jit(do_not_specialize=['n'])\n"]
)
def test_functions_over_their_lines_are_found(jit: str) -> None:
    text = function("short", 60, docstring='    """One.\n\n    Two.\n    """\n') + function("long", 61)
    text += function("short_kernel", 100, jit) + function("long_device_function", 101, jit)
    found = detectors.long_functions({"a.py": text})
    assert [line.split()[1:] for line in found] == [
        ["long", "has", "61", "lines"],
        ["long_device_function", "has", "101", "lines"],
    ]


def test_wide_kernels_are_found() -> None:
    ten, eleven = (", ".join(f"x{i}" for i in range(n)) for n in (10, 11))
    text = (
        f"@jit\ndef a_kernel({ten}): ...\n@triton.jit\ndef b_kernel({eleven}): ...\n@jit\ndef device({eleven}): ...\n"
    )
    text += f"def host_kernel({eleven}): ...\n@triton.jit\ndef c_kernel({ten}, *, y): ...\n"
    assert detectors.wide_kernels({"a.py": text}) == [
        "a.py:4 b_kernel has 11 parameters",
        "a.py:9 c_kernel has 11 parameters",
    ]
    assert len(detectors.jitted({"a.py": text})) == 4


def test_calls_with_many_positionals_are_found() -> None:
    nine = "1, 2, 3, 4, 5, 6, 7, 8, 9"
    files = {"a.py": f"f({nine}, key=0)\nf({nine}, 10)\ng[(1,)]({nine}, *rest)\nh(*rest)\n"}
    assert [line.split()[0] for line in detectors.positional_calls(files)] == ["a.py:2", "a.py:3"]


def test_operands_by_number_are_found() -> None:
    text = "tensors[7]\ncall.inputs[:9]\nnear_q[-1]\nfeatures[i]\nx.shape[0]\ntensors['q']\ngiven[:n]\n"
    assert detectors.numbered_elements({"a.py": text}) == [
        "a.py:1 tensors[7]",
        "a.py:2 call.inputs[:9]",
        "a.py:3 near_q[-1]",
    ]


def test_classes_of_one_name_are_found() -> None:
    files = {"a.py": "class Plan: ...\nclass Own: ...\n", "b.py": "def f():\n    class Plan: ...\n"}
    assert detectors.repeated_classes(files) == ["Plan is defined in a.py, b.py"]


def test_private_names_of_another_file_are_found() -> None:
    user = "from flashmix.x import _y, z, __version__\nfrom flashmix import _gpu, x\nimport flashmix.x as other\n"
    user += "x._y\nother._z\n_gpu.known\nself._own\nfrom torch import _C\n"
    files = {"flashmix/__init__.py": "", "flashmix/x.py": "", "flashmix/_gpu.py": "", "flashmix/user.py": user}
    assert detectors.private_imports(files) == [
        "flashmix/user.py:1 from flashmix.x import _y",
        "flashmix/user.py:4 x._y",
        "flashmix/user.py:5 other._z",
    ]


def test_foreign_files_in_folders_of_ops_are_found() -> None:
    good = ["__init__.py", "norm/__init__.py", "norm/op.py", "norm/triton_gpu/wide.py", "recurrence/native/tiles.h"]
    good += ["recurrence/segments.py", "recurrence/step/definition.py", "norm/portable.py"]
    bad = ["op.py", "norm/wide.py", "norm/step/op.py", "recurrence/step/engine.py"]
    found = detectors.foreign_op_files({f"flashmix/ops/{name}": "" for name in good + bad} | {"flashmix/gpu/x.py": ""})
    assert [line.split()[0] for line in found] == [
        "flashmix/ops/norm/step",
        "flashmix/ops/norm/wide.py",
        "flashmix/ops/op.py",
        "flashmix/ops/recurrence/step/engine.py",
    ]


def test_headlines_and_skips_are_found() -> None:
    files = {"a.py": '"""What all share."""\n', "b.py": '"""Whatever."""\nx = "# fmt: skip"\ny = 1  # fmt: skip\n'}
    assert detectors.what_headlines(files) == ["a.py begins: What all share."]
    assert detectors.fmt_skips(files) == ["b.py:3 # fmt: skip"]


def test_public_names_without_docstring_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child(types.SimpleNamespace): ...

    module = types.ModuleType("of_tests")
    module.__dict__.update(__all__=["Child", "number", "documented"], Child=Child, number=1, documented=law)
    monkeypatch.setitem(sys.modules, "of_tests", module)
    assert detectors.undocumented(["of_tests"]) == ["of_tests.Child"]


def test_loaded_tiles_without_shape_are_found() -> None:
    body = [
        "n = tl.load(cu_seqlens + 1)",
        "a = tl.load(x + i, mask=i < n)",
        "b = tl.load(x + i, mask=i < n)  # [rows]",
        "c = load_rows(x)",
        "c += tl.load(tile_at(x, 1))",
        "d = descriptor.load([0])  # no shape",
        "e = load_rows(",
        "    x",
        ")  # of q, [rows, K]",
    ]
    text = "\n    ".join(["@triton.jit\ndef device():", *body]) + "\ndef host():\n    a = tl.load(x, mask=y)\n"
    text += '@triton.jit\ndef load_rows():\n    """A tile `[rows, K]`."""\n    return tl.load(x, mask=y)\n'
    found = detectors.unshaped_loads({"a.py": text})
    assert [line.split()[0] for line in found] == ["a.py:4", "a.py:6", "a.py:7", "a.py:8"]


def test_literal_tolerances_are_found() -> None:
    bad = ["assert_close(a, b, rtol=0, atol=1e-5)", "assert error <= 1e-6 * size", "assert 1e-6 > error"]
    bad += ["x == pytest.approx(y, rel=0.1)", "torch.allclose(a, b, atol=2**-8 * largest)"]
    good = ["assert_close(a, b, rtol=0, atol=limit)", "assert error < budget", "assert size > 1e-3", "approx(1.5)"]
    good += ["assert_close(a, b, rtol=2 * torch.finfo(d).eps, atol=0.0)", "assert n < 2"]
    assert len(detectors.literal_tolerances({"a.py": "\n".join(bad)})) == len(bad)
    assert not detectors.literal_tolerances({"a.py": "\n".join(good)})


def test_duplicates_are_found_at_their_full_length() -> None:
    lines = [f"x{i} = f({i})" for i in range(7)]
    first = "\n".join(["import torch", *lines, "own()"])
    second = "\n".join(["y = 0", *lines[:3], "", "# a comment", *(line + "  # why" for line in lines[3:])])
    assert detectors.duplicates({"a.py": first, "b.py": second}) == ["a.py:2 ~ b.py:2 (7 lines)"]
    assert not detectors.duplicates({"a.py": first, "b.py": "\n".join(lines[:5] + lines[6:])})
    assert detectors.duplicates({"a.c": "a;\nb;\n}\nc; // x\n" + "/* no\n */ a;\nb;\nc;\n"}, 3) == [
        "a.c:1 ~ a.c:6 (3 lines)"
    ]


def test_signatures_are_no_duplicates_but_bodies_are() -> None:
    parameters = [f"x{i}: int" for i in range(7)]
    given = ",\n    ".join(f"x{i}=x{i}" for i in range(7))
    body = "\n".join(f"    y{i} = x{i} + {i}" for i in range(6))
    head = "def {}(\n    " + ",\n    ".join(parameters) + ",\n) -> None:\n"
    fields = "@dataclass\nclass {}:\n    " + "\n    ".join(parameters) + "\n"
    only = {f"{n}.py": head.format(n) + f"    g_{n}(\n    {given},\n)\n" + fields.format(n.upper()) for n in "ab"}
    assert not detectors.duplicates(only)
    copied = {f"{n}.py": head.format(n) + body for n in "ab"}
    assert detectors.duplicates(copied) == ["a.py:10 ~ b.py:10 (6 lines)"]
    renamed = {f"{n}.py": f"{n}(\n    {given},\n)\n".replace("=x", "=z") for n in "ab"}
    assert detectors.duplicates(renamed) == ["a.py:2 ~ b.py:2 (7 lines)"]


def test_files_that_name_a_word_are_found() -> None:
    assert detectors.naming_files({"a.py": "GatedX", "b.md": "gated_x and gatedx", "c.py": "gate"}, "gatedx") == [
        "a.py",
        "b.md",
    ]
