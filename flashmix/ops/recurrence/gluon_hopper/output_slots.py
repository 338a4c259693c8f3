"""The ring of tiles of a value head in the backward of `output`: dO, S, dR, dS', the states in parts of 64 channels of keys.

A consumer has a part. Every slot is released once by each consumer and once by the warpgroup for dA, or as often by the one consumer
that reads it. Letters of tiles: `C` = 64 tokens, `V` = BV channels of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, mbarrier
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens

DO = gl.constexpr(0)
STATE = gl.constexpr(1)  # and the parts after the first


@gluon.constexpr_function
def parts_of(BK):
    """Consumers, and parts of the keys: with 256 channels two for each (`wide_output.py`)."""
    return min(BK // 64, 2)


@gluon.constexpr_function
def dr_slot(BK):
    return 1 if BK == 256 else 1 + BK // 64


@gluon.constexpr_function
def dstate_slot(BK):
    return 2 + BK // 64


@gluon.constexpr_function
def slot_count(BK):
    """Slots of a value head."""
    return 2 + 2 * (BK // 64)


@gluon.jit
def place_of(slot, it, S: gl.constexpr):
    """Where value head `it` has this slot."""
    if S.STAGES == 1:
        return slot
    else:
        return (it % S.STAGES) * slot_count(S.BK) + slot


@gluon.jit
def await_slot(bars, slot, it, S: gl.constexpr):
    """Waits until a tile of value head `it` lies in its slot."""
    mbarrier.wait(bars.slots.full.index(place_of(slot, it, S)), (it // S.STAGES) & 1)


@gluon.jit
def leave_slot(bars, slot, it, COUNT: gl.constexpr, S: gl.constexpr):
    """A reader leaves a slot; it may count as several."""
    mbarrier.arrive(bars.slots.empty.index(place_of(slot, it, S)), count=COUNT)


@gluon.jit
def fill_slot(d, j: gl.constexpr, at, head, row, it, tiles, bars, S: gl.constexpr):
    """Copies tile `j` of value head `it` into its slot, when its readers have left it."""
    do_d, dr_d, s_d, ds_d = d
    DR: gl.constexpr = dr_slot(S.BK)
    DSTATE: gl.constexpr = dstate_slot(S.BK)
    place = place_of(j, it, S)
    mbarrier.wait(bars.slots.empty.index(place), ((it // S.STAGES) & 1) ^ 1)
    bar = bars.slots.full.index(place)
    mbarrier.expect(bar, 64 * S.BV * 2)
    slot = tiles.slots.index(place)
    if j == DO:
        fetch_tokens(do_d, at.span, at.t, head, 0, bar, slot, S)
    elif j == DR:
        fetch_tokens(dr_d, at.span, at.t, head, 0, bar, slot, S)
    elif j < DR:
        fetch_tile(s_d, [row, 0, (j - STATE) * 64], bar, slot)
    else:
        fetch_tile(ds_d, [row, 0, (j - DSTATE) * 64], bar, slot)
