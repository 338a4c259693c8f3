"""The warps that copy in the output's backward of DPLR (`dplr_output.py`): a producer, and a finisher for gradients.

Every tile of an item has a slot of 16 KiB, which is filled anew when its readers have left it. There is no room for two of them: V and nu
share a slot in turn, and so do the sums G and those of the token before.
"""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, mbarrier, reinterpret, stores_done
from flashmix.ops.recurrence.gluon_hopper.channel_copies import (
    READERS,
    channel_item,
    channel_item_count,
    fill_slot,
    leave_slot,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, TILE_32
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens, store_tokens

# Slots of 16 KiB: tokens of 128 channels; states in two halves of K, one a consumer, and sums of decays likewise.
SLOTS = gl.constexpr(13)
W = gl.constexpr(0)  # V, then nu: uses 2 i and 2 i + 1 of item i
DO = gl.constexpr(1)
DR = gl.constexpr(2)
DSTATE = gl.constexpr(3)
STATE = gl.constexpr(5)
Q = gl.constexpr(7)
A = gl.constexpr(8)
K = gl.constexpr(9)
B = gl.constexpr(10)
G = gl.constexpr(11)  # G, then G of the token before: likewise


@gluon.jit
def fetch_columns(columns_d, v_d, x, numbers, i, tiles, bars, S: gl.constexpr):
    """Copies what the next item is begun with, which this one leaves first: k, b and V."""
    k_d, b_d = columns_d
    _, head, at = channel_item(x, numbers, i, S)
    slots = tiles.slots
    fetch_tokens(k_d, at.span, at.t, head // (S.HV // S.HEADS[2]), 0, fill_slot(bars.slots, K, i), slots.index(K), S)
    fetch_tokens(b_d, at.span, at.t, head // (S.HV // S.HEADS[3]), 0, fill_slot(bars.slots, B, i), slots.index(B), S)
    fetch_tokens(v_d, at.span, at.t, head, 0, fill_slot(bars.slots, W, 2 * i), slots.index(W), S)


@gluon.jit
def dplr_producer(read, x, numbers, tiles, bars, S: gl.constexpr):
    """Copies the tiles of each item to their slots as these are left, in the order in which they are needed."""
    rows_d, columns_d, sums_d, values_d, states_d = read
    q_d, a_d = rows_d
    G_d, before_d = sums_d
    v_d, nu_d, do_d, dr_d = values_d
    s_d, ds_d = states_d
    slots = tiles.slots
    sums = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
    count = channel_item_count(numbers, S)
    fetch_columns(columns_d, v_d, x, numbers, 0, tiles, bars, S)
    for i in range(count):
        item, head, at = channel_item(x, numbers, i, S)
        for w in gl.static_range(2):
            fetch_tile(ds_d, [item, 0, w * 64], fill_slot(bars.slots, DSTATE + w, i), slots.index(DSTATE + w))
        fetch_tokens(do_d, at.span, at.t, head, 0, fill_slot(bars.slots, DO, i), slots.index(DO), S)
        for w in gl.static_range(2):
            bar = fill_slot(bars.slots, G + w, 2 * i)
            fetch_tokens(G_d, at.span, at.t, head, w * 64, bar, sums.index(G + w), S)
        fetch_tokens(dr_d, at.span, at.t, head, 0, fill_slot(bars.slots, DR, i), slots.index(DR), S)
        fetch_tokens(q_d, at.span, at.t, head, 0, fill_slot(bars.slots, Q, i), slots.index(Q), S)
        fetch_tokens(a_d, at.span, at.t, head, 0, fill_slot(bars.slots, A, i), slots.index(A), S)
        for w in gl.static_range(2):
            fetch_tile(s_d, [item, 0, w * 64], fill_slot(bars.slots, STATE + w, i), slots.index(STATE + w))
        fetch_tokens(nu_d, at.span, at.t, head, 0, fill_slot(bars.slots, W, 2 * i + 1), slots.index(W), S)
        if i + 1 < count:
            fetch_columns(columns_d, v_d, x, numbers, i + 1, tiles, bars, S)
        for w in gl.static_range(2):
            bar = fill_slot(bars.slots, G + w, 2 * i + 1)
            fetch_tokens(before_d, at.span, at.t, head, w * 64, bar, sums.index(G + w), S)


@gluon.jit
def dplr_finisher(gradients_d, x, numbers, tiles, bars, S: gl.constexpr):
    """The gradients of each item on their way to memory, after which the slots are left: dk, then db, dq with da, and dg."""
    dq_d, da_d, dk_d, db_d, dg_d = gradients_d
    slots = tiles.slots
    for i in range(channel_item_count(numbers, S)):
        _, head, at = channel_item(x, numbers, i, S)
        mbarrier.wait(bars.gradients.index(0), i & 1)
        store_tokens(dk_d, at.span, at.t, head, 0, slots.index(K), S)
        stores_done(0)
        leave_slot(bars.slots, K, READERS)
        mbarrier.wait(bars.gradients.index(1), i & 1)
        store_tokens(db_d, at.span, at.t, head, 0, slots.index(B), S)
        stores_done(0)
        leave_slot(bars.slots, B, READERS)
        mbarrier.wait(bars.gradients.index(2), i & 1)
        store_tokens(dq_d, at.span, at.t, head, 0, slots.index(Q), S)
        store_tokens(da_d, at.span, at.t, head, 0, slots.index(A), S)
        stores_done(0)
        leave_slot(bars.slots, Q, READERS)
        leave_slot(bars.slots, A, READERS)
        mbarrier.wait(bars.gradients.index(3), i & 1)
        for w in gl.static_range(2):
            if dg_d.dtype == gl.float32:
                sums = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
                store_tokens(dg_d, at.span, at.t, head, w * 64, sums.index(STATE + w), S)
            else:
                narrow = reinterpret(slots, dg_d.dtype, [2 * SLOTS, 64, 64], TILE)
                store_tokens(dg_d, at.span, at.t, head, w * 64, narrow.index(2 * (STATE + w)), S)
        stores_done(0)
        for w in gl.static_range(2):
            leave_slot(bars.slots, STATE + w, READERS)
