"""Token shift: each token's predecessor in its own sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_floating, check_like, check_shape, dims
from flashmix.op.choose import choose
from flashmix.op.packing import Packing, as_packing
from flashmix.op.rowwise import Operator, Options, Tensors, portable, triton

IMPLEMENTATIONS = (triton("flashmix.ops.token_shift.triton_gpu"), portable(__name__))


def token_shift(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The token before each token.

        y_t = x_{t-1},    y_0 = state (zeros without one)

    Args:
        x: `[B, T, D]`, floating.
        initial_state: `[N, 1, D]` in the dtype of `x`: the token before each sequence's first; None for zeros.
        return_state: also return each sequence's last token, the `initial_state` of what follows.
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`: nothing passes from one sequence into the next.
        impl: "auto" or the name of an implementation.

    Returns:
        `(y, state)`: `y` like `x`, and the state `[N, 1, D]` or None, N = B or the number of packed sequences.

    Raises:
        TypeError: an input is not a floating tensor, or the state's dtype is not that of `x`.
        ValueError: shapes or devices differ, `cu_seqlens` does not fit, or `impl` is unknown.

    Source:
        Peng et al., "RWKV" (2305.13048), section 3.1.1.

    Example:
        >>> import torch
        >>> y, state = token_shift(torch.tensor([[[1.0], [2.0], [3.0]]]), return_state=True)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([0.0, 1.0, 2.0], [3.0])
    """
    batch, tokens, channels = dims("x", x, "B T D")
    check_floating("x", x)
    packing = as_packing(cu_seqlens, batch, tokens, x.device)
    count = batch if packing is None else packing.count
    if initial_state is not None:
        check_shape("initial_state", initial_state, count, 1, channels)
        check_like("initial_state", initial_state, "x", x)
    if choose("token_shift", IMPLEMENTATIONS, (x, initial_state), impl).name == "triton":
        cu_seqlens = None if packing is None else packing.cu_seqlens
        y, *last = _SHIFT(x, initial_state, cu_seqlens, options=(count, tokens, False, return_state))
        return y, last[0] if last else None
    return _portable(x, initial_state, return_state, packing, count)


def _portable(
    x: Tensor, initial_state: Tensor | None, return_state: bool, packing: Packing | None, count: int
) -> tuple[Tensor, Tensor | None]:
    tokens, channels = x.shape[1:]
    state = x.new_zeros(count, 1, channels) if initial_state is None else initial_state
    if packing is None:
        joined = torch.cat([state, x], dim=1)
        return joined[:, :tokens], joined[:, tokens:].clone() if return_state else None
    joined = torch.cat([x.new_zeros(1, 1, channels), x], dim=1)  # row t + 1 is token t
    bounds, filled = packing.cu_seqlens.to(torch.int64), packing.lengths > 0
    last = torch.where(filled[:, None, None], joined[0, bounds[1:]].unsqueeze(1), state)
    # The states go before the sequences' first tokens, those of empty sequences into the last row, which is cut off.
    first = torch.where(filled, bounds[:-1], tokens)
    return joined.index_copy(1, first, state.transpose(0, 1))[:, :tokens], last if return_state else None


def _shifted_back(grads: Tensors, inputs: Tensors, options: Options) -> Tensors:
    """The gradients of `x` and the state: the same shift, the other way, of those of `y` and of the state after."""
    _, _, cu_seqlens = inputs
    count, tokens, reverse, _ = options
    d_y, d_last = (*grads, None)[:2]
    if d_y is None:
        assert d_last is not None
        d_y = d_last.new_zeros(count if cu_seqlens is None else 1, tokens, d_last.shape[2])
    d_x, d_state = _SHIFT(d_y, d_last, cu_seqlens, options=(count, tokens, not reverse, True))
    return d_x, d_state, None


_SHIFT = Operator(
    "token_shift",
    "flashmix.ops.token_shift.triton_gpu.TokenShift",
    "Tensor x, Tensor? initial_state, Tensor? cu_seqlens",
    "SymInt count, SymInt tokens, bool reverse, bool return_state",
    adjoint=_shifted_back,
    forgets=("x", "initial_state"),
)
