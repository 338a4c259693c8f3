"""The `state` phase with the `output` of the forward: the one serial pass over the chunks of a sequence.

    R = V + ~a S   (raw rules: A_ak V + ~a S)          nu = T R                                 (5.1), (5.2)
    o = ~q S + A_qk V + A_qb nu                        S <- e^{G_C} S + ^k^T V + ^b^T nu        (1.8), (5.3)

A program holds `BV` columns of the state of one (sequence, value head), transposed, `S^T [BV, BK]`: every product has it or a
tile made of it on the left, which stays in registers. Backward from the end, with `dS` in its place:

    dnu = A_qb^T dO + ^b dS'     dR = T^T dnu     dv = A_qk^T dO + A_ak^T dR + ^k dS'           (5.4), (5.5), (6.3)
    dS = e^{G_C} dS' + ~q^T dO + ~a^T dR                                                        (5.7)

Columns are k, written with V, and b, written with nu, of which a rule has one or both; row 0 is q, row 1 is a. Of the tiles of pairs
those of q come first, one for each column, then T, then ak.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.correlated import add_product, is_left_out, is_long, load_long, load_long_rows
from flashmix.ops.recurrence.triton_gpu.structs import Place
from flashmix.ops.recurrence.triton_gpu.tiles import (
    append,
    factor_vector,
    load_rows,
    map_tile,
    pair_tile,
    saved_tile,
    sequence_chunks,
    state_tile,
    store_rows,
)


@triton.jit
def over_keys(x, y, S: tl.constexpr):
    """x y over channels of keys, [BV, BK] by [BK, C]; 256 of float32 in blocks of 64, as one multiply-add after another errs too much."""
    if x.dtype == tl.float32 and S.BK > 128:
        ROWS: tl.constexpr = x.shape[0]
        COLUMNS: tl.constexpr = y.shape[1]
        parts = tl.permute(tl.reshape(x, [ROWS, S.BK // 64, 64]), [1, 0, 2])
        return tl.sum(tl.dot(parts, tl.reshape(y, [S.BK // 64, 64, COLUMNS]), input_precision=S.PRECISION), 0)
    else:
        return tl.dot(x, y, input_precision=S.PRECISION)


@triton.jit
def load_factor(scores, at, SLOT: tl.constexpr, S: tl.constexpr):
    """The factors of the chunk's rows or columns, [1, C]; with a per-channel decay the keys have them already."""
    if S.DECAY == "channel":
        return tl.full([1, S.C], 1.0, tl.float32)
    else:
        return tl.load(factor_vector(scores.factors, at, SLOT, S))[None, :]


@triton.jit
def load_total(total, at, k, S: tl.constexpr):
    """The decay of the whole chunk: a number, or [1, BK]."""
    if S.DECAY == "channel":
        return tl.load(total + (at.chunk * S.HV + at.head) * S.K + k, mask=k < S.K, other=0.0)[None, :]
    else:
        return tl.load(total + at.chunk * S.HV + at.head)


@triton.jit
def load_row(scores, ROW: tl.constexpr, at, k, S: tl.constexpr):
    """A row key, [C, BK]."""
    return load_rows(scores.rows[ROW], at, S.ROW_HEADS[ROW], S.K, k, S)


@triton.jit
def load_column(scores, COLUMN: tl.constexpr, at, k, S: tl.constexpr):
    """A column key, [C, BK]."""
    return load_rows(scores.columns[COLUMN], at, S.COLUMN_HEADS[COLUMN], S.K, k, S)


@triton.jit
def segment_span(segment, segments, chunks):
    """First and end of the chunks of a segment; the last ones may be short or empty."""
    size = (chunks + segments - 1) // segments
    return tl.minimum(segment * size, chunks), tl.minimum((segment + 1) * size, chunks)


