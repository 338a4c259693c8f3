"""The step of the selective scan on a GPU: a program has a block of channels of one sequence and all their states.

    dt = softplus(dt + bias);  h <- e^{dt A} h + dt u B;  y = (h C + D u) silu(z)

Tiles: `c` channels, `s` states, up to a power of two with zeros.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import activation
from flashmix.op.call import Outputs
from flashmix.ops.decay.triton_gpu import softplus
from flashmix.ops.delta_net_step.triton_gpu import find_slot
from flashmix.ops.scan.triton_gpu.numbers import exponential
from flashmix.ops.selective_scan.step.call import SelectiveStepCall

NUMBERS, WARPS = 1024, 1  # of states in a program


class SelectiveStepInputs(NamedTuple):
    """Contiguous tensors: `u`, `dt`, `z` `[B, T, D]`, `A` `[D, S]`, `B`, `C` `[B, T, G, S]`, `D`, `bias` `[D]`; `slots` `[B]`; absent ones
    None."""

    u: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any
    slots: Any


class SelectiveStepNumbers(NamedTuple):
    tokens: Any
    pool: Any  # slots
    state: Any  # stride of a slot
    slots: Any  # stride of `slots`


class SelectiveStepSpec(NamedTuple):
    WIDTH: int  # D, channels
    STATES: int  # S
    BLOCK: int  # c
    TILE: int  # s
    SHARES: int  # G, groups of channels that share B and C
    SOFTPLUS: bool
    PRECISE: bool


@triton.jit
def numbers_of(tensor, column, inside, S: tl.constexpr):
    """A number a channel [c], zeros if there are none."""
    BLOCK: tl.constexpr = S.BLOCK
    if tensor is None:
        return tl.full([BLOCK], 0.0, tl.float32)
    else:
        return tl.load(tensor + column, mask=inside, other=0.0).to(tl.float32)  # [c]


@triton.jit(do_not_specialize=["n"])
def selective_step_kernel(x, y_ptr, state, n, S: tl.constexpr):
    """All tokens of one sequence and block of channels; the states are written."""
    BLOCK: tl.constexpr = S.BLOCK
    TILE: tl.constexpr = S.TILE
    SIZE: tl.constexpr = S.WIDTH // S.SHARES
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row, block = (tl.program_id(0) // (S.SHARES * blocks)).to(tl.int64), tl.program_id(0) % (S.SHARES * blocks)
    share, lane = block // blocks, (block % blocks) * BLOCK + tl.arange(0, BLOCK)
    column, inside = share * SIZE + lane, lane < SIZE
    slot, live = find_slot(x.slots, row, n.slots, n.pool)
    s = tl.arange(0, TILE)
    place = column[:, None] * S.STATES + s[None, :]
    within = inside[:, None] & (s < S.STATES)[None, :]
    ptr = state + (slot * n.state + place)
    h = tl.load(ptr, mask=within & live, other=0.0).to(tl.float32)  # [c, s]
    rates = tl.maximum(tl.load(x.A + place, mask=within, other=0.0).to(tl.float32), -1e30)  # [c, s]
    bias, skip = numbers_of(x.bias, column, inside, S), numbers_of(x.D, column, inside, S)
    for t in range(n.tokens):
        token = row * n.tokens + t
        at = token * S.WIDTH + column
        u = tl.load(x.u + at, mask=inside, other=0.0).to(tl.float32)  # [c]
        dt = tl.load(x.dt + at, mask=inside, other=0.0).to(tl.float32) + bias  # [c]
        if S.SOFTPLUS:
            dt = softplus(dt, S.PRECISE)
        shared = (token * S.SHARES + share) * S.STATES + s
        B = tl.load(x.B + shared, mask=s < S.STATES, other=0.0).to(tl.float32)  # [s]
        C = tl.load(x.C + shared, mask=s < S.STATES, other=0.0).to(tl.float32)  # [s]
        if S.PRECISE:
            factor = exponential(dt[:, None] * rates)
        else:
            factor = tl.exp2(dt[:, None] * (rates * 1.4426950408889634))
        h = factor * h + (dt * u)[:, None] * B[None, :]
        y = tl.sum(h * C[None, :], 1) + skip * u
        if x.z is not None:
            z = tl.load(x.z + at, mask=inside, other=0.0).to(tl.float32)  # [c]
            y *= activation(z, "silu", S.PRECISE)
        tl.store(y_ptr + at, tl.where(live, y, 0.0).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(ptr, h.to(state.dtype.element_ty), mask=within & live)


def forward(call: SelectiveStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, D]`; the states are written."""
    (y,) = call.results()
    if not y.numel():
        return (y,), ()
    (batch, tokens, width), states, groups = call.u.shape, call.A.shape[1], call.B.shape[2]
    tile = power_of_two(states)
    block = max(min(NUMBERS // tile, power_of_two(width // groups)), 1)
    spec = SelectiveStepSpec(width, states, block, tile, groups, call.softplus, call.dtype.itemsize == 4)
    names = {"u": "u", "dt": "dt", "A": "A", "B": "B", "C": "C", "D": "D", "z": "z", "bias": "dt_bias"}
    tensors: dict[str, Any] = {name: getattr(call, field) for name, field in names.items()}
    given = {name: None if t is None else t.contiguous() for name, t in tensors.items()}
    slots = call.state_indices
    numbers = SelectiveStepNumbers(
        tokens, call.state.shape[0], call.state.stride(0), 0 if slots is None else slots.stride(0)
    )
    grid = batch * groups * cdiv(width // groups, block)
    bound(selective_step_kernel, spec, num_warps=WARPS)(
        grid, SelectiveStepInputs(**given, slots=slots), y, call.state, numbers
    )
    return (y,), ()
