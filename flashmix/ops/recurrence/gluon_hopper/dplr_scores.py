"""The `decay` and `scores` phases of DPLR (RWKV-7) with a per-channel decay, one program per (chunk, value head): all pairs in one pass.

    ~q_i = scale e^{G_i} q_i      ~a_i = e^{G_{i-1}} a_i      ^y_j = e^{G_C - G_j} y_j of the columns y = k, b     (1.6)
    A_qy = ~q_i . (e^{-G_j} y_j), j <= i                      A_ay = ~a_i . (e^{-G_j} y_j), j < i                  (1.7), (3.1)

What `channel_scores.py` does for the tied delta rule, with a and b of their own: rows out of range are left to `channel_far_rows.py`,
A_ab is written as float16 in the place of T, which `channel_inverse.py` makes of it. The four keys are decayed in the places where TMA
put them; the pairs lie where e^{-G} k and e^{-G} b were.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    copy_to_global,
    ex2,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    plus,
    product,
    products_done,
    reinterpret,
    retire,
    stores_done,
    thread_barrier,
    wait_full,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.channel_scores import LIMIT, store_chunk
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, TILE
from flashmix.ops.recurrence.gluon_hopper.place import block_of, chunk_of_item, fetch_tokens, kind_of_keys, store_tokens
from flashmix.ops.recurrence.gluon_hopper.scores import LOG2E


@gluon.constexpr_function
def key_layout(width):
    """The layout of `[64, width]` keys, whose threads have 32 tokens of one or two channels each."""
    return gl.BlockedLayout([32, width // 64], [2, 16], [1, 4], [1, 0])


@gluon.jit
def load_decays(x, at, head, S: gl.constexpr):
    """The decay of a chunk's tokens to base 2 and its sums G, [C, K] each, and that of the whole chunk, [K].

    G is written too with SAVE, or where a row is out of range.
    """
    KEYS: gl.constexpr = key_layout(S.BK)
    channels = gl.arange(0, S.BK, gl.SliceLayout(0, KEYS))
    t = gl.arange(0, 64, gl.SliceLayout(1, KEYS))[:, None]
    inside = (t < at.span.length) & (channels < S.K)[None, :]
    to = ((at.row + t) * S.HV + head) * S.K + channels[None, :]
    own = gl.maximum(gl.load(x.decay + to, mask=inside, other=0.0).to(gl.float32) * LOG2E, -160.0)  # [C, K]
    G = gl.associative_scan(own, 0, plus)
    last = gl.min(G, 0)  # sums never rise
    gl.store(x.sums + to, G, mask=inside & (S.SAVE | (gl.min(last, 0) < -LIMIT)))
    store_chunk(x, gl.program_id(0), last, channels, LIMIT, S)
    return own, G, last


@gluon.jit
def decay_keys(keys, scaled, own, G, last, scale, S: gl.constexpr):
    """Decays q, a, k and b in their places, and puts e^{-G} k and e^{-G} b into others."""
    KEYS: gl.constexpr = key_layout(S.BK)
    DT: gl.constexpr = keys.dtype
    a = keys.index(1).load(KEYS).to(gl.float32)  # [C, K]
    keys.index(1).store((a * ex2(gl.minimum(G - own, 0.0))).to(DT))
    q = keys.index(0).load(KEYS).to(gl.float32)  # [C, K]
    keys.index(0).store((q * (ex2(G) * scale)).to(DT))
    for column in gl.static_range(2):
        y = keys.index(2 + column).load(KEYS).to(gl.float32)  # [C, K]
        scaled.index(column).store((y * ex2(0.0 - G)).to(DT))
        keys.index(2 + column).store((y * ex2(last[None, :] - G)).to(DT))


@gluon.jit
def store_pairs(A, pairs, A_d):
    """Writes A_qk, A_qb, A_ab in the bits of float16, and A_ak."""
    i = gl.arange(0, 64, ROWS_64)[:, None]
    j = gl.arange(0, 64, COLUMNS_64)[None, :]
    qk, qb, ab, ak = A  # [C, C] each
    pairs.index(0).store(gl.where(i >= j, qk, 0.0).to(pairs.dtype))
    pairs.index(1).store(gl.where(i >= j, qb, 0.0).to(pairs.dtype))
    reinterpret(pairs, gl.float16, [4, 64, 64], TILE).index(2).store(gl.where(i > j, ab, 0.0).to(gl.float16))
    pairs.index(3).store(gl.where(i > j, ak, 0.0).to(pairs.dtype))
    fence_async_shared()
    copy_to_global(A_d, [gl.program_id(0) * 256, 0], block_of(A_d, pairs))


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def dplr_scores_kernel(q_d, a_d, k_d, b_d, keys_d, A_d, x, n, S: gl.constexpr):
    """Writes the decayed q, a, k and b behind one another, whole decays, A_qk, A_qb, A_ab and A_ak; with SAVE the sums of the decay."""
    DT: gl.constexpr = q_d.dtype
    at = chunk_of_item(gl.program_id(0), x, n, S)  # of value heads
    head = at.key_head
    keys = gl.allocate_shared_memory(DT, [4, 64, S.BK], TILE)  # q, a, k, b, then the same decayed
    scaled = gl.allocate_shared_memory(DT, [256 // S.BK, 64, S.BK], TILE)  # e^{-G} k and e^{-G} b, then the pairs
    landed = allocate_barriers(1, 1)
    bar = expect_bytes(landed, 0, 4 * 64 * S.BK * 2)
    fetch_tokens(q_d, at.span, at.t, head // (S.HV // S.HEADS[0]), 0, bar, keys.index(0), S)
    fetch_tokens(a_d, at.span, at.t, head // (S.HV // S.HEADS[1]), 0, bar, keys.index(1), S)
    fetch_tokens(k_d, at.span, at.t, head // (S.HV // S.HEADS[2]), 0, bar, keys.index(2), S)
    fetch_tokens(b_d, at.span, at.t, head // (S.HV // S.HEADS[3]), 0, bar, keys.index(3), S)
    own, G, last = load_decays(x, at, head, S)  # [C, K], [C, K], [K]
    wait_full(landed, 0)
    decay_keys(keys, scaled, own, G, last, n.scale, S)
    fence_async_shared()
    thread_barrier()
    for kind in gl.static_range(4):
        store_tokens(keys_d, kind_of_keys(at.span, kind, n), at.t, head, 0, keys.index(kind), S)
    k = scaled.index(0).permute((1, 0))  # [K, C]
    b = scaled.index(1).permute((1, 0))  # [K, C]
    qk = product(keys.index(0), k, ACC_64, 64, 64)
    qb = product(keys.index(0), b, ACC_64, 64, 64)
    ab = product(keys.index(1), b, ACC_64, 64, 64)
    ak = product(keys.index(1), k, ACC_64, 64, 64)
    qk, qb, ab, ak = products_done(0, deps=[qk, qb, ab, ak])
    thread_barrier()  # all have read e^{-G} k and e^{-G} b
    pairs = reinterpret(scaled, DT, [4, 64, 64], TILE)
    store_pairs((qk, qb, ab, ak), pairs, A_d)
    stores_done(0)
    retire(landed)
