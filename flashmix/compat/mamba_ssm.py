"""The functions of mamba_ssm that Mamba-2 needs, and its norms.

Example:
    >>> import torch
    >>> from flashmix.compat.mamba_ssm import mamba_chunk_scan_combined
    >>> x, dt, keys = torch.randn(1, 10, 4, 16), torch.randn(1, 10, 4), torch.randn(1, 10, 1, 32)
    >>> mamba_chunk_scan_combined(x, dt, -torch.ones(4), keys, keys, 256, dt_softplus=True).shape
    torch.Size([1, 10, 4, 16])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from flashmix.compat.causal_conv1d import packing_of
from flashmix.compat.norms import ZGatedRMSNorm, z_gated_norm
from flashmix.compat.surface import Surface, refuse
from flashmix.op.checks import contents_are_checked
from flashmix.op.dtypes import state_dtype
from flashmix.ops.recurrence import linear_attention, linear_attention_step
from flashmix.ops.selective_scan import selective_scan
from flashmix.ops.selective_scan.step.op import selective_scan_step

MAMBA = Surface(
    "mamba_ssm",
    {
        "mamba_inner_fn": "call causal_conv1d_fn, the projections and selective_scan_fn",
        "mamba_split_conv1d_scan_combined": "call causal_conv1d_fn, mamba_chunk_scan_combined, the norm and the projection",
    },
)


@MAMBA.function(
    "mamba_chunk_scan_combined",
    "x dt A B C ~chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None cu_seqlens=None dt_softplus=False "
    "dt_limit=(0.0,1e999) return_final_states=False !return_varlen_states=False ~state_dtype=None",
    "`seq_idx` with states",
)
@MAMBA.function("mamba_chunk_scan", "x dt A B C ~chunk_size D=None z=None dt_bias=None dt_softplus=False")
def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """`flashmix.mamba2` from the raw step: `A` negative `[H]`, `D` `[H]` or `[H, P]`, states `[B, H, P, N]`, packed rows by `seq_idx`.

    `cu_seqlens` only names the sequences of `return_varlen_states` there, which is not here; alone it changes nothing, here neither.
    """
    step = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    batch, wide = x.shape[0], state_dtype(x.dtype)
    packing = None if seq_idx is None else packing_of(seq_idx)
    if packing is not None:
        whole = initial_states is None and not return_final_states
        refuse("mamba_ssm.mamba_chunk_scan_combined", "states together with seq_idx", whole)
    v, decay = (x * step.unsqueeze(-1)).to(x.dtype), A.to(wide) * step
    if packing is not None:
        C, B, v, decay = (y.reshape(1, -1, *y.shape[2:]) for y in (C, B, v, decay))
    y, state = linear_attention(
        *(C, B, v, decay),
        scale=1.0,
        initial_state=None if initial_states is None else initial_states.mT.to(wide),
        return_state=return_final_states,
        cu_seqlens=packing,
    )
    y = _skip_and_gate(y.reshape(batch, -1, *y.shape[2:]), x, D, z)
    return (y, state.mT) if state is not None else y


def _step_size(
    dt: Tensor, bias: Tensor | None, use_softplus: bool, limit: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """The step size in float32: the bias, softplus, then the limits."""
    dt = dt.to(state_dtype(dt.dtype))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = softplus(dt) if use_softplus else dt
    return dt if tuple(limit) == (0.0, float("inf")) else dt.clamp(*limit)


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """`(y + D x) silu(z)` in the dtype of `x`; `D` is `[H]` or `[H, P]`."""
    if D is None and z is None:
        return y
    y = y.to(state_dtype(y.dtype))
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * silu(z.to(y.dtype))).to(x.dtype)


@MAMBA.function(
    "selective_state_update",
    "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None",
    "a step or decay that differs between the channels of a head",
)
def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
) -> Tensor:
    """One token of Mamba-2: `state` `[.., H, P, N]` is updated in place; `dt`, `A` and `dt_bias` are spread, one number per head.

    The numbers of a Mamba-2 call are read at their first channel. A state of three axes is one of Mamba-1, `selective_scan_step`.
    """
    if state.dim() == 3:
        extras = {"D": D, "z": z, "dt_bias": dt_bias, "softplus": bool(dt_softplus)}
        return _mamba_1_token(state, x, dt, A, B, C, extras, state_batch_indices)
    label = "mamba_ssm.selective_state_update"
    refuse(label, "step or decay that differs between the channels of a head", _spread(dt, 1) and _spread(A, 2))
    refuse(label, "dt_bias that differs between channels", dt_bias is None or _spread(dt_bias, 1))
    step = _step_size(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    B, C = (y.unsqueeze(1) if y.dim() == 2 else y for y in (B, C))
    v = (x * step.unsqueeze(-1)).to(x.dtype)
    if state.dtype == torch.float16:  # the step has none of this dtype: on a copy of the rows in float32
        rows = slice(None) if state_batch_indices is None else state_batch_indices.long()
        wide, slots = state[rows].float(), None
    else:
        rows, wide, slots = None, state, state_batch_indices
    operands = C[:, None], B[:, None], v[:, None], wide.mT, A[:, 0, 0] * step[:, None]
    y = linear_attention_step(*operands, scale=1.0, state_indices=slots)
    if rows is not None:
        state[rows] = wide.to(state.dtype)
    return _skip_and_gate(y[:, 0], x, D, z)


def _mamba_1_token(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, extras: dict[str, Any], slots: Tensor | None
) -> Tensor:
    """One token `[B, D]` of Mamba-1; `state` `[.., D, N]` is updated in place."""
    extras["z"] = None if extras["z"] is None else extras["z"][:, None].to(x.dtype)
    u, dt, B, C = (t[:, None] for t in (x, _with_bias(dt, extras), B.to(x.dtype), C.to(x.dtype)))
    return selective_scan_step(u, dt, A, B, C, state, state_indices=slots, **extras)[:, 0]


def _with_bias(dt: Tensor, extras: dict[str, Any]) -> Tensor:
    """`dt`, and without a softplus the bias added, which the op takes with one alone."""
    bias = extras["dt_bias"]
    if bias is None or extras["softplus"]:
        return dt
    extras["dt_bias"] = None
    return dt.to(state_dtype(dt.dtype)) + bias


@MAMBA.function(
    "selective_scan_fn",
    "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False",
    "complex numbers, `B` or `C` without tokens",
)
def selective(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
) -> Any:
    """`flashmix.selective_scan` of `u` and `delta` `[B, D, T]`, `B` and `C` `[B, N, T]` or by groups `[B, G, N, T]`."""
    label = "mamba_ssm.selective_scan_fn"
    refuse(label, "complex numbers", not any(x.is_complex() for x in (A, B, C)))
    refuse(label, "B or C without tokens", B.dim() > 2 and C.dim() > 2)
    B, C = (x.movedim(-1, 1).to(u.dtype) for x in (B, C))
    groups = [x.dim() == 4 for x in (B, C)]
    if any(groups) and not all(groups):
        B, C = (
            x if grouped else x.unsqueeze(2).expand_as(C if x is B else B)
            for x, grouped in zip((B, C), groups, strict=True)
        )
    extras: dict[str, Any] = {
        "D": D,
        "z": None if z is None else z.mT.to(u.dtype),
        "dt_bias": delta_bias,
        "softplus": bool(delta_softplus),
    }
    dt = _with_bias(delta.mT, extras)
    y, state = selective_scan(u.mT, dt, A, B, C, return_state=bool(return_last_state), **extras)
    return y.mT if state is None else (y.mT, state)


def _spread(x: Tensor, axes: int) -> bool:
    """Whether the last axes are copies of one number: by their strides, else by their values (on a GPU after `flashmix.checks(True)`)."""
    spread = all(x.stride(i) == 0 or x.shape[i] == 1 for i in range(-axes, 0))
    return spread or not contents_are_checked(x) or bool((x.flatten(-axes) == x.flatten(-axes)[..., :1]).all())


_NORM = "x weight bias=None z=None eps=1e-06 group_size=None norm_before_gate=True"


@MAMBA.function("rmsnorm_fn", _NORM)
def rmsnorm_fn(**options: Any) -> Tensor:
    """`norm(x) silu(z)`, or with `norm_before_gate=False` `norm(x silu(z))`, in groups of `group_size` channels."""
    return z_gated_norm(center=False, **options)


@MAMBA.function("layernorm_fn", f"{_NORM} is_rms_norm=False")
def layernorm_fn(is_rms_norm: bool, **options: Any) -> Tensor:
    """`rmsnorm_fn` that takes the mean off too, unless `is_rms_norm`."""
    return z_gated_norm(center=not is_rms_norm, **options)


MAMBA.add("RMSNorm", ZGatedRMSNorm)
globals().update(MAMBA.names)
__getattr__ = MAMBA.lookup
__all__ = sorted(MAMBA.names)
