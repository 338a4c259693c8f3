"""The running softmax on a GPU: a warp goes through the tokens of 32 channels of a sequence or of a segment of it, a thread has one.

    m_t = max(m_{t-1}, s_t);  p_t = e^{m_{t-1} - m_t} c_{t-1},  c_t = p_t + e^{s_t - m_t},  z_t = m_t + log c_t
    w_t = e^{s_t - m_t} / c_t;  g_t = log(p_t / c_t), of a small weight by the series of log(1 + x), as 1 - w would lose it

The next GROUP tokens are loaded while those of this group are computed; segments as in the scan. Backwards, with `D_t` the gradient of
`z_t` by all later tokens and `1 - w_t = e^{g_t}`, which is kept:

    a_t = (dw_t e^{g_t} - dg_t) w_t;  ds_t = a_t + w_t D_t;  D_{t-1} = e^{g_t} D_t - a_t

Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.backward import lengthened, prepend
from flashmix.ops.scan.triton_gpu.kernels import joined, left_of, put_segment, span_of
from flashmix.ops.scan.triton_gpu.numbers import exponential_and_rest
from flashmix.ops.scan.triton_gpu.places import loaded_once, moved, places
from flashmix.ops.scan.triton_gpu.weights import fast_exponential_and_rest
from flashmix.ops.wkv.triton_gpu.kernels import channels_of
from flashmix.ops.wkv.triton_gpu.states import power, sums_of

NONE = tl.constexpr(float("-inf"))  # m of no tokens, and the logit of a token that is not there


class SoftmaxSpec(NamedTuple):
    WIDTH: int  # channels of a sequence
    BLOCK: int  # c
    GROUP: int  # tokens that are loaded at a time
    JOINED: int  # segments that are read at a time
    PACKED: bool
    SEGMENTS: bool
    PRECISE: bool  # exponentials to float32's rounding
    MAXIMUM: bool = False  # of the scan whose `joined` the backward takes
    COMPLEX: bool = False
    TURNING: bool = False


class SoftmaxInputs(NamedTuple):
    """Logits `[T, C]`, the first `z` `[N, C]`, and of segments `m` and `c` from no past, `[slots, C]`, None where they are to be found."""

    s: Any
    z: Any
    m: Any
    c: Any


class SoftmaxResults(NamedTuple):
    """Weights and log decays `[T, C]`, the last `z` `[N, C]`; of a pass over segments alone `m` and `c`."""

    weight: Any
    decay: Any
    z: Any
    m: Any
    c: Any


class SoftmaxFlows(NamedTuple):
    """Log decays and the gradients of all outputs, None for zeros; of segments the products of `e^g` and `D` from zero."""

    decay: Any
    d_weight: Any
    d_decay: Any
    d_z: Any
    totals: Any
    ends: Any


class SoftmaxGradients(NamedTuple):
    """Of logits and of the first `z`; of a pass over segments alone `totals` and `ends`."""

    s: Any
    z: Any
    totals: Any
    ends: Any


@triton.jit
def advanced(m, c, s, S: tl.constexpr):
    """`m_t`, `p_t` and `e^{s_t - m_t}` [c]; nothing is added where no logit was above -inf yet."""
    after = tl.maximum(m, s, propagate_nan=tl.PropagateNan.ALL)
    nothing = after == NONE
    small = power(-tl.abs(tl.where(nothing, 0.0, m - s)), S)
    own = tl.where(m >= s, small, 1.0)
    return after, tl.where(m >= s, 1.0, small) * c, tl.where(nothing, 0.0, own)


@triton.jit
def weight_and_decay(past, own):
    """`own / (past + own)`, and `log(past / (past + own))` [c]; 0 and 0 where both are 0."""
    total = past + own
    inverse = 1.0 / total
    rest = own / (past + total)  # log(1 + x) = 2 artanh(x / (2 + x))
    q = rest * rest
    series = ((q * 0.14285715 + 0.2) * q + 0.33333334) * q * rest + rest
    decay = tl.where(own <= 0.25 * past, -2.0 * series, tl.log(past * inverse))
    return tl.where(total == 0.0, 0.0, own * inverse), tl.where(total == 0.0, 0.0, decay)


@triton.jit
def past_of(x, m, c, slot, count, column, inside, S: tl.constexpr):
    """`m` and `c` [c] after so many segments, the slots from `slot` on."""
    JOINED: tl.constexpr = S.JOINED
    for first in range(0, count, JOINED):
        tops, sums = (), ()
        for i in tl.static_range(JOINED):
            at, exists = (slot + first + i) * S.WIDTH + column, inside & (first + i < count)
            tops = append(tops, tl.load(x.m + at, mask=exists, other=NONE))  # [c]
            sums = append(sums, tl.load(x.c + at, mask=exists, other=0.0))  # [c]
        for i in tl.static_range(JOINED):
            m, past, own = advanced(m, c, tops[i], S)
            c = past + own * sums[i]
    return m, c


@triton.jit(do_not_specialize=["n"])
def running_softmax_kernel(x, y, slots, n, S: tl.constexpr):
    GROUP: tl.constexpr = S.GROUP
    STEP: tl.constexpr = GROUP * S.WIDTH
    slot, column, inside = channels_of(S)
    span = span_of(slots, n, slot, S)
    limit, state = tl.where(inside, span.last, span.first), span.sequence * S.WIDTH + column  # [c]
    m, c = tl.full([S.BLOCK], NONE, tl.float32), tl.full([S.BLOCK], 0.0, tl.float32)
    if y.m is None:
        m = tl.load(x.z + state, mask=inside, other=0.0)  # [c]
        c = tl.where(m == NONE, 0.0, 1.0)
        if S.SEGMENTS:
            m, c = past_of(x, m, c, slot - span.place, span.place, column, inside, S)
    at, left = span.first * S.WIDTH + column, left_of(limit, span.first)
    s_at, weight_at, decay_at = places(x.s, at, S), places(y.weight, at, S), places(y.decay, at, S)
    logits = loaded_once(s_at, span.first < span.last, left, NONE)
    s_at = moved(s_at, STEP)
    for token in range(span.first, span.last, GROUP):
        left, later = left_of(limit, token), ()
        for i in tl.static_range(GROUP):
            m, past, own = advanced(m, c, logits[i].to(tl.float32), S)
            c = past + own
            if y.m is None:
                weight, decay = weight_and_decay(past, own)
                tl.store(weight_at[i], weight.to(y.weight.dtype.element_ty), mask=i < left)
                tl.store(decay_at[i], decay, mask=i < left)
            later = append(later, tl.load(s_at[i], mask=GROUP + i < left, other=NONE))  # [c]
        logits = later
        s_at, weight_at, decay_at = moved(s_at, STEP), moved(weight_at, STEP), moved(decay_at, STEP)
    if y.m is None:
        ends = inside & (span.last == span.end)
        if S.SEGMENTS:  # an empty sequence, which has no segment, keeps its state
            ends = ends & (span.first < span.last)
        tl.store(y.z + state, m + tl.log(tl.where(c == 0.0, 1.0, c)), mask=ends)
    else:
        tl.store(y.m + slot * S.WIDTH + column, m, mask=inside)
        tl.store(y.c + slot * S.WIDTH + column, c, mask=inside)


@triton.jit
def factor_and_weight(g, S: tl.constexpr):
    """`e^g` and `1 - e^g` [c]."""
    if S.PRECISE:
        return exponential_and_rest(g)
    else:
        return fast_exponential_and_rest(g)


@triton.jit
def faded(x, lost, factor, weight, own, S: tl.constexpr):
    """`e^g x - own` [c] and what rounding has lost so far: of small weights `x` less `weight x + own`, for thousands of products would lose
    more than float32 has to spare.
    """
    if S.PRECISE:
        after, rest = lengthened(x, lost, -(weight * x + own))
        small = weight < 0.5
        return tl.where(small, after, factor * x - own), tl.where(small, rest, factor * lost)
    else:
        return factor * x - own, lost


@triton.jit
def with_flow(ptrs, j: tl.constexpr, mask, flows):
    """Gradients [c] with that of one more token in front; none of an absent tensor."""
    if len(ptrs) == 0:
        return flows
    else:
        return prepend(tl.load(ptrs[j], mask=mask, other=0.0), flows)  # [c]


@triton.jit
def first_flows(ptrs, some, left):
    """Gradients of the last tokens of a slot."""
    if len(ptrs) == 0:
        return ()
    else:
        return loaded_once(ptrs, some, left, 0.0)


@triton.jit
def flow_of(flows, j: tl.constexpr):
    """That of one token; 0 where there are none."""
    if len(flows) == 0:
        return 0.0
    else:
        return flows[j].to(tl.float32)


@triton.jit
def later_flow(x, span, n, slot, column, inside, S: tl.constexpr):
    """`D` [c] after a slot's last token."""
    flow = sums_of(x.d_z, span.sequence * S.WIDTH + column, inside, S)
    if S.SEGMENTS:
        later = tl.maximum(tl.cdiv(span.end - span.start, n.segment) - 1 - span.place, 0)
        later = tl.where(span.place < 0, 0, later)
        flow = joined(x, flow, slot + later, later, -1, column, inside, S)
    return flow


