"""Calls of the sLSTM with recurrent weights, by an implementation and by the definition, and how they are compared."""

from __future__ import annotations

from itertools import pairwise

import torch
from budget import spend
from rowwise_cases import random
from torch import Tensor

from flashmix import Packing, slstm
from flashmix.ops.slstm.definition import slstm_cell as define

LENGTHS = [5, 0, 1, 14]
SIZES = [(3, 5), (1, 16), (2, 33)]
ORDERS = 4


def inputs(heads: int, channels: int, sequences: int, *shape: int) -> list[Tensor]:
    """Gates `[*shape, heads, channels]`, recurrent weights and a state."""
    gates = [3 * random(*shape, heads, channels, seed=seed) for seed in range(4)]
    recurrent = random(4, heads, channels, channels, seed=4) / channels**0.5
    c, n, m, y = (random(sequences, heads, channels, seed=seed) for seed in range(5, 9))
    return [*gates, recurrent, c, n.abs(), m, torch.tanh(y)]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a sum of them all but `m`."""
    parts = [*outputs[:3], outputs[4]]
    flows = [random(*t.shape, seed=9 + place).to(t) for place, t in enumerate(parts)]
    found = torch.autograd.grad(parts, leaves, flows)
    return [*(t.detach() for t in outputs), *found]


def ours(given: list[Tensor], impl: str, packing: Packing | None = None, device: str = "cpu") -> list[Tensor]:
    leaves = [t.to(device, copy=True).requires_grad_() for t in given]
    write, forget, candidate, output, recurrent, c, n, m, y = leaves
    out, state = slstm(
        write,
        forget,
        candidate,
        output,
        recurrent,
        initial_state=(c, n, m, y),
        return_state=True,
        cu_seqlens=packing,
        impl=impl,
    )
    assert state is not None
    return [t.cpu() for t in gradients([out, *state], leaves)]


def defined(given: list[Tensor], ends: list[int] | None = None, order: Tensor | None = None) -> list[Tensor]:
    """The definition with `m` a constant of the gradient, of each packed sequence by itself; with its channels in another order."""
    leaves = [t.clone().requires_grad_() for t in given]
    inside, back = leaves, slice(None)
    if order is not None:
        inside, back = [t[..., order] for t in leaves], order.argsort()
        inside[4] = inside[4][..., order, :]
    *gates, recurrent, c, n, m, y = inside
    past = torch.exp(m - m.detach())
    state = [c * past, n * past, m.detach(), y]
    if ends is None:
        found = define(tuple(gates), recurrent, tuple(state), constant=True)
        return gradients([t[..., back] for t in found], leaves)
    parts = [
        define(tuple(g[:, a:b] for g in gates), recurrent, tuple(s[k : k + 1] for s in state), constant=True)
        for k, (a, b) in enumerate(pairwise(ends))
    ]
    outputs = [torch.cat([part[0] for part in parts], 1)]
    outputs += [torch.cat([part[place] for part in parts]) for place in range(1, 5)]
    return gradients([t[..., back] for t in outputs], leaves)


def compare(found: list[Tensor], given: list[Tensor], ends: list[int] | None = None) -> None:
    """Within the budget of the plain evaluation in one of some orders of channels: single numbers amplify a rounding, which is luck."""
    exact, narrow = defined([t.double() for t in given], ends), [t.float() for t in given]
    orders = [torch.randperm(given[0].shape[-1], generator=torch.Generator().manual_seed(n)) for n in range(ORDERS)]
    plain = [defined(narrow, ends), *(defined(narrow, ends, order) for order in orders)]
    for place, (got, want, *baselines) in enumerate(zip(found, exact, *plain, strict=True)):
        assert torch.isfinite(got).all(), f"{place}: not finite"
        for spent in zip(*(spend(got, want, baseline.to(got.dtype), steps=4) for baseline in baselines), strict=True):
            least = min(spent, key=lambda one: one.share)
            assert least.within, f"{place}: {least.kind} error {least.error:.2e} is over the budget {least.budget:.2e}"
