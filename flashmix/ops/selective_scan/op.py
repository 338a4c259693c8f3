"""The selective scan: the state space of Mamba-1, whose step size, input and output depend on the token."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.call import Op, always, native_refuses, refused
from flashmix.op.checks import check_dtype, check_like, check_shape, check_tensor
from flashmix.op.choose import Implementation, chosen
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import public
from flashmix.ops.selective_scan.call import SelectiveScanCall
from flashmix.ops.selective_scan.extras import Extras, by_groups, finite_rates
from flashmix.ops.selective_scan.native.binding import missing


def _gluon_supports(call: SelectiveScanCall) -> str | None:
    if call.A.shape[1] != 16:
        return f"its kernels take 16 states, got {call.A.shape[1]}"
    if call.A.shape[0] // max(call.groups, 1) % 8:
        return f"its kernels copy 8 channels of a group at a time, got {call.A.shape[0]} in {call.groups} groups"
    if call.segmented:
        return f"it has no segments, which few channels of long sequences want, got {tuple(call.u.shape)}"
    return gpu.hopper_refuses(call.device, call.dtype, (torch.bfloat16, torch.float16))


def _triton_supports(call: SelectiveScanCall) -> str | None:
    if not 1 <= call.A.shape[1] <= MOST_STATES:
        return f"its kernels take 1 to {MOST_STATES} states, got {call.A.shape[1]}"
    return refused(call.tensors())


def _native_supports(call: SelectiveScanCall) -> str | None:
    return native_refuses(call, call.state_dtype, call.dtype) or missing()


MOST_STATES = 16  # of a channel in registers
IMPLEMENTATIONS: tuple[Implementation[SelectiveScanCall], ...] = (
    Implementation("gluon", "flashmix.ops.selective_scan.gluon_hopper", _gluon_supports),
    Implementation("triton", "flashmix.ops.selective_scan.triton_gpu", _triton_supports),
    Implementation("native", "flashmix.ops.selective_scan.native", _native_supports),
    Implementation("portable", "flashmix.ops.selective_scan.portable", always),
)
WITH_EXTRAS = ("gluon", "triton")  # implementations that compute step sizes, skip and gate too
SHARDED = "flashmix.ops.selective_scan.sharded"
SELECTIVE_SCAN = Op("selective_scan", SelectiveScanCall, IMPLEMENTATIONS, sharded=SHARDED)


@public
def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The selective scan: each channel has a diagonal state, whose decay, input and output depend on the token.

        h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t;  y_t = h_t C_t + D u_t;  y_t = y_t silu(z_t)

    Computed in float32 (float64) whatever comes in, autocast or not. No tensor of all states is made: the backward recomputes them from one
    every 64 tokens (16 in the kernels for Hopper).

    Args:
        u: inputs `[B, T, D]`, float32, bfloat16, float16 or float64.
        dt: step sizes `[B, T, D]`, at least 0, any floating dtype; with `softplus` the logits of `softplus(dt + dt_bias)`.
        A: rates `[D, S]`, at most 0, any floating dtype.
        B: input weights `[B, T, S]` or, by groups of channels, `[B, T, G, S]`, in the dtype of `u`.
        C: output weights, like `B`.
        D: skip weight `[D]`, any floating dtype.
        z: gate `[B, T, D]`, in the dtype of `u`.
        dt_bias: added to `dt`, `[D]`, any floating dtype; needs `softplus`.
        softplus: whether `dt` are logits.
        initial_state: `h_0` `[N, D, S]` float32 (float64 for float64 inputs); default zeros. `N` is `B`, or the number of packed sequences.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of sequences packed end to end (needs `B == 1`), or a `Packing`.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        `y` `[B, T, D]` in the dtype of `u`, and the final state like `initial_state`, or None.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, `A` is above 0 or `dt` below 0 (where contents are checked), `cu_seqlens` does not fit,
            `impl` cannot run this.

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.2, algorithm 2.

    Example:
        >>> import torch
        >>> u, dt, B = torch.randn(1, 10, 32), torch.rand(1, 10, 32), torch.randn(1, 10, 16)
        >>> y, state = selective_scan(u, dt, -torch.ones(32, 16), B, B, return_state=True)
        >>> y.shape, state.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32, 16]))
    """
    extras = Extras(D, z, dt_bias, softplus)
    batch, channels, S = extras.check(u, dt, A, B, C)
    packing = as_packing(cu_seqlens, batch, u.shape[1], u.device)
    if initial_state is not None:
        check_tensor("initial_state", initial_state)
        check_shape("initial_state", initial_state, batch if packing is None else packing.count, channels, S)
        check_dtype("initial_state", initial_state, state_dtype(u.dtype))
        check_like("initial_state", initial_state, "u", u, dtype=False)
    extras.check_contents(A, dt)
    B, C = by_groups(B), by_groups(C)
    call = SelectiveScanCall(u, dt, A, B, C, initial_state, packing, *extras)
    apart = chosen(IMPLEMENTATIONS, call, impl) not in (None, *WITH_EXTRAS)
    if apart:
        call = SelectiveScanCall(u, extras.step(dt), finite_rates(A), B, C, initial_state, packing)
    y, state = SELECTIVE_SCAN(call, impl, "selective_scan")
    return extras.after(y, u) if apart else y, state if return_state else None