@triton.jit
def load_start(starts, sequence_state, row, index, v, k, S: tl.constexpr):
    """The state S^T, [BV, BK], that a segment begins with: its own start, the sequence's initial or final state, or 0."""
    mask = (v < S.V)[:, None] & (k < S.K)[None, :]
    if starts is not None:
        return tl.load(saved_tile(starts, index, v, k, S), mask=mask, other=0.0)
    elif sequence_state is not None:
        return tl.load(state_tile(sequence_state, row, v, k, S), mask=mask, other=0.0)
    else:
        return tl.full([S.BV, S.BK], 0.0, tl.float32)


@triton.jit
def store_map(maps, state, whole, index, block, S: tl.constexpr):
    """Writes BV rows of a segment's map (7.1): of N^T, or in the blocks after those of M^T; the diagonal along with N^T."""
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    k = tl.arange(0, S.BK)
    rows = block * S.BV + tl.arange(0, S.BV)
    rows = tl.where(block < NV, rows, rows - NV * S.BV + S.V)
    fits = tl.where(block < NV, rows < S.V, rows < S.V + S.K)
    tl.store(map_tile(maps, index, rows, k, S), state, mask=fits[:, None] & (k < S.K)[None, :])
    if S.DIAGONAL:
        ptr = map_tile(maps, index, S.V + tl.arange(0, 1), k, S)
        tl.store(ptr, whole, mask=(k < S.K)[None, :] & (block == 0))


@triton.jit
def corrected(scores, state, V_T, a, bits, at, S: tl.constexpr):
    """nu^T = (T R)^T, [BV, C], of the rows a^T [BK, C] (5.1), (5.2)."""
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    R = over_keys(state, a, S) * load_factor(scores, at, 1, S)  # [BV, C]
    if COLUMNS == 2:
        ak = tl.trans(tl.load(pair_tile(scores.A, at, COLUMNS + 1, S)))  # [C, C]
        R += tl.dot(V_T, ak, input_precision=S.PRECISION)
    else:
        R += V_T
    T = tl.trans(tl.load(pair_tile(scores.A, at, COLUMNS, S)))  # [C, C]
    nu = tl.dot(R.to(V_T.dtype), T, input_precision=S.PRECISION)
    if S.LONG == 2:
        long = is_long(bits, S)
        exact = tl.trans(load_long_rows(scores, long, at, S))  # [C, C]
        nu = tl.where(long, tl.dot(R.to(tl.float64), exact, input_precision="ieee").to(tl.float32), nu)
    return nu


