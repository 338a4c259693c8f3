"""Parameters of the norm kernels: structs of tensors, and the load of `h` that they share.

Tiles: `r` rows (a row is a group of channels), `c` channels of a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class NormInputs(NamedTuple):
    """The tensors of a call: x, residual and gate as `Rows`, and the sizes that these share (`Layout.sizes`)."""

    x: Any
    residual: Any
    weight: Any  # [GROUPS WIDTH], as bias
    bias: Any
    gate: Any
    sizes: Any


class NormResults(NamedTuple):
    """Contiguous `y` and `h`, and of each row the numbers that the backward reads."""

    y: Any
    h: Any
    scale: Any
    mean: Any


class NormSaved(NamedTuple):
    """What the backward reads: h, gate, and the gradients `dy` and `dh` (of `h` itself) as `Rows`."""

    h: Any
    weight: Any
    bias: Any
    gate: Any
    dy: Any
    dh: Any
    scale: Any
    mean: Any
    sizes: Any


class NormGradients(NamedTuple):
    """Contiguous gradients; those of weight and bias are partial sums `[programs, GROUPS WIDTH]`."""

    h: Any
    gate: Any
    weight: Any
    bias: Any


class NormNumbers(NamedTuple):
    count: Any  # rows
    eps: Any


class NormSpec(NamedTuple):
    WIDTH: int  # channels of a row
    GROUPS: int
    DIVISOR: int
    CENTER: bool
    ACTIVATION: str
    OUTER: int  # see Layout
    ROWS: int  # r
    BLOCK: int  # c
    STAGES: int = 1  # backward: tiles on their way at once


@triton.jit
def load_sum(inputs, h_ptr, x_at, residual_at, mask, EVICT: tl.constexpr):
    """`x + residual` at offsets `x_at` and `residual_at`, rounded as it is kept.

    EVICT: what the caches throw away first. Lines that are read and kept for long ("evict_last") leave room where others are
    written: 3 to 5 % of a forward on an H200.
    """
    h = tl.load(inputs.x.data + x_at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)  # [r, c]
    if inputs.residual is not None:
        residual = tl.load(inputs.residual.data + residual_at, mask=mask, other=0.0, eviction_policy=EVICT)  # [r, c]
        h += residual.to(tl.float32)
        if h_ptr is not None:
            h = h.to(h_ptr.dtype.element_ty).to(tl.float32)
    return h
