"""Hopper's own instructions for kernels in Gluon: layouts, barriers, named barriers, TMA copies, the unit for 2^x.

Gluon is Triton's language below its tiles and calls itself experimental; this file is the only one that knows where in Triton it lies, and
under which name in which release. It holds for the releases that `device.hopper_refuses` lets through: import it from an implementation,
never from what `supports` reads.

A ring is a row of buffers in shared memory with two barriers a buffer: `full` (its bytes have come) and `empty` (every reader has left it).
Use `i` of a ring takes buffer `i % stages`, and the parity of a wait is that of `i // stages`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashmix.gpu.tma import renamed

__all__ = [
    "accumulator", "add_to_global", "allocate_barriers", "arrive", "arrive_at_group", "await_copies", "await_count", "await_kernels",
    "await_readers", "begin_count", "begin_next", "close_copies", "coalesced", "copy_later", "copy_to_global", "copy_to_shared",
    "count_up", "counted", "ex2", "expect", "expect_bytes", "fence_async_shared", "gl", "gluon", "halves", "in_float32", "joined",
    "leave", "mma_v2", "opaque_zero", "operand", "overlap", "pin", "plain", "plus", "product", "products_done", "reinterpret", "release",
    "retire", "row_pieces", "shared_rows", "signal", "stores_done", "sync_group", "take_turn", "thread_barrier", "wait_empty",
    "wait_full", "warpgroup_mma",
]  # fmt: skip

copy_to_shared = renamed(tma, "async_copy_global_to_shared", "async_load")  # 3.8
copy_to_global = renamed(tma, "async_copy_shared_to_global", "async_store")  # 3.8
thread_barrier = renamed(gl, "thread_barrier", "barrier")  # 3.7
copy_later = async_copy.async_copy_global_to_shared  # cp.async: numbers outside of the mask become zeros
close_copies = async_copy.commit_group  # those since the last time are a group
await_copies = async_copy.wait_group  # all groups but so many
stores_done = tma.store_wait
products_done = warpgroup_mma_wait
expect = mbarrier.expect


@gluon.constexpr_function
def accumulator(columns, rows=64):
    """The layout of `[rows, columns]` float32 sums of products, 64 rows a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def shared_rows(columns):
    """The layout of `[64, columns]` sums of two warpgroups, half the columns each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, columns // 2, 16])


@gluon.constexpr_function
def operand(columns, rows=64):
    """The layout of a left operand in registers, 16 bits an element, whose product is `[rows, columns]`."""
    return gl.DotOperandLayout(0, accumulator(columns, rows), k_width=2)


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
def coalesced(columns, rows=64):
    """The layout of `[rows, columns]` 16-bit numbers, 16 rows a warp, that lie in memory row by row: 16 bytes a thread."""
    threads = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [rows // 16, 1], [1, 0])


@gluon.constexpr_function
def plain():
    """The layout in shared memory of a row of numbers."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@builtin
def add_to_global(descriptor, coordinates, tile, _semantic=None):
    """TMA's addition of a tile in shared memory to a tensor, as `copy_to_global` stores one."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The bytes of a tile in shared memory as another dtype, shape and layout; Triton 3.9 renamed the tile's own method."""
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(tile, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))


@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers, each passed by `arrivals` arrivals.

    Triton gives their memory to other tiles after the last use that it sees, though a card that changes to another process in the middle
    of a kernel rewrites them there. So a barrier is used by a role of `warp_specialize`, or ended by `retire` at the kernel's end.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def retire(barriers):
    """Ends barriers, as the last thing that a kernel does."""
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(barriers.index(i))