@triton.jit
def target_gradient(scores, dnu, bits, at, S: tl.constexpr):
    """dR = dnu T, [BV, C] (5.5)."""
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    T = tl.load(pair_tile(scores.A, at, COLUMNS, S))  # [C, C]
    if S.LONG != 2:
        return tl.dot(dnu.to(T.dtype), T, input_precision=S.PRECISION)
    else:
        long = is_long(bits, S)
        dR = tl.dot(tl.where(long, 0.0, dnu), T, input_precision=S.PRECISION)
        if bits != 0:
            exact = load_long_rows(scores, long, at, S)  # [C, C]
            dR += tl.dot(dnu.to(tl.float64), exact, input_precision="ieee").to(tl.float32)
        return dR


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def state_forward_kernel(scores, x, out, where, n, S: tl.constexpr):
    """OUTPUT writes o; SAVE writes nu and the state that each chunk starts from.

    A sequence may be cut into segments. With `out.maps`, each is worked on from nothing: N^T from a zero state, and in further
    programs M^T, the same without values from the identity; of a rule without corrected writes M is DIAGONAL, the whole decay,
    and made along with N. With `x.starts`, each begins at the state that is its own.
    """
    MAPS: tl.constexpr = out.maps is not None
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    NB: tl.constexpr = NV + (S.K + S.BV - 1) // S.BV if MAPS and not S.DIAGONAL else NV
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    CORRECTED: tl.constexpr = len(S.ROW_HEADS) == 2
    DT: tl.constexpr = x.v.dtype.element_ty
    block = tl.program_id(0) % NB
    segment = (tl.program_id(0) // NB) % n.segments
    row = tl.program_id(0) // (NB * n.segments)  # of sequences x heads
    index = row.to(tl.int64) * n.segments + segment
    head = row % S.HV
    vs = block * S.BV + tl.arange(0, S.BV)
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    start, length, chunk0, chunks = sequence_chunks(where, row // S.HV, n, S)
    begin, end = segment_span(segment, n.segments, chunks)
    whole = tl.full([1, S.BK], 1.0, tl.float32)
    state = load_start(x.starts, x.initial_state, row, index, vs, ks, S)  # [BV, BK]
    if MAPS:
        if block >= NV:
            state = tl.where((vs - NV * S.BV)[:, None] == ks[None, :], 1.0, 0.0)
            vs += S.V  # no value is there
    if S.LONG > 0:
        if is_left_out(scores, chunk0 + begin, end - begin, head, S):
            return
    for i in tl.range(begin, end, num_stages=S.STAGES):
        at = Place(chunk0 + i, head, start + i * S.C, tl.minimum(length - i * S.C, S.C))
        before = state.to(DT)
        if S.SAVE:
            tl.store(saved_tile(out.states, at.chunk * S.HV + head, vs, ks, S), before, mask=mask)
        V_T = tl.trans(load_rows(x.v, at, S.HV, S.V, vs, S))  # [BV, C]
        decay = load_total(scores.total, at, ks, S)  # [] or [1, BK]
        bits = load_long(scores, at, S)  # []
        W = ()  # of each column, [BV, C]
        if COLUMNS == 2 or not CORRECTED:
            W = append(W, V_T)
        if CORRECTED:
            if S.TIED:  # a and b are one tensor: sign, beta and decay are in the factors
                b = load_column(scores, 0, at, ks, S)  # [C, BK]
                nu = corrected(scores, before, V_T, tl.trans(b), bits, at, S)
            else:
                nu = corrected(scores, before, V_T, tl.trans(load_row(scores, 1, at, ks, S)), bits, at, S)  # [BV, C]
            W = append(W, nu)
            if S.SAVE:
                store_rows(out.nu, tl.trans(nu), at, S.V, vs, S)
        if S.OUTPUT:
            q = tl.trans(load_row(scores, 0, at, ks, S))  # [BK, C]
            o = over_keys(before, q, S) * load_factor(scores, at, 0, S)  # [BV, C]
            for c in tl.static_range(COLUMNS):
                A = tl.trans(tl.load(pair_tile(scores.A, at, c, S)))  # [C, C]
                if c == COLUMNS - 1:
                    o = add_product(W[c].to(DT), A, o, bits, S)
                else:
                    o = tl.dot(W[c].to(DT), A, o, input_precision=S.PRECISION)
            store_rows(out.o, tl.trans(o.to(DT)), at, S.V, vs, S)
        state *= decay
        if MAPS and S.DIAGONAL:
            whole *= decay
        for c in tl.static_range(COLUMNS):
            y = b if S.TIED else load_column(scores, c, at, ks, S)  # [C, BK]
            w = (W[c] * load_factor(scores, at, len(S.ROW_HEADS) + c, S)).to(DT)  # [BV, C]
            if c == COLUMNS - 1:
                state = add_product(w, y, state, bits, S)
            else:
                state = tl.dot(w, y, state, input_precision=S.PRECISION)
    if MAPS:
        store_map(out.maps, state, whole, index, block, S)
    elif out.final_state is not None:
        last = mask & (segment == n.segments - 1)
        tl.store(state_tile(out.final_state, row, vs, ks, S), state, mask=last)
    if S.OUTPUT and S.PACKED:
        if row // S.HV == tl.num_programs(0) // (NB * S.HV) - 1:  # rows past the last sequence
            for past in range(start + length, n.tokens, S.C):
                rest = Place(chunk0, head, past, tl.minimum(n.tokens - past, S.C))
                store_rows(out.o, tl.full([S.C, S.BV], 0.0, DT), rest, S.V, vs, S)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def state_backward_kernel(scores, x, out, where, n, S: tl.constexpr):
    """SAVE writes dR, dv of raw writes, and the gradient of the state that each chunk leaves.

    With `out.ends`, each segment is worked on from nothing, and what it sends back is written there, transposed. With `x.starts`,
    each begins at the gradient that reaches it from behind.
    """
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    ROWS: tl.constexpr = len(S.ROW_HEADS)
    CORRECTED: tl.constexpr = ROWS == 2
    DT: tl.constexpr = x.do.dtype.element_ty
    vs = (tl.program_id(0) % NV) * S.BV + tl.arange(0, S.BV)
    segment = (tl.program_id(0) // NV) % n.segments
    row = tl.program_id(0) // (NV * n.segments)  # of sequences x heads
    index = row.to(tl.int64) * n.segments + segment
    head = row % S.HV
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    start, length, chunk0, chunks = sequence_chunks(where, row // S.HV, n, S)
    begin, end = segment_span(segment, n.segments, chunks)
    dstate = load_start(x.starts, x.final_state, row, index, vs, ks, S)  # [BV, BK]
    if S.LONG > 0:
        if is_left_out(scores, chunk0 + begin, end - begin, head, S):
            return
    for back in tl.range(0, end - begin, num_stages=S.STAGES):
        i = end - 1 - back
        at = Place(chunk0 + i, head, start + i * S.C, tl.minimum(length - i * S.C, S.C))
        after = dstate.to(DT)
        if S.SAVE:
            tl.store(saved_tile(out.dstates, at.chunk * S.HV + head, vs, ks, S), after, mask=mask)
        dO = tl.trans(load_rows(x.do, at, S.HV, S.V, vs, S))  # [BV, C]
        q = load_row(scores, 0, at, ks, S)  # [C, BK]
        decay = load_total(scores.total, at, ks, S)  # [] or [1, BK]
        bits = load_long(scores, at, S)  # []
        Z = append((), dO)  # of each row, [BV, C]
        if CORRECTED:
            b = load_column(scores, COLUMNS - 1, at, ks, S)  # [C, BK]
            dnu = over_keys(after, tl.trans(b), S) * load_factor(  # [BV, C]
                scores, at, ROWS + COLUMNS - 1, S
            )
            qb = tl.load(pair_tile(scores.A, at, COLUMNS - 1, S))  # [C, C]
            dnu = tl.dot(dO, qb, dnu, input_precision=S.PRECISION)
            dR = target_gradient(scores, dnu, bits, at, S)
            Z = append(Z, dR)
            if S.SAVE:
                store_rows(out.dr, tl.trans(dR.to(DT)), at, S.V, vs, S)
        if S.SAVE and (COLUMNS == 2 or not CORRECTED):
            k = tl.trans(load_column(scores, 0, at, ks, S))  # [BK, C]
            dv = over_keys(after, k, S) * load_factor(scores, at, ROWS, S)  # [BV, C]
            qk = tl.load(pair_tile(scores.A, at, 0, S))  # [C, C]
            dv = tl.dot(dO, qk, dv, input_precision=S.PRECISION)
            if CORRECTED:
                ak = tl.load(pair_tile(scores.A, at, COLUMNS + 1, S))  # [C, C]
                dv = tl.dot(dR.to(DT), ak, dv, input_precision=S.PRECISION)
            store_rows(out.dv, tl.trans(dv.to(DT)), at, S.V, vs, S)
        dstate *= decay
        for r in tl.static_range(ROWS):
            z = (Z[r] * load_factor(scores, at, r, S)).to(DT)  # [BV, C]
            if r == 0:
                x_r = q
            elif S.TIED:
                x_r = b
            else:
                x_r = load_row(scores, r, at, ks, S)  # [C, BK]
            if r > 0:
                dstate = add_product(z, x_r, dstate, bits, S)
            else:
                dstate = tl.dot(z, x_r, dstate, input_precision=S.PRECISION)
    if out.ends is not None:
        tl.store(saved_tile(out.ends, index, vs, ks, S), dstate, mask=mask)
    elif out.initial_state is not None:
        first = mask & (segment == 0)
        tl.store(state_tile(out.initial_state, row, vs, ks, S), dstate, mask=first)
