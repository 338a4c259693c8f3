"""Mamba-3 with several keys, queries and values per token (MIMO): the paper's loop, packed, split and with gradients."""

from __future__ import annotations

import pytest
import torch
from model_cases import assert_same
from papers.mamba3 import turned
from torch import Tensor

import flashmix

B, T, R, H, K, P, M = 2, 9, 3, 2, 6, 5, 2
pytestmark = pytest.mark.usefixtures("one_thread")


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    gates = {name: torch.rand(B, T, H, generator=generator, dtype=torch.float64) for name in ("dt", "trapezoid_gate")}
    rest = {"log_decay": -gates["dt"] / 2, "angles": normal(B, T, H, M), "D": normal(H)}
    return {"x": normal(B, T, R, H, P), "B": normal(B, T, R, 1, K), "C": normal(B, T, R, 1, K)} | gates | rest


def loop(x: dict[str, Tensor], b: int) -> Tensor:
    """2603.15569: a token writes the sum of its ranks, and each rank reads it; `[T, R, H, P]` of one sequence."""
    heads = []
    for h in range(H):
        theta, S = torch.zeros(M, dtype=torch.float64), torch.zeros(K, P, dtype=torch.float64)
        before, outputs = torch.zeros_like(S), []
        for t in range(T):
            dt, gate, alpha = x["dt"][b, t, h], x["trapezoid_gate"][b, t, h], x["log_decay"][b, t, h].exp()
            theta = theta + dt * x["angles"][b, t, h]
            keys, queries = (torch.stack([turned(x[n][b, t, r, 0], theta) for r in range(R)]) for n in "BC")
            write = keys.T @ x["x"][b, t, :, h]
            S = alpha * (S + (1 - gate) * dt * before) + gate * dt * write
            before = write
            outputs.append(queries @ S + x["D"][h] * x["x"][b, t, :, h])
        heads.append(torch.stack(outputs))
    return torch.stack(heads, 2)


def test_ranks_are_the_papers_loop() -> None:
    """Values and gradients of every argument."""
    x = inputs()
    leaves = [t for t in x.values() if t.requires_grad]
    expected = torch.stack([loop(x, b) for b in range(B)])
    y, _ = flashmix.mamba3(**x)
    assert_same(y, expected)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    pairs = zip(*(torch.autograd.grad((o * weight).sum(), leaves) for o in (y, expected)), strict=True)
    for got, wanted in pairs:
        assert_same(got, wanted)


def test_ranks_packed_and_in_parts() -> None:
    x = {name: t.detach() for name, t in inputs().items()}
    one = {name: t[:1] for name, t in x.items() if name != "D"}
    packed, states = flashmix.mamba3(**one, D=x["D"], cu_seqlens=torch.tensor([0, 4, 4, T]), return_state=True)
    parts, state = [], None
    for n, (first, last) in enumerate(((0, 4), (4, 4), (4, T))):
        part = {name: t[:, first:last] for name, t in one.items()}
        alone, own = flashmix.mamba3(**part, D=x["D"], return_state=True)
        assert_same(alone, packed[:, first:last])
        for got, wanted in zip(own, states, strict=True):
            assert_same(got[0], wanted[n])
    whole, last_states = flashmix.mamba3(**one, D=x["D"], return_state=True)
    for t in range(T):
        part = {name: value[:, t : t + 1] for name, value in one.items()}
        y, state = flashmix.mamba3(**part, D=x["D"], initial_state=state, return_state=True)
        parts.append(y)
    assert_same(torch.cat(parts, 1), whole)
    for got, wanted in zip(state, last_states, strict=True):
        assert_same(got, wanted)
    with pytest.raises(ValueError, match=r"C must have shape \[B, T, R, G, N\] with R >= 1, got \[2, 9, 0, 1, 6\]"):
        flashmix.mamba3(**x | {name: x[name][:, :, :0] for name in "xBC"})


def test_a_long_sum_of_angles_stays_exact() -> None:
    """At 2^20 radians float32 knows an angle to 1/16: the sum is kept in float64, within a turn."""
    one, zero = torch.ones(1, 2, 1), torch.zeros(1, 2, 1)
    k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
    turns = 2 * torch.pi * torch.tensor([2.0**19 + 0.25, 2.0**19], dtype=torch.float64).view(1, 2, 1, 1)
    _, (theta, _, last_k, _) = flashmix.mamba3(k, one, zero, one, k, k, turns, return_state=True)
    torch.testing.assert_close(theta, torch.full((1, 1, 1), torch.pi / 2))
    torch.testing.assert_close(last_k, torch.tensor([[[0.0, 1.0]]]))