@triton.jit(do_not_specialize=["n"])
def running_softmax_backward_kernel(x, d, slots, n, S: tl.constexpr):
    GROUP: tl.constexpr = S.GROUP
    STEP: tl.constexpr = -GROUP * S.WIDTH  # to the tokens before
    slot, column, inside = channels_of(S)
    span = span_of(slots, n, slot, S)
    total, flow = tl.full([S.BLOCK], 1.0, tl.float32), tl.full([S.BLOCK], 0.0, tl.float32)
    total_lost, flow_lost = flow, flow
    if d.totals is None:
        flow = later_flow(x, span, n, slot, column, inside, S)
    groups = (tl.maximum(span.last - span.first, 0) + GROUP - 1) // GROUP
    token = span.first + tl.maximum(groups - 1, 0) * GROUP
    left, at = left_of(tl.where(inside, span.last, span.first), token), token * S.WIDTH + column  # [c]
    g_at, weight_at, decay_at = places(x.decay, at, S), places(x.d_weight, at, S), places(x.d_decay, at, S)
    s_at, some = places(d.s, at, S), groups > 0
    decays, d_weights, d_decays = (
        loaded_once(g_at, some, left, 0.0),
        first_flows(weight_at, some, left),
        first_flows(decay_at, some, left),
    )
    g_at, weight_at, decay_at = moved(g_at, STEP), moved(weight_at, STEP), moved(decay_at, STEP)
    for _ in range(groups):
        next_left = tl.where(inside & (token - GROUP >= span.first), GROUP, 0)  # [c]
        next_decays, next_weights, next_flows = (), (), ()
        for j in tl.static_range(GROUP - 1, -1, -1):
            factor, weight = factor_and_weight(decays[j], S)
            own = (flow_of(d_weights, j) * factor - flow_of(d_decays, j)) * weight
            if d.totals is None:
                tl.store(s_at[j], (own + weight * flow).to(d.s.dtype.element_ty), mask=j < left)
            else:
                total, total_lost = faded(total, total_lost, factor, weight, 0.0, S)
            flow, flow_lost = faded(flow, flow_lost, factor, weight, own, S)
            next_decays = prepend(tl.load(g_at[j], mask=j < next_left, other=0.0), next_decays)  # [c]
            next_weights = with_flow(weight_at, j, j < next_left, next_weights)
            next_flows = with_flow(decay_at, j, j < next_left, next_flows)
        decays, d_weights, d_decays = next_decays, next_weights, next_flows
        left, token = next_left, token - GROUP
        g_at, s_at = moved(g_at, STEP), moved(s_at, STEP)
        weight_at, decay_at = moved(weight_at, STEP), moved(decay_at, STEP)
    if d.totals is None:
        mine = inside & (span.first == span.start)
        if S.SEGMENTS:
            mine = mine & (span.first < span.last)
        tl.store(d.z + span.sequence * S.WIDTH + column, flow, mask=mine)
    else:
        put_segment(d, slot * S.WIDTH + column, inside, total, flow, S)
