"""The `decay` and `scores` phases of a per-channel decay, one program per (chunk, value head): all pairs in one pass.

    ~x_i = e^{G_i} x_i        ^y_j = e^{G_C - G_j} y_j        A_ij = (e^{G_i - m} x_i) . (e^{m - G_j} y_j)      (1.6), (1.7)

A thread has 32 tokens of two channels, so that sums over tokens are its own. To base 2, m is 0 in a chunk that decays by up to `2^-LIMIT`
in every channel, else -LIMIT: so the scaled keys have the same bits but for their exponents, and a pair's do not depend on later tokens.
A row that has decayed by more than `2^-REACHED` in some channel since the chunk's start is out of range (its pairs may be NaN): its chunk
is marked, and `channel_far_rows.py` makes those rows again. A_ab is written as float16 in the place of T, which `channel_inverse.py` makes
of it. Without corrections there are no a, A_ab and beta.
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
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.place import block_of, chunk_of_item, fetch_tokens, kind_of_keys, store_tokens
from flashmix.ops.recurrence.gluon_hopper.scores import LOG2E

COLUMNS = gl.constexpr(gl.BlockedLayout([32, 2], [2, 16], [1, 4], [1, 0]))  # [64, 128]: few threads share a channel
TOKENS_4 = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
LIMIT = gl.constexpr(80.0)  # a factor of columns is at most 2^LIMIT
REACHED = gl.constexpr(160.0)
HIGHEST = gl.constexpr(2.0**80)  # 2^LIMIT
WHOLE = gl.constexpr(6)  # the reach of a row that reaches the chunk's start: log2 of its tokens


@gluon.jit
def load_sums(x, at, head, channels, S: gl.constexpr):
    """The sums G of a chunk's decay to base 2, [C, K], and that of the whole chunk, [K].

    G is written too with SAVE, or where a row is out of range.
    """
    t = gl.arange(0, 64, gl.SliceLayout(1, COLUMNS))[:, None]
    inside = (t < at.span.length) & (channels < S.K)[None, :]
    to = ((at.row + t) * S.HV + head) * S.K + channels[None, :]
    own = gl.maximum(gl.load(x.decay + to, mask=inside, other=0.0).to(gl.float32) * LOG2E, -160.0)  # [C, K]
    G = gl.associative_scan(own, 0, plus)
    last = gl.min(G, 0)  # sums never rise
    least = gl.min(last, 0)
    gl.store(x.sums + to, G, mask=inside & (S.SAVE | (least < -REACHED)))
    return G, last, least


@gluon.jit
def row_factors(G, split):
    """2^(G - m); with `split`, where G may be under the least exponent, of each number by its own G alone."""
    if split:
        below = G < -LIMIT
        factors = ex2(gl.where(below, G + LIMIT, G)) * gl.where(below, 1.0, HIGHEST)
    else:
        factors = ex2(G)
    return factors


@gluon.jit
def column_factors(G, split):
    """2^(m - G) likewise."""
    if split:
        below = G < -LIMIT
        factors = ex2(gl.where(below, 0.0 - LIMIT - G, 0.0 - G)) * gl.where(below, 1.0, 1.0 / HIGHEST)
    else:
        factors = ex2(0.0 - G)
    return factors


@gluon.jit
def store_chunk(x, index, last, channels, RANGE: gl.constexpr, S: gl.constexpr):
    """Writes the decay of a whole chunk and how far some channel decays: 2 where a row is out of range, beyond 2^-RANGE, else 1 beyond
    2^-LIMIT. With SAVE reaches as if no row were out of range.
    """
    gl.store(x.total + index.to(gl.int64) * S.K + channels, ex2(last), mask=channels < S.K)
    least = gl.min(last, 0)
    gl.store(x.far + index, (least < -LIMIT).to(gl.int32) + (least < -RANGE).to(gl.int32))
    if S.SAVE:
        REACHES: gl.constexpr = (S.K + 31) // 32 * 64
        n = gl.arange(0, 256, LINE)
        gl.store(x.reach + index.to(gl.int64) * REACHES + n, gl.full([256], WHOLE, gl.int8, LINE), mask=n < REACHES)


@gluon.jit
def token_numbers(x, at, head, memory, S: gl.constexpr):
    """beta of the chunk's tokens, float32, [C] on the rows of keys."""
    t = gl.arange(0, 64, TOKENS_4)
    beta = gl.load(x.beta + (at.row + t) * S.HV + head, mask=t < at.span.length, other=0.0)  # [C]
    memory.store(beta.to(gl.float32))
    return memory.load(gl.SliceLayout(1, COLUMNS))


