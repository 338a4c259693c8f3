"""AdamW in one pass of a kernel: torch's in float64 is the definition; interpreted, compiled, and on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from torch import Tensor

from flashmix.models import Decoder, DecoderConfig, LayerConfig
from flashmix.train.adamw import AdamW
from flashmix.train.folder import TrainConfig
from flashmix.train.optimizer import Updates

pytest.importorskip("triton")

from kernels import compile_launch, recording

from flashmix.train import adamw as module

GPU = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = [(3,), (40, 7), (2, 5, 16)]
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=GPU)]


SIZES = module.CHUNK, module.BLOCK


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tensor has several, the last of them not full."""
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "BLOCK", 64)


def numbers(dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masters", [False, True])
def test_steps_are_those_of_torch(masters: bool, device: str) -> None:
    """Four steps, with clipping; `masters`: the gradients are those of bfloat16 copies, which follow."""
    start, scale = numbers(torch.float32, device), torch.tensor(0.7, device=device)
    ours, plain, wide = (leaves(start, dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    optimizer, baseline, reference = AdamW(ours, **OPTIONS), *(torch.optim.AdamW(t, **OPTIONS) for t in (plain, wide))
    copies = leaves(start, torch.bfloat16)
    optimizer.rounded, optimizer.scale = dict(zip(ours, copies, strict=True)) if masters else {}, scale
    for step in range(4):
        for own, rounded, one, other, gradient in zip(
            ours, copies, plain, wide, numbers(torch.bfloat16, device, 1 + step), strict=True
        ):
            (rounded if masters else own).grad = gradient.clone() if masters else gradient.float()
            one.grad, other.grad = gradient.float() * scale, gradient.double() * scale.double()
        assert optimizer.one_pass()
        optimizer.step(), baseline.step(), reference.step()
    for own, rounded, one, other in zip(ours, copies, plain, wide, strict=True):
        assert_within_budget("parameter", own.detach(), other.detach(), one.detach(), steps=4)
        if masters:
            assert_within_budget("copy", rounded.detach(), other.detach(), one.detach().bfloat16())
        for name in ("exp_avg", "exp_avg_sq"):
            found = (o.state[t][name] for o, t in ((optimizer, own), (reference, other), (baseline, one)))
            assert_within_budget(name, *found, steps=4)  # type: ignore[misc]
        assert optimizer.state[own]["step"].item() == 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_goes_on_from_the_state_of_torch_and_back(device: str) -> None:
    start = numbers(torch.float32, device)
    ours, theirs = leaves(start, torch.float32), leaves(start, torch.float32)
    first, second = torch.optim.AdamW(theirs, fused=True, **OPTIONS), AdamW(ours, **OPTIONS)
    for own, other in zip(ours, theirs, strict=True):
        own.grad = other.grad = torch.ones_like(own)
    first.step()
    second.step()
    states = copy.deepcopy(first.state_dict()), copy.deepcopy(second.state_dict())
    second.load_state_dict(states[0])
    first.load_state_dict(states[1])
    second.step()
    first.step()
    for own, other in zip(ours, theirs, strict=True):
        assert_within_budget("parameter", own.detach(), other.detach().double(), other.detach(), steps=2)
        assert second.state[own]["step"].item() == 2


@pytest.mark.interpreted
def test_parameters_without_gradients_and_of_other_groups_stay_apart() -> None:
    a, b, c = leaves(numbers(torch.float32, "cpu"), torch.float32)
    optimizer = AdamW([{"params": [a, b]}, {"params": [c], "lr": 0.0, "weight_decay": 0.0}], **OPTIONS)
    before = [t.detach().clone() for t in (a, b, c)]
    a.grad, c.grad = torch.ones_like(a), torch.ones_like(c)
    optimizer.step()
    assert not torch.equal(a, before[0]) and torch.equal(b, before[1]) and torch.equal(c, before[2])
    assert b not in optimizer.state and optimizer.state[c]["step"].item() == 1


@pytest.mark.interpreted
def test_what_the_kernel_does_not_take_is_torchs() -> None:
    for parameter in (torch.zeros(8, dtype=torch.float64), torch.zeros(9)[1:], torch.zeros(4, 4).T):
        parameter.requires_grad_().grad = torch.ones_like(parameter)
        optimizer = AdamW([parameter], **OPTIONS)
        assert not optimizer.one_pass()
        optimizer.step()
        assert parameter.detach().max() < 0
        optimizer.scale = torch.ones(())
        with pytest.raises(RuntimeError, match=r"rounded parameters and scaled gradients need one_pass\(\)"):
            optimizer.step()


def updates_of(device: str, optimizer: str) -> tuple[Decoder, Updates]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(32, 16, [LayerConfig("gated_deltanet", {"heads": 2})], mlp_width=16)).to(device)
    return model, Updates(model, TrainConfig(dtype="bfloat16", optimizer=optimizer), masters=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_of_masters_in_one_pass_are_those_in_several(
    optimizer: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bfloat16 model: the gradient's norm, float32 masters and rounded parameters, whose gradients are gone."""
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    found = []
    for one_pass in (True, False):
        model, updates = updates_of(device, optimizer)
        if not one_pass:
            monkeypatch.setattr(AdamW, "one_pass", lambda self: False)
        generator, norms = torch.Generator().manual_seed(1), []
        for _ in range(2):
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(device, parameter.dtype)
            norms.append(updates.step(0.01, 1.0))
        assert bool(updates.adamw.rounded) == one_pass
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append((norms, updates.weights(), model.state_dict()))
    (norms, masters, rounded), (other_norms, other_masters, _) = found
    for one, other in zip(norms, other_norms, strict=True):
        assert_within_budget("norm", one[None], other.double()[None], other[None])
    for name, master in masters.items():
        if optimizer == "muon" and name.startswith("blocks.") and master.dim() == 2:
            continue  # its bfloat16 iterations make much of the last bit of a gradient
        assert_within_budget(name, master, other_masters[name].double(), other_masters[name], steps=4)
        assert_within_budget(name, rounded[name], master.double(), master.to(rounded[name].dtype))


def test_the_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With loads and stores of 16 bytes."""
    for name, size in zip(("CHUNK", "BLOCK"), SIZES, strict=True):
        monkeypatch.setattr(module, name, size)
    with recording((9, 0)) as launches:
        for dtype, rounded in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
            (parameter,) = leaves([torch.zeros(1000)], dtype)
            optimizer = AdamW([parameter], **OPTIONS)
            own = parameter
            if rounded is not None:
                (own,) = leaves([torch.zeros(1000)], rounded)
                optimizer.rounded, optimizer.scale = {parameter: own}, torch.ones(())
            own.grad = torch.zeros_like(own)
            optimizer.step()
    assert len(launches) == 2
    for launch in launches:
        made = compile_launch(launch)
        assert made.stack == 0 and made.registers <= 128, (launch.key, made.stack, made.registers)
        assert "ld.global.v4.b32" in made.ptx and "st.global.v4.b32" in made.ptx
