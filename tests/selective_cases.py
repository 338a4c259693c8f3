"""Cases of the selective scan, and how each is compared with the definition, on any device."""

from __future__ import annotations

from typing import Any

import torch
from budget import assert_within_budget
from rowwise_cases import random
from torch import Tensor

from flashmix import Packing, selective_scan
from flashmix.ops.selective_scan.definition import selective_scan as define

STAGES = 5  # step size, scan, skip, gate; and what an implementation keeps of them
# Batch, tokens, channels, states, groups (0: none); lengths of packed sequences
CASES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    *(((2, tokens, 32, 5, 2), ()) for tokens in (0, 1, 2, 63, 64, 65, 200)),
    ((1, 143, 16, 16, 0), (5, 0, 64, 1, 0, 73)),
    ((1, 143, 96, 3, 3), (70, 73)),
    ((1, 0, 16, 2, 1), (0, 0)),
    ((2, 70, 16, 1, 1), ()),
    ((3, 20, 320, 4, 1), ()),
    ((2, 70, 14, 3, 2), ()),
    ((1, 75, 150, 2, 0), (70, 0, 5)),
]
Tensors = dict[str, Tensor]


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, sequences: int, extras: bool = True) -> Tensors:
    batch, tokens, D, S, groups = sizes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shared = (batch, tokens, groups, S) if groups else (batch, tokens, S)
    x = {"u": random(batch, tokens, D, dtype=dtype), "dt": random(batch, tokens, D, dtype=wide, seed=1)}
    x |= {"A": -random(D, S, dtype=wide, seed=2).abs(), "B": random(*shared, dtype=dtype, seed=3)}
    x |= {"C": random(*shared, dtype=dtype, seed=4), "initial_state": random(sequences, D, S, dtype=wide, seed=5)}
    if not extras:
        return x | {"dt": x["dt"].abs()}
    x |= {"D": random(D, dtype=wide, seed=6), "z": random(batch, tokens, D, dtype=dtype, seed=7)}
    return x | {"dt_bias": random(D, dtype=wide, seed=8)}


def defined(x: Tensors, lengths: tuple[int, ...], **options: Any) -> tuple[Tensor, Tensor]:
    if not lengths:
        return define(**x, **options)
    names, found = ("u", "dt", "B", "C", "z"), []
    for n, part in enumerate(torch.arange(x["u"].shape[1]).split(list(lengths))):
        own = {name: t[:, part] if name in names else t for name, t in x.items()}
        found.append(define(**{**own, "initial_state": x["initial_state"][n : n + 1]}, **options))
    return torch.cat([y for y, _ in found], 1), torch.cat([h for _, h in found])


def evaluate(run: Any, x: Tensors) -> Tensors:
    """Outputs and gradients by name."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    y, h = run(leaves)
    flows = [random(*t.shape, dtype=torch.float64, seed=9).to(torch.bfloat16).to(t) for t in (y, h)]
    grads = torch.autograd.grad([y, h], list(leaves.values()), flows, materialize_grads=True, allow_unused=True)
    return {"y": y.detach(), "h": h.detach()} | {f"d_{n}": d for n, d in zip(leaves, grads, strict=True)}


def assert_scans(
    sizes: tuple[int, ...], lengths: tuple[int, ...], dtype: torch.dtype, impl: str, extras: bool, device: str = "cpu"
) -> None:
    """Outputs and gradients against the definition in float64; budget: the definition in float32."""
    x = inputs(sizes, dtype, len(lengths) or sizes[0], extras)
    packing = Packing.from_lengths(lengths, device) if lengths else None
    options: dict[str, Any] = {"return_state": True, "cu_seqlens": packing, "impl": impl, "softplus": extras}
    have = evaluate(lambda x: selective_scan(**x, **options), {n: t.to(device) for n, t in x.items()})
    narrow = {n: t.float() for n, t in x.items()}
    exact = evaluate(lambda x: defined(x, lengths, softplus=extras), {n: t.double() for n, t in x.items()})
    wide = evaluate(lambda x: defined(x, lengths, softplus=extras), {n: t.double() for n, t in narrow.items()})
    plain = evaluate(lambda x: defined(x, lengths, softplus=extras), narrow)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    for name, result in have.items():
        got, baseline = result.cpu(), plain[name]
        if dtype == torch.float64:
            baseline = exact[name] + (plain[name] - wide[name]) * ratio
        assert_within_budget(f"{impl} {name}", got, exact[name], baseline.to(got.dtype), dtype, STAGES)
