"""Tile functions of Hopper kernels in Gluon: rings of barriers, products of a warpgroup, copies by TMA. Only Triton 3.6 has this API.

A kernel is a set of roles (`gl.warp_specialize`): a producer warp fills rings of shared tiles by TMA, warpgroups multiply them. Tile `n`
of a ring of `s` stages lies in stage `n % s`; the `full` barrier of a stage says that its copy has landed, `empty` that all its readers are
done.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
def wait_full(full, n, pred=True):
    """Waits until tile `n` of a ring has landed, if `pred`."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1, pred=pred)


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


@gluon.constexpr_function
def accumulator(columns):
    """The layout of `[64, columns]` float32 sums of a warpgroup's products."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand(columns):
    """The layout of a left operand in registers, 16 bits an element, whose product has `columns`."""
    return gl.DotOperandLayout(0, accumulator(columns), k_width=2)


@gluon.constexpr_function
def row_pieces():
    """The layout of `[64, 4]` numbers: what each of the four threads that share a row of an `accumulator` has of it."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def coalesced(columns):
    """The layout of `[64, columns]` 16-bit numbers of four warps that lie in memory row by row: 16 bytes a thread."""
    threads = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@builtin
def add_to_global(descriptor, coordinates, tile, _semantic=None):
    """TMA's addition of a tile in shared memory to a tensor, as `copy_to_global` stores one."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.constexpr_function
def _named_barrier(instruction, number, threads):
    return f"bar.{instruction} {number}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def sync_group(number: gl.constexpr, threads: gl.constexpr):
    """Waits at named barrier `number` for `threads` threads, this one included."""
    text: gl.constexpr = _named_barrier("sync", number, threads)
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pin(x):
    """x, computed before whatever waits or branches below: ptxas would otherwise hoist a wait for products above it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def await_count(counter, count):
    """Waits until a counter in memory has come to `count` or past it, and sees what was written or added by TMA before."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; AGAIN: ld.acquire.gpu.global.b32 t, [$1]; setp.lt.s32 p, t, $2; @p bra AGAIN;"
        " fence.proxy.async; mov.u32 $0, t; }",
        "=r,l,r",
        [counter.to(gl.int64), count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _count_up(pending):
    return (
        f"{{ .reg .pred p; cp.async.bulk.wait_group {pending}; fence.proxy.async; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
        " @p red.release.gpu.global.add.s32 [$2], 1; mov.u32 $0, 0; }"
    )


@gluon.jit
def count_up(counter, pending: gl.constexpr):
    """Adds 1 to a counter in memory, from a lone warp, when all but the last `pending` stores by TMA have come to memory."""
    text: gl.constexpr = _count_up(pending)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(text, "=r,r,l", [lane, counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
