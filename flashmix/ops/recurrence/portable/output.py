"""The `output` phase: what each token reads, and what each product passes back (docs/chunk_algorithm.md, section 6).

    forward      o = ~q S + A_qk v + A_qb nu
    backward     d~q = do S^T;   d~a = dR S^T;   d^k = v dS^T;   d^b = nu dS^T;   dA = rows columns^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.portable.scores import Decay, Scores, Tiles
from flashmix.ops.recurrence.problem import Rule


def output_forward(x: Tiles, rows: Tensor, A: Scores, states: Tensor, nu: Tensor | None) -> Tensor:
    """`o` `[chunks, C, V]`; `rows` is `~q`, `states` the state each chunk starts from."""
    o = torch.bmm(rows, states)
    if A.qk is not None:
        o.baddbmm_(A.qk, x.v)
    if A.qb is not None:
        o.baddbmm_(A.qb, nu)
    return o


def output_backward(
    x: Tiles, rows: Tensor, erase: Tensor | None, columns: Tensor | None, raw_columns: Tensor | None, A: Scores,
    states: Tensor, dstates: Tensor, nu: Tensor | None, do: Tensor, dR: Tensor | None, decay: Decay,
) -> tuple[Tiles, Scores]:  # fmt: skip
    """Gradients of the operands through the state, and of the scores; `rows, erase, columns, raw_columns` are ~q, ~a, ^b, ^k."""
    dq = decay.rows_backward(rows, do @ states.mT, exclusive=x.read_before)
    decay.total_backward(states, dstates)
    grad = Tiles(x.rule, x.read_before, dq, None, torch.empty_like(x.v), None, None, None)
    dA = Scores()
    if x.rule.raw:
        grad.k = decay.columns_backward(raw_columns, x.v @ dstates.mT)
        grad.v = torch.baddbmm(A.qk.mT @ do, raw_columns, dstates)
        dA.qk = do @ x.v.mT
    if x.rule.corrected:
        dcolumns = decay.columns_backward(columns, nu @ dstates.mT)
        derase = dR @ states.mT
        dA.qb = do @ nu.mT
        dA.ab = dR @ nu.mT
        if x.rule is Rule.TIED:
            plain = decay.rows(x.k)
            grad.beta = (dR * x.v).sum(-1, keepdim=True) - (derase * plain).sum(-1, keepdim=True)
            grad.k = dcolumns.add_(decay.rows_backward(plain, -x.beta * derase))
            grad.v = x.beta * dR
        else:
            grad.a = decay.rows_backward(erase, derase, exclusive=True)
            grad.b = dcolumns
            if x.rule is Rule.DPLR:
                dA.ak = dR @ x.v.mT
                grad.v.baddbmm_(A.ak.mT, dR)
            else:
                grad.v = dR
    return grad, dA
