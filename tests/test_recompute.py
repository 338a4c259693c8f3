"""What a backward makes again instead of keeping it: the same gradients, less memory, and nothing where hooks of others are set."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashmix import Packing
from flashmix.models import Decoder, DecoderConfig, LayerConfig, preset
from flashmix.modules.decay import ExactParameters
from flashmix.op import recompute
from flashmix.op.recompute import KINDS, recomputed, recomputing
from flashmix.ops.gated_product.linear import SwiGLULinear
from flashmix.ops.gated_product.op import swiglu


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether a scope is opened for any tensor on the CPU, or none is."""
    return lambda opened: monkeypatch.setattr(recompute, "LEAST", {"cpu": 0} if opened else {})


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(("name", "packed"), [("kda", True), ("qwen3_next_like", False)])
def test_gradients_keep_their_bits(name: str, packed: bool, everywhere: Callable[[bool], None]) -> None:
    torch.manual_seed(0)
    model = Decoder(preset(f"{name}_nano"))
    tokens = torch.randint(256, (1, 21))
    packing = Packing.from_lengths([7, 13]) if packed else None
    found = []
    for opened in (False, True):
        everywhere(opened)
        loss = model(tokens[:, :-1], targets=tokens[:, 1:], cu_seqlens=packing)
        found.append([loss, *gradients(model, loss)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "kinds"), [("gated_deltanet", ["norms", "gated_norms", "convolutions"]), ("qwen3_next_like", KINDS)]
)
def test_a_model_keeps_what_it_is_told_to(name: str, kinds: list[str], everywhere: Callable[[bool], None]) -> None:
    """Fewer bytes with each kind that is made again, and the same bits."""
    everywhere(True)
    tokens = torch.randint(256, (2, 21))
    before, sizes = [], []
    for count in range(len(kinds) + 1):
        torch.manual_seed(0)
        model = Decoder(preset(f"{name}_nano"), recompute=kinds[:count])
        held: dict[int, Tensor] = {}

        def pack(x: Tensor, held: dict[int, Tensor] = held) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x
            return x

        with pytest.MonkeyPatch.context() as patch:
            original = recompute.Scope.pack
            patch.setattr(
                recompute.Scope,
                "pack",
                lambda self, x, own=original, pack=pack: (
                    own(self, pack(x)) if self.reference(x) is None else own(self, x)
                ),
            )
            patch.setattr(recompute, "_NOTHING", torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        sizes.append(sum(t.untyped_storage().nbytes() for t in held.values()))
        found = [loss, *gradients(model, loss)]
        assert not before or all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
        before = found
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), sizes


def test_a_kind_must_be_known() -> None:
    with pytest.raises(ValueError, match="recompute must be one of 'norms', 'gated_norms'"):
        Decoder(preset("gated_deltanet_nano"), recompute=["norms", "everything"])


def checkpointed(config: DecoderConfig, dtype: torch.dtype, lengths: list[int], device: str) -> list[str]:
    """The loss and the parameters whose gradients have other bits with checkpointed activations than without."""
    torch.manual_seed(0)
    model = Decoder(config, device=device, dtype=dtype)
    for module in model.modules():
        if isinstance(module, ExactParameters):
            module.float()
    tokens = torch.randint(config.vocab_size, (1, sum(lengths) + 1), device=device)
    packing, found = Packing.from_lengths(lengths, device=device), []
    for model.checkpoint_activations in (False, True):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:], cu_seqlens=packing)
        found.append([loss, *gradients(model, loss)])
    names = ["loss", *(name for name, _ in model.named_parameters())]
    return [name for name, a, b in zip(names, *found, strict=True) if not torch.equal(a, b)]


