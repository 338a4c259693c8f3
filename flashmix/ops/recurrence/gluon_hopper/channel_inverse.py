"""`transform` of a per-channel decay: T = (I - A_ab)^-1 (4.2) of every chunk, one warp each, as in `scores.py`."""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, stores_done
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE
from flashmix.ops.recurrence.gluon_hopper.scores import BLOCK_COLUMNS, BLOCK_ROWS, append, store_inverse, store_tile


@gluon.jit
def load_blocks(A):
    """The ten lower blocks of a tile [64, 64] of float16, and the first step of the inverses of the diagonal ones, transposed."""
    row = gl.arange(0, 16, BLOCK_ROWS)[:, None]
    column = gl.arange(0, 16, BLOCK_COLUMNS)[None, :]
    blocks = ()
    first_t = ()
    for i in gl.static_range(4):
        for j in gl.static_range(i + 1):
            blocks = append(blocks, gl.load(A + (i * 16 + row) * 64 + (j * 16 + column)).to(gl.float32))  # [16, 16]
        turned = gl.load(A + (i * 16 + column) * 64 + (i * 16 + row)).to(gl.float32)  # [16, 16]
        unit = gl.where(row == column, 1.0, 0.0)
        first_t = append(first_t, gl.where((row // 2 == column // 2) & (row < column), turned, unit))
    return blocks, first_t


@with_sound_ptxas
@gluon.jit
def channel_inverse_kernel(before, A_d, S: gl.constexpr):
    """Writes T in place of A_ab, the second tile of `[chunks, HV, 2, 64, 64]`, or with four TILES the third; of these `before` has the
    same bytes as float16.
    """
    index = gl.program_id(0)
    PLACE: gl.constexpr = S.TILES // 2
    A = load_blocks(before + index.to(gl.int64) * (S.TILES * 4096) + PLACE * 4096)  # [16, 16] each
    out = gl.allocate_shared_memory(A_d.dtype, [64, 64], TILE)
    store_inverse(A, out, False)
    store_tile(A_d, index * (S.TILES * 64) + PLACE * 64, out)
    stores_done(0)
