"""The rotation forward: sums of turns by blocks of tokens, the angles before blocks, then queries and late keys.

theta_t = theta_{t-1} + dt_t angles_t,    q_t = R(theta_t) C_t,    late_k_{t+1} = w_{t+1} R(theta_t) B_t
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.cumulative_rotary.triton_gpu.tiles import (
    TURN,
    WHOLE,
    angles_of,
    blocks_of,
    first_of,
    fixed,
    late_weight,
    load_pairs,
    load_rest,
    own_weight,
    place_of,
    rotations,
    rounded,
    store_pairs,
    store_rest,
    turns_of,
)


class RotaryInputs(NamedTuple):
    """`B, C [B, T, R, G, K]`, `angles [B, T, H, M]` are `Strided`; `offsets [blocks, H, M]`: angles before blocks;
    `last_k [N, R, H, K]`: keys that come in, or None."""

    B: Any
    C: Any
    angles: Any
    gates: Any
    offsets: Any
    last_k: Any


class RotaryOutputs(NamedTuple):
    q: Any
    late_k: Any
    last_k: Any
    last_own: Any


@triton.jit(do_not_specialize=["n"])
def turns_forward_kernel(angles, dt_ptr, totals, places, n, S: tl.constexpr):
    """`totals [blocks, H, M]`: the turns of each block of a head."""
    block, head = tl.program_id(0) // S.HEADS, tl.program_id(0) % S.HEADS
    _, batch, first, _, end = place_of(places, n, block, S)
    token = first + tl.arange(0, S.TOKENS)
    pair = tl.arange(0, S.BLOCK_PAIRS)
    dt = tl.load(dt_ptr + (batch * n.tokens + token) * S.HEADS + head, mask=token < end, other=0.0)  # [t]
    turns = turns_of(angles_of(angles, (batch, token, token < end), head, n, S), dt)  # [t, m]
    tl.store(totals + tl.program_id(0).to(tl.int64) * S.PAIRS + pair, tl.sum(turns, 0), mask=pair < S.PAIRS)


@triton.jit(do_not_specialize=["n"])
def offsets_forward_kernel(totals, start, last, places, n, S: tl.constexpr):
    """Totals in place to the angles before blocks, and the `last` angles; a program for each sequence and head."""
    sequence, head = (tl.program_id(0) // S.HEADS).to(tl.int64), tl.program_id(0) % S.HEADS
    block, count, tokens = blocks_of(places, n, sequence)
    pair = tl.arange(0, S.BLOCK_PAIRS)
    state = tl.program_id(0).to(tl.int64) * S.PAIRS + pair
    BLOCK_PAIRS: tl.constexpr = S.BLOCK_PAIRS
    own = tl.zeros([BLOCK_PAIRS], last.dtype.element_ty)
    if start is not None:
        own = tl.load(start + state, mask=pair < S.PAIRS, other=0.0)  # [m]
    theta = fixed(own.to(tl.float64) / TURN)
    for line in range(0, count, S.LINES):
        its = line + tl.arange(0, S.LINES)
        ptr = totals + ((block + its) * S.HEADS + head).to(tl.int64)[:, None] * S.PAIRS + pair[None, :]
        mask = (its < count)[:, None] & (pair < S.PAIRS)[None, :]
        turns = tl.load(ptr, mask=mask, other=0)  # [lines, m]
        tl.store(ptr, theta[None, :] + tl.cumsum(turns, 0) - turns, mask=mask)
        theta += tl.sum(turns, 0)
    within = (theta & ((1 << 62) - 1)).to(tl.float64) * (TURN / WHOLE)
    tl.store(last + state, tl.where(tokens > 0, within.to(last.dtype.element_ty), own), mask=pair < S.PAIRS)


@triton.jit
def entered_forward(inputs, outputs, line, sequence, row, has_tokens, S: tl.constexpr):
    """The late key of a sequence's first row, and the states of an empty one."""
    BLOCK_WIDTH: tl.constexpr = S.BLOCK_WIDTH
    lines: tl.constexpr = S.RANKS * S.HEADS
    rank, head = line // S.HEADS, line % S.HEADS
    weight, _ = late_weight(inputs.gates, row * S.HEADS + head, 0.0, has_tokens)
    channel = tl.arange(0, S.BLOCK_WIDTH)
    inside, state = channel < S.WIDTH, (sequence * lines + line) * S.WIDTH + channel
    late_k = outputs.late_k + (row * lines + line) * S.WIDTH + channel
    k = tl.zeros([BLOCK_WIDTH], tl.float32)
    if inputs.last_k is not None:
        k = rounded(tl.load(inputs.last_k + state, mask=inside, other=0.0), late_k)  # [c]
    tl.store(late_k, (weight * k).to(late_k.dtype.element_ty), mask=inside & has_tokens)
    tl.store(outputs.last_k + state, k, mask=inside & (has_tokens == 0))
    tl.store(outputs.last_own + sequence * S.HEADS + head, 0.0, mask=(has_tokens == 0) & (rank == 0))


