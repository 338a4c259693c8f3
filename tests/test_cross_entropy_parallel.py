"""The cross entropy of a head spread over processes: gloo, on the CPU, two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import definitions
import pytest
import torch
from budget import assert_within_budget
from processes import together
from rowwise_cases import random
from torch import Tensor

from flashmix.ops.losses.op import linear_cross_entropy

RANKS, VOCABULARY = 2, 14
TARGET = torch.tensor([[3, 0, -100, 10, 7], [1, 13, 9, -100, 2]])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "label_smoothing": 0.3, "z_loss": 0.1, "softcap": 5.0},
]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = random(2, 5, 8, dtype=dtype), random(VOCABULARY, 8, dtype=dtype, seed=1)
    return hidden, weight, random(VOCABULARY, dtype=dtype, seed=2)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [
        loss.detach(),
        *torch.autograd.grad(loss, leaves, torch.linspace(0.5, 2, loss.numel()).to(loss).view_as(loss)),
    ]


def work(rank: int, folder: str, device: str) -> None:
    """One process: its rows of the head, everything it finds into a file."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "nccl"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = []
    own = slice(rank * VOCABULARY // RANKS, (rank + 1) * VOCABULARY // RANKS)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight, bias = (t.to(device) for t in inputs(dtype))
        hidden, weight, bias = hidden.requires_grad_(), weight[own].requires_grad_(), bias[own].requires_grad_()
        for options in OPTIONS:
            loss = linear_cross_entropy(
                hidden, weight, TARGET.to(device), bias=bias, chunk=3, group=dist.group.WORLD, **options
            )
            found.append([t.cpu() for t in gradients(loss, hidden, weight, bias)])
    frozen = linear_cross_entropy(hidden, weight.detach(), TARGET.to(device), group=dist.group.WORLD)
    frozen.backward()
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def definition(
    hidden: Tensor, weight: Tensor, bias: Tensor, smoothing: float, reduction: str, **options: Any
) -> list[Tensor]:
    losses = definitions.cross_entropy(hidden @ weight.T + bias, TARGET, smoothing, **options)
    loss = losses if reduction == "none" else losses.sum() / ((TARGET != -100).sum() if reduction == "mean" else 1)
    return gradients(loss, hidden, weight, bias)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_are_one(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    together(work, (str(tmp_path), device), RANKS)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(RANKS))
    cases = [(dtype, options) for dtype in (torch.float64, torch.float32, torch.bfloat16) for options in OPTIONS]
    for (dtype, options), a, b in zip(cases, first, second, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), "every process has the same loss and gradient"
        got = [a[0], a[1], torch.cat([a[2], b[2]]), torch.cat([a[3], b[3]])]
        leaves = [t.double().requires_grad_() for t in inputs(dtype)]
        plain = [t.requires_grad_() for t in inputs(dtype)]
        arguments = {"smoothing": 0.0, "reduction": "mean", **options}
        arguments["smoothing"] = arguments.pop("label_smoothing", 0.0)
        exact, baseline = (definition(*some, **arguments) for some in (leaves, plain))
        for name, have, want, rough in zip(("loss", "hidden", "weight", "bias"), got, exact, baseline, strict=True):
            step = 2 if dtype != torch.float64 else 20  # one of the shard's own, one of joining them
            assert_within_budget(f"{dtype} {options} {name}", have, want, rough, dtype, steps=step)
