"""Options of layers and modules: each is refused by name where the object is made, before a parameter is."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from flashmix import layers, modules
from flashmix.layer.mixer import Mixer

CLASSES = {
    name: cls
    for source in (layers, modules)
    for name in source.__all__
    if inspect.isclass(cls := getattr(source, name)) and issubclass(cls, nn.Module) and cls is not Mixer
}
SPOILT: dict[str, tuple[Any, ...]] = {
    "int": ("x", [1], {}, True, 1.5, math.nan, torch.tensor(1)),
    "float": ("x", [1.0], {}, True, torch.tensor(0.5)),
    "bool": ("no", 0, 1.0, [], torch.tensor(True)),
}
SIZES = (
    "width",
    "dim",
    "heads",
    "head_dim",
    "value_heads",
    "value_dim",
    "hidden",
    "rank",
    "inner",
    "kv_heads",
    "groups",
)


def options(cls: type) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}


def needed(cls: type) -> dict[str, Any]:
    """What the class cannot be made without."""
    given = {"width": 32, "dim": 16, "head_dim": 16, "heads": 2}
    return {name: given.get(name, 4) for name, p in options(cls).items() if p.default is p.empty}


def refused(cls: type, name: str, value: Any, *errors: type[Exception]) -> None:
    with pytest.raises(errors, match=f"^{name} must be "):
        cls(**needed(cls) | {name: value})


@pytest.mark.parametrize("name", CLASSES)
def test_an_option_of_another_type(name: str) -> None:
    cls = CLASSES[name]
    for option, parameter in options(cls).items():
        kind = str(parameter.annotation)
        for value in SPOILT.get(kind.removesuffix(" | None"), ()):
            refused(cls, option, value, TypeError)
        if kind in SPOILT:
            refused(cls, option, None, TypeError)


@pytest.mark.parametrize("name", CLASSES)
def test_a_number_out_of_range(name: str) -> None:
    cls = CLASSES[name]
    for option, parameter in options(cls).items():
        kind = str(parameter.annotation).removesuffix(" | None")
        if kind == "float":
            for value in (math.nan, math.inf):
                refused(cls, option, value, ValueError)
        if option == "eps" or (option in SIZES and kind == "int"):
            refused(cls, option, -1, ValueError)


@pytest.mark.parametrize("name", CLASSES)
def test_tuples_and_choices(name: str) -> None:
    cls = CLASSES[name]
    for option, parameter in options(cls).items():
        if str(parameter.annotation).startswith("tuple"):
            for value in ("xy", (1,), ("a", "b", "c", "d"), {}, math.nan):
                refused(cls, option, value, TypeError)
        kind = str(parameter.annotation).removesuffix(" | None")
        if kind == "str" and option in ("activation", "output_gate", "qk_norm", "qk_activation"):
            refused(cls, option, "x", ValueError)
            for value in (1, ["silu"]):
                refused(cls, option, value, TypeError)


def test_numbers_of_another_library_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    layer = layers.GatedDeltaNet(numpy.int64(32), numpy.int32(2), eps=numpy.float32(1e-6))
    assert type(layer.heads) is int and layer.width == 32
