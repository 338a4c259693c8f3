"""The warps that copy in the output's backward of a per-channel decay (`channel_output.py`): a producer, and a finisher for gradients.

Every tile of an item has a slot of 16 KiB, which is filled anew when its readers have left it.
"""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, mbarrier, reinterpret, signal, stores_done, wait_full
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, TILE_32
from flashmix.ops.recurrence.gluon_hopper.output_sums import LANES_2
from flashmix.ops.recurrence.gluon_hopper.place import chunk_of_item, fetch_tile, fetch_tokens, store_tokens, vector

# Slots of 16 KiB: tokens of 128 channels; states in two halves of K, one a consumer, and sums of decays likewise.
SLOTS = gl.constexpr(11)
NU = gl.constexpr(0)
DO = gl.constexpr(1)
DR = gl.constexpr(2)
DSTATE = gl.constexpr(3)
STATE = gl.constexpr(5)
Q = gl.constexpr(7)
K = gl.constexpr(8)
G = gl.constexpr(9)
READERS = gl.constexpr(3)  # releases of a slot: by all readers, or as many by its one


@gluon.jit
def channel_item_count(n, S: gl.constexpr):
    """Items of this program."""
    H: gl.constexpr = S.HV // S.GROUP
    return (n.items // H * S.HV - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def channel_item(x, n, i, S: gl.constexpr):
    """Item i of this program, its value head and its chunk."""
    H: gl.constexpr = S.HV // S.GROUP
    item = gl.program_id(0) + i * gl.num_programs(0)
    head = item % S.HV
    return item, head, chunk_of_item(item // S.HV * H + head // S.GROUP, x, n, S)


@gluon.jit
def await_slot(slots, slot, i):
    """Waits until a tile of item i lies in its slot."""
    mbarrier.wait(slots.full.index(slot), i & 1)


@gluon.jit
def leave_slot(slots, slot, COUNT: gl.constexpr):
    """A reader leaves a slot; it may count as several."""
    mbarrier.arrive(slots.empty.index(slot), count=COUNT)


@gluon.jit
def fill_slot(slots, slot, i):
    """The barrier of a slot that its readers of item i - 1 have left, which 16 KiB by TMA will complete."""
    mbarrier.wait(slots.empty.index(slot), (i & 1) ^ 1)
    bar = slots.full.index(slot)
    mbarrier.expect(bar, 64 * 128 * 2)
    return bar


@gluon.jit
def channel_producer(keys_d, values_d, states_d, x, numbers, tiles, bars, S: gl.constexpr):
    """Copies the tiles of each item to their slots as these are left, in the order in which they are needed."""
    q_d, k_d, G_d = keys_d
    nu_d, do_d, dr_d = values_d
    s_d, ds_d = states_d
    sums = reinterpret(tiles.slots, gl.float32, [SLOTS, 64, 64], TILE_32)
    for i in range(channel_item_count(numbers, S)):
        item, head, at = channel_item(x, numbers, i, S)
        fetch_tokens(nu_d, at.span, at.t, head, 0, fill_slot(bars.slots, NU, i), tiles.slots.index(NU), S)
        fetch_tokens(do_d, at.span, at.t, head, 0, fill_slot(bars.slots, DO, i), tiles.slots.index(DO), S)
        for w in gl.static_range(2):
            fetch_tile(ds_d, [item, 0, w * 64], fill_slot(bars.slots, DSTATE + w, i), tiles.slots.index(DSTATE + w))
        for w in gl.static_range(2):
            bar = fill_slot(bars.slots, G + w, i)
            fetch_tokens(G_d, at.span, at.t, head, w * 64, bar, sums.index(G + w), S)
        fetch_tokens(k_d, at.span, at.t, at.key_head, 0, fill_slot(bars.slots, K, i), tiles.slots.index(K), S)
        fetch_tokens(q_d, at.span, at.t, at.key_head, 0, fill_slot(bars.slots, Q, i), tiles.slots.index(Q), S)
        if S.CORRECTED:
            fetch_tokens(dr_d, at.span, at.t, head, 0, fill_slot(bars.slots, DR, i), tiles.slots.index(DR), S)
        for w in gl.static_range(2):
            fetch_tile(s_d, [item, 0, w * 64], fill_slot(bars.slots, STATE + w, i), tiles.slots.index(STATE + w))


@gluon.jit
def pass_on_beta(x, numbers, tiles, bars, i, S: gl.constexpr):
    """beta of item i, for the consumers."""
    _, head, at = channel_item(x, numbers, i, S)
    t = gl.arange(0, 64, LANES_2)
    beta = gl.load(x.beta + (at.row + t) * S.HV + head, mask=t < at.span.length, other=0.0)  # [C]
    tiles.beta.index(i % 2).store(beta.to(gl.float32))
    signal(bars.beta, i)


@gluon.jit
def channel_finisher(gradients_d, x, numbers, tiles, bars, S: gl.constexpr):
    """beta of the next item; dbeta of each item, and its other gradients on their way to memory, after which the slots are left."""
    dq_d, dk_d, dg_d = gradients_d
    slots = tiles.slots
    t = gl.arange(0, 64, LANES_2)
    count = channel_item_count(numbers, S)
    if S.CORRECTED:
        pass_on_beta(x, numbers, tiles, bars, 0, S)
    for i in range(count):
        if S.CORRECTED:
            if i + 1 < count:
                pass_on_beta(x, numbers, tiles, bars, i + 1, S)
        _, head, at = channel_item(x, numbers, i, S)
        wait_full(bars.gradients, i)
        store_tokens(dq_d, at.span, at.t, head, 0, slots.index(Q), S)
        store_tokens(dk_d, at.span, at.t, head, 0, slots.index(K), S)
        for w in gl.static_range(2):
            if dg_d.dtype == gl.float32:
                sums = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
                store_tokens(dg_d, at.span, at.t, head, w * 64, sums.index(STATE + w), S)
            else:
                narrow = reinterpret(slots, dg_d.dtype, [2 * SLOTS, 64, 64], TILE)
                store_tokens(dg_d, at.span, at.t, head, w * 64, narrow.index(2 * (STATE + w)), S)
        if S.CORRECTED:
            dbeta = vector(tiles.sums, 0, LANES_2)  # [C]
            for part in gl.static_range(1, 8):
                dbeta += vector(tiles.sums, part, LANES_2)
            to = x.dbeta + (at.row + t) * S.HV + head
            gl.store(to, dbeta.to(x.dbeta.dtype.element_ty), mask=t < at.span.length)
        stores_done(0)
        leave_slot(bars.slots, Q, READERS)
        leave_slot(bars.slots, K, READERS)
        for w in gl.static_range(2):
            leave_slot(bars.slots, STATE + w, READERS)
