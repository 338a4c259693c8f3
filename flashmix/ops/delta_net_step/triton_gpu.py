"""All that a delta net layer does to one token between its projections, in two launches.

    q, k, v = silu(conv)    q, k of length 1    beta = sigmoid(.), g = decay(.)    S <- delta rule    o = scale S^T q

A program of the first has `BV` columns of the state of one value head, and works out its keys anew: that is little beside
the state, and columns are many enough to keep a GPU busy with one sequence. What needs a whole head, or that all programs have
read the convolution's past, is left to the second: `y = norm(o) act(gate)`, and the past moves on by one token.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.prepared import Launch
from flashmix.gpu.sizes import cdiv
from flashmix.ops.recurrence.call import DeltaNetOptions
from flashmix.ops.recurrence.step.triton_gpu import tile

L2_EPS: tl.constexpr = tl.constexpr(1e-6)

# qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, state_indices
Tensors = tuple[Tensor | None, ...]

_VECTORS = ["qkv", "strength", "past", "weight", "bias", "decay", "A_log", "dt_bias", "slots", "o"]
_VARYING = ["pool", "qkv_n", "strength_n", "strength_h", "past_n", "past_w", "decay_n", "decay_h", "slots_n"]


@triton.jit
def load_window(x, past, channel, inside, past_w, W: tl.constexpr, BW: tl.constexpr):
    """The inputs that the convolution sees at some channels, oldest first and this token's last: [channels, BW]."""
    i = tl.arange(0, BW)[None, :]
    older = tl.load(past + i * past_w + channel[:, None], mask=(i < W - 1) & inside[:, None], other=0.0)
    new = tl.load(x + channel, mask=inside, other=0.0)
    return tl.where(i == W - 1, new[:, None], older)


@triton.jit
def load_taps(weight, channel, inside, weight_d, weight_w, W: tl.constexpr, BW: tl.constexpr):
    """The convolution's weights of some channels: [channels, BW]."""
    i = tl.arange(0, BW)[None, :]
    at = weight + channel[:, None] * weight_d + i * weight_w
    return tl.load(at, mask=(i < W) & inside[:, None], other=0.0)


@triton.jit
def convolve(window, taps, bias, channel, inside):
    """silu(sum_i weight[:, W-1-i] x_{t-i} + bias) at some channels, in float32: [channels]."""
    y = tl.sum(window.to(tl.float32) * taps.to(tl.float32), 1)
    if bias is not None:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def find_slot(slots, n, slots_n, pool):
    """The slot of sequence n and whether it is one of the pool's."""
    slot = n
    live = n >= 0
    if slots is not None:
        slot = tl.load(slots + n * slots_n).to(tl.int64)
        live = (slot >= 0) & (slot < pool)
        slot = tl.where(live, slot, 0)
    return slot, live


@triton.jit
def decay_factor(
    decay, A_log, dt_bias, h, d, in_k, lower, K: tl.constexpr, CHANNEL: tl.constexpr, BOUNDED: tl.constexpr
):
    """e^g of one head, a number or [BK]: g = -exp(A_log) softplus(x + dt_bias), or lower sigmoid(exp(A_log) (x + dt_bias))."""
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    if CHANNEL:
        x = tl.load(decay + d, mask=in_k, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + h * K + d, mask=in_k, other=0.0).to(tl.float32)
    else:
        x = tl.load(decay).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    if BOUNDED:
        return tl.exp(lower * tl.sigmoid(rate * x))
    return tl.exp(-rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VECTORS)
