"""RWKV-4's averages on a GPU: a warp goes through the tokens of 32 channels of a sequence or of a segment of it, a thread has one.

    d = m_{t-1} - u - k_t;  o_t = (P a_{t-1} + W v_t) / (P b_{t-1} + W),  P = e^{min(d, 0)},  W = e^{min(-d, 0)}
    m_t = max(m_{t-1} + w, k_t);  a_t = f a_{t-1} + e v_t,  b_t = f b_{t-1} + e,  f = e^{m_{t-1} + w - m_t},  e = e^{k_t - m_t}

Of each two weights one is 1. `m_{t-1} + w` is `peak + n w`, with the key that `m` was last and the tokens since then: rounded once, where
adding one decay token after token rounds as often, and to one side. The next GROUP tokens are loaded while those of this group are
computed. A forward that saves keeps the state before every KEEP-th token; the backward goes from the last KEEP tokens to the first and
computes the states between again. With m a constant and D the denominator:

    dn = do / D;  s = -do o / D;  c_t the gradient of a_t, z_t that of b_t;  p = v c_t + z_t,  dk = W (v dn + s) + e p,  dv = W dn + e c_t
    c_{t-1} = f c_t + P dn;  z_{t-1} = f z_t + P s;  du = sum of W (v dn + s);  dw = sum of f (a_{t-1} c_t + b_{t-1} z_t)

Segments as in the scan: a first pass writes what each makes of no past, the state or, backwards, the product of `f` and the flows; the
second starts from what those before it make of the state that comes in. All but the last of a sequence are full.

Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.backward import lengthened, prepend
from flashmix.ops.scan.triton_gpu.kernels import left_of, span_of
from flashmix.ops.scan.triton_gpu.places import loaded_once, moved, places
from flashmix.ops.wkv.triton_gpu.states import NONE, ends_of, first_state, last_flows, put_part, weights


class WkvSpec(NamedTuple):
    WIDTH: int  # channels of a sequence
    BLOCK: int  # c
    GROUP: int  # tokens that are loaded at a time, of the backward KEEP
    KEEP: int  # tokens from one kept state to the next
    JOINED: int  # segments that are read at a time
    PACKED: bool
    SEGMENTS: bool
    PRECISE: bool  # exponentials to float32's rounding


class WkvInputs(NamedTuple):
    """Keys and values `[T, C]`, decay and bonus `[C]`, the states that come in `[N, C]`; of the backward the gradients of the averages
    `[T, C]` and of the last sums `[N, C]` or None, and the states `[3, groups, C]` that the forward kept. `parts` is what the first pass
    wrote of segments, None where it is to be found: `[4, slots, C]` of the forward, the key that `m` was, the tokens since, `a` and `b`;
    `[3, slots, C]` of the backward, the product of `f`, `c` and `z`.
    """

    k: Any
    v: Any
    w: Any
    u: Any
    a: Any
    b: Any
    m: Any
    d_out: Any
    d_a: Any
    d_b: Any
    kept: Any
    parts: Any


class WkvResults(NamedTuple):
    """Averages `[T, C]`, the last states `[N, C]`, states before groups `[3, groups, C]` or None; of a first pass `parts` alone."""

    out: Any
    a: Any
    b: Any
    m: Any
    kept: Any
    parts: Any


class WkvGradients(NamedTuple):
    """Of keys and values `[T, C]`; of decay and bonus `[slots, C]`, of the sums that came in `[N, C]`; of a first pass `parts` alone."""

    k: Any
    v: Any
    w: Any
    u: Any
    a: Any
    b: Any
    parts: Any


class WkvNumbers(NamedTuple):
    tokens: Any  # T; packed, of all sequences
    each: Any  # segments of a sequence
    segment: Any  # tokens of a segment
    slots: Any  # segments of all sequences
    groups: Any  # of a dense sequence
    kept: Any  # of all sequences


@triton.jit
def step_weights(top, w, k, exists, S: tl.constexpr):
    """`top`, `f` and `e` [c] of a token; where nothing is before it and it is nothing, `f` 1 and `e` 0. `top` is `m`, the key that `m` was
    last, and the tokens since then.
    """
    m, peak, age = top
    age += 1.0
    aged = tl.where(exists, tl.fma(age, w, peak), m)
    after = tl.maximum(aged, k, propagate_nan=tl.PropagateNan.ALL)
    older, nothing = aged >= k, after == NONE
    f, e = weights(tl.where(nothing, 0.0, aged), tl.where(nothing, 0.0, k), S)
    return (after, tl.where(older, peak, after), tl.where(older, age, 0.0)), f, tl.where(nothing, 0.0, e)


@triton.jit
def number(x):
    return x.to(tl.float32)


@triton.jit
def group_at(span, n, S: tl.constexpr):
    """The first of the kept states of a slot."""
    before = (span.first - span.start) // S.KEEP
    if S.PACKED:
        return span.start // S.KEEP + span.sequence + before
    else:
        return span.sequence * n.groups + before


@triton.jit
def channels_of(S: tl.constexpr):
    """Sequence, channels [c] and which of them there are."""
    blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    column = tl.program_id(0) % blocks * S.BLOCK + tl.arange(0, S.BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), column, column < S.WIDTH


@triton.jit
def advanced(a, b, top, w, k, v, exists, S: tl.constexpr):
    """The state [c] after a token, and its `f` and `e`."""
    top, f, e = step_weights(top, w, k, exists, S)
    return f * a + e * v, f * b + e, top, f, e


@triton.jit
def kept_places(kept, n, group, column, COUNT: tl.constexpr, S: tl.constexpr):
    """Where `a`, `b` and `m` [c] before so many groups are kept, those of one group side by side; none if they are not kept."""
    found = ()
    if kept is not None:
        ptr, part = kept + (group * S.WIDTH + column), n.kept * S.WIDTH
        for i in tl.static_range(COUNT):
            for j in tl.static_range(3):
                found = append(found, ptr + j * part + i * S.WIDTH)
    return found


@triton.jit
def keep(ptrs, GROUP: tl.constexpr, state, exists):
    """Writes the state [c] before a group."""
    if len(ptrs) > 0:
        for i in tl.static_range(3):
            tl.store(ptrs[3 * GROUP + i], state[i], mask=exists)


@triton.jit(do_not_specialize=["n"])
def wkv_kernel(x, y, slots, n, S: tl.constexpr):
    GROUP: tl.constexpr = S.GROUP
    STEP: tl.constexpr = GROUP * S.WIDTH
    STATES: tl.constexpr = GROUP // S.KEEP
    ALONE: tl.constexpr = y.parts is not None
    slot, column, inside = channels_of(S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    w, u = tl.load(x.w + column, mask=inside, other=0.0), tl.load(x.u + column, mask=inside, other=0.0)  # [c]
    a, b, top = first_state(x, n, span, w, slot, column, inside, ALONE, S)
    at, left = span.first * S.WIDTH + column, left_of(limit, span.first)
    k_at, v_at, out_at = places(x.k, at, S), places(x.v, at, S), places(y.out, at, S)
    kept_at = kept_places(y.kept, n, group_at(span, n, S), column, STATES, S)
    some = span.first < span.last
    ks, vs = loaded_once(k_at, some, left, NONE), loaded_once(v_at, some, left, 0.0)
    k_at, v_at = moved(k_at, STEP), moved(v_at, STEP)
    for token in range(span.first, span.last, GROUP):
        left, next_ks, next_vs = left_of(limit, token), (), ()
        for i in tl.static_range(GROUP):
            if i % S.KEEP == 0:
                keep(kept_at, i // S.KEEP, (a, b, top[0]), i < left)
            k, v = number(ks[i]), number(vs[i])
            if not ALONE:
                past, own = weights(top[0] - u, k, S)
                out = (past * a + own * v) / (past * b + own)
                tl.store(out_at[i], out.to(y.out.dtype.element_ty), mask=i < left)
            a, b, top, _f, _e = advanced(a, b, top, w, k, v, i < left, S)
            next_ks = append(next_ks, tl.load(k_at[i], mask=GROUP + i < left, other=NONE))  # [c]
            next_vs = append(next_vs, tl.load(v_at[i], mask=GROUP + i < left, other=0.0))  # [c]
        ks, vs = next_ks, next_vs
        k_at, v_at, out_at = moved(k_at, STEP), moved(v_at, STEP), moved(out_at, STEP)
        kept_at = moved(kept_at, STATES * S.WIDTH)
    if ALONE:
        put_part(y.parts, n, slot, column, inside, (top[1], top[2], a, b), S)
    else:
        state, mine = span.sequence * S.WIDTH + column, ends_of(span, inside, span.last == span.end, S)
        tl.store(y.a + state, a, mask=mine)
        tl.store(y.b + state, b, mask=mine)
        tl.store(y.m + state, top[0], mask=mine)


@triton.jit
def token_gradients(before, v, factors, look, d_out, flows, exists):
    """Of a token from the sums before it: of key, value and bonus, the decay's summand, and `c` and `z` before it, all [c]."""
    inverse = 1.0 / (look[0] * before[1] + look[1])
    out = (look[0] * before[0] + look[1] * v) * inverse
    dn = tl.where(exists, d_out * inverse, 0.0)
    s = tl.where(exists, -(d_out * inverse) * out, 0.0)
    own = look[1] * (v * dn + s)
    d_k, d_v = own + factors[1] * (v * flows[0] + flows[1]), look[1] * dn + factors[1] * flows[0]
    d_w = factors[0] * (before[0] * flows[0] + before[1] * flows[1])
    return d_k, d_v, own, d_w, factors[0] * flows[0] + look[0] * dn, factors[0] * flows[1] + look[0] * s


