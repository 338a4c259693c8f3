"""Mechanisms of the delta rule: calls of `delta_rule`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_shape, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.ops.named._common import Result, check_per_head
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


def deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """DeltaNet: each token replaces what the state holds under its key. The paper normalises keys (`flashmix.l2_norm`).

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 4.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> deltanet(q, k / 4, v, torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    return delta_rule(
        q, k, v, beta, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Gated DeltaNet: the delta rule on a state that decays once a token and head, `log_decay` `[B, T, HV]`.

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), equation 10.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> gated_deltanet(q, k / 4, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    return delta_rule(
        q, k, v, beta, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def kda(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Kimi Delta Attention: the delta rule on a state that decays by channel, `log_decay` `[B, T, HV, K]`.

        S = diag(e^{g_t}) S_{t-1};  S_t = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Kimi Team 2025 (arXiv 2510.26692), equation 1.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> kda(q, k / 4, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    return delta_rule(
        q, k, v, beta, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip


def deltaproduct(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """(Gated) DeltaProduct: `n` delta steps a token, so that a token's transition is a product of `n` Householder-like matrices.

        S <- e^{g_t} S;  then for j = 1 ... n:  S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T;  o_t = scale S^T q_t

    The steps run as `n` interleaved tokens of which the first decays and the last is read.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys of the steps `[B, T, n, H, K]`.
        v: values of the steps `[B, T, n, HV, V]`.
        beta: write strengths `[B, T, n, HV]`.
        log_decay: `[B, T, HV]`, or None for DeltaProduct without a gate.

    Source: Siems et al. 2025 (arXiv 2502.10297), equation 3.

    Example:
        >>> q, k, v = torch.randn(1, 10, 4, 16), torch.randn(1, 10, 2, 4, 16) / 4, torch.randn(1, 10, 2, 4, 16)
        >>> deltaproduct(q, k, v, torch.rand(1, 10, 2, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    B, T, H, K = dims("q", q, "B T H K")
    n = dims("k", k, "B T n H K")[2]
    HV, V = dims("v", v, "B T n HV V")[3:]
    check_shape("k", k, B, T, n, H, K)
    check_shape("v", v, B, T, n, HV, V)
    check_shape("beta", beta, B, T, n, HV)
    if n < 1:
        raise ValueError(f"k must have shape [B, T, n, H, K] with n >= 1, got {list(k.shape)}")
    if log_decay is not None:
        check_shape("log_decay", log_decay, B, T, HV)
    first = {"k": k[:, :, 0]}
    packing = check_operands(q, v[:, :, 0], first, beta[:, :, 0], log_decay, initial_state, cu_seqlens)
    steps = None if packing is None else Packing(packing.cu_seqlens * n, T * n)
    log_decay = None if log_decay is None else _at_step(log_decay, n, 0)
    o, state = delta_rule(
        _at_step(q, n, n - 1), k.flatten(1, 2), v.flatten(1, 2), beta.flatten(1, 2), log_decay,
        scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=steps, impl=impl,
    )  # fmt: skip
    return o.unflatten(1, (T, n))[:, :, -1], state


def comba(
    q: Tensor, k: Tensor, p: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Comba: the correction has a key of its own and reads the state before its decay.

        u_t = beta_t (v_t - S_{t-1}^T p_t);  S_t = e^{g_t} S_{t-1} + k_t u_t^T;  o_t = scale S_t^T q_t

    The paper's `p` is `k` times a number a head, and its query is corrected before: `q - d p`.

    Args:
        p: keys that read what is to be corrected, `[B, T, H, K]`.
        log_decay: `[B, T, HV]`.

    Source: Hu et al. 2025 (arXiv 2506.02475), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> comba(q, k / 4, k / 8, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    check_operands(q, v, {"k": k, "p": p}, beta, log_decay, initial_state, cu_seqlens)
    erase = beta.unsqueeze(-1) * p.repeat_interleave(v.shape[2] // p.shape[2], 2)
    return delta_rule(
        q, k, v, beta, log_decay, erase=erase.to(k.dtype), write=k, scale=scale, initial_state=initial_state,
        return_state=return_state, cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip


def gated_deltanet2(
    q: Tensor, k: Tensor, v: Tensor, erase_gate: Tensor, write_gate: Tensor, log_decay: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Gated DeltaNet-2: erasing and writing have gates of their own, by channel.

        S = diag(e^{g_t}) S_{t-1};  S_t = S + k_t (w_t * v_t - S^T (b_t * k_t))^T;  o_t = scale S_t^T q_t

    With `b = w = beta` it is `kda`.

    Args:
        erase_gate: `b`, in [0, 1] (or 2), `[B, T, HV, K]`.
        write_gate: `w`, in [0, 1], `[B, T, HV, V]`.
        log_decay: `[B, T, HV, K]`.

    Source: Gated DeltaNet-2, 2026 (arXiv 2605.22791).

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 10, 4, 16)
        >>> gated_deltanet2(q, k / 4, v, torch.sigmoid(g), torch.sigmoid(v), -g.square())[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    check_operands(q, v, {"k": k}, None, log_decay, initial_state, cu_seqlens)
    check_per_head("erase_gate", erase_gate, "q", q, *log_decay.shape)
    check_per_head("write_gate", write_gate, "q", q, *v.shape)
    wide = state_dtype(k.dtype)
    erase = (log_decay.to(wide).exp() * erase_gate) * k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    one = torch.ones(v.shape[:3], dtype=wide, device=v.device)
    return delta_rule(
        q, k, (v * write_gate).to(v.dtype), one, log_decay, erase=erase.to(k.dtype), write=k, scale=scale,
        initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip


def _at_step(x: Tensor, n: int, step: int) -> Tensor:
    """`x` `[B, T, ...]` as `[B, T * n, ...]`: each token at one of its `n` steps, zeros at the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if j == step else zeros for j in range(n)], 2).flatten(1, 2)
