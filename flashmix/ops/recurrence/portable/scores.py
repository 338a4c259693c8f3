"""The `scores` phase: how much each token of a chunk reads of each earlier one (docs/chunk_algorithm.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flashmix.ops.recurrence.portable.gate import ChannelDecay, NoDecay, TokenDecay
from flashmix.ops.recurrence.problem import Rule

Decay = NoDecay | TokenDecay | ChannelDecay


@dataclass
class Tiles:
    """The operands of a slab as chunks `[chunks, C, ...]`; `q` is scaled, `beta` is `[chunks, C, 1]`."""

    rule: Rule
    read_before: bool
    q: Tensor
    k: Tensor | None
    v: Tensor
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None

    @property
    def write(self) -> Tensor | None:
        """The key of the corrected write."""
        return self.k if self.rule is Rule.TIED else self.b


@dataclass
class Scores:
    """`A_xy` `[chunks, C, C]` of a slab: what row key x reads of column key y; None where the rule has no such pair.

    For the tied delta rule `ak` holds the plain pairs of `k` with `k`, of which `ab = -beta ak`.
    """

    qk: Tensor | None = None
    qb: Tensor | None = None
    ak: Tensor | None = None
    ab: Tensor | None = None


def scores_forward(x: Tiles, decay: Decay) -> Scores:
    """A_qk, A_qb on and below the diagonal (A_qk below it when the output reads before the write), A_ak, A_ab below it."""
    A = Scores()
    if x.rule is Rule.LINEAR:
        A.qk = decay.pairs(x.q, x.k, diagonal=not x.read_before, exclusive=x.read_before)
    elif x.rule is Rule.TIED:
        A.qb = decay.pairs(x.q, x.k, diagonal=True)
        A.ak = decay.pairs(x.k, x.k, diagonal=False)
        A.ab = -x.beta * A.ak
    else:
        A.qb = decay.pairs(x.q, x.b, diagonal=True)
        A.ab = decay.pairs(x.a, x.b, diagonal=False, exclusive=True)
        if x.rule is Rule.DPLR:
            A.qk = decay.pairs(x.q, x.k, diagonal=True)
            A.ak = decay.pairs(x.a, x.k, diagonal=False, exclusive=True)
    return A


def scores_backward(x: Tiles, A: Scores, dA: Scores, decay: Decay, grad: Tiles) -> None:
    """Adds to `grad` what reaches the keys (and beta) through the scores; `decay` collects what reaches the gate."""

    def pair(row: str, column: str, score: Tensor, dscore: Tensor, diagonal: bool, exclusive: bool) -> None:
        drow, dcolumn = decay.pairs_backward(
            getattr(x, row), getattr(x, column), score, dscore, diagonal=diagonal, exclusive=exclusive
        )
        getattr(grad, row).add_(drow)
        getattr(grad, column).add_(dcolumn)

    if x.rule is Rule.LINEAR:
        pair("q", "k", A.qk, dA.qk, not x.read_before, x.read_before)
    elif x.rule is Rule.TIED:
        pair("q", "k", A.qb, dA.qb, True, False)
        grad.beta.sub_((dA.ab * A.ak).sum(-1, keepdim=True))
        pair("k", "k", A.ak, -x.beta * dA.ab, False, False)
    else:
        pair("q", "b", A.qb, dA.qb, True, False)
        pair("a", "b", A.ab, dA.ab, False, True)
        if x.rule is Rule.DPLR:
            pair("q", "k", A.qk, dA.qk, True, False)
            pair("a", "k", A.ak, dA.ak, False, True)
