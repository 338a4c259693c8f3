"""One token of a delta net layer, from its projections to its output projection, as one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.checks import (
    check_choice,
    check_dtype,
    check_floating,
    check_like,
    check_multiple,
    check_range,
    check_shape,
    check_tensor,
    dims,
)
from flashmix.op.choose import Implementation, choose
from flashmix.op.operator import bump_versions, only_data
from flashmix.ops.recurrence.call import DTYPES, DeltaNetOptions
from flashmix.ops.recurrence.step.engine import (
    StepProblem,
    Tensors,
    aligned,
    check_indices,
    check_state,
    check_written,
    prepared,
    refuse_gradient,
    remember,
    rememberable,
    signature,
)

IMPLEMENTATIONS: tuple[Implementation[StepProblem], ...] = (
    Implementation("triton", "flashmix.ops.delta_net_step.triton_gpu", lambda p: gpu.refuses(p.device, p.dtype)),
    Implementation("portable", "flashmix.ops.delta_net_step.portable", lambda problem: None),
)
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
_known: dict[Any, Callable[[Tensors], Tensor]] = {}


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
        decay: `[B, HV]`, or `[B, HV, K]` for a decay a channel, floating; None: no decay.
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
    tensors = (
        qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, state_indices
    )  # fmt: skip
    options = (heads, lower, negative_eigenvalues, gate_activation, eps)
    if torch.compiler.is_compiling() or not rememberable(tensors, state_indices):
        return _run(tensors, options, impl)[0]
    key = (options, impl, signature(tensors))
    known = _known.get(key) if aligned(state) else None
    if known is None:
        y, again = _run(tensors, options, impl)
        if again is not None:
            remember(_known, key, again)
        return y
    y = known(tensors)
    bump_versions(state, conv_state)
    return y


def _run(tensors: Tensors, options: tuple[Any, ...], impl: str) -> tuple[Tensor, Callable[[Tensors], Tensor] | None]:
    """The output, and how to do the same again for tensors of the same signature, where there is a short way."""
    _check(tensors, *options)
    qkv = tensors[0]
    assert qkv is not None
    refuse_gradient("delta_net_step", tensors)
    chosen = choose("delta_net_step", IMPLEMENTATIONS, StepProblem(qkv.dtype, qkv.device), impl)
    call: tuple[Any, ...] = (*tensors, *options, chosen.name)
    if torch.compiler.is_compiling() or not only_data(tensors):
        return _delta_net_step(*call), None
    y = _step(*call)  # as the operator, whose first call imports all of torch's compiler
    bump_versions(tensors[2], tensors[3])
    return y, prepared(chosen, tensors, (tensors[2],), DeltaNetOptions(*options))


def _step(
    qkv: Tensor, strength: Tensor, state: Tensor, conv_state: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
    decay: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor | None,
    gate: Tensor | None, state_indices: Tensor | None, heads: int, lower: float | None,
    negative_eigenvalues: bool, gate_activation: str, eps: float, impl: str,
) -> Tensor:  # fmt: skip
    tensors = (
        qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, state_indices
    )  # fmt: skip
    if qkv.shape[0] == 0:
        return qkv.new_empty(0, state.shape[1], state.shape[3])
    options = DeltaNetOptions(heads, lower, negative_eigenvalues, gate_activation, eps)
    again = prepared(_BY_NAME[impl], tensors, (state,), options)
    if again is not None:
        return again(tensors)
    with torch.autocast(qkv.device.type, enabled=False):
        return _BY_NAME[impl].load().delta_net_step(tensors, options)


_delta_net_step = torch.library.custom_op("flashmix::delta_net_step", _step, mutates_args=("state", "conv_state"))


@_delta_net_step.register_fake
def _(qkv, strength, state, *rest):  # type: ignore[no-untyped-def]
    return qkv.new_empty(qkv.shape[0], state.shape[1], state.shape[3])


def _check(
    tensors: Tensors, heads: int, lower: float | None, negative_eigenvalues: bool, gate_activation: str, eps: float
) -> None:
    """Raises unless the tensors and options of a call fit one another."""
    qkv, strength, state, conv_state, conv_weight, conv_bias, decay, A_log, dt_bias, norm_weight, gate, slots = tensors
    check_tensor("qkv", qkv)
    assert qkv is not None
    B, C = dims("qkv", qkv, "B C")
    check_dtype("qkv", qkv, *DTYPES)
    _, HV, K, V = dims("state", state, "P HV K V")  # type: ignore[arg-type]
    check_multiple("the number of heads of state", HV, "heads", heads)
    check_shape("qkv", qkv, B, 2 * heads * K + HV * V)
    assert state is not None
    check_state(state, slots, qkv, B, HV, K, V, like="qkv")
    _, W = dims("conv_weight", conv_weight, "C W")  # type: ignore[arg-type]
    check_range("the width of conv_weight", W, 2, 64)
    check_shape("conv_state", conv_state, state.shape[0], W - 1, C)  # type: ignore[arg-type]
    check_like("conv_state", conv_state, "qkv", qkv)  # type: ignore[arg-type]
    check_written("conv_state", conv_state, "qkv", qkv)  # type: ignore[arg-type]
    if decay is not None:
        check_tensor("decay", decay)
        if tuple(decay.shape) not in ((B, HV), (B, HV, K)):
            raise ValueError(f"decay must have shape [{B}, {HV}] or [{B}, {HV}, {K}], got {list(decay.shape)}")
    if (decay is None) != (A_log is None) or (decay is None) != (dt_bias is None):
        raise ValueError("decay, A_log and dt_bias must be given together")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "strength": (strength, (B, HV)), "conv_weight": (conv_weight, (C, W)), "conv_bias": (conv_bias, (C,)),
        "decay": (decay, () if decay is None else tuple(decay.shape)), "A_log": (A_log, (HV,)),
        "dt_bias": (dt_bias, () if decay is None else tuple(decay.shape[1:])), "norm_weight": (norm_weight, (V,)),
        "gate": (gate, (B, HV, V)),
    }  # fmt: skip
    for name, (value, shape) in expected.items():
        if value is not None or name == "strength":
            check_shape(name, value, *shape)  # type: ignore[arg-type]
            check_floating(name, value)  # type: ignore[arg-type]
            check_like(name, value, "qkv", qkv, dtype=False)  # type: ignore[arg-type]
    check_indices(slots, qkv, B, state.shape[0], like="qkv")
    check_choice("gate_activation", gate_activation, "silu", "sigmoid")
    if lower is not None:
        check_range("lower", lower, -5.0, -1e-6)
