"""The layers of the later mechanisms against their papers, with nothing of flashmix but the layer's own weights."""

from __future__ import annotations

import pytest
import torch
from model_cases import WIDTH, assert_same, make_layer, numbers
from paper_loops import MECHANISMS

from flashmix.layers import PreconditionedGatedDeltaNet, PreconditionedKDA
from flashmix.mechanisms.registry import MECHANISMS as REGISTERED

T = 7
WRITTEN_OUT = [(name, layer) for name, case in MECHANISMS.items() if case.layer is not None for layer in case.layers]


@pytest.mark.parametrize("name, layer_name", WRITTEN_OUT, ids=[layer for _, layer in WRITTEN_OUT])
def test_a_layer_is_its_paper(name: str, layer_name: str) -> None:
    """In float64 with no parameter left at a round number."""
    layer, generator = make_layer(layer_name), torch.Generator().manual_seed(3)
    assert type(layer) is REGISTERED[name].layer
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x, expected = numbers(T, WIDTH), MECHANISMS[name].layer
    assert expected is not None
    assert_same(layer(x[None])[0], expected(layer, x))


def test_every_layer_is_in_the_tests() -> None:
    for name, case in MECHANISMS.items():
        assert bool(case.layers) == (REGISTERED[name].layer is not None), f"{name}: layers in tests/papers"


def test_preconditioned_layers_refuse_negative_eigenvalues() -> None:
    for kind in (PreconditionedGatedDeltaNet, PreconditionedKDA):
        with pytest.raises(ValueError, match="negative_eigenvalues must be false where writes are preconditioned"):
            kind(WIDTH, 2, negative_eigenvalues=True)
