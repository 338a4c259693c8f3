"""The selective scan a token at a time, for generation: states are updated in place, in a batch or in a pool of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.call import Op, implementations, refused
from flashmix.op.checks import check_dtype, check_like, check_range, check_shape, check_tensor, check_written
from flashmix.op.dtypes import state_dtype
from flashmix.op.public import public
from flashmix.ops.recurrence.step.call import MOST_TOKENS, check_indices
from flashmix.ops.selective_scan.extras import Extras, by_groups, finite_rates
from flashmix.ops.selective_scan.step.call import SelectiveStepCall

MOST_STATES = 256


def _triton_supports(call: SelectiveStepCall) -> str | None:
    if not 1 <= call.A.shape[1] <= MOST_STATES:
        return f"its kernel takes 1 to {MOST_STATES} states, got {call.A.shape[1]}"
    if call.state.stride()[1:] != (call.A.shape[1], 1):
        return f"its kernel takes states without gaps in a slot, got strides {list(call.state.stride())}"
    return refused(call.tensors())


IMPLEMENTATIONS = implementations("selective_scan.step", _triton_supports)
SELECTIVE_STEP = Op("selective_scan_step", SelectiveStepCall, IMPLEMENTATIONS, outputs=1)


@public
def selective_scan_step(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    state_indices: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`selective_scan` of one token (or a few) of each sequence; the state is updated in place.

        h <- e^{dt_t A} h + dt_t u_t B_t;  y_t = (h C_t + D u_t) silu(z_t)

    Args:
        u, dt, A, B, C, D, z, dt_bias, softplus: as in `selective_scan`, with T from 1 to 16.
        state: `h`, `[B, D, S]`, or with `state_indices` a pool `[P, D, S]`; float32 or bfloat16 (float64 for float64 inputs). Written.
            It is computed in float32 whatever it is kept in.
        state_indices: `[B]` int32 or int64, the slot of each sequence in the pool, each at most once. A sequence with -1, or any number
            that is no slot, is idle: its output is 0 and no state is touched.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        `y` of each token, `[B, T, D]` in the dtype of `u`.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, T is not 1 to 16, `A` is above 0 or `dt` below 0 (where contents are checked),
            `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.2, algorithm 2.

    Example:
        >>> import torch
        >>> u, B, state = torch.ones(2, 1, 4), torch.ones(2, 1, 3), torch.zeros(2, 4, 3)
        >>> selective_scan_step(u, u, -torch.ones(4, 3), B, B, state).unique(), state.unique()
        (tensor([3.]), tensor([1.]))
    """
    extras = Extras(D, z, dt_bias, softplus)
    batch, channels, S = extras.check(u, dt, A, B, C)
    check_tensor("state", state)
    slots = batch if state_indices is None or not state.dim() else state.shape[0]
    check_shape("state", state, slots, channels, S)
    wide = state_dtype(u.dtype)
    check_dtype("state", state, *((torch.float32, torch.bfloat16) if wide == torch.float32 else (wide,)))
    check_like("state", state, "u", u, dtype=False)
    check_written("state", state)
    if state_indices is not None and slots < 1:
        raise ValueError("state must have at least one slot, got 0")
    check_indices(state_indices, u, batch, slots, "u")
    check_range("the number of tokens", u.shape[1], 1, MOST_TOKENS)
    given = [t for t in (u, dt, A, B, C, D, z, dt_bias, state) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise RuntimeError(
            "selective_scan_step has no gradient, it writes its state in place: call it under torch.no_grad()"
        )
    extras.check_contents(A, dt)
    B, C = by_groups(B), by_groups(C)
    call = SelectiveStepCall(u, dt, A, B, C, state, state_indices, *extras)
    if impl in ("auto", "triton") and _triton_supports(call) is None:
        return SELECTIVE_STEP(call, impl, "selective_scan_step")[0]
    call = SelectiveStepCall(u, extras.step(dt), finite_rates(A), B, C, state, state_indices)
    y = SELECTIVE_STEP(call, impl, "selective_scan_step")[0]
    idle = None if D is None or state_indices is None else (state_indices < 0) | (state_indices >= slots)
    return extras.after(y, u if idle is None else u.masked_fill(idle[:, None, None], 0))
