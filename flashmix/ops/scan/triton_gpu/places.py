"""Where the tokens of a group lie, as tuples that the loop over groups carries: a block's arguments.

For each load and store whose place is computed Triton's pass `TritonGPUCoalesce` walks the whole kernel, which took 95 % of a kernel's
compilation; it does not for a place that is an argument of a block. Hence also `loaded_once`, a loop of at most one turn whose places move
for nothing. LLVM makes one register of all places of a tensor.

Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append


@triton.jit
def places(tensor, at, S: tl.constexpr):
    """Of the tokens [c] of a group, the first at `at`; none of a tensor that is absent."""
    GROUP: tl.constexpr = S.GROUP
    found = ()
    if tensor is not None:
        for i in tl.static_range(GROUP):
            found = append(found, tensor + at + i * S.WIDTH)
    return found


@triton.jit
def moved(ptrs, STEP: tl.constexpr):
    """Places so many numbers on."""
    COUNT: tl.constexpr = len(ptrs)
    found = ()
    for i in tl.static_range(COUNT):
        found = append(found, ptrs[i] + STEP)
    return found


@triton.jit
def loaded_once(ptrs, some, left, other, after=-1):
    """The tokens [c] there if there are `some`; `other` where they are not among those `left`, or up to `after`."""
    COUNT: tl.constexpr = len(ptrs)
    found = ()
    for i in tl.static_range(COUNT):
        found = append(found, tl.full(ptrs[i].shape, 0, ptrs[i].dtype.element_ty))
    for _ in range(some.to(tl.int32)):
        tokens = ()
        for i in tl.static_range(COUNT):
            tokens = append(tokens, tl.load(ptrs[i], mask=(i < left) & (i > after), other=other))  # [c]
        found, ptrs = tokens, moved(ptrs, 1)
    return found
