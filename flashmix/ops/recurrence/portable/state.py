"""The `state` phase: the one serial pass, chunk after chunk (docs/chunk_algorithm.md, section 5).

    forward      Z = ~X S (+ what is read within the chunk);   nu = T Z_a;   S <- e^{G_C} S + ^Y^T W
    backward     dW += ^Y dS;   dR = T^T dnu;   d~X = [do; dR] S^T;   d^Y = W dS^T;   dS <- e^{G_C} dS + ~X^T [do; dR]

`~X` stacks the row keys (query, and correction), `^Y` the column keys, `W` what they write (values, and corrected values `nu`), `Z`
what the rows read. The chunks of one depth advance together, with their states still in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch
from flashmix.ops.recurrence.portable.gate import ChannelDecay, NoDecay, TokenDecay
from flashmix.ops.recurrence.portable.layout import Layout, Slab
from flashmix.ops.recurrence.portable.value_gate import ValueDecay

Decay = NoDecay | TokenDecay | ChannelDecay | ValueDecay


def state_forward(
    layout: Layout, slab: Slab, S: Tensor, decay: Decay, rows: Tensor, columns: Tensor, T: Tensor | None,
    within: Tensor | None, target: Tensor | None, W: Tensor, states: Tensor | None,
) -> Tensor:  # fmt: skip
    """Advances `S` over a slab; returns `Z` `[chunks, R * C, V]`, fills the last `C` rows of `W` with `nu`, and `states` if it is given.

    `within` is what rows read of raw writes in their own chunk, `target` what the correction aims at.
    """
    C = layout.C
    Z = scratch.tile(W, *rows.shape[:2], W.shape[-1])
    for depth in range(slab.first, slab.last):
        at = layout.at(depth, slab)
        S_now = S[: at.stop - at.start]
        if states is not None:
            states[at] = S_now
        Z_now = torch.bmm(rows[at], S_now, out=Z[at])
        if decay.row_scale is not None:
            Z_now *= decay.row_scale[at]
        if within is not None:
            Z_now += within[at]
        if T is not None:
            R = Z_now[:, -C:]
            if target is not None:
                R += target[at]
            W[at][:, -C:] = T[at] @ R
        if decay.total is not None:
            S_now *= decay.total[at]
        S_now.baddbmm_(columns[at].mT, W[at] if decay.column_scale is None else W[at] * decay.column_scale[at])
    return Z


def state_backward(
    layout: Layout, slab: Slab, dS: Tensor, decay: Decay, rows: Tensor, columns: Tensor, T: Tensor | None,
    states: Tensor, W: Tensor, dZ: Tensor, dW: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Takes `dS` back over a slab; returns `d~X` and `d^Y`, fills the last `C` rows of `dZ` with `dR` and adds to `dW`.

    `dZ` comes in holding `do` in its first `C` rows, `dW` what reaches the written values within their chunk from `do`.
    """
    C = layout.C
    drows, dcolumns = scratch.tile(rows, *rows.shape), scratch.tile(columns, *columns.shape)
    for depth in range(slab.last - 1, slab.first - 1, -1):
        at = layout.at(depth, slab)
        dS_now = dS[: at.stop - at.start]
        W_now = W[at]
        if decay.column_scale is None:
            dW[at].baddbmm_(columns[at], dS_now)
        else:
            reached = torch.bmm(columns[at], dS_now).mul_(decay.column_scale[at])
            dW[at].add_(reached)
            decay.scales_backward(at, rows[at], states[at], dZ[at], W_now, reached)
            W_now = W_now * decay.column_scale[at]
        torch.bmm(W_now, dS_now.mT, out=dcolumns[at])
        if T is not None:
            dZ[at][:, -C:] = T[at].mT @ dW[at][:, -C:]
        dZ_now = dZ[at] if decay.row_scale is None else dZ[at] * decay.row_scale[at]
        torch.bmm(dZ_now, states[at].mT, out=drows[at])
        decay.total_backward(at, states[at], dS_now)
        if decay.total is not None:
            dS_now *= decay.total[at]
        dS_now.baddbmm_(rows[at].mT, dZ_now)
    return drows, dcolumns