@gluon.jit
def wait_full(full, i, pred=True):
    """Waits for the bytes of use `i` of a ring."""
    stages: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(i % stages), (i // stages) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, i):
    """Waits until every reader has left the buffer of use `i` of a ring; the first use of a buffer need not."""
    stages: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(i % stages), ((i // stages) & 1) ^ 1)


@gluon.jit
def release(empty, i, pred=True, count: gl.constexpr = 1):
    """A reader leaves the buffer of use `i`; one reader may count as several."""
    mbarrier.arrive(empty.index(i % empty.shape[0]), count=count, pred=pred)


@gluon.jit
def signal(full, i):
    """A writer has filled the buffer of use `i` without TMA."""
    mbarrier.arrive(full.index(i % full.shape[0]), count=1)


@gluon.jit
def expect_bytes(full, i, count: gl.constexpr):
    """The barrier of use `i`, which `count` bytes by TMA will complete."""
    bar = full.index(i % full.shape[0])
    mbarrier.expect(bar, count)
    return bar


@gluon.jit
def arrive(barrier):
    """Counts as one arrival at a barrier, after what this warp wrote to shared memory."""
    mbarrier.arrive(barrier, count=1)


@gluon.constexpr_function
def _named_barrier(instruction, threads):
    return f"bar.{instruction} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def sync_group(number, threads: gl.constexpr):
    """Waits at named barrier `number`, of 0 to 15, for `threads` threads, this one included."""
    text: gl.constexpr = _named_barrier("sync", threads)
    gl.inline_asm_elementwise(text, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at_group(number, threads: gl.constexpr):
    """Counts as one of the `threads` at named barrier `number`, without waiting."""
    text: gl.constexpr = _named_barrier("arrive", threads)
    gl.inline_asm_elementwise(text, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(number: gl.constexpr, i, threads: gl.constexpr, WAIT: gl.constexpr, COUNT: gl.constexpr = 2):
    """Use `i` at COUNT named barriers from `number` on, which take turns: waits there, or counts as one of the `threads`.

    By a branch for each, so that no register holds the barrier's number, as it does in `leave`.
    """
    for turn in gl.static_range(COUNT):
        if i % COUNT == turn:
            if WAIT:
                sync_group(number + turn, threads)
            else:
                arrive_at_group(number + turn, threads)


@gluon.jit
def leave(number: gl.constexpr, i, threads: gl.constexpr, STAGES: gl.constexpr = 2):
    """A reader leaves the buffer of use `i` of a ring: `release` by a named barrier, at which none of its warps waits for another.

    The rings' barriers have the numbers from `number` on.
    """
    arrive_at_group(number + i % STAGES, threads)


@gluon.jit
def await_readers(number: gl.constexpr, i, threads: gl.constexpr, STAGES: gl.constexpr = 2):
    """Until all readers have left, by `leave`, the buffer that use `i` fills. `threads`: of the readers and of the waiting warp."""
    if i >= STAGES:
        take_turn(number, i, threads, True, STAGES)


@gluon.jit
def ex2(x):
    """2^x to 2 units in the last place; denormal results are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pin(x):
    """x, computed before whatever waits or branches below: ptxas would otherwise hoist a wait for products above it."""
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth  # numbers a register
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@gluon.jit
def word_of(a, b):
    """Two numbers of 16 bits as a word of 32, the first in its low half."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def halves_of(word):
    """Both numbers of a `word_of`, as integers."""
    low: gl.constexpr = "{ .reg .b16 t; mov.b32 {$0, t}, $1; }"
    high: gl.constexpr = "{ .reg .b16 t; mov.b32 {t, $0}, $1; }"
    a = gl.inline_asm_elementwise(low, "=h,r", [word], dtype=gl.int16, is_pure=True, pack=1)
    b = gl.inline_asm_elementwise(high, "=h,r", [word], dtype=gl.int16, is_pure=True, pack=1)
    return a, b


@gluon.jit
def in_float32(x):
    """x of two axes in float32. Of bfloat16 pairs by words: the compiler takes a register of two apart before it widens each."""
    if x.dtype == gl.bfloat16:
        a, b = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
        word = word_of(a, b)
        low, high = (word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True)
        return gl.convert_layout(gl.join(low, high).reshape(x.shape), x.type.layout, assert_trivial=True)
    else:
        return x.to(gl.float32)


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


@gluon.jit
def begin_count(counter, pred):
    """Begins to add 1 to a counter in memory, from a lone warp, if `pred`; `counted` waits for what it was, 0 without."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 $0, 0; mov.u32 t, %laneid; setp.lt.u32 p, t, $2; @p atom.global.add.u32 $0, [$1], 1; }",
        "=&r,l,r",
        [counter.to(gl.int64), pred.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def counted(begun):
    """What the counter of `begin_count` was, to all of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [begun], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_next():
    """Lets the programs of the next kernel, if it is launched with `launch_pdl`, begin as soon as all of this one have."""
    text: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernels():
    """Waits until the kernels before this one have ended, and sees all that they have written.

    Nothing that they read or write may be touched earlier, but what a kernel wrote that the one before this has waited for.
    """
    text: gl.constexpr = "griddepcontrol.wait; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def overlap():
    """`begin_next`, then `await_kernels`. What follows, in all roles that begin later, sees all that the kernels before have written."""
    begin_next()
    await_kernels()


@gluon.jit
def opaque_zero():
    """A 0 that the compiler does not know: added to an index it keeps masks from being hoisted out of a loop into registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product(a, b, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """a b, [ROWS, COLUMNS], begun: `products_done` ends it."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def plus(x, y):
    return x + y


@gluon.jit
def halves(x):
    """The first and the second half of the columns of a tile in the layout `accumulator`; no number changes its register."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    L: gl.constexpr = accumulator(HALF, ROWS)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def joined(a, b):
    """The tile whose `halves` are a and b."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = 2 * a.shape[1]
    x = gl.join(a, b).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(x, accumulator(COLUMNS, ROWS), assert_trivial=True)
