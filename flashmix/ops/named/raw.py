"""Each published mechanism under its paper's name: a call of an engine, nothing more.

Shapes are `[B, T, H, D]`; `scale`, `initial_state`, `return_state`, `cu_seqlens` and `impl` are those of the engine's op
(`linear_attention`, `delta_rule`, `dplr`), and so are the returned pair and the errors. Where a paper scales nothing, `scale` is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix._checks import check_floating, check_like, check_range, check_shape, dims
from flashmix.ops.packing import Packing
from flashmix.ops.recurrence import delta_rule, dplr, linear_attention
from flashmix.ops.recurrence.engine import state_dtype
from flashmix.ops.recurrence.problem import check_operands

Result = tuple[Tensor, Tensor | None]


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
        _check_per_head("D", D, "x", x, H)
    wide = state_dtype(x.dtype)
    decay = -A_log.to(wide).exp() * dt.to(wide)
    v = (x * dt.unsqueeze(-1)).to(x.dtype)
    y, state = linear_attention(
        C, B, v, decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens, impl=impl
    )  # fmt: skip
    return (y if D is None else (y + D[:, None] * x).to(y.dtype)), state


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
    _check_same_heads(q, "q", v)
    check_operands(q, v, {}, None, log_forget, initial_state, cu_seqlens, {"log_decay": "log_forget"})
    k = -torch.expm1(log_forget)
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
    _check_same_heads(r, "r", v)
    check_operands(r, v, {"k": k}, None, log_decay, initial_state, cu_seqlens, {"q": "r"})
    _check_per_head("bonus", bonus, "r", r, *r.shape[2:])
    o, state = linear_attention(
        r, k, v, log_decay, scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
        read_before=True, impl=impl,
    )  # fmt: skip
    own = (r * k * bonus).contiguous().sum(-1, keepdim=True)  # sums in one order however r lies in memory
    return (o + scale * own * v).to(o.dtype), state


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
    cu = check_operands(q, v[:, :, 0], first, beta[:, :, 0], log_decay, initial_state, cu_seqlens)
    steps = None if cu is None else Packing(cu * n, T * n)
    log_decay = None if log_decay is None else _at_step(log_decay, n, 0)
    o, state = delta_rule(
        _at_step(q, n, n - 1), k.flatten(1, 2), v.flatten(1, 2), beta.flatten(1, 2), log_decay,
        scale=scale, initial_state=initial_state, return_state=return_state, cu_seqlens=steps, impl=impl,
    )  # fmt: skip
    return o.unflatten(1, (T, n))[:, :, -1], state


def _check_same_heads(keys: Tensor, name: str, v: Tensor) -> None:
    """Raises ValueError unless there are as many heads of values as of keys."""
    B, T, H, _ = dims(name, keys, "B T H K")
    check_shape("v", v, B, T, H, dims("v", v, "B T H V")[3])


def _check_per_head(name: str, weight: Tensor, like_name: str, like: Tensor, *shape: int) -> None:
    """Raises unless `weight` has this shape, any floating dtype, and the device of `like`."""
    check_shape(name, weight, *shape)
    check_floating(name, weight)
    check_like(name, weight, like_name, like, dtype=False)


def _at_step(x: Tensor, n: int, step: int) -> Tensor:
    """`x` `[B, T, ...]` as `[B, T * n, ...]`: each token at one of its `n` steps, zeros at the others."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if j == step else zeros for j in range(n)], 2).flatten(1, 2)


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
