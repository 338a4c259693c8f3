"""How far the roundings of 16-bit operands move the gradient of a decay's own parameter: the budget of sums that cancel.

Where log decays are `g = -exp(A_log) f`, the gradient of `A_log` is the sum of `dg g` over tokens and channels. The pairs of a chunk give

    sum over i, j, k of P_ijk (G_ik - G_jk),      P_ijk = x_ik y_jk e^{G_ik - G_jk} dA_ij,      G = cumsum(g) in the chunk

(docs/chunk_algorithm.md, 2.5 and 2.6). With 16-bit inputs kernels take it as row sums less column sums: `x_ik G_ik dx_ik`, where dx is the
product of dA and decayed y, less `y_jk G_jk dy_jk`, where dy is that of dA and decayed x. Independent relative roundings of these
operands move it, to first order, by one rounding times the root of

    sum_jk (sum_i P_ijk G_ik)^2  +  sum_ik (sum_j P_ijk G_jk)^2  +  sum_ij (sum_k P_ijk (G_ik - G_jk))^2.

Where a chunk decays far, `G_ik` and `G_jk` are large beside their difference: rows and columns cancel, their roundings do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from budget import relative_errors, spend
from chunk_form import C, pairs, to
from torch import Tensor


class Pairs(NamedTuple):
    """Row keys and column keys `[B, H, C, K]`, the logarithms of the decay since the chunk's start, and the pairs below the diagonal."""

    x: Tensor
    y: Tensor
    G: Tensor
    A: Tensor

    def terms(self, dA: Tensor) -> Tensor:
        """`P` `[B, H, C, C, K]`. A token with itself has no decay in between."""
        seen = torch.ones_like(dA).tril(-1)
        decay = torch.where(seen[..., None] > 0, self.G.unsqueeze(3) - self.G.unsqueeze(2), -torch.inf).exp()
        return torch.einsum("bhij,bhik,bhjk,bhijk->bhijk", dA, self.x, self.y, decay)

    def moved(self, dA: Tensor) -> Tensor:
        """The sum of squares above, of each head."""
        P, row, column = self.terms(dA), self.G.unsqueeze(3), self.G.unsqueeze(2)
        parts = ((P * row).sum(2), (P * column).sum(3), (P * (row - column)).sum(4))
        return sum((part.square().sum((0, 2, 3)) for part in parts), torch.zeros(()))

    def rows_less_columns(self, dA: Tensor, dtype: torch.dtype) -> Tensor:
        """The part of the gradient that these pairs give, with operands of the products rounded to `dtype`, of each head."""
        dA = to(dA.tril(-1), dtype)
        x, y = (to(t, dtype) for t in (self.x * self.G.exp(), self.y * (-self.G).exp()))
        return ((self.x * self.G.exp() * (dA @ y) - self.y * (-self.G).exp() * (dA.mT @ x)) * self.G).sum((0, 2, 3))


def kda_pairs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, do: Tensor) -> list[tuple[Pairs, Tensor]]:
    """The pairs of each chunk of KDA and the gradients of their sums, from float64 tensors `[B, T, H, .]` and no initial state."""
    S = v.new_zeros(*v.shape[::2], k.shape[-1], v.shape[-1])
    found: list[Pairs] = []
    outputs = []
    for x, y, column, values, logs, flow in _chunks(q * q.shape[-1] ** -0.5, -k, k * beta.unsqueeze(-1), v, g, do):
        G = logs.cumsum(2)
        A_q, A_a = (pairs(row, column, G, G, diagonal).requires_grad_() for row, diagonal in ((x, 0), (y, -1)))
        R = values + (y * G.exp()) @ S
        nu = torch.linalg.solve_triangular(torch.eye(G.shape[2]).to(A_a) - A_a, R, upper=False, unitriangular=True)
        outputs.append(((x * G.exp()) @ S + A_q @ nu).mul(flow).sum())
        S = G[:, :, -1:].exp().mT * S + (column * (G[:, :, -1:] - G).exp()).mT @ nu
        found += [Pairs(x, column, G, A_q), Pairs(y, column, G, A_a)]
    grads = torch.autograd.grad(sum(outputs, v.new_zeros(())), [pair.A for pair in found])
    return list(zip(found, grads, strict=True))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors chunk by chunk, `[B, H, C, .]`."""
    return zip(*(t.transpose(1, 2).split(C, 2) for t in tensors), strict=True)


def assert_within_roundings(
    name: str, got: Tensor, reference: Tensor, baseline: Tensor, moved: Tensor, dtype: torch.dtype
) -> None:
    """Twice the baseline's error, and what one unit roundoff of each operand moves the result by (`moved`, over a rounding)."""
    of_roundings = relative_errors(reference + torch.finfo(dtype).eps / 2 * moved, reference)
    for spent, part in zip(spend(got, reference, baseline, dtype, steps=0), of_roundings, strict=True):
        assert spent.error <= spent.budget + part, (
            f"{name}: {spent.kind} error {spent.error:.2e}, {spent.budget + part:.2e} allowed"
        )