def delta_net_kernel(
    qkv, strength, state, past, weight, bias, decay, A_log, dt_bias, slots, o,
    pool, qkv_n, strength_n, strength_h, state_n, state_h, past_n, past_w, weight_d, weight_w,
    decay_n, decay_h, slots_n, scale, lower,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
    CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, STRONGEST: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and value head, BV columns: the state and the output `[B, HV, V]` before its norm."""
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    row = tl.program_id(0) // COLUMNS
    n, h = (row // HV).to(tl.int64), row % HV
    d = tl.arange(0, BK)  # [BK]
    c = (tl.program_id(0) % COLUMNS) * BV + tl.arange(0, BV)  # [BV]
    slot, live = find_slot(slots, n, slots_n, pool)
    in_k, in_v = (d < K) & live, (c < V) & live
    at = state + slot * state_n + h.to(tl.int64) * state_h + (d[:, None] * V + c[None, :])  # [BK, BV]
    inside = in_k[:, None] & in_v[None, :]
    qkv += n * qkv_n
    past += slot * past_n
    key = (h // (HV // H)) * K + d
    value = 2 * H * K + h * V + c
    # Everything is asked for first, the state last: Triton lays out the tile by the load that is nearest to its use.
    qs = load_window(qkv, past, key, in_k, past_w, W, BW)  # [BK, BW]
    ks = load_window(qkv, past, H * K + key, in_k, past_w, W, BW)  # [BK, BW]
    vs = load_window(qkv, past, value, in_v, past_w, W, BW)  # [BV, BW]
    q_taps = load_taps(weight, key, in_k, weight_d, weight_w, W, BW)
    k_taps = load_taps(weight, H * K + key, in_k, weight_d, weight_w, W, BW)
    v_taps = load_taps(weight, value, in_v, weight_d, weight_w, W, BW)
    S = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BK, BV]
    q = convolve(qs, q_taps, bias, key, in_k)  # [BK]
    k = convolve(ks, k_taps, bias, H * K + key, in_k)  # [BK]
    v = convolve(vs, v_taps, bias, value, in_v)  # [BV]
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + L2_EPS))
    k = k / tl.sqrt(tl.sum(k * k, 0) + L2_EPS)
    if decay is not None:
        factor = decay_factor(
            decay + n * decay_n + h * decay_h, A_log, dt_bias, h, d, d < K, lower, K, CHANNEL, BOUNDED
        )
        S = S * factor[:, None] if CHANNEL else S * factor
    beta = STRONGEST * tl.sigmoid(tl.load(strength + n * strength_n + h * strength_h).to(tl.float32))
    u = beta * (v - tl.sum(S * k[:, None], 0))  # [BV]
    S += k[:, None] * u[None, :]
    tl.store(at, S.to(state.dtype.element_ty), mask=inside)
    tl.store(o + (n * HV + h) * V + c, tl.sum(S * q[:, None], 0), mask=c < V)


@triton.jit(
    do_not_specialize=["pool", "qkv_n", "past_n", "past_w", "gate_n", "gate_h", "slots_n"],
    do_not_specialize_on_alignment=["qkv", "past", "norm_weight", "gate", "slots", "o", "y"],
)
def finish_kernel(
    qkv, past, norm_weight, gate, slots, o, y,
    pool, qkv_n, past_n, past_w, gate_n, gate_h, slots_n, eps,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The norm and the gate of one value head, and a share of the channels whose past moves on by one token."""
    SHARE: tl.constexpr = (C + HV - 1) // HV
    n, h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    slot, live = find_slot(slots, n, slots_n, pool)
    past += slot * past_n
    channel = h * SHARE + tl.arange(0, BC)  # [BC]
    mine = (channel < C) & (tl.arange(0, BC) < SHARE) & live
    window = load_window(qkv + n * qkv_n, past, channel, mine, past_w, W, BW)  # [BC, BW]
    c = tl.arange(0, BV)  # [BV]
    out = tl.load(o + (n * HV + h) * V + c, mask=c < V, other=0.0)
    out = out / tl.sqrt(tl.sum(out * out, 0) / V + eps)
    if norm_weight is not None:
        out *= tl.load(norm_weight + c, mask=c < V, other=0.0).to(tl.float32)
    if gate is not None:
        z = tl.load(gate + n * gate_n + h * gate_h + c, mask=c < V, other=0.0).to(tl.float32)
        out *= tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    tl.store(y + (n * HV + h) * V + c, tl.where(live, out, 0.0).to(y.dtype.element_ty), mask=c < V)
    tl.debug_barrier()  # all threads have read the past
    i = tl.arange(0, BW)[None, :]
    tl.store(past + (i - 1) * past_w + channel[:, None], window, mask=(i > 0) & (i < W) & mine[:, None])


def delta_net_step(tensors: Tensors, options: DeltaNetOptions) -> Tensor:
    """The output `[B, HV, V]`; states are written."""
    ready, back = _ready(tensors)
    y = prepare(ready, options)(ready)
    for t, copy in back:
        t.copy_(copy)
    return y


def prepare(tensors: Tensors, options: DeltaNetOptions) -> Any:
    """A function of tensors like these that does as `delta_net_step`, its choices made; None if they must be copied first."""
    if any(copy is not t for t, copy in zip(tensors, _ready(tensors)[0], strict=True)):
        return None
    advance, finish = _launches(tensors, options)
    qkv, state = tensors[0], tensors[2]
    assert qkv is not None and state is not None
    shape, dtype, device = (qkv.shape[0], state.shape[1], state.shape[3]), qkv.dtype, qkv.device

    def run(tensors: Tensors) -> Tensor:
        qkv, *_, norm_weight, gate, slots = tensors
        o = torch.empty(shape, dtype=torch.float32, device=device)
        y = torch.empty(shape, dtype=dtype, device=device)
        advance(device, (*tensors[:9], slots, o))
        finish(device, (qkv, tensors[3], norm_weight, gate, slots, o, y))
        return y

    return run


def _ready(tensors: Tensors) -> tuple[Tensors, list[tuple[Tensor, Tensor]]]:
    """The tensors as the kernel takes them, and the pairs of what was copied though it is written."""
    ready, back = list(tensors), []
    for at in (0, 3, 5, 6, 7, 8, 9, 10):  # rows of channels, and whole vectors of heads
        t = tensors[at]
        if t is not None and not (
            t.is_contiguous() if at in (7, 8) else _has_unit_stride(t) or (at == 6 and t.dim() == 2)
        ):
            ready[at] = t.contiguous()
    state = tensors[2]
    assert state is not None
    V = state.shape[-1]
    if (state.stride(-1) != 1 and V > 1) or (state.stride(-2) != V and state.shape[-2] > 1):
        ready[2] = state.contiguous()
    for at in (2, 3):
        before, after = tensors[at], ready[at]
        if before is not None and after is not None and before is not after:
            back.append((before, after))
    return tuple(ready), back


def _has_unit_stride(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _launches(tensors: Tensors, options: DeltaNetOptions) -> tuple[Launch, Launch]:
    """The two launches for tensors of these sizes."""
    qkv, strength, state, past, weight, _, decay, _, _, _, gate, slots = tensors
    assert qkv is not None and strength is not None and state is not None and past is not None and weight is not None
    (B, C), (P, HV, K, V), W = qkv.shape, state.shape, weight.shape[1]
    BK, BV, warps = tile(K, V, state.element_size())
    slots_n = 0 if slots is None else slots.stride(0)
    numbers = (
        P, qkv.stride(0), *strength.stride(), *state.stride()[:2], *past.stride()[:2], *weight.stride(),
        *((0, 0) if decay is None else decay.stride()[:2]), slots_n, K**-0.5, options.lower or 0.0,
    )  # fmt: skip
    BW = triton.next_power_of_2(W)
    constants = {
        "H": options.heads, "HV": HV, "K": K, "V": V, "W": W, "BK": BK, "BV": BV, "BW": BW,
        "CHANNEL": decay is not None and decay.dim() == 3, "BOUNDED": options.lower is not None,
        "STRONGEST": 2.0 if options.negative_eigenvalues else 1.0,
    }  # fmt: skip
    advance = Launch(delta_net_kernel, B * HV * cdiv(V, BV), numbers, constants, warps)
    gates = (0, 0) if gate is None else gate.stride()[:2]
    constants = {
        "HV": HV, "V": V, "C": C, "W": W, "BV": triton.next_power_of_2(V),
        "BC": triton.next_power_of_2(cdiv(C, HV)), "BW": BW, "SIGMOID": options.gate_activation == "sigmoid",
    }  # fmt: skip
    numbers = (P, qkv.stride(0), *past.stride()[:2], *gates, slots_n, options.eps)
    return advance, Launch(finish_kernel, B * HV, numbers, constants, 4)
