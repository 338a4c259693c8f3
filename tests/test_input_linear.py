"""Linear maps of one input as one node of autograd: the same numbers, and nothing where it must not be."""

from __future__ import annotations

import itertools

import pytest
import torch
from budget import assert_within_budget
from torch import Tensor, nn

from flashmix.mechanisms.gated_deltanet import GatedDeltaNet
from flashmix.models import Decoder, DecoderConfig, LayerConfig, preset
from flashmix.modules import input_linear
from flashmix.modules.input_linear import InputLinear, as_one_node
from flashmix.op.recompute import KINDS
from flashmix.ops.rotary import joined


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, whatever the size."""
    monkeypatch.setattr(input_linear, "LEAST", {"cpu": 0})
    monkeypatch.setattr(input_linear, "FEW", 8)


class Layer(nn.Module):
    """Four maps of whole numbers, whose sums float32 holds."""

    def __init__(self, frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.ModuleList(InputLinear(6, out) for out in (16, 3, 24, 5))
        for index, one in enumerate(self.maps):
            one.weight.data = torch.randint(-3, 4, one.weight.shape).float()
            one.weight.requires_grad_(index not in frozen)

    def forward(self, x: Tensor) -> list[Tensor]:
        with as_one_node(x, self):
            return [one(x) for one in self.maps]


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 3), (1, 3), (2,)])
@pytest.mark.parametrize("frozen", [(), (1,)])
@pytest.mark.parametrize("leaf", [True, False])
def test_sums_are_the_same(used: tuple[int, ...], frozen: tuple[int, ...], leaf: bool, request: pytest.FixtureRequest):
    layer, x = Layer(frozen), torch.randint(-3, 4, (2, 7, 6)).float().requires_grad_(leaf)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    found, nodes = [], []
    for together in (False, True):
        if together:
            request.getfixturevalue("everywhere")
        parts = layer(x)
        nodes.append({type(y.grad_fn).__name__ for y in parts})
        loss = sum((parts[index] * torch.arange(parts[index].shape[-1])).sum() for index in used)
        found.append([*parts, *torch.autograd.grad(loss, wanted, allow_unused=True)])
    assert "InputProductsBackward" in nodes[1] and "InputProductsBackward" not in nodes[0]
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "iplr", "qdelta", "gated_deltanet2", "preconditioned_kda"])
def test_a_model_takes_each_product_once(name: str, monkeypatch: pytest.MonkeyPatch):
    """In float64, where the order of sums is no matter."""
    torch.manual_seed(0)
    model = Decoder(preset(f"{name}_nano")).double()
    tokens = torch.randint(256, (2, 19))
    made: list[input_linear.Products] = []
    original = input_linear.Products.__init__
    monkeypatch.setattr(input_linear.Products, "__init__", lambda self, *a: made.append(self) or original(self, *a))
    found = []
    for least in ({"cpu": 0}, {}):
        monkeypatch.setattr(input_linear, "LEAST", least)
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert made and not any(products.made for products in made)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("everywhere")
def test_a_map_with_a_hook_or_another_dtype_stays_apart():
    layer, x = Layer(), torch.randint(-3, 4, (2, 7, 6)).float().requires_grad_()
    seen: list[Tensor] = []
    layer.maps[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    parts = layer(x)
    assert len(seen) == 1 and torch.equal(seen[0], parts[0])
    names = [type(y.grad_fn).__name__ for y in parts]
    assert names[0] != "InputProductsBackward" and set(names[1:]) == {"InputProductsBackward"}


@pytest.mark.usefixtures("everywhere")
def test_nothing_is_joined_where_nothing_is_recorded_or_something_else_looks():
    layer, x = Layer(), torch.randint(-3, 4, (2, 7, 6)).float()
    with torch.no_grad():
        assert all(y.grad_fn is None for y in layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {y.dtype for y in layer(x)} == {torch.bfloat16}
    jacobian = torch.func.jacrev(lambda x: layer(x)[0])(x)
    assert torch.equal(jacobian[0, 0, :, 0, 0], layer.maps[0].weight)


@pytest.mark.usefixtures("everywhere")
def test_another_input_is_multiplied_for_itself():
    layer, x = GatedDeltaNet(16, heads=2), torch.randn(1, 5, 16)
    with as_one_node(x, layer):
        other = layer.qkv(x + 1)
        assert torch.equal(other, torch.nn.functional.linear(x + 1, layer.qkv.weight))
        assert torch.equal(layer.qkv(x), torch.nn.functional.linear(x, layer.qkv.weight))


def large_model(dtype: torch.dtype, recompute: tuple[str, ...] = KINDS) -> Decoder:
    """Of tensors that are large enough for one node."""
    torch.manual_seed(0)
    heads = {"heads": 4, "head_dim": 128}
    layers = [LayerConfig("gated_deltanet", heads), LayerConfig("kda", heads), LayerConfig("attention", heads)]
    config = DecoderConfig(vocab_size=512, width=512, layers=layers)
    return Decoder(config, recompute=recompute, dtype=dtype, device="cuda")


def gradients_of(model: Decoder) -> dict[str, Tensor]:
    tokens = torch.randint(512, (2, 2049), generator=torch.Generator().manual_seed(1)).cuda()
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.detach(), **dict(zip(dict(model.named_parameters()), found, strict=True))}


@pytest.mark.gpu
def test_a_model_on_a_gpu_errs_as_with_maps_apart(monkeypatch: pytest.MonkeyPatch):
    made: list[input_linear.Products] = []
    original = input_linear.Products.__init__
    monkeypatch.setattr(input_linear.Products, "__init__", lambda self, *a: made.append(self) or original(self, *a))
    model = large_model(torch.bfloat16)
    together = gradients_of(model)
    assert len(made) == 2 and not any(products.made for products in made)
    monkeypatch.setattr(input_linear, "LEAST", {})
    monkeypatch.setattr(joined, "joins", lambda *a: False)
    monkeypatch.setattr("flashmix.modules.rotary_embedding.joins", lambda *a: False)
    apart = gradients_of(model)
    exact = gradients_of(model.float())
    for name, t in together.items():
        wide, other = exact[name].double().cpu(), apart[name].cpu()
        assert_within_budget(name, t.cpu(), wide, other, torch.bfloat16, steps=len(model.blocks))


@pytest.mark.gpu
def test_what_is_made_again_keeps_its_bits_on_a_gpu():
    wanted = gradients_of(large_model(torch.bfloat16, ()))
    for kinds in [*itertools.combinations(KINDS, 1), KINDS]:
        found = gradients_of(large_model(torch.bfloat16, kinds))
        assert all(torch.equal(t, wanted[name]) for name, t in found.items()), kinds
