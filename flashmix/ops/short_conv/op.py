"""Short causal depthwise convolution over time: each channel mixes its last few tokens."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import check_choice, check_floating, check_like, check_shape, dims
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import public
from flashmix.ops.gated_product.portable import ACTIVATIONS
from flashmix.ops.short_conv.call import ShortConvCall, ShortConvQKVCall, triton_supports
from flashmix.ops.short_conv.portable import formula

IMPLEMENTATIONS = implementations("short_conv", triton_supports)
SHARDED = "flashmix.ops.short_conv.sharded"
SHORT_CONV = Op("short_conv", ShortConvCall, IMPLEMENTATIONS, formula=formula, passes={"residual": 0}, sharded=SHARDED)
SHORT_CONV_QKV = Op("short_conv_qkv", ShortConvQKVCall, IMPLEMENTATIONS, formula=formula, sharded=SHARDED)


@public
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Convolves each channel with its own W weights over the tokens so far.

        y_t = act(sum_{i < W} weight[:, W-1-i] * x_{t-i} + bias) + residual_t
        x_{-1}, x_{-2}, ... from the state, newest last

    The backward keeps the inputs and nothing else.

    Args:
        x: `[B, T, D]`, floating.
        weight: `[D, W]`, floating; the last column weighs the token itself.
        bias: `[D]`, floating, or None.
        activation: "silu" or another of `gated`, or None.
        residual: like `x`, added to the output before it is rounded; None: nothing. It is `x` itself in Canon layers.
        initial_state: `[N, W - 1, D]` in the dtype of `x`, the inputs before the first token, oldest first; None:
            zeros.
        return_state: also return the last W - 1 inputs, the `initial_state` of what follows.
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`: nothing passes from one sequence into the next.
        impl: "auto" or the name of an implementation.

    Returns:
        `(y, state)`: `y` like `x`, and the state `[N, W - 1, D]` or None, N = B or the number of packed sequences.
        Computed in float32 (float64 if any input is).

    Raises:
        TypeError: an input is not a floating tensor, or the state's dtype is not that of `x`.
        ValueError: shapes or devices differ, `cu_seqlens` does not fit, `activation` or `impl` is unknown.

    Source:
        The convolution of Mamba (2312.00752), section 3.4. With a residual: Allen-Zhu, "Physics of language models:
        part 4.1" (Canon layers).

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).view(1, 4, 1)
        >>> y, state = short_conv(x, torch.ones(1, 3), activation=None, return_state=True)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([0.0, 1.0, 3.0, 6.0], [2.0, 3.0])
    """
    batch, tokens, channels = dims("x", x, "B T D")
    check_floating("x", x)
    _, width = dims("weight", weight, "D W")
    if width < 1:
        raise ValueError(f"weight must have shape [{channels}, W] with W >= 1, got [{weight.shape[0]}, 0]")
    packing = as_packing(cu_seqlens, batch, tokens, x.device)
    count = batch if packing is None else packing.count
    expected = {"weight": (channels, width), "bias": (channels,), "initial_state": (count, width - 1, channels)}
    for (name, shape), value in zip(expected.items(), (weight, bias, initial_state), strict=True):
        if value is not None:
            check_shape(name, value, *shape)
            check_floating(name, value)
            check_like(name, value, "x", x, dtype=name == "initial_state")
    if residual is not None:
        check_shape("residual", residual, *x.shape)
        check_like("residual", residual, "x", x)
    check_choice("activation", activation, None, *ACTIVATIONS)
    call = ShortConvCall(x, weight, bias, residual, initial_state, packing, activation, return_state)
    outputs = SHORT_CONV(call, impl)
    return outputs[0], outputs[1] if return_state else None


