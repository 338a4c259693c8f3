"""One token of a delta net layer, from its projections to its output projection, as one op."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations, triton_refuses_first
from flashmix.op.checks import (
    check_choice,
    check_dtype,
    check_floating,
    check_like,
    check_multiple,
    check_range,
    check_shape,
    check_tensor,
    check_written,
    dims,
)
from flashmix.op.public import public
from flashmix.op.remember import Remembered
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.recurrence.call import DTYPES
from flashmix.ops.recurrence.step.call import check_indices, check_state

IMPLEMENTATIONS = implementations("delta_net_step", triton_refuses_first)
DELTA_NET_STEP = Op("delta_net_step", DeltaNetStepCall, IMPLEMENTATIONS, outputs=1)
DELTA_NET_STEPS = Remembered(DELTA_NET_STEP)


@public
def delta_net_step(
    qkv: Tensor,
    strength: Tensor,
    state: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    heads: int,
    *,
    conv_bias: Tensor | None = None,
    decay: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower: float | None = None,
    negative_eigenvalues: bool = False,
    norm_weight: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    eps: float = 1e-6,
    state_indices: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """One token of DeltaNet, Gated DeltaNet or Kimi Delta Attention, between the projections; states are updated in place.

        q, k, v = silu(conv(qkv));    q, k <- q / |q|, k / |k|
        beta = sigmoid(strength);    g = -exp(A_log) softplus(decay + dt_bias), or lower sigmoid(exp(A_log) (decay + dt_bias))
        S <- diag(e^g) S;    S <- S + k (beta (v - S^T k))^T;    o = K^-0.5 S^T q
        y = o / sqrt(mean(o^2) + eps) * norm_weight * act(gate)

    What `short_conv`, `l2_norm`, the decay modules, `delta_rule_step` and `rms_norm` do one after the other; on a GPU in one
    launch (two where more than four value heads share a key head), and it captures into a CUDA graph.

    Args:
        qkv: `[B, C]` with `C = 2 H K + HV V`: the token's queries, keys and values side by side, float32, bfloat16, float16
            or float64.
        strength: `[B, HV]`, floating, before the sigmoid.
        state: `[B, HV, K, V]`, or with `state_indices` a pool `[P, HV, K, V]`; float32 or bfloat16 (float64 for float64
            inputs). Written.
        conv_state: `[B, W - 1, C]`, or `[P, W - 1, C]`, in the dtype of `qkv`: the inputs before, oldest first. Written.
        conv_weight: `[C, W]`, floating, W from 2 to 64.
        heads: H, the heads of queries and keys; HV is a multiple.
        conv_bias: `[C]`, floating.
        decay: `[B, HV]`, or `[B, HV, K]` for a per-channel decay, floating; None: no decay.
        A_log: `[HV]`, floating; needed with `decay`.
        dt_bias: `[HV]`, or `[HV, K]` like `decay`, floating; needed with `decay`.
        lower: the strongest log decay, in [-5, 0), of the bounded form.
        negative_eigenvalues: whether `beta` is `2 sigmoid(strength)`.
        norm_weight: `[V]`, floating.
        gate: `[B, HV, V]`, floating.
        gate_activation: "silu" or "sigmoid".
        eps: added to the mean square.
        state_indices: `[B]` int32 or int64, the slot of each sequence in both pools, each at most once. A sequence with -1, or
            any number that is no slot, is idle: its output is 0 and no state is touched.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        `y` `[B, HV, V]` in the dtype of `qkv`; computed in float32 (float64).

    Raises:
        TypeError: a dtype is not as said.
        ValueError: shapes or devices do not fit, an option is out of its range, `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), section 3.4; Kimi Team 2025 (arXiv 2510.26692), section 4.

    Example:
        >>> import torch
        >>> state, past = torch.zeros(2, 4, 16, 8), torch.zeros(2, 3, 2 * 2 * 16 + 4 * 8)
        >>> y = delta_net_step(torch.randn(2, 96), torch.randn(2, 4), state, past, torch.randn(96, 4), heads=2)
        >>> y.shape, bool(state.any()), bool(past[:, :-1].any())
        (torch.Size([2, 4, 8]), True, False)
    """
    tensors = {
        "qkv": qkv,
        "strength": strength,
        "state": state,
        "conv_state": conv_state,
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "decay": decay,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "gate": gate,
        "state_indices": state_indices,
    }
    options = {
        "heads": heads,
        "lower": lower,
        "negative_eigenvalues": negative_eigenvalues,
        "gate_activation": gate_activation,
        "eps": eps,
    }
    return DELTA_NET_STEPS("delta_net_step", impl, _checked, tensors, options)


def _checked(call: DeltaNetStepCall) -> DeltaNetStepCall:
    """The call; raises unless its tensors and options fit one another."""
    qkv, state, conv_state, conv_weight, decay = call.qkv, call.state, call.conv_state, call.conv_weight, call.decay
    B, C = dims("qkv", qkv, "B C")
    check_dtype("qkv", qkv, *DTYPES)
    _, HV, K, V = dims("state", state, "P HV K V")
    check_multiple("the number of heads of state", HV, "heads", call.heads)
    check_shape("qkv", qkv, B, 2 * call.heads * K + HV * V)
    check_state(state, call.state_indices, qkv, B, heads=HV, K=K, V=V, like="qkv")
    _, W = dims("conv_weight", conv_weight, "C W")
    check_range("the width of conv_weight", W, 2, 64)
    check_shape("conv_state", conv_state, state.shape[0], W - 1, C)
    check_like("conv_state", conv_state, "qkv", qkv)
    check_like("conv_state", conv_state, "qkv", qkv, dtype=False)
    check_written("conv_state", conv_state)
    if decay is not None:
        check_tensor("decay", decay)
        if tuple(decay.shape) not in ((B, HV), (B, HV, K)):
            raise ValueError(f"decay must have shape [{B}, {HV}] or [{B}, {HV}, {K}], got {list(decay.shape)}")
    if (decay is None) != (call.A_log is None) or (decay is None) != (call.dt_bias is None):
        raise ValueError("decay, A_log and dt_bias must be given together")
    per_head = () if decay is None else tuple(decay.shape[1:])
    expected: dict[str, tuple[int, ...]] = {"strength": (B, HV), "conv_weight": (C, W), "conv_bias": (C,)}
    expected |= {"decay": (B, *per_head), "A_log": (HV,), "dt_bias": per_head}
    expected |= {"norm_weight": (V,), "gate": (B, HV, V)}
    for name, shape in expected.items():
        value = getattr(call, name)
        if value is not None or name == "strength":
            check_shape(name, value, *shape)
            check_floating(name, value)
            check_like(name, value, "qkv", qkv, dtype=False)
    check_indices(call.state_indices, qkv, B, state.shape[0], like="qkv")
    check_choice("gate_activation", call.gate_activation, "silu", "sigmoid")
    if call.lower is not None:
        check_range("lower", call.lower, -5.0, -1e-6)
    return call
