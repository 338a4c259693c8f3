"""The chunk form of docs/chunk_algorithm.md in float64, its operands rounded to another dtype: what products in that dtype cost at all.

For correlated keys with strengths near 2 a token loop is no yardstick of 16-bit products. Rows of `T` are long there and their sums cancel,
so that one rounding of `T`, of what it multiplies or of what it gives comes out many times as large (of parallel keys at 1.999 `T` alone,
rounded to bfloat16, moves the output by 44 % and the state by 95 %).
"""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from torch import Tensor

C = 64  # tokens of a chunk, as the kernels have them for 16-bit operands


class Rounded(torch.autograd.Function):
    """The numbers that `dtype` has of a tensor, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return to(t, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return to(grad, ctx.dtype), None


class Corrected(torch.autograd.Function):
    """`nu = T R` with `T = (I - A)^-1`, and `dR = T^T dnu`, `dA = dR nu^T` (4.5), all of them rounded."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, R: Tensor, dtype: torch.dtype) -> Tensor:
        one = torch.eye(A.shape[-1], dtype=A.dtype)
        T = torch.linalg.solve_triangular(one - A, one.expand_as(A), upper=False, unitriangular=True)
        T = to(T, dtype)
        nu = to(T @ to(R, dtype), dtype)
        ctx.save_for_backward(T, nu)
        ctx.dtype = dtype
        return nu

    @staticmethod
    def backward(ctx: Any, dnu: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        T, nu = ctx.saved_tensors
        dR = to(T.mT @ to(dnu, ctx.dtype), ctx.dtype)
        return to(dR @ nu.mT, ctx.dtype), dR, None


def to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype).to(t.dtype)


def operands(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """`q, a, b, v` and of DPLR the raw `k`, by value head, `[B, HV, T, .]`; a gate of no decay is zeros."""
    v = x["v"]
    named = {"q": x["q"], "v": v}
    if case.rule == "delta":
        named |= {
            "a": -x["k"],
            "b": x["k"].repeat_interleave(v.shape[2] // x["k"].shape[2], 2) * x["beta"].unsqueeze(-1),
        }
    elif case.rule == "untied":
        named |= {"a": -x["erase"], "b": x["write"]}
    else:
        named |= {"a": x["a"], "b": x["b"], "k": x["k"]}
    by_head = {n: t.repeat_interleave(v.shape[2] // t.shape[2], 2).transpose(1, 2) for n, t in named.items()}
    g = x["log_decay"].transpose(1, 2) if case.gate == "channel" else torch.zeros_like(by_head["q"])
    return by_head | {"g": g}


def pairs(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor, diagonal: int) -> Tensor:
    """`A_ij = x_i . y_j e^(rows_i - columns_j)` below the diagonal, `[B, HV, C, C]`."""
    seen = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril(diagonal)
    decay = torch.where(seen[..., None], rows.unsqueeze(3) - columns.unsqueeze(2), -torch.inf).exp()
    return torch.einsum("bhid,bhjd,bhijd->bhij", x, y, decay)


def run_chunks(case: Case, x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and state of a correcting rule without a decay or with one per channel, from float64 tensors `x`."""
    whole, S, outputs = operands(case, x), x["initial_state"], []
    for first in range(0, case.T, C):
        t = {n: part[:, :, first : first + C] for n, part in whole.items()}
        o, S = one_chunk(case, t, S, dtype)
        outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2), S


def one_chunk(case: Case, t: dict[str, Tensor], S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk and the state after it."""

    def low(x: Tensor) -> Tensor:
        return Rounded.apply(x, dtype)  # type: ignore[no-any-return, no-untyped-call]

    G = t["g"].cumsum(2)
    before = G if case.rule == "delta" else G - t["g"]  # a tied rule reads the decayed state
    last, scale, start = G[:, :, -1:], t["q"].shape[-1] ** -0.5, low(S)
    R = (t["a"] * before.exp()) @ start
    R = R + (low(pairs(t["a"], t["k"], before, G, -1)) @ t["v"] if "k" in t else t["v"])
    nu = Corrected.apply(pairs(t["a"], t["b"], before, G, -1), R, dtype)  # type: ignore[no-untyped-call]
    o = scale * (t["q"] * G.exp()) @ start + low(scale * pairs(t["q"], t["b"], G, G, 0)) @ nu
    S = last.exp().mT * S + (t["b"] * (last - G).exp()).mT @ nu
    if "k" in t:
        o = o + low(scale * pairs(t["q"], t["k"], G, G, 0)) @ t["v"]
        S = S + (t["k"] * (last - G).exp()).mT @ t["v"]
    return low(o), S
