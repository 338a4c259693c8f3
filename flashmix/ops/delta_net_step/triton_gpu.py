"""All that a delta net layer does to one token between its projections, in two launches.

    q, k, v = silu(conv)    q, k of length 1    beta = sigmoid(.), g = decay(.)    S <- delta rule    o = scale S^T q

A program of the first has `BV` columns of the state of one value head and computes its keys anew: that costs little next to the state,
and there are enough columns to keep a GPU busy with one sequence. The second does what needs a whole head, `y = norm(o) act(gate)`, and
moves the convolution's past on by one token, which all programs of the first have read by then.
Letters: `d` channels of a key (BK), `c` channels of a value (BV), `i` taps of the convolution (BW).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.series import LaunchSeries
from flashmix.op.call import Outputs
from flashmix.op.remember import Again, Tensors, by_signature
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.recurrence.step.triton_gpu import tile

L2_EPS: tl.constexpr = tl.constexpr(1e-6)


class AdvanceInputs(NamedTuple):
    """The token's channels `[B, C]`, those of the tokens before `[P, W - 1, C]`, the convolution's weight and bias; `strength` is beta
    before its sigmoid; `decay`, `A_log` and `dt_bias` make the log decay, or are None.
    """

    qkv: Any
    past: Any
    weight: Any
    bias: Any
    strength: Any
    decay: Any
    A_log: Any
    dt_bias: Any
    slots: Any
    o: Any  # the output before its norm, float32


class StatePool(NamedTuple):
    state: Any


class AdvanceNumbers(NamedTuple):
    pool: Any
    qkv: Any  # stride of a sequence
    strength: Any  # strides of sequence and head
    past: Any  # strides of slot, and of tap or channel, see `past_strides`
    decay: Any  # strides of sequence and head
    slots: Any
    scale: Any
    lower: Any


class AdvanceStrides(NamedTuple):
    state: Any  # slot, head
    weight: Any  # channel, tap


class AdvanceSpec(NamedTuple):
    H: int
    HV: int
    K: int
    V: int
    W: int
    BK: int
    BV: int
    BW: int
    BY_CHANNEL: bool  # the past lies [C, W - 1], the taps of a channel side by side
    CHANNEL: bool  # a per-channel decay
    BOUNDED: bool
    STRONGEST: float  # the largest beta


class FinishInputs(NamedTuple):
    qkv: Any
    past: Any
    norm_weight: Any
    gate: Any
    slots: Any
    o: Any
    y: Any


class FinishNumbers(NamedTuple):
    pool: Any
    qkv: Any
    past: Any
    gate: Any  # strides of sequence and head
    slots: Any
    eps: Any


class FinishSpec(NamedTuple):
    HV: int
    V: int
    C: int
    W: int
    BV: int
    BC: int
    BW: int
    BY_CHANNEL: bool
    SIGMOID: bool


@triton.jit
def tap_of(past, i, channel, stride, S: tl.constexpr):
    """The address of tap `i` of the past of some channels: [channels, BW]."""
    if S.BY_CHANNEL:
        return past + channel[:, None].to(tl.int64) * stride + i
    else:
        return past + i * stride + channel[:, None]


@triton.jit
def load_window(x, past, channel, inside, stride, S: tl.constexpr):
    """The inputs that the convolution sees at some channels, oldest first and this token's last: [channels, BW]."""
    i = tl.arange(0, S.BW)[None, :]
    older = tl.load(tap_of(past, i, channel, stride, S), mask=(i < S.W - 1) & inside[:, None], other=0.0)
    new = tl.load(x + channel, mask=inside, other=0.0)
    return tl.where(i == S.W - 1, new[:, None], older)


@triton.jit
def load_taps(weight, strides, channel, inside, S: tl.constexpr):
    """The convolution's weights of some channels: [channels, BW]."""
    i = tl.arange(0, S.BW)[None, :]
    at = weight + channel[:, None] * strides[0] + i * strides[1]
    return tl.load(at, mask=(i < S.W) & inside[:, None], other=0.0)


