"""Exact softmax attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Op, always
from flashmix.op.checks import (
    FLOATING,
    check_dtype,
    check_floating,
    check_like,
    check_multiple,
    check_positive,
    check_range,
    check_shape,
    check_tensor,
    dims,
)
from flashmix.op.choose import Implementation
from flashmix.op.dtypes import autocast
from flashmix.op.kind import ByKind
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import public
from flashmix.ops.attention import sdpa
from flashmix.ops.attention.call import (
    MOST_CHANNELS_BACKWARD,
    AttentionCall,
    hopper_supports,
    sdpa_supports,
    triton_supports,
)

Window = tuple[int | None, int | None]
IMPLEMENTATIONS = (
    Implementation("gluon", "flashmix.ops.attention.gluon_hopper", hopper_supports),
    Implementation("triton", "flashmix.ops.attention.triton_gpu", triton_supports),
    Implementation("sdpa", "flashmix.ops.attention.sdpa", sdpa_supports, sdpa.formula),
    Implementation("portable", "flashmix.ops.attention.portable", always),
)
SHARDED = "flashmix.ops.attention.sharded"
ATTENTION = Op("softmax_attention", AttentionCall, IMPLEMENTATIONS, keeps_outputs=(0,), sharded=SHARDED)


def fit(values: dict[str, Any]) -> None:
    """Gives fields of a call their packings, scale, seed and the autocast dtype; raises unless tensors fit, and numbers are in range."""
    q, k, v, slopes = values["q"], values["k"], values["v"], values["alibi_slopes"]
    _check_qkv(q, k, v)
    by_sequence, sink, decay, dropout_p = False, values["sink"], values["log_decay"], values["dropout_p"]
    if sink is not None or slopes is not None or decay is not None:
        if slopes is not None:
            check_tensor("alibi_slopes", slopes)
            by_sequence = slopes.shape == (q.shape[0], q.shape[2])
        decay_shape = k.shape[0], k.shape[1], q.shape[2]
        check_features(q, sink, slopes, decay, decay_shape, values["right"], by_sequence=by_sequence)
    check_softcap(values["softcap"])
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    packing, values["packing_k"] = _check_packing(q, k, values["packing"], values["packing_k"])
    values["packing"], scale = packing, values["scale"]
    values["scale"] = q.shape[3] ** -0.5 if scale is None else float(scale)
    if values["key_starts"] is not None or values["key_lengths"] is not None:
        _check_ranges(q, values["key_starts"], values["key_lengths"], packing)
    if by_sequence and packing is not None:
        values["alibi_slopes"] = slopes[0]  # one row, whatever it packs
    if dropout_p > 0:
        values["seed"] = torch.randint(2**62, (), device=q.device)
    values["q"], values["k"], values["v"] = autocast(q, k, v)


CALLS = ByKind(ATTENTION, fit)


@public
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    log_decay: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | Packing | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Exact softmax attention, in memory linear in the number of tokens, forward and backward.

    With `p_i = i + Tk - Tq` the position of query `i` (the newest query stands at the newest key):

        s_ij = scale q_i . k_j                               then softcap tanh(s / softcap)
             - slope_h |p_i - j| + sum_{j < t <= p_i} log_decay_t      over the keys j that query i may see
        o_i  = sum_j e^{s_ij} v_j / (sum_j e^{s_ij} + e^{sink_h})
        lse_i = log(sum_j e^{s_ij} + e^{sink_h})

    A query with nothing to see gives `o = 0`, `lse = -inf` (with a sink: `lse = sink`) and zero gradients. Every tensor
    argument is differentiable, and so is `lse`, so that partial results over disjoint keys can be merged.

    Args:
        q: `[B, Tq, HQ, K]` float16, bfloat16, float32 or float64; K and V up to 256, up to 512 where no gradient is wanted.
        k: `[B, Tk, H, K]`, `HQ % H == 0`: query head `h` reads key head `h // (HQ / H)`.
        v: `[B, Tk, H, V]`.
        causal: query `i` sees the keys `j <= p_i`.
        scale: factor of the scores; default `K ** -0.5`.
        window: `(left, right)`: query `i` sees `p_i - left <= j <= p_i + right`, both ends included; None is unbounded.
        softcap: scores are squashed into `(-softcap, softcap)`.
        sink: `[HQ]` floating, a logit per head that takes probability and gives no value.
        alibi_slopes: `[HQ]`, or `[B, HQ]` for each sequence its own, floating: ALiBi's slope per head, in natural-log units per token.
        log_decay: `[B, Tk, HQ]` floating, at most 0: log of the forget gate of each key token, not cumulative; needs
            `causal`.
        dropout_p: share of the probabilities that is dropped, drawn from torch's generator; the rest grows by
            `1 / (1 - dropout_p)`.
        cu_seqlens: `[N + 1]` or `Packing`: the boundaries of packed queries (`B == 1`), and of the keys if those have
            none of their own.
        cu_seqlens_k: `[N + 1]` or `Packing`: the boundaries of packed keys.
        key_starts: `[B]` int32 or int64: sequence `b` has no keys before this one (left padding).
        key_lengths: `[B]` int32 or int64: sequence `b` has no keys from this one on (right padding, the unused end of a cache). It
            takes the place of `Tk`: the newest query stands at key `key_lengths[b] - 1`.
        return_lse: return `lse` too.
        impl: `"auto"`, `"gluon"` (on a Hopper GPU), `"triton"` (on a GPU), `"sdpa"` (torch's own attention) or `"portable"`.

    Returns:
        `o` `[B, Tq, HQ, V]` in q's dtype; `lse` `[B, HQ, Tq]`, packed `[HQ, total]`, natural log in float32 (float64
        for float64 inputs), or None.

    Raises:
        TypeError: a dtype that is not floating, or that differs between q, k and v.
        ValueError: shapes that do not fit, a negative window, a value out of its range, `impl` that cannot run this.

    Source: Vaswani et al., 1706.03762 (eq. 1); Dao et al., 2205.14135 (blockwise); Gemma 2, 2408.00118 (softcap);
        Press et al., 2108.12409 (ALiBi); Lin et al., 2503.02130 (forget gate).

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(2, 5, 8, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 24)
        >>> o, lse = softmax_attention(q, k, v, causal=True, window=(3, 0), return_lse=True)
        >>> o.shape, lse.shape
        (torch.Size([2, 5, 8, 24]), torch.Size([2, 8, 5]))
    """
    left = right = None
    if window is not None:
        _check_qkv(q, k, v)  # whose errors come first
        left, right = check_window(window)
    values: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "sink": sink,
        "alibi_slopes": alibi_slopes,
        "log_decay": log_decay,
        "seed": None,
        "packing": cu_seqlens,
        "packing_k": cu_seqlens_k,
        "key_starts": key_starts,
        "key_lengths": key_lengths,
        "scale": scale,
        "left": left,
        "right": 0 if causal else right,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "return_lse": return_lse,
    }
    o, *rest = CALLS(values, impl, "softmax_attention")
    return o, rest[0] if return_lse else None


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether plain q, k and v pass `_check_qkv`, found in a third of its time."""
    if not type(q) is type(k) is type(v) is Tensor or not q.layout is k.layout is v.layout is torch.strided:
        return False
    if q.is_nested or k.is_nested or v.is_nested:
        return False
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) == 4 or of_k[:3] != of_v[:3]:
        return False
    fit = of_q[0] == of_k[0] and of_q[3] == of_k[3] and 0 < of_k[2] <= of_q[2] and of_q[2] % of_k[2] == 0
    fit = fit and 0 < of_q[3] <= MOST_CHANNELS_BACKWARD and 0 < of_v[3] <= MOST_CHANNELS_BACKWARD
    return fit and q.dtype == k.dtype == v.dtype and q.dtype in FLOATING and q.device == k.device == v.device


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    if _fit(q, k, v):
        return
    batch, _, heads_q, dim_qk = dims("q", q, "B Tq HQ K")
    _, tokens_k, heads, _ = dims("k", k, "B Tk H K")
    *_, dim_v = dims("v", v, "B Tk H V")
    check_shape("k", k, batch, tokens_k, heads, dim_qk)
    check_shape("v", v, batch, tokens_k, heads, dim_v)
    check_multiple("the number of heads of q", heads_q, "that of k", heads)
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    for name, dim in (("q", dim_qk), ("v", dim_v)):
        check_range(f"the head dim of {name}", dim, 1, MOST_CHANNELS_BACKWARD if gradient else 512)
    check_dtype("q", q, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    check_like("k", k, "q", q)
    check_like("v", v, "q", q)


def check_window(window: Window | None) -> Window:
    """`(left, right)` of a window argument; raises ValueError unless both are non-negative or None."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window!r}")
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (not isinstance(bound, int) or bound < 0):
            raise ValueError(f"window {name} must be a non-negative int or None (unbounded), got {bound!r}")
    left, right = window
    return left, right


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError unless `softcap` is None or positive in float32."""
    check_positive("softcap", softcap)


def check_features(
    q: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    log_decay: Tensor | None,
    decay_shape: tuple[int, int, int],
    right: int | None,
    *,
    by_sequence: bool = False,
) -> None:
    """Raises unless sink, slopes and decay fit the query heads, and decay comes with a causal mask (`right == 0`).

    `by_sequence`: slopes are `[B, HQ]`.
    """
    heads_q = decay_shape[2]
    for name, tensor, shape in (
        ("sink", sink, (heads_q,)),
        ("alibi_slopes", alibi_slopes, (q.shape[0], heads_q) if by_sequence else (heads_q,)),
        ("log_decay", log_decay, decay_shape),
    ):
        if tensor is not None:
            check_shape(name, tensor, *shape)
            check_floating(name, tensor)
            check_like(name, tensor, "q", q, dtype=False)
    if log_decay is not None and right != 0:
        raise ValueError(
            "log_decay must come with causal=True (the decay from a key in the future is not defined), got causal=False"
        )


def _check_ranges(q: Tensor, key_starts: Tensor | None, key_lengths: Tensor | None, packing: Packing | None) -> None:
    """Raises unless both are `[B]` integers beside `q`, and no sequences are packed."""
    for name, given in (("key_starts", key_starts), ("key_lengths", key_lengths)):
        if given is not None:
            check_shape(name, given, q.shape[0])
            check_dtype(name, given, torch.int32, torch.int64)
            check_like(name, given, "q", q, dtype=False)
            if packing is not None:
                raise ValueError(f"{name} must not come with cu_seqlens, which says where keys begin and end")


def _check_packing(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | Packing | None, cu_seqlens_k: Tensor | Packing | None
) -> tuple[Packing | None, Packing | None]:
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k must come with cu_seqlens, the boundaries of the queries, got None")
        return None, None
    packing = as_packing(cu_seqlens, q.shape[0], q.shape[1], q.device)
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens:  # one packing, whose tables serve both sides
        cu_seqlens_k = packing if q.shape[1] == k.shape[1] else cu_seqlens
    elif not isinstance(cu_seqlens_k, Packing):
        check_tensor("cu_seqlens_k", cu_seqlens_k)
    packing_k = as_packing(cu_seqlens_k, k.shape[0], k.shape[1], k.device)
    assert packing is not None and packing_k is not None
    if packing.count != packing_k.count:
        raise ValueError(f"cu_seqlens_k must have shape [{packing.count + 1}], got [{packing_k.count + 1}]")
    return packing, packing_k
