"""flashmix.compat as a whole: declarations, the table in the documents, and what importing it brings in."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashmix.compat.coverage import SURFACES, table
from flashmix.compat.surface import Arguments, Surface

ROOT = Path(__file__).resolve().parent.parent


def test_table_in_the_documents_is_the_one_that_is_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "flashmix.compat"], capture_output=True, text=True, check=True, cwd=ROOT, timeout=100
    ).stdout
    assert printed.strip() == table().strip()
    assert (ROOT / "docs" / "compat.md").read_text().endswith(table().strip() + "\n"), (
        "docs/compat.md: replace the tables with the output of python -m flashmix.compat"
    )


def test_originals_are_not_imported() -> None:
    code = "import flashmix.compat.coverage, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=100
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"fla", "flash_attn", "mamba_ssm", "causal_conv1d", "einops", "triton", "transformers"}


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.library)
def test_every_name_is_there_documented_and_not_missing_too(surface: Surface) -> None:
    module = sys.modules[f"flashmix.compat.{surface.library}"]
    assert module.__all__ == sorted(surface.names)
    assert not set(surface.names) & set(surface.missing)
    for name in surface.names:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        if name in surface.options:
            assert inspect.signature(thing) == surface.options[name].signature and thing.__name__ == name
    for name, reason in surface.missing.items():
        with pytest.raises(AttributeError, match="not in flashmix"):
            getattr(module, name)
        assert reason
    with pytest.raises(AttributeError, match="not a name that flashmix"):
        module.nothing_of_this_name  # noqa: B018


def test_arguments_bind_as_in_python() -> None:
    declared = Arguments("q k=2 ~hint=None !absent=None * only=1.5")
    assert declared.bind("f", (1,), {}) == {"q": 1, "k": 2, "only": 1.5}
    assert declared.bind("f", (1, 3, "any", None), {"only": 4}) == {"q": 1, "k": 3, "only": 4}
    assert str(declared.signature) == "(q, k=2, hint=None, absent=None, *, only=1.5)"
    for args, options, error, match in (
        ((), {}, TypeError, "missing a required argument: 'q'"),
        ((1, 2, 3, 4, 5), {}, TypeError, "at most 4 positional"),
        ((1,), {"other": 1}, TypeError, "unexpected keyword argument 'other'"),
        ((1,), {"q": 1}, TypeError, "multiple values for argument 'q'"),
        ((1,), {"absent": 1}, NotImplementedError, "f: flashmix has no absent"),
        ((1,), {"absent": torch.zeros(1)}, NotImplementedError, "absent"),
    ):
        with pytest.raises(error, match=match):
            declared.bind("f", args, options)


@pytest.mark.parametrize("off", [None, False, 0, 0.0, ()])
def test_a_refused_option_that_is_off_is_accepted(off: object) -> None:
    assert Arguments("!absent=None").bind("f", (off,), {}) == {}
    assert Arguments("!absent=False").bind("f", (), {"absent": off}) == {}


def test_a_refused_constant_is_accepted_as_it_is() -> None:
    assert Arguments("!x=1.5").bind("f", (1.5,), {}) == {}
    with pytest.raises(NotImplementedError, match="no x"):
        Arguments("!x=1.5").bind("f", (0,), {})
