"""Token shift: each token's predecessor in its own sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Op, implementations
from flashmix.op.checks import check_floating, check_like, check_shape, dims
from flashmix.op.choose import preparing
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import public
from flashmix.ops.token_shift.call import ShiftCall
from flashmix.ops.token_shift.portable import formula


def _shifted_back(call: ShiftCall, grads: Sequence[Tensor | None], wanted: Sequence[str], impl: str) -> Gradients:
    """The gradients of `x` and the state: the same shift, the other way, of those of `y` and of the state after."""
    d_y, d_last = (*grads, None)[:2]
    if d_y is None:
        assert d_last is not None
        rows = d_last.shape[0] if call.packing is None else 1
        d_y = d_last.new_zeros(rows, call.tokens, d_last.shape[2])
    wants_state = "initial_state" in wanted
    back = call.but(x=d_y, initial_state=d_last, reverse=not call.reverse, return_state=wants_state)
    return dict(zip(("x", "initial_state"), SHIFT(back, impl), strict=False))


IMPLEMENTATIONS = implementations("token_shift", formula=formula)
SHARDED = "flashmix.ops.token_shift.sharded"
SHIFT = Op("token_shift", ShiftCall, IMPLEMENTATIONS, formula=formula, adjoint=_shifted_back, sharded=SHARDED)


@public
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
    call = ShiftCall(x, initial_state, packing, tokens, reverse=False, return_state=return_state)
    outputs = SHIFT(call, impl)
    return outputs[0], outputs[1] if return_state else None


def shifted(x: Tensor, start: Tensor | None, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The token before each one of `x` `[B, T, ...]`, `start` `[N, ...]` or 0 before a first one, and the last token `[N, ...]`.

    `start` and the last token are in the dtype of states.
    """
    count, wide = x.shape[0] if packing is None else packing.count, state_dtype(x.dtype)
    first = None if start is None else start.to(x.dtype).flatten(1).unsqueeze(1)
    with preparing():
        before, last = token_shift(x.flatten(2), initial_state=first, return_state=True, cu_seqlens=packing)
    assert last is not None
    return before.view(x.shape), last.view(count, *x.shape[2:]).to(wide)
