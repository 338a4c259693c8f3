"""Layouts of the recurrence's tiles in registers and in shared memory.

A warpgroup holds 64 rows of an accumulator; rows and columns are vectors over those of accumulators with 32, 64 or `width` columns.
"""

from __future__ import annotations

from flashmix.gpu.hopper import accumulator, gl, gluon

ACC_32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
ACC_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT_64 = gl.constexpr(
    gl.DotOperandLayout(0, ACC_64.value, 2)
)  # left operands in registers, of products with so many columns
ROWS_32 = gl.constexpr(gl.SliceLayout(1, ACC_32.value))
COLUMNS_32 = gl.constexpr(gl.SliceLayout(0, ACC_32.value))
ROWS_64 = gl.constexpr(gl.SliceLayout(1, ACC_64.value))
COLUMNS_64 = gl.constexpr(gl.SliceLayout(0, ACC_64.value))
# Shared tiles of 16-bit numbers, 64 channels or more wide, as `wgmma` and TMA read them; vectors of float32.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE_32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # of float32, as TMA copies it
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def sums(width):
    """The layout of `[64, width]` sums of products, by products of at most 128 columns: ptxas refuses one of 256 with `maxnreg` 128."""
    return accumulator(min(width, 128))


@gluon.constexpr_function
def rows(width):
    return gl.SliceLayout(1, sums(width))


@gluon.constexpr_function
def columns(width):
    return gl.SliceLayout(0, sums(width))