@triton.jit(do_not_specialize=["n"])
def rotary_forward_kernel(inputs, outputs, places, n, S: tl.constexpr):
    """Queries of a block's tokens and a line, and the late keys of the tokens after them."""
    lines: tl.constexpr = S.RANKS * S.HEADS
    block, line = tl.program_id(0) // lines, tl.program_id(0) % lines
    rank, head = line // S.HEADS, line % S.HEADS
    group = head // (S.HEADS // S.GROUPS)
    sequence, batch, first, begin, end = place_of(places, n, block, S)
    token = first + tl.arange(0, S.TOKENS)
    inside, goes_on = token < end, token + 1 < end
    row = batch * n.tokens + token
    dt, own = own_weight(inputs.gates, row * S.HEADS + head, inside)  # [t]
    weight, _ = late_weight(inputs.gates, (row + 1) * S.HEADS + head, own, goes_on)  # [t]
    C, B = first_of(inputs.C, batch, token, rank, group, n, S), first_of(inputs.B, batch, token, rank, group, n, S)
    q = outputs.q + ((row * lines + line) * S.WIDTH)[:, None]
    late_k = outputs.late_k + (((row + 1) * lines + line) * S.WIDTH)[:, None]
    state = (sequence * lines + line) * S.WIDTH
    last_k = outputs.last_k + state + (token * 0)[:, None]
    where = batch, token, inside
    inside, goes_on, is_last, weight = inside[:, None], goes_on[:, None], (token + 1 == end)[:, None], weight[:, None]
    if S.BLOCK_PAIRS > 0:
        cos, sin = rotations(inputs, dt, where, block, head, n, S)  # [t, m]
        even, odd = load_pairs(C, inside, S)  # [t, m]
        store_pairs(q, even * cos - odd * sin, odd * cos + even * sin, inside, S)
        even, odd = load_pairs(B, inside, S)  # [t, m]
        k_even, k_odd = rounded(even * cos - odd * sin, late_k), rounded(odd * cos + even * sin, late_k)
        store_pairs(late_k, weight * k_even, weight * k_odd, goes_on, S)
        store_pairs(last_k, k_even, k_odd, is_last, S)
    if S.BLOCK_REST > 0:
        store_rest(q, load_rest(C, inside, S), inside, S)  # [t, c]
        k = load_rest(B, inside, S)  # [t, c]
        store_rest(late_k, weight * k, goes_on, S)
        store_rest(last_k, k, is_last, S)
    if rank == 0:
        tl.store(outputs.last_own + sequence * S.HEADS + head + token * 0, own, mask=token + 1 == end)
    if first == begin:
        entered_forward(inputs, outputs, line, sequence, batch * n.tokens + begin, begin < end, S)
