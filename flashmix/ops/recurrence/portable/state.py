"""The `state` phase: the one serial pass, chunk after chunk (docs/chunk_algorithm.md, section 5).

    forward      R = r + ~a S;   nu = T R;   S <- e^{G_C} S + ^k^T v + ^b^T nu
    backward     dnu += ^b dS;   dR = T^T dnu;   dS <- e^{G_C} dS + ~q^T do + ~a^T dR

`S` holds one state a (sequence, head) and is updated in place; the chunks of one depth advance together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.portable.layout import Layout, Slab


def state_forward(
    layout: Layout, slab: Slab, S: Tensor, total: Tensor, write: Tensor | None,
    erase: Tensor | None, T: Tensor | None, columns: Tensor | None, states: Tensor, nu: Tensor | None,
) -> None:  # fmt: skip
    """Advances `S` over a slab; writes the state each chunk starts from to `states` and the corrected values to `nu`.

    `write` is `^k^T v` of each chunk (None without a raw write), `erase` is `~a`, `columns` is `^b`; `nu` comes in holding `r`.
    """
    for depth in range(slab.first, slab.last):
        at = layout.at(depth, slab)
        S_now = S[: at.stop - at.start]
        torch.mul(S_now, 1.0, out=states[at])
        if nu is not None:
            R = torch.baddbmm(nu[at], erase[at], S_now)
            torch.bmm(T[at], R, out=nu[at])
        S_now.mul_(total[at] if len(total) > 1 else total)
        if write is not None:
            S_now.add_(write[at])
        if nu is not None:
            S_now.baddbmm_(columns[at].mT, nu[at])


def state_backward(
    layout: Layout, slab: Slab, dS: Tensor, total: Tensor, read: Tensor,
    erase: Tensor | None, T: Tensor | None, columns: Tensor | None, dstates: Tensor, dR: Tensor | None,
) -> None:  # fmt: skip
    """Takes `dS` back over a slab; writes the gradient of the state each chunk ends with to `dstates`, and `dR`.

    `read` is `~q^T do` of each chunk; `dR` comes in holding `A_qb^T do`.
    """
    for depth in range(slab.last - 1, slab.first - 1, -1):
        at = layout.at(depth, slab)
        dS_now = dS[: at.stop - at.start]
        torch.mul(dS_now, 1.0, out=dstates[at])
        if dR is not None:
            dnu = torch.baddbmm(dR[at], columns[at], dS_now)
            torch.bmm(T[at].mT, dnu, out=dR[at])
        dS_now.mul_(total[at] if len(total) > 1 else total)
        dS_now.add_(read[at])
        if dR is not None:
            dS_now.baddbmm_(erase[at].mT, dR[at])
