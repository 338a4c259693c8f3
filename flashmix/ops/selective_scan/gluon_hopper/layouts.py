"""Where the numbers of the selective scan's forward on Hopper lie, in registers and in shared memory.

A program is one warp, with 32 channels of one sequence. A thread has two channels and eight of their 16 states: a number of a channel
serves eight states, one of B or C two channels, and sums over states or channels leave a thread with few numbers. What is made of single
numbers (step sizes, gates) is made for TOKENS tokens at once, eight numbers a thread, and comes to the states through shared memory.
Tiles: `t` tokens, `c` channels, `s` states.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon

STATES, CHANNELS, TOKENS = gl.constexpr(16), gl.constexpr(32), gl.constexpr(8)


@gluon.constexpr_function
def tile():
    """Of `[c, s]`."""
    return gl.BlockedLayout([2, 8], [16, 2], [1, 1], [1, 0])


@gluon.constexpr_function
def tokens():
    """Of `[t, c]`, for numbers of all channels and tokens: 16 bytes a thread of 16-bit numbers in memory."""
    return gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])


@gluon.constexpr_function
def weights():
    """Of `[t, s]`, B or C."""
    return gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])


@gluon.constexpr_function
def rows():
    """In shared memory, row by row."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