@gluon.jit
def store_query_pairs(qb, pairs, A_d, index):
    """Writes A_qb."""
    i = gl.arange(0, 64, ROWS_64)[:, None]
    j = gl.arange(0, 64, COLUMNS_64)[None, :]
    tile = pairs.index(0)  # [C, C]
    tile.store(gl.where(i >= j, qb, 0.0).to(pairs.dtype))
    fence_async_shared()
    copy_to_global(A_d, [index * 64, 0], block_of(A_d, tile))


@gluon.jit
def store_pairs(qb, ab, pairs, A_d, index):
    """Writes A_qb, and A_ab in the bits of float16."""
    i = gl.arange(0, 64, ROWS_64)[:, None]
    j = gl.arange(0, 64, COLUMNS_64)[None, :]
    pairs.index(0).store(gl.where(i >= j, qb, 0.0).to(pairs.dtype))
    reinterpret(pairs, gl.float16, [2, 64, 64], TILE).index(1).store(gl.where(i > j, ab, 0.0).to(gl.float16))
    fence_async_shared()
    copy_to_global(A_d, [index * 128, 0], block_of(A_d, pairs))


@gluon.jit
def store_rows(keys_d, span, at, head, keys, n, S: gl.constexpr):
    """Writes ~q, and with corrections ~a."""
    store_tokens(keys_d, span, at.t, head, 0, keys.index(0), S)
    if S.CORRECTED:
        store_tokens(keys_d, kind_of_keys(span, 1, n), at.t, head, 0, keys.index(1), S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def channel_scores_kernel(q_d, k_d, keys_d, A_d, x, n, S: gl.constexpr):
    """Writes decayed queries, a and b behind one another, whole decays, A_qb and A_ab; with SAVE the sums of the decay."""
    DT: gl.constexpr = q_d.dtype
    head = gl.program_id(0) % S.HV
    H: gl.constexpr = S.HV // S.GROUP
    at = chunk_of_item(gl.program_id(0) // S.HV * H + head // S.GROUP, x, n, S)
    keys = gl.allocate_shared_memory(DT, [2, 64, 128], TILE)  # q and k, then ~q and ~a
    others = gl.allocate_shared_memory(DT, [2, 64, 128], TILE)  # e^{-G} b and ^b, then the pairs
    numbers = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    landed = allocate_barriers(1, 1)
    bar = expect_bytes(landed, 0, 2 * 64 * 128 * 2)
    fetch_tokens(q_d, at.span, at.t, at.key_head, 0, bar, keys.index(0), S)
    fetch_tokens(k_d, at.span, at.t, at.key_head, 0, bar, keys.index(1), S)
    channels = gl.arange(0, 128, gl.SliceLayout(0, COLUMNS))
    if S.CORRECTED:
        beta = token_numbers(x, at, head, numbers, S)
    G, last, least = load_sums(x, at, head, channels, S)  # [C, K], [K], []
    store_chunk(x, gl.program_id(0), last, channels, REACHED, S)
    split = least < -LIMIT
    wait_full(landed, 0)
    row = row_factors(G, split)
    q = keys.index(0).load(COLUMNS).to(gl.float32)  # [C, K]
    keys.index(0).store((q * (row * n.scale)).to(DT))
    k = keys.index(1).load(COLUMNS).to(gl.float32)  # [C, K]
    if S.CORRECTED:
        keys.index(1).store((0.0 - k * row).to(DT))
        k = k * beta[:, None]
    others.index(0).store((k * column_factors(G, split)).to(DT))
    others.index(1).store((k * ex2(last[None, :] - G)).to(DT))
    fence_async_shared()
    thread_barrier()
    span = at.span
    if least >= -LIMIT:
        store_rows(keys_d, span, at, head, keys, n, S)
    store_tokens(keys_d, kind_of_keys(span, 1 + S.CORRECTED, n), at.t, head, 0, others.index(1), S)
    y = others.index(0).permute((1, 0))  # [K, C]
    qb = product(keys.index(0), y, ACC_64, 64, 64)
    if S.CORRECTED:
        ab = product(keys.index(1), y, ACC_64, 64, 64)
        qb, ab = products_done(0, deps=[qb, ab])
    else:
        qb = products_done(0, deps=[qb])
    thread_barrier()  # all have read the scaled keys
    if split:
        for i in gl.static_range(1 + S.CORRECTED):
            scaled = keys.index(i).load(COLUMNS).to(gl.float32)  # [C, K]
            keys.index(i).store((scaled * (1.0 / HIGHEST)).to(DT))
        fence_async_shared()
        thread_barrier()
        store_rows(keys_d, span, at, head, keys, n, S)
    pairs = reinterpret(others.index(0), DT, [2, 64, 64], TILE)
    if S.CORRECTED:
        store_pairs(qb, ab, pairs, A_d, gl.program_id(0))
    else:
        store_query_pairs(qb, pairs, A_d, gl.program_id(0))
    stores_done(0)
    retire(landed)
