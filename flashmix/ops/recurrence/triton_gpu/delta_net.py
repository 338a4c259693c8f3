"""All that a delta net layer does to one token between its projections, in one launch.

    q, k, v = silu(conv)    q, k of length 1    beta = sigmoid(.), g = decay(.)    S <- delta rule    y = norm(scale S^T q) act(gate)

A program has one head of keys and the value heads that read it, so that it alone moves the convolution's past of its
channels on. Where very many value heads share a key head, a program has one of them, and a second launch moves the keys' past.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.recurrence.problem import DeltaNetOptions
from flashmix.ops.recurrence.triton_gpu.launch import Launch

MOST_HEADS = 4  # value heads that one program does in turn
L2_EPS: tl.constexpr = tl.constexpr(1e-6)

# qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, state_indices
Tensors = tuple[Tensor | None, ...]

_VECTORS = [
    "qkv",
    "strength",
    "past",
    "weight",
    "bias",
    "decay",
    "A_log",
    "dt_bias",
    "norm_weight",
    "gate",
    "slots",
    "o",
]
_VARYING = ["pool", "slots_n", "past_w", *(f"{t}_n" for t in ("qkv", "strength", "past", "decay", "gate"))]
_VARYING += ["strength_h", "decay_h", "gate_h"]


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
def move_window(window, past, channel, inside, past_w, W: tl.constexpr, BW: tl.constexpr):
    """Writes all inputs but the oldest as the past of the next token; all threads must have read the window before."""
    i = tl.arange(0, BW)[None, :]
    tl.store(past + (i - 1) * past_w + channel[:, None], window, mask=(i > 0) & (i < W) & inside[:, None])


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


@triton.jit
def state_tile(state, state_h, h, i: tl.constexpr, d, live, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Where block i of the columns of head h is, [BK, BV], and what of it there is."""
    c = i * BV + tl.arange(0, BV)
    at = state + h.to(tl.int64) * state_h + (d[:, None] * V + c[None, :])
    return at, (d < K)[:, None] & (c < V)[None, :] & live


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VECTORS)
def delta_net_kernel(
    qkv, strength, state, past, weight, bias, decay, A_log, dt_bias, norm_weight, gate, slots, o,
    pool, qkv_n, strength_n, strength_h, state_n, state_h, past_n, past_w, weight_d, weight_w,
    decay_n, decay_h, gate_n, gate_h, slots_n, scale, eps, lower,
    H: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, BW: tl.constexpr,
    CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, STRONGEST: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, HEADS value heads of one key head. A slot outside [0, pool) is idle: o = 0."""
    GROUP: tl.constexpr = HV // H
    n = (tl.program_id(0) // (HV // HEADS)).to(tl.int64)
    first = (tl.program_id(0) % (HV // HEADS)) * HEADS
    d, in_k = tl.arange(0, BK), tl.arange(0, BK) < K  # [BK]
    slot, live = n, True
    if slots is not None:
        slot = tl.load(slots + n * slots_n).to(tl.int64)
        live = (slot >= 0) & (slot < pool)
        slot = tl.where(live, slot, 0)
    qkv += n * qkv_n
    past += slot * past_n
    key = (first // GROUP) * K + d
    qs = load_window(qkv, past, key, in_k & live, past_w, W, BW)  # [BK, BW]
    ks = load_window(qkv, past, H * K + key, in_k & live, past_w, W, BW)  # [BK, BW]
    q_taps = load_taps(weight, key, in_k, weight_d, weight_w, W, BW)  # [BK, BW]
    k_taps = load_taps(weight, H * K + key, in_k, weight_d, weight_w, W, BW)  # [BK, BW]
    start, here = state_tile(state + slot * state_n, state_h, first, 0, d, live, K, V, BV)
    S = tl.load(start, mask=here, other=0.0).to(tl.float32)  # [BK, BV], while the rest is worked on
    q = convolve(qs, q_taps, bias, key, in_k)  # [BK]
    k = convolve(ks, k_taps, bias, H * K + key, in_k)  # [BK]
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + L2_EPS))
    k = k / tl.sqrt(tl.sum(k * k, 0) + L2_EPS)
    columns = tl.arange(0, NV)[:, None] * BV + tl.arange(0, BV)[None, :]  # [NV, BV]
    if norm_weight is not None:
        w = tl.load(norm_weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    for j in range(HEADS):
        h = first + j
        if gate is not None:
            z = tl.load(gate + n * gate_n + h * gate_h + columns, mask=columns < V, other=0.0).to(tl.float32)
        beta = STRONGEST * tl.sigmoid(tl.load(strength + n * strength_n + h * strength_h).to(tl.float32))
        if decay is not None:
            factor = decay_factor(
                decay + n * decay_n + h * decay_h, A_log, dt_bias, h, d, in_k, lower, K, CHANNEL, BOUNDED
            )
        out = tl.zeros([NV, BV], tl.float32)
        for i in tl.static_range(NV):
            c = i * BV + tl.arange(0, BV)  # [BV]
            value, in_v = 2 * H * K + h * V + c, (c < V) & live
            vs = load_window(qkv, past, value, in_v, past_w, W, BW)  # [BV, BW]
            v_taps = load_taps(weight, value, in_v, weight_d, weight_w, W, BW)  # [BV, BW]
            v = convolve(vs, v_taps, bias, value, in_v)  # [BV]
            if decay is not None:
                S = S * factor[:, None] if CHANNEL else S * factor
            u = beta * (v - tl.sum(S * k[:, None], 0))  # [BV]
            S += k[:, None] * u[None, :]
            at, inside = state_tile(state + slot * state_n, state_h, h, i, d, live, K, V, BV)
            tl.store(at, S.to(state.dtype.element_ty), mask=inside)
            y = tl.sum(S * q[:, None], 0)  # [BV]
            out = tl.where(tl.arange(0, NV)[:, None] == i, y[None, :], out)
            if i + 1 < NV:
                at, inside = state_tile(state + slot * state_n, state_h, h, i + 1, d, live, K, V, BV)
                S = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            elif HEADS > 1:
                at, inside = state_tile(state + slot * state_n, state_h, h + 1, 0, d, live, K, V, BV)
                S = tl.load(at, mask=inside & (j + 1 < HEADS), other=0.0).to(tl.float32)
            tl.debug_barrier()  # all threads have read the past
            move_window(vs, past, value, in_v, past_w, W, BW)
        out = out / tl.sqrt(tl.sum(tl.sum(out * out, 1), 0) / V + eps)
        if norm_weight is not None:
            out *= w
        if gate is not None:
            out *= tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
        tl.store(o + (n * HV + h) * V + columns, tl.where(live, out, 0.0).to(o.dtype.element_ty), mask=columns < V)
    if HEADS == GROUP:
        move_window(qs, past, key, in_k & live, past_w, W, BW)
        move_window(ks, past, H * K + key, in_k & live, past_w, W, BW)


@triton.jit(
    do_not_specialize=["pool", "qkv_n", "past_n", "past_w", "slots_n"],
    do_not_specialize_on_alignment=["qkv", "past", "slots"],
)
def move_keys_kernel(
    qkv, past, slots, pool, qkv_n, past_n, past_w, slots_n,
    CHANNELS: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Moves the past of the first CHANNELS channels, BC of them in a program, on by one token."""
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = (tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC)
    inside = channel < CHANNELS
    slot = n
    if slots is not None:
        slot = tl.load(slots + n * slots_n).to(tl.int64)
        inside = inside & (slot >= 0) & (slot < pool)
        slot = tl.where((slot >= 0) & (slot < pool), slot, 0)
    past += slot * past_n
    window = load_window(qkv + n * qkv_n, past, channel, inside, past_w, W, BW)
    tl.debug_barrier()  # all threads have read it
    move_window(window, past, channel, inside, past_w, W, BW)


@dataclass(frozen=True)
class Tile:
    """The tile of the state that is worked on at a time, `BK` by `BV`, and warps."""

    BK: int
    BV: int
    warps: int


def tile(K: int, V: int) -> Tile:
    """A table, measured on an H200 (`benchmarks/decode.py --tiles`): at most 16,384 numbers in registers."""
    BK = max(16, triton.next_power_of_2(K))
    BV = min(max(16, 16384 // BK), max(16, triton.next_power_of_2(V)))
    return Tile(BK, BV, 8 if BK * BV >= 8192 else 4)


def delta_net_step(tensors: Tensors, options: DeltaNetOptions) -> Tensor:
    """The output `[B, HV, V]`; states are written."""
    ready, back = _ready(tensors)
    o = prepare(ready, options)(ready)
    for t, copy in back:
        t.copy_(copy)
    return o


def prepare(tensors: Tensors, options: DeltaNetOptions) -> Any:
    """A function of tensors like these that does as `delta_net_step`, its choices made; None if they must be copied first."""
    if any(copy is not t for t, copy in zip(tensors, _ready(tensors)[0], strict=True)):
        return None
    launches = _launches(tensors, options)
    qkv, state = tensors[0], tensors[2]
    assert qkv is not None and state is not None
    shape, dtype, device = (qkv.shape[0], state.shape[1], state.shape[3]), qkv.dtype, qkv.device

    def run(tensors: Tensors) -> Tensor:
        o = torch.empty(shape, dtype=dtype, device=device)
        launches[0](device, (*tensors, o))
        for launch in launches[1:]:
            launch(device, (tensors[0], tensors[3], tensors[11]))
        return o

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


def _launches(tensors: Tensors, options: DeltaNetOptions) -> list[Launch]:
    """The launch for tensors of these sizes, and that of the keys' past where there is one."""
    qkv, strength, state, past, weight, _, decay, _, _, _, gate, slots = tensors
    assert qkv is not None and strength is not None and state is not None and past is not None and weight is not None
    (B, _), (P, HV, K, V), (_, W), H = qkv.shape, state.shape, weight.shape, options.heads
    chosen, group = tile(K, V), HV // H
    heads = group if group <= MOST_HEADS else 1
    slots_n = 0 if slots is None else slots.stride(0)
    numbers = (
        P, qkv.stride(0), *strength.stride(), *state.stride()[:2], *past.stride()[:2], *weight.stride(),
        *((0, 0) if decay is None else decay.stride()[:2]), *((0, 0) if gate is None else gate.stride()[:2]),
        slots_n, K**-0.5, options.eps, options.lower or 0.0,
    )  # fmt: skip
    BW = triton.next_power_of_2(W)
    constants = {
        "H": H, "HV": HV, "HEADS": heads, "K": K, "V": V, "W": W, "BK": chosen.BK, "BV": chosen.BV,
        "NV": triton.next_power_of_2(triton.cdiv(V, chosen.BV)), "BW": BW,
        "CHANNEL": decay is not None and decay.dim() == 3, "BOUNDED": options.lower is not None,
        "STRONGEST": 2.0 if options.negative_eigenvalues else 1.0, "SIGMOID": options.gate_activation == "sigmoid",
    }  # fmt: skip
    found = [Launch(delta_net_kernel, B * (HV // heads), numbers, constants, chosen.warps)]
    if heads != group:
        keys = {"CHANNELS": 2 * H * K, "W": W, "BC": 256, "BW": BW}
        numbers = (P, qkv.stride(0), *past.stride()[:2], slots_n)
        found.append(Launch(move_keys_kernel, B * triton.cdiv(2 * H * K, 256), numbers, keys, 4))
    return found