@public
def short_conv_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`short_conv` of queries, keys and values, each with its own weights: one launch on a GPU, nothing concatenated.

        y_t = act(sum_{i < W} weight[:, W-1-i] * x_{t-i} + bias)    for (x, y) = (q, q'), (k, k'), (v, v')

    The inputs may be parts of one projection: their rows may lie anywhere, and gradients are written part by part.

    Args:
        q, k, v: `[B, T, DQ]`, `[B, T, DK]`, `[B, T, DV]`, floating, of one dtype.
        q_weight, k_weight, v_weight: `[DQ, W]`, `[DK, W]`, `[DV, W]`, floating, of one dtype.
        q_bias, k_bias, v_bias: `[DQ]`, `[DK]`, `[DV]`, floating, of one dtype; all three or none.
        activation: as in `short_conv`.
        initial_state: `[N, W - 1, DQ + DK + DV]` in the dtype of `q`: the inputs before the first token, oldest first;
            None: zeros.
        return_state: also return the last W - 1 inputs, the `initial_state` of what follows.
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`: nothing passes from one sequence into the next.
        impl: "auto" or the name of an implementation.

    Returns:
        `(q', k', v', state)`: tensors like `q`, `k`, `v`, contiguous, and the state or None.

    Raises:
        TypeError: an input is not a floating tensor, or dtypes differ.
        ValueError: shapes or devices differ, only some biases are given, `cu_seqlens` does not fit, `activation` or
            `impl` is unknown.

    Source:
        The convolutions of Gated DeltaNet (2412.06464), section 3.4; each is that of Mamba (2312.00752), section 3.4.

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).view(1, 4, 1)
        >>> q, k, v, state = short_conv_qkv(
        ...     x, x, x, torch.ones(1, 2), torch.ones(1, 2) / 2, torch.zeros(1, 2), activation=None, return_state=True
        ... )
        >>> q.flatten().tolist(), k.flatten().tolist(), v.any().item(), state.flatten().tolist()
        ([0.0, 1.0, 3.0, 5.0], [0.0, 0.5, 1.5, 2.5], False, [3.0, 3.0, 3.0])
    """
    inputs, weights, biases = (q, k, v), (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias)
    packing = _check_qkv(inputs, weights, biases, activation, initial_state, cu_seqlens)
    call = ShortConvQKVCall(*inputs, *weights, *biases, initial_state, packing, activation, return_state)
    outputs = SHORT_CONV_QKV(call, impl)
    return outputs[0], outputs[1], outputs[2], outputs[3] if return_state else None


def _check_qkv(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
) -> Packing | None:
    q, *_ = inputs
    batch, tokens, _ = dims("q", q, "B T DQ")
    check_floating("q", q)
    _, width = dims("q_weight", weights[0], "DQ W")
    if width < 1:
        raise ValueError(f"q_weight must have shape [{q.shape[2]}, W] with W >= 1, got [{weights[0].shape[0]}, 0]")
    for name, x, weight, bias in zip("qkv", inputs, weights, biases, strict=True):
        channels = dims(name, x, f"B T D{name.upper()}")[2]
        check_shape(name, x, batch, tokens, channels)
        check_like(name, x, "q", q)
        check_shape(f"{name}_weight", weight, channels, width)
        check_floating(f"{name}_weight", weight)
        check_like(f"{name}_weight", weight, "q", q, dtype=False)
        check_like(f"{name}_weight", weight, "q_weight", weights[0])
        if (bias is None) != (biases[0] is None):
            raise ValueError("q_bias, k_bias and v_bias must be given together or not at all, got some of them")
        if bias is not None and biases[0] is not None:
            check_shape(f"{name}_bias", bias, channels)
            check_floating(f"{name}_bias", bias)
            check_like(f"{name}_bias", bias, "q", q, dtype=False)
            check_like(f"{name}_bias", bias, "q_bias", biases[0])
    packing = as_packing(cu_seqlens, batch, tokens, q.device)
    if initial_state is not None:
        count = batch if packing is None else packing.count
        check_shape("initial_state", initial_state, count, width - 1, sum(x.shape[2] for x in inputs))
        check_like("initial_state", initial_state, "q", q)
    check_choice("activation", activation, None, *ACTIVATIONS)
    return packing
