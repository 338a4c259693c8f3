"""Sums over the states and over the channels of a tile by tensor cores, in place of exchanges between threads.

A tile `[8, 4, 4, 4]` has channel `4 q + i` and state `4 j + e` at `[q, i, j, e]`; thread `4 q + j` of a warp has q and j. What a thread has
added up of its own numbers is an operand of a product m16n8k8 as it lies in registers: a left one where its q is a row and its j are summed
over, a right one where its q is a column. A product with zeros and a one in each row moves or adds numbers: 16 columns are four tiles of
such numbers, and a token has two columns of an accumulator, so that QUAD tokens fill it. Operands are cut to the ten bits of TF32 (by 3e-4
on average), sums are float32.

In a product zero times infinity is NaN. So a row of sums over states is one channel, and each two of a thread's channels have their own
accumulator: what is not finite reaches the numbers of its channel at the other tokens of QUAD, and no other channel. Sums over channels
become NaN at all tokens of QUAD.
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
def columns_of(first):
    """What puts sums of tokens `first` and `first + 1` in columns 2 t and 2 t + 1, [k, n]."""
    L: gl.constexpr = gl.DotOperandLayout(1, sums(), 1)
    k, n = gl.arange(0, 16, layout=gl.SliceLayout(1, L)), gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    return gl.where(n[None, :] == (k // 4 + 2 * first)[:, None], 1.0, 0.0)


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
def no_states():
    """Accumulators of sums over states: for channels 0 and 1 of each thread's four, and for channels 2 and 3."""
    return no_sums(), no_sums()


@gluon.jit
def add_over_states(total, x, columns):
    """Adds the sums over states of four tiles, given as the `own_states` of each, in the columns that `columns` tells."""
    every = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    every = gl.reshape(every, [8, 2, 2, 4, 4])  # [q, i / 2, i % 2, j, tile]
    lower, upper = gl.split(gl.reshape(every.permute([2, 0, 4, 3, 1]), [16, 16, 2]))
    L: gl.constexpr = gl.DotOperandLayout(0, sums(), 1)
    return (
        mma_v2(gl.convert_layout(lower, L), columns, total[0], input_precision="tf32"),
        mma_v2(gl.convert_layout(upper, L), columns, total[1], input_precision="tf32"),
    )


@gluon.jit
def quad_columns():
    """Of the tiles of QUAD tokens, [k, n]: columns 2 t and 2 t + 1 are the same."""
    L: gl.constexpr = gl.DotOperandLayout(1, sums(), 1)
    k, n = gl.arange(0, 16, layout=gl.SliceLayout(1, L)), gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    return gl.where(n[None, :] // 2 == (k // 4)[:, None], 1.0, 0.0)


@gluon.jit
def sums_of_states(total):
    """The sums of even columns and those of odd ones, each [t, c] of QUAD tokens."""
    lower, odd_lower = gl.split(gl.reshape(total[0], [2, 8, 4, 2]))
    upper, odd_upper = gl.split(gl.reshape(total[1], [2, 8, 4, 2]))
    return by_token(lower, upper), by_token(odd_lower, odd_upper)


@gluon.jit
def by_token(lower, upper):
    apart = gl.join(lower, upper)  # [i % 2, q, t, i / 2]
    return gl.convert_layout(gl.reshape(apart.permute([2, 1, 3, 0]), [4, 32]), quad_numbers())


@gluon.jit
def over_threads(x):
    """What threads add up over their own channels of a tile, put together, [s, q]."""
    mine = gl.reshape(gl.sum(x, 1), [8, 4, 2, 2])  # [q, j, hi, lo]
    right = gl.reshape(mine.permute([2, 3, 1, 0]), [16, 8])
    right = gl.convert_layout(right, gl.DotOperandLayout(1, sums(), 1))
    return mma_v2(state_chooser(), right, no_sums(), input_precision="tf32")


@gluon.jit
def add_over_channels(total, first, second, columns):
    """Adds the sums of two tokens' `over_threads` to those of QUAD tokens."""
    both = gl.reshape(gl.join(first, second), [2, 8, 4, 2, 2])  # [s / 8, s % 8, q / 2, q % 2, t]
    left = gl.reshape(both.permute([3, 1, 4, 0, 2]), [16, 16])
    left = gl.convert_layout(left, gl.DotOperandLayout(0, sums(), 1))
    return mma_v2(left, columns, total, input_precision="tf32")


@gluon.jit
def sums_of_channels(total):
    """The sums over channels of QUAD tokens, [t, s]."""
    both = gl.sum(gl.reshape(total, [2, 8, 4, 2]), 0)  # [s % 8, t, s / 8]
    return gl.reshape(both.permute([1, 2, 0]), [4, 16])
