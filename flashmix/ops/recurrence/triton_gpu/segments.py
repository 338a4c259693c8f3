"""Segments: a long sequence with few heads, cut so that it fills the card, and joined again.

    S_out = M S_in + N        dS_in = M^T dS_out + dN                                                   (7.1)

The `state` phase makes the maps of all segments at once; the pass here, one product per segment, gives each its own start. Over ranks
the state that enters a sequence (or the gradient that comes back to it) is known last: the pass then runs without it, beside it the
products of the maps, and what it adds to all starts is one product for each, all at once.
Tiles: `BV` channels of values, `BK` all channels of keys, `BN` those of them that are computed at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.tiles import map_tile, saved_tile, state_tile


@triton.jit
def load_diagonal(maps, index, k, S: tl.constexpr):
    """M of a map that is DIAGONAL, [1, k]."""
    return tl.load(map_tile(maps, index, S.V + tl.arange(0, 1), k, S), mask=(k < S.K)[None, :], other=0.0)


@triton.jit
def load_state(x, index, v, k, S: tl.constexpr):
    """One state of `[..., V, K]`, [v, k], 0 outside."""
    return tl.load(saved_tile(x, index, v, k, S), mask=(v < S.V)[:, None] & (k < S.K)[None, :], other=0.0)


@triton.jit
def load_map(maps, index, rows, k, S: tl.constexpr):
    """M^T of a map, [rows, k] of its K rows and K columns, 0 outside."""
    mask = (rows < S.K)[:, None] & (k < S.K)[None, :]
    return tl.load(map_tile(maps, index, S.V + rows, k, S), mask=mask, other=0.0)


@triton.jit
def product_tile(products, index, rows, k, S: tl.constexpr):
    """Pointers to a tile `[rows, k]` of product `index` of `[..., K, K]`, of DIAGONAL maps `[..., 1, K]`."""
    SIZE: tl.constexpr = S.K if S.DIAGONAL else S.K * S.K
    return products + index.to(tl.int64) * SIZE + rows[:, None] * S.K + k[None, :]


@triton.jit
def state_after(state, maps, index, v, columns, k, S: tl.constexpr):
    """Some columns of the state that a segment leaves, transposed, [v, columns], from the one that enters it, [v, k] (7.1)."""
    mask = (v < S.V)[:, None] & (columns < S.K)[None, :]
    N = tl.load(map_tile(maps, index, v, columns, S), mask=mask, other=0.0)  # [v, columns]
    if S.DIAGONAL:
        return state * load_diagonal(maps, index, columns, S) + N
    else:
        M = load_map(maps, index, k, columns, S)  # M^T, [k, columns]
        return tl.dot(state, M, N, input_precision=S.PRECISION)


@triton.jit
def gradient_before(dstate, maps, ends, index, v, columns, k, S: tl.constexpr):
    """Some columns of the gradient that enters a segment from behind it, [v, columns], from that of the state it leaves, [v, k] (7.1)."""
    own = load_state(ends, index, v, columns, S)  # [v, columns]
    if S.DIAGONAL:
        return dstate * load_diagonal(maps, index, columns, S) + own
    else:
        M = load_map(maps, index, columns, k, S)  # M^T, [columns, k]
        return tl.dot(dstate, tl.trans(M), own, input_precision=S.PRECISION)


@triton.jit
def product_mask(rows, k, S: tl.constexpr):
    """Which entries of a product there are, [rows, k]."""
    return (rows < (1 if S.DIAGONAL else S.K))[:, None] & (k < S.K)[None, :]


@triton.jit
def multiplied(product, maps, index, columns, k, FROM_END: tl.constexpr, S: tl.constexpr):
    """Some columns of a product with the next map, [rows, columns]."""
    if FROM_END:
        M = tl.trans(load_map(maps, index, columns, k, S))  # M, [k, columns]
    else:
        M = load_map(maps, index, k, columns, S)  # M^T, [k, columns]
    return tl.dot(product, M, input_precision=S.PRECISION)


@triton.jit
def write_products(maps, products, row, block, n, FROM_END: tl.constexpr, S: tl.constexpr):
    """BV rows of the products of a row's maps, for each segment (M_i ... M_0)^T: how the sequence up to its end acts on the state.

    FROM_END: M_last ... M_i, how the sequence from its start on does. Of DIAGONAL maps there is one row, as of theirs.
    """
    rs = tl.arange(0, 1) if S.DIAGONAL else block * S.BV + tl.arange(0, S.BV)
    ks = tl.arange(0, S.BK)
    first = row * n.segments
    index = first + n.segments - 1 if FROM_END else first
    if S.DIAGONAL:
        product = load_diagonal(maps, index, ks, S)  # [1, BK]
    elif FROM_END:
        product = tl.trans(load_map(maps, index, ks, rs, S))  # M, [BV, BK]
    else:
        product = load_map(maps, index, rs, ks, S)  # M^T, [BV, BK]
    tl.store(product_tile(products, index, rs, ks, S), product, mask=product_mask(rs, ks, S))
    for passed in tl.range(1, n.segments, num_stages=S.STAGES):
        at = index - passed if FROM_END else index + passed
        if S.DIAGONAL:
            product *= load_diagonal(maps, at, ks, S)  # [1, BK]
            tl.store(product_tile(products, at, rs, ks, S), product, mask=product_mask(rs, ks, S))
        elif S.BN < S.BK:  # BN columns at a time, put together in memory
            for k0 in tl.range(0, S.K, S.BN, num_stages=1):
                cs = k0 + tl.arange(0, S.BN)
                some = multiplied(product, maps, at, cs, ks, FROM_END, S)  # [BV, BN]
                tl.store(product_tile(products, at, rs, cs, S), some, mask=product_mask(rs, cs, S))
            tl.debug_barrier()
            product = tl.load(
                product_tile(products, at, rs, ks, S), mask=product_mask(rs, ks, S), other=0.0
            )  # [BV, BK]
        else:
            product = multiplied(product, maps, at, ks, ks, FROM_END, S)  # [BV, BK]
            tl.store(product_tile(products, at, rs, ks, S), product, mask=product_mask(rs, ks, S))


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def segments_forward_kernel(maps, initial_state, starts, last, products, n, S: tl.constexpr):
    """starts [rows, segments, V, K]: the state, transposed, that each segment begins with. One program per (row, BV values).

    With `last`, the state after the last segment too, as the caller has states; with `products` those of the maps, in further programs.
    """
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    NP: tl.constexpr = 1 if S.DIAGONAL else (S.K + S.BV - 1) // S.BV
    NB: tl.constexpr = NV if products is None else NV + NP
    block = tl.program_id(0) % NB
    row = (tl.program_id(0) // NB).to(tl.int64)
    if products is not None:
        if block >= NV:
            write_products(maps, products, row, block - NV, n, False, S)
            return
    vs = block * S.BV + tl.arange(0, S.BV)
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    state = tl.full([S.BV, S.BK], 0.0, tl.float32)
    if initial_state is not None:
        state = tl.load(state_tile(initial_state, row, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
    first = row * n.segments
    tl.store(saved_tile(starts, first, vs, ks, S), state, mask=mask)
    for segment in tl.range(0, n.segments - 1, num_stages=S.STAGES):
        index = first + segment
        if S.BN < S.BK:  # BN columns at a time, put together in memory
            for k0 in tl.range(0, S.K, S.BN, num_stages=1):
                cs = k0 + tl.arange(0, S.BN)
                part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
                some = state_after(state, maps, index, vs, cs, ks, S)  # [BV, BN]
                tl.store(saved_tile(starts, index + 1, vs, cs, S), some, mask=part)
            tl.debug_barrier()
            state = load_state(starts, index + 1, vs, ks, S)  # [BV, BK]
        else:
            state = state_after(state, maps, index, vs, ks, ks, S)  # [BV, BK]
            tl.store(saved_tile(starts, index + 1, vs, ks, S), state, mask=mask)
    if last is not None:
        for k0 in tl.range(0, S.K, S.BN, num_stages=1):
            cs = k0 + tl.arange(0, S.BN)
            part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
            some = state_after(state, maps, first + n.segments - 1, vs, cs, ks, S)  # [BV, BN]
            tl.store(state_tile(last, row, vs, cs, S), some, mask=part)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def segments_backward_kernel(maps, ends, final_state, starts, first, products, n, S: tl.constexpr):
    """starts [rows, segments, V, K]: the gradient, transposed, that reaches the end of each segment; `ends` what each sends back.

    With `first`, the gradient of the state before the first segment too, as the caller has states; with `products` those of the maps.
    """
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    NP: tl.constexpr = 1 if S.DIAGONAL else (S.K + S.BV - 1) // S.BV
    NB: tl.constexpr = NV if products is None else NV + NP
    block = tl.program_id(0) % NB
    row = (tl.program_id(0) // NB).to(tl.int64)
    if products is not None:
        if block >= NV:
            write_products(maps, products, row, block - NV, n, True, S)
            return
    vs = block * S.BV + tl.arange(0, S.BV)
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    dstate = tl.full([S.BV, S.BK], 0.0, tl.float32)
    if final_state is not None:
        dstate = tl.load(state_tile(final_state, row, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
    last = row * n.segments + n.segments - 1
    tl.store(saved_tile(starts, last, vs, ks, S), dstate, mask=mask)
    for back in tl.range(0, n.segments - 1, num_stages=S.STAGES):
        index = last - back
        if S.BN < S.BK:  # BN columns at a time, put together in memory
            for k0 in tl.range(0, S.K, S.BN, num_stages=1):
                cs = k0 + tl.arange(0, S.BN)
                part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
                some = gradient_before(dstate, maps, ends, index, vs, cs, ks, S)  # [BV, BN]
                tl.store(saved_tile(starts, index - 1, vs, cs, S), some, mask=part)
            tl.debug_barrier()
            dstate = load_state(starts, index - 1, vs, ks, S)  # [BV, BK]
        else:
            dstate = gradient_before(dstate, maps, ends, index, vs, ks, ks, S)  # [BV, BK]
            tl.store(saved_tile(starts, index - 1, vs, ks, S), dstate, mask=mask)
    if first is not None:
        for k0 in tl.range(0, S.K, S.BN, num_stages=1):
            cs = k0 + tl.arange(0, S.BN)
            part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
            some = gradient_before(dstate, maps, ends, row * n.segments, vs, cs, ks, S)  # [BV, BN]
            tl.store(state_tile(first, row, vs, cs, S), some, mask=part)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def enter_segments_kernel(products, entered, starts, n, S: tl.constexpr):
    """Adds to the starts of all segments what a state that enters their sequence comes to there; FROM_END: a gradient from behind it.

    One program per (row, segment, BV values, BN keys). The segment that it enters first has no product before it.
    """
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    NK: tl.constexpr = (S.K + S.BN - 1) // S.BN
    vs = (tl.program_id(0) // NK % NV) * S.BV + tl.arange(0, S.BV)
    cs = (tl.program_id(0) % NK) * S.BN + tl.arange(0, S.BN)
    index = (tl.program_id(0) // (NK * NV)).to(tl.int64)
    row, segment = index // n.segments, index % n.segments
    before = index + 1 if S.FROM_END else index - 1
    nothing = segment == n.segments - 1 if S.FROM_END else segment == 0
    part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
    own = load_state(starts, index, vs, cs, S)  # [BV, BN]
    if S.DIAGONAL or nothing:
        some = tl.load(state_tile(entered, row, vs, cs, S), mask=part, other=0.0)  # [BV, BN]
        if not nothing:
            diagonal = product_tile(products, before, tl.arange(0, 1), cs, S)
            some *= tl.load(diagonal, mask=(cs < S.K)[None, :], other=0.0)  # [1, BN]
        own += some
    else:
        ks = tl.arange(0, S.BK)
        mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
        state = tl.load(state_tile(entered, row, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
        square = (ks < S.K)[:, None] & (cs < S.K)[None, :]
        P = tl.load(product_tile(products, before, ks, cs, S), mask=square, other=0.0)  # [BK, BN]
        own = tl.dot(state, P, own, input_precision=S.PRECISION)
    tl.store(saved_tile(starts, index, vs, cs, S), own, mask=part)
