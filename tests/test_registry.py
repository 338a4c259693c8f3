"""The registry of mechanisms: what is derived from it, and the tables of the documents that must agree with it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashmix
from flashmix import layers
from flashmix.capabilities import tiny_call
from flashmix.mechanisms.deltanet import DeltaNet
from flashmix.mechanisms.registry import MECHANISMS, Mechanism, functions, mixers, presets, register
from flashmix.models import PRESETS, SIZES, Decoder, preset
from flashmix.models.config import MIXERS
from flashmix.modules.projection import HeadProjection

ROOT = Path(__file__).resolve().parent.parent
every_mechanism = pytest.mark.parametrize("entry", MECHANISMS.values(), ids=list(MECHANISMS))


def rows_of(document: str) -> list[list[str]]:
    """The cells of each row of the tables of a document."""
    lines = (ROOT / document).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


@every_mechanism
def test_the_readme_has_a_row(entry: Mechanism) -> None:
    first = f"{entry.title}, {entry.link}"
    row = next((row for row in rows_of("README.md") if row[0] == first), None)
    assert row is not None, f"README.md: no row begins with {first}"
    assert entry.function is None or f"`{entry.name}(" in row[1]
    assert entry.layer is None or row[2].strip(" |") == f"`layers.{entry.layer.__name__}`"


@every_mechanism
def test_the_page_of_mechanisms_has_a_row(entry: Mechanism) -> None:
    rows = [row for row in rows_of("docs/mechanisms.md") if any(entry.link in cell for cell in row)]
    assert rows, f"docs/mechanisms.md: no row has the paper {entry.paper}"
    assert entry.function is None or any(f"`{entry.name}(" in row[1] for row in rows)


def test_no_row_is_of_a_mechanism_that_is_not_there() -> None:
    titles = {f"{entry.title}, {entry.link}" for entry in MECHANISMS.values()}
    assert {row[0] for row in rows_of("README.md") if "](https://" in row[0]} == titles


def test_names_are_public() -> None:
    for name, function in functions().items():
        assert getattr(flashmix, name) is function and name in flashmix.__all__
        assert function.__module__.startswith("flashmix.mechanisms.")
    for name, layer in mixers().items():
        assert getattr(layers, layer.__name__) is layer and layer.__name__ in layers.__all__ and MIXERS[name] is layer
    assert set(presets()) <= set(PRESETS)


def test_a_name_is_registered_once() -> None:
    entry = next(iter(MECHANISMS.values()))
    with pytest.raises(
        ValueError, match=f"^{entry.name} must be registered once, got a second mechanism of this name$"
    ):
        register(replace(entry, title="Another"))


def test_every_file_of_a_mechanism_is_imported() -> None:
    """A file that is forgotten in `flashmix/mechanisms/__init__.py` registers nothing when it is imported alone."""
    shared = {"__init__", "common", "registry", "rwkv", "slots", "momentum"}
    modules = {owner.__module__ for entry in MECHANISMS.values() for owner in (entry.function, entry.layer) if owner}
    files = {f"flashmix.mechanisms.{path.stem}" for path in (ROOT / "flashmix/mechanisms").glob("*.py")}
    assert modules == files - {f"flashmix.mechanisms.{name}" for name in shared}


def test_a_type_checker_sees_every_name(tmp_path: Path) -> None:
    """`flashmix.kda` and `flashmix.layers.KDA` come out of the registry at run time and out of the imports for a checker.

    It runs with the project's settings and cache, which `.ci/run` has filled before: without them it checks torch first.
    """
    pytest.importorskip("mypy")
    names = [f"flashmix.{name}" for name in functions()]
    names += [f"layers.{layer.__name__}" for layer in mixers().values()]
    lines = ["import flashmix", "from flashmix import layers", *(f"reveal_type({name})" for name in names)]
    (tmp_path / "names.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", str(tmp_path / "names.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    types = [line.split("Revealed type is ")[1] for line in done.stdout.splitlines() if "Revealed type is " in line]
    unseen = [name for name, type in zip(names, types, strict=True) if type == '"Any"']
    assert not unseen, "the module's __getattr__ hides that these are not imported"


def test_a_layer_that_changes_the_mechanism_has_no_fast_step() -> None:
    """`DeltaNet.step` computes the recurrence of `DeltaNet` with the gates of the class that also gives its inputs."""
    for layer in mixers().values():
        if not issubclass(layer, DeltaNet):
            continue
        owner = {
            method: next(c for c in layer.__mro__ if method in vars(c))
            for method in ("recurrence", "beta_and_decay", "step_inputs", "normalise", "queries_keys_values")
        }
        of_base = all(owner[method] is DeltaNet for method in ("recurrence", "normalise", "queries_keys_values"))
        same = of_base and owner["beta_and_decay"] is owner["step_inputs"]
        assert layer.has_step == same, layer.__name__


def test_values_are_shared_between_layers_of_one_kind() -> None:
    """A class that shares says with which option a layer reads; the models know nothing else of it."""
    for layer in mixers().values():
        parameters = inspect.signature(layer.__init__).parameters
        assert layer.shares is None or layer.shares in parameters
        forward = inspect.signature(layer.forward).parameters
        assert ({"first_values", "return_values"} <= set(forward)) == (layer.shares is not None)


def test_a_head_projection_is_one_linear_map() -> None:
    project, x = HeadProjection(6, q=(2, 3), gate=None, beta=(2,), v=(4, 1)).double(), torch.randn(2, 5, 6).double()
    assert list(project.state_dict()) == ["weight"] and project.weight.shape == (12, 6)
    q, gate, beta, v = project(x)
    assert gate is None and (q.shape, beta.shape, v.shape) == ((2, 5, 2, 3), (2, 5, 2), (2, 5, 4, 1))
    assert torch.equal(torch.cat([q.flatten(2), beta, v.flatten(2)], -1), x @ project.weight.T)


@pytest.mark.parametrize("name", functions())
def test_an_option_of_the_engine_that_is_not_handed_on_is_refused(name: str) -> None:
    assert "read_before" not in inspect.signature(functions()[name]).parameters
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'read_before'$"):
        functions()[name](**tiny_call(name), read_before=True)


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_its_mechanism_alone(name: str) -> None:
    config = preset(f"{name}_nano")
    assert len(config.layers) == SIZES["nano"].depth and {layer.mixer for layer in config.layers} == {name}
    assert {type(block.mixer) for block in Decoder(config, device="meta").blocks} == {mixers()[name]}
