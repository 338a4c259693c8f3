"""Tile functions of Hopper kernels in Gluon: rings of barriers, products of a warpgroup, copies by TMA. Only Triton 3.6 has this API.

A kernel is a set of roles (`gl.warp_specialize`): a producer warp fills rings of shared tiles by TMA, warpgroups multiply them. Tile `n` of a ring
of `s` stages lies in stage `n % s`; the `full` barrier of a stage says that its copy has landed, `empty` that all its readers are done.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["fence_async_shared", "gl", "gluon", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]

# Accumulators of a warpgroup with 64 and 128 columns, and left operands in registers, which are laid out as accumulators are.
ACC_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC_128 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LEFT_64 = gl.constexpr(gl.DotOperandLayout(0, ACC_64.value, 2))
LEFT_128 = gl.constexpr(gl.DotOperandLayout(0, ACC_128.value, 2))
# Vectors over the rows and over the columns of an accumulator.
ROWS_64 = gl.constexpr(gl.SliceLayout(1, ACC_64.value))
COLUMNS_64 = gl.constexpr(gl.SliceLayout(0, ACC_64.value))
ROWS_128 = gl.constexpr(gl.SliceLayout(1, ACC_128.value))
COLUMNS_128 = gl.constexpr(gl.SliceLayout(0, ACC_128.value))
# Shared tiles of 16-bit numbers, 64 channels or more wide, as `wgmma` and TMA read them; vectors of float32.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN_TILE = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def exp2(x):
    """2^x by the hardware's `ex2` (relative error 2^-22; results below 2^-126 are 0)."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque_zero():
    """A 0 that the compiler does not know: added to an index it keeps masks from being hoisted out of a loop into registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barriers(stages: gl.constexpr, arrivals: gl.constexpr):
    """One barrier a stage of a ring, each complete after so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(stages):
        mbarrier.init(bars.index(n), count=arrivals)
    return bars


@gluon.jit
def wait_full(full, n):
    """Waits until tile `n` of a ring has landed."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(empty, n):
    """Waits until the stage of tile `n` is free."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def arrive(bars, n, COUNT: gl.constexpr = 1):
    """An arrival at the barrier of tile `n`; a warpgroup arrives once, after all its threads."""
    mbarrier.arrive(bars.index(n % bars.shape[0]), count=COUNT)


@gluon.jit
def expect(full, n, BYTES: gl.constexpr):
    """The barrier of tile `n`, which BYTES will complete."""
    bar = full.index(n % full.shape[0])
    mbarrier.expect(bar, BYTES)
    return bar


@gluon.jit
def product(a, b, ACC: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """a b, [ROWS, COLUMNS], begun: `warpgroup_mma_wait` ends it."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def vector(vectors, index, LAYOUT: gl.constexpr):
    """Row `index` of shared vectors `[n, length]` of float32."""
    return vectors.index(index).load(LAYOUT)


@gluon.jit
def plus(x, y):
    return x + y
