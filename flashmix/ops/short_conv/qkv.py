"""The short convolutions of a layer's queries, keys and values in one call, each with its own weight."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_choice, check_floating, check_like, check_shape, dims
from flashmix.op.choose import choose
from flashmix.op.packing import Packing, as_packing
from flashmix.op.rowwise import Operator, portable, triton
from flashmix.ops.gated_product.portable import ACTIVATIONS
from flashmix.ops.short_conv.op import convolved, kernel_width_refused, short_conv

IMPLEMENTATIONS = (
    triton("flashmix.ops.short_conv.triton_gpu", lambda tensors: kernel_width_refused(tensors[3])),
    portable(__name__),
)


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
    packing = _check(inputs, weights, biases, activation, initial_state, cu_seqlens)
    chosen = choose("short_conv_qkv", IMPLEMENTATIONS, (*inputs, *weights, *biases, initial_state), impl)
    if chosen.name == "triton":
        boundaries = (None, None) if packing is None else (packing.sequence, packing.cu_seqlens)
        options = (activation or "", return_state)
        results = _OPERATOR(*inputs, *weights, *biases, initial_state, *boundaries, options=options)
        return results[0], results[1], results[2], results[3] if return_state else None
    sizes = [x.shape[2] for x in inputs]
    states = (None, None, None) if initial_state is None else initial_state.split(sizes, dim=2)
    found = [
        short_conv(
            x, weight, bias, activation=activation, initial_state=state, return_state=return_state,
            cu_seqlens=packing, impl="portable",
        )
        for x, weight, bias, state in zip(inputs, weights, biases, states, strict=True)
    ]  # fmt: skip
    state = torch.cat([final for _, final in found if final is not None], dim=2) if return_state else None
    return found[0][0], found[1][0], found[2][0], state


def _check(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
) -> Packing | None:
    q = inputs[0]
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


def _formula(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    q_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, state: Tensor | None,
    sequence: Tensor | None, starts: Tensor | None, activation: str, return_state: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    states = (None, None, None) if state is None else state.split([q.shape[2], k.shape[2], v.shape[2]], dim=2)
    parts = zip((q, k, v), (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias), states, strict=True)
    found = [convolved(x, w, b, None, s, sequence, starts, activation, True) for x, w, b, s in parts]
    final = (torch.cat([part[1] for part in found], dim=2),) if return_state else ()
    return *(part[0] for part in found), *final


_OPERATOR = Operator(
    "short_conv_qkv",
    "flashmix.ops.short_conv.triton_gpu.ShortConvQKV",
    "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor? q_bias, Tensor? k_bias, "
    "Tensor? v_bias, Tensor? state, Tensor? sequence, Tensor? starts",
    "str activation, bool return_state",
    formula=_formula,
)
