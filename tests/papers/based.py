"""Based and ReBased as their papers write them: the token loops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from paper_cases import QKV, Mechanism, rows
from torch import Tensor

States = tuple[Tensor, Tensor]


def weighted(
    features: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, S: States, scale: float
) -> tuple[Tensor, States]:
    """o_t = sum_j w_tj v_j / (sum_j w_tj + eps) with weights that are products of features, the scale in those of the query."""
    memory, z = S
    o = []
    for t in range(len(v)):
        memory, z = memory + torch.outer(features(k[t]), v[t]), z + features(k[t])
        phi = features(scale * q[t])
        o.append(phi @ memory / (phi @ z + 1e-6))
    return rows(o, v), (memory, z)


def off_diagonal(x: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1)
    return x[i] * x[j]


def based(q: Tensor, k: Tensor, v: Tensor, *, S: States, scale: float) -> tuple[Tensor, States]:
    """2402.18668, section 4: phi(q)^T phi(k) = 1 + q^T k + (q^T k)^2 / 2."""

    def features(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[:1]), x, x**2 / 2**0.5, off_diagonal(x)])

    return weighted(features, q, k, v, S, scale)


def rebased(q: Tensor, k: Tensor, v: Tensor, *, S: States, scale: float) -> tuple[Tensor, States]:
    """2402.10644, section 4: phi(q)^T phi(k) = (q^T k)^2."""
    return weighted(lambda x: torch.cat([x**2, 2**0.5 * off_diagonal(x)]), q, k, v, S, scale)


STATES = {"states": ("N HV F V", "N H F"), "positive": ("q", "k"), "rare": True}
CASES = {
    "based": Mechanism(based, QKV, features=lambda K: 1 + K + K * (K + 1) // 2, **STATES),
    "rebased": Mechanism(rebased, QKV, features=lambda K: K * (K + 1) // 2, **STATES),
}
