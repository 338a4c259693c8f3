"""Sums over the states and over the channels of a tile by tensor cores, in place of exchanges between threads.

A tile `[8, 4, 4, 4]` has channel `4 q + i` and state `4 j + e` at `[q, i, j, e]`; thread `4 q + j` of a warp has q and j. What a thread has
added up of its own numbers is an operand of a product m16n8k8 as it lies in registers: a left one where its q is a row and its j are summed
over, a right one where its q is a column. A product with zeros and a one in each row moves or adds numbers; two tokens are one product of
16 columns, and the sums for token t of QUAD lie in columns 2 t and 2 t + 1, so that four tokens fill an accumulator. Operands are cut to
the ten bits of TF32 (by 3e-4 on average), sums are float32. What is infinite makes other numbers of its token's neighbours NaN (zero times
infinity).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, mma_v2

QUAD = gl.constexpr(4)  # tokens whose sums fill an accumulator


@gluon.constexpr_function
def tile():
    """Of `[q, i, j, e]`."""
    return gl.BlockedLayout([1, 4, 1, 4], [8, 1, 4, 1], [1, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def sums():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def quad_numbers():
    """Of `[t, c]`, QUAD tokens of 32 channels: what `sums_of_states` returns, a token and four channels a thread."""
    return gl.BlockedLayout([1, 4], [4, 8], [1, 1], [0, 1])


@gluon.jit
def no_sums():
    return gl.full([16, 8], 0.0, gl.float32, layout=sums())


@gluon.jit
def columns_of(FIRST: gl.constexpr):
    """What puts sums of tokens FIRST and FIRST + 1 in columns 2 t and 2 t + 1, [k, n]."""
    L: gl.constexpr = gl.DotOperandLayout(1, sums(), 1)
    k, n = gl.arange(0, 16, layout=gl.SliceLayout(1, L)), gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    return gl.where(n[None, :] == (k // 4 + 2 * FIRST)[:, None], 1.0, 0.0)


@gluon.jit
def state_chooser():
    """The matrix `[s, k]` that puts what threads have as `[hi, lo, j]`, `k = 8 hi + 4 lo + j`, in row `s = 4 j + 2 hi + lo`."""
    L: gl.constexpr = gl.DotOperandLayout(0, sums(), 1)
    s, k = gl.arange(0, 16, layout=gl.SliceLayout(1, L)), gl.arange(0, 16, layout=gl.SliceLayout(0, L))
    return gl.where(s[:, None] == (4 * (k % 4) + 2 * (k // 8) + (k // 4) % 2)[None, :], 1.0, 0.0)


@gluon.jit
def own_states(x):
    """What threads add up over their own states of a tile, [q, i, j]."""
    return gl.sum(x, 3)


@gluon.jit
def add_over_states(total, first, second, FIRST: gl.constexpr):
    """Adds the sums of two tokens' `own_states` to those of QUAD tokens."""
    both = gl.reshape(gl.join(first, second), [8, 2, 2, 4, 2])  # [q, i / 2, i % 2, j, t]
    left = gl.reshape(both.permute([2, 0, 4, 1, 3]), [16, 16])
    left = gl.convert_layout(left, gl.DotOperandLayout(0, sums(), 1))
    return mma_v2(left, columns_of(FIRST), total, input_precision="tf32")


@gluon.jit
def sums_of_states(total):
    """The sums over states of QUAD tokens, [t, c]."""
    apart = gl.reshape(total, [2, 8, 4, 2])  # [i % 2, q, t, i / 2]
    return gl.convert_layout(gl.reshape(apart.permute([2, 1, 3, 0]), [4, 32]), quad_numbers())


@gluon.jit
def over_threads(x):
    """What threads add up over their own channels of a tile, put together, [s, q]."""
    mine = gl.reshape(gl.sum(x, 1), [8, 4, 2, 2])  # [q, j, hi, lo]
    right = gl.reshape(mine.permute([2, 3, 1, 0]), [16, 8])
    right = gl.convert_layout(right, gl.DotOperandLayout(1, sums(), 1))
    return mma_v2(state_chooser(), right, no_sums(), input_precision="tf32")


@gluon.jit
def add_over_channels(total, first, second, FIRST: gl.constexpr):
    """Adds the sums of two tokens' `over_threads` to those of QUAD tokens."""
    both = gl.reshape(gl.join(first, second), [2, 8, 4, 2, 2])  # [s / 8, s % 8, q / 2, q % 2, t]
    left = gl.reshape(both.permute([3, 1, 4, 0, 2]), [16, 16])
    left = gl.convert_layout(left, gl.DotOperandLayout(0, sums(), 1))
    return mma_v2(left, columns_of(FIRST), total, input_precision="tf32")


@gluon.jit
def sums_of_channels(total):
    """The sums over channels of QUAD tokens, [t, s]."""
    both = gl.sum(gl.reshape(total, [2, 8, 4, 2]), 0)  # [s % 8, t, s / 8]
    return gl.reshape(both.permute([1, 2, 0]), [4, 16])
