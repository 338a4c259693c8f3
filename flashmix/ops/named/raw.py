"""Mechanisms whose state takes raw writes: calls of `linear_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_range, check_shape, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.ops.named._common import Result, check_per_head, check_same_heads, check_states
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands


def retnet(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Multi-scale retention: a fixed decay a head.

        S_t = gamma_h S_{t-1} + k_t v_t^T,  gamma_h = 1 - 2^{-5-h};  o_t = scale S_t^T q_t

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 5 and 8.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> retnet(q, k, v)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    heads = torch.arange(dims("v", v, "B T HV V")[2], device=v.device, dtype=state_dtype(v.dtype))
    decay = torch.log1p(-torch.exp2(-5.0 - heads))
    return linear_attention(
        q, k, v, decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def lightning(
    q: Tensor, k: Tensor, v: Tensor, *, layer: int, layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Lightning attention: a fixed decay a head that weakens with depth.

        S_t = e^{g_h} S_{t-1} + k_t v_t^T,  g_h = -(8 / H) (1 - layer / layers) h,  h = 0 ... H-1;  o_t = scale S_t^T q_t

    Args:
        layer: place of this layer in the model, from 0.
        layers: number of layers.

    Source: Qin et al. 2024 (arXiv 2401.04658), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> lightning(q, k, v, layer=0, layers=12)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    check_range("layer", layer, 0, layers)
    H = dims("v", v, "B T HV V")[2]
    decay = torch.arange(H, device=v.device, dtype=state_dtype(v.dtype)) * (-8 / H * (1 - layer / layers))
    return linear_attention(
        q, k, v, decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def mamba2(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, scale: float = 1.0,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Mamba-2, the state space dual: a decay and a step size a token.

        S_t = e^{-e^{A_log} dt_t} S_{t-1} + B_t (dt_t x_t)^T;  y_t = scale S_t^T C_t + D x_t

    Args:
        x: inputs `[B, T, H, P]`.
        dt: step sizes, positive, after their softplus, `[B, T, H]`.
        A_log: logarithm of the decay rate, `[H]`.
        B: keys `[B, T, G, N]`; `H` is a multiple of the number of groups `G`.
        C: queries `[B, T, G, N]`.
        D: skip weight `[H]`, or None.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.

    Example:
        >>> x, dt, keys = torch.randn(1, 10, 4, 16), torch.rand(1, 10, 4), torch.randn(1, 10, 1, 32)
        >>> mamba2(x, dt, torch.zeros(4), keys, keys)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    H = dims("x", x, "B T H P")[2]
    check_shape("A_log", A_log, H)
    names = {"q": "C", "k": "B", "v": "x", "beta": "dt", "log_decay": "A_log"}
    check_operands(C, x, {"k": B}, dt, A_log, initial_state, cu_seqlens, names)
    if D is not None:
        check_per_head("D", D, "x", x, H)
    wide = state_dtype(x.dtype)
    decay = -A_log.to(wide).exp() * dt.to(wide)
    v = (x * dt.unsqueeze(-1)).to(x.dtype)
    y, state = linear_attention(
        C, B, v, decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip
    return (y if D is None else (y + D[:, None] * x).to(y.dtype)), state


def normalised_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: tuple[Tensor, Tensor] | None = None, return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """The first linear attention: the output is an average of the values, its weights divided by their sum.

        S_t = S_{t-1} + k_t v_t^T;  z_t = z_{t-1} + k_t;  o_t = S_t^T q_t / (q_t . z_t)

    Queries and keys are features, positive so that no sum is 0 (the paper's are `elu(x) + 1`); a scale would cancel.

    Args:
        q, k: features of queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        initial_state: `(S, z)`, `([N, HV, K, V], [N, H, K])`, float32 (float64 for float64 inputs).

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 10 to 12.

    Example:
        >>> q, k, v = torch.rand(3, 1, 10, 4, 16)
        >>> o, (S, z) = normalised_linear_attention(q, k, v, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]))
    """
    check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    packing = as_packing(cu_seqlens, q.shape[0], q.shape[1], q.device)
    N = q.shape[0] if packing is None else packing.count
    check_states(initial_state, q, (N, v.shape[2], q.shape[3], v.shape[3]), (N, *q.shape[2:]))
    S, z = (None, None) if initial_state is None else initial_state
    one = v.new_ones(1, 1, 1, 1).expand(*q.shape[:3], 1)
    o, S = linear_attention(
        q, k, v, scale=1.0, initial_state=S, return_state=return_state, cu_seqlens=packing, impl=impl
    )
    weight, z = linear_attention(
        q, k, one, scale=1.0, initial_state=None if z is None else z.unsqueeze(-1), return_state=return_state, cu_seqlens=packing,
        impl=impl,
    )  # fmt: skip
    o = o / weight.repeat_interleave(v.shape[2] // q.shape[2], 2)
    return o, None if S is None or z is None else (S, z.squeeze(-1))


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Simple gated linear attention: one decay a token and head, `[B, T, HV]`; `mamba2` without its step size.

        S_t = e^{g_t} S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Source: Dao and Gu 2024 (arXiv 2405.21060), equation 1.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> simple_gla(q, k, v, -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    return linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def gla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Gated linear attention: a decay a token and channel, `[B, T, H, K]`.

        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Source: Yang et al. 2023 (arXiv 2312.06635), equation 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> gla(q, k, v, -torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    return linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def hgrn2(
    q: Tensor, log_forget: Tensor, v: Tensor, *, scale: float = 1.0, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """HGRN-2: gated linear attention whose key is what the forget gate leaves free.

        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T,  f_t = e^{log_forget_t};  o_t = scale S_t^T q_t

    Args:
        log_forget: `log f`, at most 0, `[B, T, H, K]`.

    Source: Qin et al. 2024 (arXiv 2404.07904), equation 6.

    Example:
        >>> q, v = torch.randn(2, 1, 10, 4, 16)
        >>> hgrn2(q, -torch.rand(1, 10, 4, 16), v)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_forget", log_forget, "B T H K")
    check_same_heads(q, "q", v)
    check_operands(q, v, {}, None, log_forget, initial_state, cu_seqlens, {"log_decay": "log_forget"})
    k = torch.where(
        log_forget < -1, 1 - log_forget.exp(), -torch.expm1(log_forget)
    )  # expm1's gradient adds 1 to -1 + f
    return linear_attention(
        q, k.to(q.dtype), v, log_forget, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
        impl=impl,
    )  # fmt: skip


def rwkv6(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, scale: float = 1.0,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """RWKV-6: the output reads the state before the write, and its own token with a learned weight.

        o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t;  S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

    Args:
        log_decay: `w`, at most 0, `[B, T, H, K]`.
        bonus: `u` `[H, K]`.

    Source: Peng et al. 2024 (arXiv 2404.05892), equation 19.

    Example:
        >>> r, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> rwkv6(r, k, v, -torch.rand(1, 10, 4, 16), torch.zeros(4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    check_same_heads(r, "r", v)
    check_operands(r, v, {"k": k}, None, log_decay, initial_state, cu_seqlens, {"q": "r"})
    check_per_head("bonus", bonus, "r", r, *r.shape[2:])
    o, state = linear_attention(
        r, k, v, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
        read_before=True, impl=impl,
    )  # fmt: skip
    own = (r * k * bonus).contiguous().sum(-1, keepdim=True)  # sums in one order however r lies in memory
    return (o + scale * own * v).to(o.dtype), state
