"""Mechanisms whose transition is diagonal or the identity, plus low rank: calls of `dplr`."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.checks import check_shape, dims
from flashmix.op.packing import Packing
from flashmix.ops.named._common import Result
from flashmix.ops.recurrence import dplr
from flashmix.ops.recurrence.call import check_operands


def rwkv7(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, *, scale: float = 1.0,
    initial_state: Tensor | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """RWKV-7: a normalised removal key, a learning rate a channel, and a raw write.

        S_t = (diag(e^{w_t}) - (kk_t * a_t) kk_t^T) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T r_t

    Args:
        r: receptance `[B, T, H, K]`.
        log_decay: `w`, at most 0, `[B, T, H, K]`.
        k: replacement keys `[B, T, H, K]`.
        kk: removal keys of unit length `[B, T, H, K]`.
        a: in-context learning rate in [0, 1], `[B, T, H, K]`.

    Source: Peng et al. 2025 (arXiv 2503.14456), equation 17.

    Example:
        >>> import torch
        >>> r, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> rwkv7(r, -torch.rand(1, 10, 4, 16), k, v, k / 16, torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    check_shape("kk", kk, *dims("k", k, "B T H K"))
    check_shape("a", a, *k.shape)
    check_operands(r, v, {"k": k, "kk": kk, "a": a}, None, log_decay, initial_state, cu_seqlens, {"q": "r"})
    return dplr(
        r, k, v, -kk, (kk * a).to(kk.dtype), log_decay,
        scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip


def iplr(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> Result:  # fmt: skip
    """Identity plus low rank: the generalised delta rule without decay, with any `a` and `b`.

        S_t = (I + b_t a_t^T) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Args:
        a: the vector that reads the state, `[B, T, H or HV, K]`.
        b: the key under which what was read is written back, `[B, T, H or HV, K]`.

    Source: Peng et al. 2025 (arXiv 2503.14456), section 3, the generalised delta rule.

    Example:
        >>> import torch
        >>> q, k, v, a = torch.randn(4, 1, 10, 4, 16) / 4
        >>> iplr(q, k, v, -a, a)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    return dplr(
        q, k, v, a, b, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip
