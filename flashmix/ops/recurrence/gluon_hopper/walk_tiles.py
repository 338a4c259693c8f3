"""Shared memory and barriers of the backward of the output in the walk of the states (`walk.py`)."""

from __future__ import annotations

from flashmix.gpu.hopper import allocate_barriers, gl, gluon
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.output_sums import SUM_STAGE, VSTAGES
from flashmix.ops.recurrence.gluon_hopper.state_parts import ring
from flashmix.ops.recurrence.gluon_hopper.structs import WalkBarriers, WalkTiles


@gluon.jit
def walk_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Both; without corrections there are no V, T, dR and N_a of their own, and where nu is GIVEN no V and T."""
    MADE: gl.constexpr = S.CORRECTED and not S.GIVEN  # nu
    nu = gl.allocate_shared_memory(DT, [S.NUS, 64, S.BV], TILE)
    tokens = nu
    T = nu
    dR = nu
    if MADE:
        tokens = gl.allocate_shared_memory(DT, [2, 64, 64], TILE)
        T = gl.allocate_shared_memory(DT, [1, 64, 64], TILE)
    if S.CORRECTED:
        dR = gl.allocate_shared_memory(DT, [1, 64, S.BV], TILE)
    tiles = WalkTiles(
        q=gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE),
        k=gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE),
        tokens=tokens,
        T=T,
        dO=gl.allocate_shared_memory(DT, [S.STAGES, 64, S.BV], TILE),
        dR=dR,
        dstate=gl.allocate_shared_memory(DT, [1, S.BV, S.BK], TILE),
        state=gl.allocate_shared_memory(DT, [1, S.BV, S.BK], TILE),
        nu=nu,
        pairs=gl.allocate_shared_memory(DT, [2 if S.CORRECTED else 1, 64, 64], TILE),
        vectors=gl.allocate_shared_memory(gl.float32, [4 * VSTAGES, 64], VECTOR),
        sums=gl.allocate_shared_memory(gl.float32, [2 * SUM_STAGE, 64], VECTOR),
    )
    TRACE: gl.constexpr = 1 if S.DECAY else 0  # `pairs` reads S and dS' too
    v = ring(VSTAGES, 1, 3)
    bars = WalkBarriers(
        keys=ring(S.KEYS, 1, 1),
        v=v,
        tokens=ring(1, 1, 1) if MADE else v,
        T=ring(1, 1, 1) if MADE else v,
        dO=ring(S.STAGES, 1, 2),
        dR=ring(1, 1, 2) if S.CORRECTED else v,
        dstate=ring(1, 1, 1 + TRACE),
        state=ring(1, 1, 1 + TRACE),
        nu=ring(S.NUS, 1, 2),
        pairs_q=ring(1, 1, 1),
        pairs_a=ring(1, 1, 1) if S.CORRECTED else v,
        sums=ring(2, 2, 1),
        gradients=allocate_barriers(S.KEYS, 1),
    )
    return tiles, bars