@pytest.mark.interpreted
def test_checkpointed_activations_keep_the_bits_of_kernels() -> None:
    """In float16: the interpreter cuts bfloat16 off where a GPU rounds."""
    layers = [LayerConfig("gated_deltanet", {"heads": 1}), LayerConfig("attention", {"heads": 1, "window": 3})]
    assert not checkpointed(DecoderConfig(vocab_size=11, width=16, layers=layers), torch.float16, [4, 3], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("width", [512, 4096])
def test_checkpointed_activations_keep_their_bits_on_a_gpu(width: int, norm: str) -> None:
    """Wide and narrow rows, for which norms have different tiles."""
    heads = {"heads": 4, "head_dim": 128}
    layers = [
        LayerConfig("gated_deltanet", heads),
        LayerConfig("kda", heads),
        LayerConfig("attention", heads | {"window": 1024}),
        LayerConfig("attention", heads),
    ]
    config = DecoderConfig(vocab_size=512, width=width, layers=layers, norm=norm)
    assert not checkpointed(config, torch.bfloat16, [3000, 1000, 96], "cuda")


class Made(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == self.name
        return func(*args, **(kwargs or {}))


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Two products of a cosine of a sine; of all these only `x` need be kept."""
    with recomputing(x):
        y = recomputed("norms", torch.sin, x)
        z = recomputed("norms", torch.cos, y)
        return (z.view(-1, 4) @ w).sum() + (z * w.sum()).sum()


def test_an_output_is_made_once_and_freed(everywhere: Callable[[bool], None]) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    everywhere(False)
    expected = torch.autograd.grad(chain(x, w), (x, w))
    everywhere(True)
    loss = chain(x, w)
    for _ in range(2):  # the graph is used twice
        with Made("cos") as made:
            found = torch.autograd.grad(loss, (x, w), retain_graph=True)
        assert made.count == 2  # once the cosine itself, once as the sine's derivative
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_is_held_but_the_input(everywhere: Callable[[bool], None]) -> None:
    everywhere(True)
    held: list[Any] = []
    original = recompute.Scope.pack

    def pack(self: recompute.Scope, x: Tensor) -> Any:
        held.append(original(self, x))
        return held[-1]

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute.Scope, "pack", pack)
        chain(x, w)
    tensors = [t for t in held if isinstance(t, Tensor)]
    assert len(tensors) < len(held)
    assert {t.untyped_storage().data_ptr() for t in tensors if t.numel() > 1} <= {x.data_ptr(), w.data_ptr()}


def test_a_second_derivative(everywhere: Callable[[bool], None]) -> None:
    everywhere(True)
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: chain(x, w), (x,))


def test_other_hooks_are_left_alone(everywhere: Callable[[bool], None]) -> None:
    everywhere(True)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    nothing = recompute._NOTHING
    assert recomputing(x) is not nothing
    with torch.no_grad():
        assert recomputing(x) is nothing
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert recomputing(x) is nothing
    with torch.autograd.graph.save_on_cpu():
        assert recomputing(x) is nothing
    with recomputing(x):
        assert recomputing(x) is nothing
    expected = torch.autograd.grad(chain(x, w), x)[0]
    assert torch.equal(torch.autograd.grad(checkpoint(chain, x, w, use_reentrant=False), x)[0], expected)
    assert torch.equal(torch.func.grad(chain)(x, w), expected)


@pytest.mark.interpreted
@pytest.mark.parametrize(("shape", "dtype"), [((2, 5), torch.float32), ((7,), torch.bfloat16)])
def test_the_product_with_a_matrix_has_the_bits_of_both(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up, weight = torch.randn(*shape, 2 * 1100, dtype=dtype), torch.randn(8, 1100, dtype=dtype)
    leaves = [gate_up.requires_grad_(), weight.requires_grad_()]
    apart = linear(swiglu(*gate_up.chunk(2, dim=-1), impl="triton"), weight)
    joined = SwiGLULinear.apply(*leaves)
    dy = torch.randn_like(apart)
    assert torch.equal(joined, apart)
    pairs = zip(*(torch.autograd.grad(y, leaves, dy) for y in (joined, apart)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