@triton.jit
def convolve(window, taps, bias, channel, inside):
    """silu(sum_i weight[:, W-1-i] x_{t-i} + bias) at some channels, in float32: [channels]."""
    y = tl.sum(window.to(tl.float32) * taps.to(tl.float32), 1)
    if bias is not None:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def find_slot(slots, row, stride, pool):
    """The slot of sequence `row` and whether it is one of the pool's."""
    slot = row
    live = row >= 0
    if slots is not None:
        slot = tl.load(slots + row * stride).to(tl.int64)
        live = (slot >= 0) & (slot < pool)
        slot = tl.where(live, slot, 0)
    return slot, live


@triton.jit
def decay_factor(x, ptr, h, d, in_k, lower, S: tl.constexpr):
    """e^g of one head, a number or [BK]: g = -exp(A_log) softplus(x + dt_bias), or lower sigmoid(exp(A_log) (x + dt_bias))."""
    rate = tl.exp(tl.load(x.A_log + h).to(tl.float32))
    if S.CHANNEL:
        raw = tl.load(ptr + d, mask=in_k, other=0.0).to(tl.float32)  # [BK]
        raw += tl.load(x.dt_bias + h * S.K + d, mask=in_k, other=0.0).to(tl.float32)  # [BK]
    else:
        raw = tl.load(ptr).to(tl.float32) + tl.load(x.dt_bias + h).to(tl.float32)
    if S.BOUNDED:
        return tl.exp(lower * tl.sigmoid(rate * raw))
    return tl.exp(-rate * (tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw)))))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def delta_net_kernel(x, states, n, strides, R: tl.constexpr):
    """One token of one sequence and value head, BV columns: the state and the output `[B, HV, V]` before its norm."""
    H: tl.constexpr = R.H
    HV: tl.constexpr = R.HV
    K: tl.constexpr = R.K
    V: tl.constexpr = R.V
    COLUMNS: tl.constexpr = (V + R.BV - 1) // R.BV
    program = tl.program_id(0) // COLUMNS
    row, h = (program // HV).to(tl.int64), program % HV
    d = tl.arange(0, R.BK)  # [BK]
    c = (tl.program_id(0) % COLUMNS) * R.BV + tl.arange(0, R.BV)  # [BV]
    slot, live = find_slot(x.slots, row, n.slots, n.pool)
    in_k, in_v = (d < K) & live, (c < V) & live
    at = strides.state
    ptr = states.state + slot * at[0] + h.to(tl.int64) * at[1] + (d[:, None] * V + c[None, :])  # [BK, BV]
    mask = in_k[:, None] & in_v[None, :]
    qkv = x.qkv + row * n.qkv
    past = x.past + slot * n.past[0]
    key = (h // (HV // H)) * K + d
    value = 2 * H * K + h * V + c
    # All loads are issued first, that of the state last: Triton lays out the tile by the load that is nearest to its use.
    qs = load_window(qkv, past, key, in_k, n.past[1], R)  # [BK, BW]
    ks = load_window(qkv, past, H * K + key, in_k, n.past[1], R)  # [BK, BW]
    vs = load_window(qkv, past, value, in_v, n.past[1], R)  # [BV, BW]
    q_taps = load_taps(x.weight, strides.weight, key, in_k, R)  # [BK, BW]
    k_taps = load_taps(x.weight, strides.weight, H * K + key, in_k, R)  # [BK, BW]
    v_taps = load_taps(x.weight, strides.weight, value, in_v, R)  # [BV, BW]
    S = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)  # [BK, BV]
    # q, k, v = silu(conv)
    q = convolve(qs, q_taps, x.bias, key, in_k)  # [BK]
    k = convolve(ks, k_taps, x.bias, H * K + key, in_k)  # [BK]
    v = convolve(vs, v_taps, x.bias, value, in_v)  # [BV]
    q = q * (n.scale / tl.sqrt(tl.sum(q * q, 0) + L2_EPS))
    k = k / tl.sqrt(tl.sum(k * k, 0) + L2_EPS)
    # S <- diag(e^g) S + k (beta (v - S^T k))^T
    if x.decay is not None:
        decay = x.decay + row * n.decay[0] + h * n.decay[1]
        factor = decay_factor(x, decay, h, d, d < K, n.lower, R)
        S = S * factor[:, None] if R.CHANNEL else S * factor
    strength = x.strength + row * n.strength[0] + h * n.strength[1]
    beta = R.STRONGEST * tl.sigmoid(tl.load(strength).to(tl.float32))
    u = beta * (v - tl.sum(S * k[:, None], 0))  # [BV]
    S += k[:, None] * u[None, :]
    tl.store(ptr, S.to(states.state.dtype.element_ty), mask=mask)
    tl.store(x.o + (row * HV + h) * V + c, tl.sum(S * q[:, None], 0), mask=c < V)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def finish_kernel(x, n, R: tl.constexpr):
    """The norm and the gate of one value head, and a share of the channels whose past moves on by one token."""
    HV: tl.constexpr = R.HV
    V: tl.constexpr = R.V
    SHARE: tl.constexpr = (R.C + HV - 1) // HV
    row, h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    slot, live = find_slot(x.slots, row, n.slots, n.pool)
    past = x.past + slot * n.past[0]
    channel = h * SHARE + tl.arange(0, R.BC)  # [BC]
    mine = (channel < R.C) & (tl.arange(0, R.BC) < SHARE) & live
    window = load_window(x.qkv + row * n.qkv, past, channel, mine, n.past[1], R)  # [BC, BW]
    c = tl.arange(0, R.BV)  # [BV]
    out = tl.load(x.o + (row * HV + h) * V + c, mask=c < V, other=0.0)  # [BV]
    # y = o / sqrt(mean(o^2) + eps) norm_weight act(gate)
    out = out / tl.sqrt(tl.sum(out * out, 0) / V + n.eps)
    if x.norm_weight is not None:
        out *= tl.load(x.norm_weight + c, mask=c < V, other=0.0).to(tl.float32)  # [BV]
    if x.gate is not None:
        ptr = x.gate + row * n.gate[0] + h * n.gate[1] + c
        z = tl.load(ptr, mask=c < V, other=0.0).to(tl.float32)  # [BV]
        out *= tl.sigmoid(z) if R.SIGMOID else z * tl.sigmoid(z)
    tl.store(x.y + (row * HV + h) * V + c, tl.where(live, out, 0.0).to(x.y.dtype.element_ty), mask=c < V)
    tl.debug_barrier()  # all threads have read the past
    i = tl.arange(0, R.BW)[None, :]
    tl.store(tap_of(past, i - 1, channel, n.past[1], R), window, mask=(i > 0) & (i < R.W) & mine[:, None])


def forward(call: DeltaNetStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """The output `[B, HV, V]`; states are written."""
    if call.qkv.shape[0] == 0:
        return call.results(), ()
    again = prepare(call)
    if again is not None:
        return (again(vars(call)),), ()
    copies = _copies(call)
    changed = call.but(**copies)
    y = _prepared(changed)(vars(changed))
    for name in set(copies) & {"state", "conv_state"}:
        getattr(call, name).copy_(copies[name])
    return (y,), ()


@by_signature
def prepare(call: DeltaNetStepCall) -> Again | None:
    """The short way of calls like this one; None if some tensors must be copied first, or nothing is to be launched."""
    return None if call.qkv.shape[0] == 0 or _copies(call) else _prepared(call)


def _prepared(call: DeltaNetStepCall) -> Again:
    series, device, names = LaunchSeries(), call.device, call.names
    options = {name: getattr(call, name) for name in call.options}
    shape, dtype = (call.qkv.shape[0], call.state.shape[1], call.state.shape[3]), call.dtype

    def run(x: Tensors) -> Tensor:
        o = torch.empty(size=shape, dtype=torch.float32, device=device)
        y = torch.empty(size=shape, dtype=dtype, device=device)

        def make() -> None:
            given = DeltaNetStepCall.make({**x, **options})
            _advance(given, o)
            _finish(given, o, y)

        series(device, (*[x[name] for name in names], o, y), make)
        return y

    return run


def _copies(call: DeltaNetStepCall) -> dict[str, Tensor]:
    """The tensors that the kernels do not take as they lie, contiguous."""
    found = {}
    for name in ("qkv", "conv_state", "conv_bias", "decay", "A_log", "dt_bias", "norm_weight", "gate"):
        t = getattr(call, name)
        if t is None or t.is_contiguous() or (name == "decay" and t.dim() == 2):
            continue
        whole = name in ("A_log", "dt_bias")  # read as whole vectors; of the others the last axis
        beside = 1 in t.stride()[1:] if name == "conv_state" else t.stride(-1) == 1
        if whole or (not beside and t.shape[-1] != 1):
            found[name] = t.contiguous()
    K, V = call.state.shape[-2:]
    if (call.state.stride(-1) != 1 and V > 1) or (call.state.stride(-2) != V and K > 1):
        found["state"] = call.state.contiguous()
    return found


def _advance(call: DeltaNetStepCall, o: Tensor) -> None:
    """Launches the first kernel."""
    (B, _), (P, HV, K, V), W = call.qkv.shape, call.state.shape, call.conv_weight.shape[1]
    BK, BV, warps = tile(K, V, call.state.element_size())
    numbers = AdvanceNumbers(
        pool=P,
        qkv=call.qkv.stride(0),
        strength=call.strength.stride(),
        past=past_strides(call),
        decay=_strides(call.decay),
        slots=_slot_stride(call),
        scale=K**-0.5,
        lower=call.lower or 0.0,
    )
    spec = AdvanceSpec(
        H=call.heads,
        HV=HV,
        K=K,
        V=V,
        W=W,
        BK=BK,
        BV=BV,
        BW=power_of_two(W),
        BY_CHANNEL=by_channel(call),
        CHANNEL=call.decay is not None and call.decay.dim() == 3,
        BOUNDED=call.lower is not None,
        STRONGEST=2.0 if call.negative_eigenvalues else 1.0,
    )
    strides = AdvanceStrides(call.state.stride()[:2], call.conv_weight.stride())
    kernel = bound(delta_net_kernel, spec, num_warps=warps, num_stages=1)
    inputs = AdvanceInputs(
        call.qkv,
        call.conv_state,
        call.conv_weight,
        call.conv_bias,
        call.strength,
        call.decay,
        call.A_log,
        call.dt_bias,
        slots=call.state_indices,
        o=o,
    )
    kernel(B * HV * cdiv(V, BV), inputs, StatePool(call.state), numbers, strides)


def _finish(call: DeltaNetStepCall, o: Tensor, y: Tensor) -> None:
    """Launches the second kernel."""
    (B, C), (P, HV, _, V), W = call.qkv.shape, call.state.shape, call.conv_weight.shape[1]
    spec = FinishSpec(
        HV=HV,
        V=V,
        C=C,
        W=W,
        BV=power_of_two(V),
        BC=power_of_two(cdiv(C, HV)),
        BW=power_of_two(W),
        BY_CHANNEL=by_channel(call),
        SIGMOID=call.gate_activation == "sigmoid",
    )
    numbers = FinishNumbers(
        P, call.qkv.stride(0), past_strides(call), _strides(call.gate), _slot_stride(call), call.eps
    )
    inputs = FinishInputs(call.qkv, call.conv_state, call.norm_weight, call.gate, call.state_indices, o, y)
    bound(finish_kernel, spec, num_warps=4, num_stages=1)(B * HV, inputs, numbers)


def by_channel(call: DeltaNetStepCall) -> bool:
    """Whether the taps of a channel of `conv_state` `[P, W - 1, C]` lie side by side, as in caches of others."""
    return call.conv_state.stride(2) != 1 and call.conv_state.stride(1) == 1


def past_strides(call: DeltaNetStepCall) -> tuple[int, int]:
    """The strides of slot and tap of `conv_state`; of slot and channel where taps lie side by side."""
    slot, tap, channel = call.conv_state.stride()
    return slot, channel if by_channel(call) else tap


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if t is None else t.stride()[:2]


def _slot_stride(call: DeltaNetStepCall) -> int:
    return 0 if call.state_indices is None else call.state_indices.stride(0)
