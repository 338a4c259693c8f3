"""The rotation backward: gradients of keys and queries and of each token's angle, their sums from the end, then those of angles and gates.

dC_t = R(-theta_t) dq_t,    dk_t = w_{t+1} dlate_k_{t+1},    dB_t = R(-theta_t) dk_t,    dw_{t+1} = k_t . dlate_k_{t+1}
dtheta_t = dq_t x q_t + dk_t x k_t (sums of a pair's cross product, q before dq),    r_t = sum_{s >= t} dtheta_s
dangles_t = dt_t r_t,    ddt_t = angles_t . r_t + lambda_t down_t + (1 - lambda_t) e^{g_t} dw_t,    dg_t = w_t dw_t
dlambda_t = dt_t (down_t - e^{g_t} dw_t),    down_t = e^{g_{t+1}} dw_{t+1}
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.cumulative_rotary.triton_gpu.tiles import (
    angles_of,
    blocks_of,
    first_of,
    late_weight,
    load_pairs,
    load_rest,
    own_weight,
    place_of,
    rotations,
    rounded,
    store_pairs,
    store_rest,
)


class RotaryGrads(NamedTuple):
    """Gradients of the outputs `q, late_k [B, T, R, H, K]`, and of the states or None."""

    q: Any
    late_k: Any
    theta: Any
    last_k: Any
    last_own: Any


class RotaryParts(NamedTuple):
    """In float32, of each rank: of tokens `theta [R, B T, H, M]`, of blocks `totals [R, blocks, H, M]`, of late weights `[R, B T, H]`."""

    theta: Any
    totals: Any
    weight: Any


class RotaryKeyGradients(NamedTuple):
    """Of the contiguous keys and queries, and of the keys that came in, each None where it is not wanted."""

    B: Any
    C: Any
    last_k: Any


class RotaryGateGradients(NamedTuple):
    """Of the contiguous angles and gates, each None where it is not wanted."""

    angles: Any
    dt: Any
    log_decay: Any
    gate: Any


@triton.jit
def entered_backward(inputs, grads, parts, d_last_k, line, entry, n, S: tl.constexpr):
    """Gradients of the key that comes into a sequence and of its weight; `entry`: the sequence, its first row, whether it has tokens."""
    sequence, row, has_tokens = entry
    lines: tl.constexpr = S.RANKS * S.HEADS
    rank, head = line // S.HEADS, line % S.HEADS
    channel = tl.arange(0, S.BLOCK_WIDTH)
    inside, state = channel < S.WIDTH, (sequence * lines + line) * S.WIDTH + channel
    late = tl.load(grads.late_k + (row * lines + line) * S.WIDTH + channel, mask=inside & has_tokens, other=0.0)  # [c]
    late = late.to(tl.float32)
    d_weight = 0.0
    if inputs.last_k is not None:
        k = tl.load(inputs.last_k + state, mask=inside, other=0.0)  # [c]
        d_weight = tl.sum(rounded(k, grads.late_k) * late, 0)
    tl.store(parts.weight + (rank.to(tl.int64) * n.rows + row) * S.HEADS + head, d_weight, mask=has_tokens)
    if d_last_k is not None:
        weight, _ = late_weight(inputs.gates, row * S.HEADS + head, 0.0, has_tokens)
        d_k = weight * late
        if grads.last_k is not None:
            passed = tl.load(grads.last_k + state, mask=inside, other=0.0)  # [c]
            d_k += tl.where(has_tokens, 0.0, passed)
        tl.store(d_last_k + state, d_k, mask=inside)


@triton.jit(do_not_specialize=["n"])
def rotary_backward_kernel(inputs, grads, parts, found, places, n, S: tl.constexpr):
    """Keys and queries of a block's tokens, a rank and a group, summed over the group's heads in their order."""
    TOKENS: tl.constexpr = S.TOKENS
    BLOCK_PAIRS: tl.constexpr = S.BLOCK_PAIRS
    BLOCK_REST: tl.constexpr = S.BLOCK_REST
    lines: tl.constexpr = S.RANKS * S.HEADS
    share: tl.constexpr = S.HEADS // S.GROUPS
    of_token: tl.constexpr = S.RANKS * S.GROUPS
    block, place = tl.program_id(0) // of_token, tl.program_id(0) % of_token
    rank, group = place // S.GROUPS, place % S.GROUPS
    sequence, batch, first, begin, end = place_of(places, n, block, S)
    token = first + tl.arange(0, S.TOKENS)
    row = batch * n.tokens + token
    inside, goes_on, is_last = (token < end)[:, None], (token + 1 < end)[:, None], (token + 1 == end)[:, None]
    C, B = first_of(inputs.C, batch, token, rank, group, n, S), first_of(inputs.B, batch, token, rank, group, n, S)
    if S.BLOCK_PAIRS > 0:
        C_even, C_odd = load_pairs(C, inside, S)  # [t, m]
        B_even, B_odd = load_pairs(B, inside, S)  # [t, m]
        dC_even, dC_odd = tl.zeros([TOKENS, BLOCK_PAIRS], tl.float32), tl.zeros([TOKENS, BLOCK_PAIRS], tl.float32)
        dB_even, dB_odd = tl.zeros([TOKENS, BLOCK_PAIRS], tl.float32), tl.zeros([TOKENS, BLOCK_PAIRS], tl.float32)
    if S.BLOCK_REST > 0:
        B_rest = load_rest(B, inside, S)  # [t, c]
        dC_rest, dB_rest = tl.zeros([TOKENS, BLOCK_REST], tl.float32), tl.zeros([TOKENS, BLOCK_REST], tl.float32)
    for i in tl.range(0, share, num_stages=S.STAGES):
        head = group * share + i
        line = rank * S.HEADS + head
        dt, own = own_weight(inputs.gates, row * S.HEADS + head, token < end)  # [t]
        weight, _ = late_weight(inputs.gates, (row + 1) * S.HEADS + head, own, token + 1 < end)  # [t]
        weight = weight[:, None]
        d_q = grads.q + ((row * lines + line) * S.WIDTH)[:, None]
        d_late = grads.late_k + (((row + 1) * lines + line) * S.WIDTH)[:, None]
        state = (sequence * lines + line) * S.WIDTH + (token * 0)[:, None]
        d_weight = tl.zeros([TOKENS], tl.float32)
        if S.BLOCK_PAIRS > 0:
            cos, sin = rotations(inputs, dt, (batch, token, token < end), block, head, n, S)  # [t, m]
            k_even, k_odd = B_even * cos - B_odd * sin, B_odd * cos + B_even * sin
            even, odd = load_pairs(d_late, goes_on, S)  # [t, m]
            d_weight += tl.sum(rounded(k_even, d_late) * even + rounded(k_odd, d_late) * odd, 1)
            even, odd = weight * even, weight * odd
            if grads.last_k is not None:
                last_even, last_odd = load_pairs(grads.last_k + state, is_last, S)  # [t, m]
                even, odd = even + last_even, odd + last_odd
            d_theta = odd * k_even - even * k_odd
            dB_even += cos * even + sin * odd
            dB_odd += cos * odd - sin * even
            even, odd = load_pairs(d_q, inside, S)  # [t, m]
            d_theta += odd * (C_even * cos - C_odd * sin) - even * (C_odd * cos + C_even * sin)
            dC_even += cos * even + sin * odd
            dC_odd += cos * odd - sin * even
            pair = tl.arange(0, S.BLOCK_PAIRS)
            ptr = (
                parts.theta + (((rank.to(tl.int64) * n.rows + row) * S.HEADS + head) * S.PAIRS)[:, None] + pair[None, :]
            )
            tl.store(ptr, d_theta, mask=inside & (pair < S.PAIRS)[None, :])
            ptr = parts.totals + ((rank.to(tl.int64) * n.blocks + block) * S.HEADS + head) * S.PAIRS + pair
            tl.store(ptr, tl.sum(d_theta, 0), mask=pair < S.PAIRS)
        if S.BLOCK_REST > 0:
            rest = load_rest(d_late, goes_on, S)  # [t, c]
            d_weight += tl.sum(B_rest * rest, 1)
            dB_rest += weight * rest
            if grads.last_k is not None:
                dB_rest += load_rest(grads.last_k + state, is_last, S)  # [t, c]
            dC_rest += load_rest(d_q, inside, S)  # [t, c]
        ptr = parts.weight + (rank.to(tl.int64) * n.rows + row + 1) * S.HEADS + head
        tl.store(ptr, d_weight, mask=token + 1 < end)
    if first == begin:
        for i in range(share):
            line = rank * S.HEADS + group * share + i
            start = batch * n.tokens + begin
            entered_backward(inputs, grads, parts, found.last_k, line, (sequence, start, begin < end), n, S)
    at = ((row * of_token + place) * S.WIDTH)[:, None]
    if found.B is not None:
        if S.BLOCK_PAIRS > 0:
            store_pairs(found.B + at, dB_even, dB_odd, inside, S)
        if S.BLOCK_REST > 0:
            store_rest(found.B + at, dB_rest, inside, S)
    if found.C is not None:
        if S.BLOCK_PAIRS > 0:
            store_pairs(found.C + at, dC_even, dC_odd, inside, S)
        if S.BLOCK_REST > 0:
            store_rest(found.C + at, dC_rest, inside, S)


@triton.jit(do_not_specialize=["n"])
def suffixes_backward_kernel(totals, after, suffixes, d_start, places, n, S: tl.constexpr):
    """`suffixes [blocks, H, M]`: the sum of a block's totals, of those of later blocks, and of the gradient of the last angle, `after`."""
    sequence, head = (tl.program_id(0) // S.HEADS).to(tl.int64), tl.program_id(0) % S.HEADS
    block, count, _ = blocks_of(places, n, sequence)
    pair = tl.arange(0, S.BLOCK_PAIRS)
    state = tl.program_id(0).to(tl.int64) * S.PAIRS + pair
    BLOCK_PAIRS: tl.constexpr = S.BLOCK_PAIRS
    total = tl.zeros([BLOCK_PAIRS], tl.float32)
    if after is not None:
        total = tl.load(after + state, mask=pair < S.PAIRS, other=0.0)  # [m]
    tiles = tl.cdiv(count, S.LINES)
    for tile in range(tiles):
        its = (tiles - 1 - tile) * S.LINES + tl.arange(0, S.LINES)
        at = ((block + its) * S.HEADS + head).to(tl.int64)[:, None] * S.PAIRS + pair[None, :]
        mask = (its < count)[:, None] & (pair < S.PAIRS)[None, :]
        sums = tl.load(totals + at, mask=mask, other=0.0)  # [lines, m]
        for rank in range(1, S.RANKS):
            step = tl.cast(n.blocks, tl.int64) * (rank * S.HEADS * S.PAIRS)
            sums += tl.load(totals + step + at, mask=mask, other=0.0)  # [lines, m]
        tl.store(suffixes + at, total[None, :] + tl.cumsum(sums, 0, reverse=True), mask=mask)
        total += tl.sum(sums, 0)
    if d_start is not None:
        tl.store(d_start + state, total, mask=pair < S.PAIRS)


@triton.jit
def sum_of_ranks(ptr, row, mask, n, S: tl.constexpr):
    """`[R, B T, H]` summed over ranks, of the rows of a head."""
    total = tl.load(ptr + row, mask=mask, other=0.0)  # [t]
    for rank in range(1, S.RANKS):
        total += tl.load(ptr + tl.cast(n.rows, tl.int64) * (rank * S.HEADS) + row, mask=mask, other=0.0)  # [t]
    return total


@triton.jit(do_not_specialize=["n"])
def gates_backward_kernel(inputs, grads, parts, suffixes, found, places, n, S: tl.constexpr):
    """Angles and gates of a block's tokens and a head."""
    block, head = tl.program_id(0) // S.HEADS, tl.program_id(0) % S.HEADS
    sequence, batch, first, begin, end = place_of(places, n, block, S)
    token = first + tl.arange(0, S.TOKENS)
    inside, goes_on, goes_before = token < end, token + 1 < end, (token > begin) & (token < end)
    row = (batch * n.tokens + token) * S.HEADS + head
    dt, own = own_weight(inputs.gates, row, inside)  # [t]
    _, own_before = own_weight(inputs.gates, row - S.HEADS, goes_before)  # [t]
    weight, decay = late_weight(inputs.gates, row, own_before, inside)  # [t]
    _, next_decay = late_weight(inputs.gates, row + S.HEADS, own, goes_on)  # [t]
    gate = tl.load(inputs.gates.gate + row, mask=inside, other=0.0).to(tl.float32)  # [t]
    d_weight = sum_of_ranks(parts.weight, row, inside, n, S)  # [t]
    d_own = next_decay * sum_of_ranks(parts.weight, row + S.HEADS, goes_on, n, S)  # [t]
    if grads.last_own is not None:
        passed = tl.load(grads.last_own + sequence * S.HEADS + head, mask=begin < end, other=0.0)  # []
        d_own += tl.where(token + 1 == end, passed, 0.0)
    d_dt = gate * d_own + (1.0 - gate) * (decay * d_weight)
    if S.BLOCK_PAIRS > 0:
        pair = tl.arange(0, S.BLOCK_PAIRS)
        at = (block.to(tl.int64) * S.HEADS + head) * S.PAIRS + pair
        BLOCK_PAIRS: tl.constexpr = S.BLOCK_PAIRS
        later = tl.zeros([BLOCK_PAIRS], tl.float32)
        if grads.theta is not None:
            state = (sequence * S.HEADS + head) * S.PAIRS + pair
            later = tl.load(grads.theta + state, mask=(pair < S.PAIRS) & (begin < end), other=0.0)  # [m]
        last = first + S.TOKENS >= end
        of_later = tl.load(
            suffixes + at + S.HEADS * S.PAIRS, mask=(pair < S.PAIRS) & (first + S.TOKENS < end), other=0.0
        )  # [m]
        later = tl.where(last, later, of_later)
        mask = inside[:, None] & (pair < S.PAIRS)[None, :]
        at = row[:, None] * S.PAIRS + pair[None, :]
        d_theta = tl.load(parts.theta + at, mask=mask, other=0.0)  # [t, m]
        for rank in range(1, S.RANKS):
            step = tl.cast(n.rows, tl.int64) * (rank * S.HEADS * S.PAIRS)
            d_theta += tl.load(parts.theta + step + at, mask=mask, other=0.0)  # [t, m]
        d_steps = later[None, :] + tl.cumsum(d_theta, 0, reverse=True)  # [t, m]
        if found.angles is not None:
            d_angles = d_steps * dt.to(tl.float32)[:, None]
            tl.store(found.angles + at, d_angles.to(found.angles.dtype.element_ty), mask=mask)
        angles = angles_of(inputs.angles, (batch, token, inside), head, n, S).to(tl.float32)
        d_dt += tl.sum(angles * d_steps, 1)
    if found.dt is not None:
        tl.store(found.dt + row, d_dt.to(found.dt.dtype.element_ty), mask=inside)
    if found.log_decay is not None:
        tl.store(found.log_decay + row, (weight * d_weight).to(found.log_decay.dtype.element_ty), mask=inside)
    if found.gate is not None:
        d_gate = dt.to(tl.float32) * (d_own - decay * d_weight)
        tl.store(found.gate + row, d_gate.to(found.gate.dtype.element_ty), mask=inside)