@triton.jit
def kept_state(ptrs, mask):
    """The state [c] before a group."""
    a, b = tl.load(ptrs[0], mask=mask, other=0.0), tl.load(ptrs[1], mask=mask, other=0.0)  # [c]
    return a, b, tl.load(ptrs[2], mask=mask, other=0.0)  # [c]


@triton.jit(do_not_specialize=["n"])
def wkv_backward_kernel(x, d, slots, n, S: tl.constexpr):
    GROUP: tl.constexpr = S.GROUP
    STEP: tl.constexpr = -GROUP * S.WIDTH  # to the tokens before
    ALONE: tl.constexpr = d.parts is not None
    slot, column, inside = channels_of(S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    w, u = tl.load(x.w + column, mask=inside, other=0.0), tl.load(x.u + column, mask=inside, other=0.0)  # [c]
    d_w, d_w_lost = tl.full([S.BLOCK], 0.0, tl.float32), tl.full([S.BLOCK], 0.0, tl.float32)
    d_u, d_u_lost = d_w, d_w
    total = d_w + 1.0
    c, z = last_flows(x, n, span, slot, column, inside, ALONE, S)
    groups = (tl.maximum(span.last - span.first, 0) + GROUP - 1) // GROUP
    token, group = (span.first + tl.maximum(groups - 1, 0) * GROUP, group_at(span, n, S) + tl.maximum(groups - 1, 0))
    left, at = left_of(limit, token), token * S.WIDTH + column
    k_at, v_at, d_at = places(x.k, at, S), places(x.v, at, S), places(x.d_out, at, S)
    dk_at, dv_at, kept_at = places(d.k, at, S), places(d.v, at, S), kept_places(x.kept, n, group, column, 1, S)
    nonempty = groups > 0
    ks, vs, ds = (
        loaded_once(k_at, nonempty, left, NONE),
        loaded_once(v_at, nonempty, left, 0.0),
        loaded_once(d_at, nonempty, left, 0.0),
    )
    next_state = loaded_once(kept_at, nonempty, tl.where(inside, 3, 0), 0.0)
    k_at, v_at, d_at, kept_at = moved(k_at, STEP), moved(v_at, STEP), moved(d_at, STEP), moved(kept_at, -S.WIDTH)
    for _ in range(groups):
        a, b, m = next_state
        top = (m, m, tl.zeros_like(m))
        sums, counts, fs, es, pasts, owns = (), (), (), (), (), ()  # [c] each, of every token
        for i in tl.static_range(GROUP):
            k = number(ks[i])
            past, own = weights(top[0] - u, k, S)
            pasts, owns, sums, counts = append(pasts, past), append(owns, own), append(sums, a), append(counts, b)
            a, b, top, f, e = advanced(a, b, top, w, k, number(vs[i]), i < left, S)
            fs, es = append(fs, f), append(es, e)
        some = inside & (token - GROUP >= span.first)
        next_state = kept_state(kept_at, some)
        next_left = tl.where(some, GROUP, 0)  # [c]
        next_ks, next_vs, next_ds = (), (), ()
        for j in tl.static_range(GROUP - 1, -1, -1):
            exists, v = j < left, number(vs[j])
            d_k, d_v, own, more, c, z = token_gradients(
                (sums[j], counts[j]), v, (fs[j], es[j]), (pasts[j], owns[j]), number(ds[j]), (c, z), exists
            )
            if ALONE:
                total *= fs[j]
            else:
                tl.store(dk_at[j], d_k.to(d.k.dtype.element_ty), mask=exists)
                tl.store(dv_at[j], d_v.to(d.v.dtype.element_ty), mask=exists)
                d_u, d_u_lost = lengthened(d_u, d_u_lost, own)
                d_w, d_w_lost = lengthened(d_w, d_w_lost, tl.where(exists, more, 0.0))
            next_ks = prepend(tl.load(k_at[j], mask=j < next_left, other=NONE), next_ks)  # [c]
            next_vs = prepend(tl.load(v_at[j], mask=j < next_left, other=0.0), next_vs)  # [c]
            next_ds = prepend(tl.load(d_at[j], mask=j < next_left, other=0.0), next_ds)  # [c]
        ks, vs, ds, left, token = next_ks, next_vs, next_ds, next_left, token - GROUP
        k_at, v_at, d_at, kept_at = moved(k_at, STEP), moved(v_at, STEP), moved(d_at, STEP), moved(kept_at, -S.WIDTH)
        dk_at, dv_at = moved(dk_at, STEP), moved(dv_at, STEP)
    if ALONE:
        put_part(d.parts, n, slot, column, inside, (total, c, z), S)
    else:
        own, state = slot * S.WIDTH + column, span.sequence * S.WIDTH + column
        tl.store(d.w + own, d_w, mask=inside)
        tl.store(d.u + own, d_u, mask=inside)
        mine = ends_of(span, inside, span.first == span.start, S)
        tl.store(d.a + state, c, mask=mine)
        tl.store(d.b + state, z, mask=mine)
