"""The `state` phase: the one serial pass, chunk after chunk (docs/chunk_algorithm.md, section 5).

    forward      Z <- Z + ~X S;   nu = T Z_a;   S <- e^{G_C} S + ^Y^T W
    backward     dnu <- dnu + ^b dS;   dR = T^T dnu;   dS <- e^{G_C} dS + ~X^T [do; dR]

`~X` stacks the row keys (query, and correction), `^Y` the column keys, `W` what they write (values, and corrected values `nu`), `Z`
what the rows read. The chunks of one depth advance together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashmix.ops.recurrence.portable.layout import Layout, Slab


def state_forward(
    layout: Layout, slab: Slab, S: Tensor, total: Tensor, rows: Tensor, columns: Tensor, T: Tensor | None,
    Z: Tensor, target: Tensor | None, W: Tensor, states: Tensor | None,
) -> None:  # fmt: skip
    """Advances `S` over a slab; fills `Z` `[chunks, R * C, V]`, the last `C` rows of `W` with `nu`, and `states`: each chunk's first state.

    With raw writes `Z` comes in holding what rows read of them within the chunk. `target` is what the correction aims at.
    """
    C, raw = layout.C, W.shape[1] > layout.C or T is None
    for at, now, after in _walk(layout, slab, range(slab.first, slab.last), S, states):
        if raw:
            Z[at].baddbmm_(rows[at], now)
        else:
            torch.bmm(rows[at], now, out=Z[at])
        if T is not None:
            R = Z[at][:, -C:]
            if target is not None:
                R += target[at]
            if raw:
                W[at][:, -C:] = T[at] @ R
            else:
                torch.bmm(T[at], R, out=W[at])
        torch.mul(now, total[at] if len(total) > 1 else total, out=after)
        after.baddbmm_(columns[at].mT, W[at])


def state_backward(
    layout: Layout, slab: Slab, dS: Tensor, total: Tensor, rows: Tensor, columns: Tensor, T: Tensor | None,
    dZ: Tensor, dnu: Tensor | None, dstates: Tensor,
) -> None:  # fmt: skip
    """Takes `dS` back over a slab; fills the last `C` rows of `dZ` with `dR`, and `dstates` with the gradient of what each chunk ends with.

    `dZ` comes in holding `do` in its first `C` rows, `dnu` what reaches the corrected values within the chunk.
    """
    C = layout.C
    for at, now, after in _walk(layout, slab, range(slab.last - 1, slab.first - 1, -1), dS, dstates):
        if T is not None and dnu is not None:
            dnu[at].baddbmm_(columns[at][:, -C:], now)
            dZ[at][:, -C:] = T[at].mT @ dnu[at]
        torch.mul(now, total[at] if len(total) > 1 else total, out=after)
        after.baddbmm_(rows[at].mT, dZ[at])


def _walk(
    layout: Layout, slab: Slab, depths: Sequence[int], state: Tensor, kept: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each depth: its chunks, their state, and where the state after them goes.

    `state` `[N * HV, K, V]` carries it between slabs. With `kept` `[chunks, K, V]` each depth's state is kept there; the next one is
    computed in its place, unless a sequence starts or ends in between.
    """
    placed = False
    for i, depth in enumerate(depths):
        at = layout.at(depth, slab)
        n = at.stop - at.start
        if kept is None:
            yield at, state[:n], state[:n]
            continue
        now = kept[at]
        if not placed:
            now.copy_(state[:n])
        following = layout.at(depths[i + 1], slab) if i + 1 < len(depths) else slice(0, 0)
        placed = following.stop - following.start == n
        yield at, now, kept[following] if placed else state[:n]
