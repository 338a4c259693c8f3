"""The `state` phase: the one serial pass, chunk after chunk (docs/chunk_algorithm.md, section 5).

    forward      Y <- Y + ~X S;   nu = T Y_a;   S <- e^{G_C} S + ^Y^T W
    backward     dnu <- dnu + ^b dS;   dR = T^T dnu;   dS <- e^{G_C} dS + ~X^T [do; dR]

`~X` stacks the row keys (query, and correction), `^Y` the column keys, `W` what they write (values, and corrected values `nu`).
`S` holds one state a (sequence, head) and is updated in place; the chunks of one depth advance together.
"""

from __future__ import annotations

from torch import Tensor

from flashmix.ops.recurrence.portable.layout import Layout, Slab


def state_forward(
    layout: Layout, slab: Slab, S: Tensor, total: Tensor, rows: Tensor, columns: Tensor, T: Tensor | None,
    Y: Tensor, W: Tensor, states: Tensor | None,
) -> None:  # fmt: skip
    """Advances `S` over a slab, adds what the rows read to `Y` `[chunks, R * C, V]`, fills the last `C` rows of `W` with `nu` and `states`.

    `Y` comes in holding what rows read within the chunk from raw writes, and the target of the correction in its last `C` rows.
    """
    C = layout.C
    for depth in range(slab.first, slab.last):
        at = layout.at(depth, slab)
        S_now = S[: at.stop - at.start]
        if states is not None:
            states[at] = S_now
        Y[at].baddbmm_(rows[at], S_now)
        if T is not None:
            W[at][:, -C:] = T[at] @ Y[at][:, -C:]
        S_now.mul_(total[at] if len(total) > 1 else total)
        S_now.baddbmm_(columns[at].mT, W[at])


def state_backward(
    layout: Layout, slab: Slab, dS: Tensor, total: Tensor, rows: Tensor, columns: Tensor, T: Tensor | None,
    dreading: Tensor, dnu: Tensor | None, dstates: Tensor,
) -> None:  # fmt: skip
    """Takes `dS` back over a slab; fills the last `C` rows of `dreading` with `dR`, and `dstates` with the gradient each chunk ends with.

    `dreading` comes in holding `do` in its first `C` rows, `dnu` what reaches the corrected values within the chunk.
    """
    C = layout.C
    for depth in range(slab.last - 1, slab.first - 1, -1):
        at = layout.at(depth, slab)
        dS_now = dS[: at.stop - at.start]
        dstates[at] = dS_now
        if T is not None and dnu is not None:
            dnu[at].baddbmm_(columns[at][:, -C:], dS_now)
            dreading[at][:, -C:] = T[at].mT @ dnu[at]
        dS_now.mul_(total[at] if len(total) > 1 else total)
        dS_now.baddbmm_(rows[at].mT, dreading[at])
