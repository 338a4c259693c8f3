"""The functions of flash_attn, generation 2, with its rotary embedding, padding, norms and cross entropy.

Example:
    >>> import torch
    >>> from flashmix.compat.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    >>> flash_attn_func(q, k, v, causal=True, window_size=(3, 0)).shape
    torch.Size([2, 5, 4, 16])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.compat import flash_attn_layers
from flashmix.compat.attend import attend, attend_packed, attend_to_cache, gather, lengths_of, options_of
from flashmix.compat.surface import Surface, refuse

FLASH = Surface("flash_attn", {"layer_norm_linear_fn": "two calls: a norm, then torch.nn.functional.linear"})

_OPTIONS = "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None"
_TAIL = f"dropout_p=0.0 {_OPTIONS} ~deterministic=False return_attn_probs=False"
_PACKED = "cu_seqlens_q cu_seqlens_k ~max_seqlen_q ~max_seqlen_k"


@FLASH.function("flash_attn_func", f"q k v {_TAIL}", "`return_attn_probs` with `dropout_p`")
def dense(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, return_attn_probs: bool, **options: Any) -> Any:
    """`flashmix.softmax_attention`; the result is `out`, with `return_attn_probs` `(out, lse, None)`.

    The LSE of a query that sees nothing is +inf, as in the original.
    """
    _no_probabilities(dropout_p, return_attn_probs)
    options = options_of(**options)
    return _results(attend(q, k, v, dropout_p=dropout_p, return_lse=return_attn_probs, **options), return_attn_probs)


@FLASH.function("flash_attn_qkvpacked_func", f"qkv {_TAIL}", "`return_attn_probs` with `dropout_p`")
def dense_qkv(qkv: Tensor, **options: Any) -> Any:
    """`flash_attn_func` of `[B, T, 3, H, D]`."""
    return dense(*qkv.unbind(2), **options)


@FLASH.function("flash_attn_kvpacked_func", f"q kv {_TAIL}", "`return_attn_probs` with `dropout_p`")
def dense_kv(q: Tensor, kv: Tensor, **options: Any) -> Any:
    """`flash_attn_func` of queries and `[B, T, 2, H, D]`."""
    return dense(q, *kv.unbind(2), **options)


@FLASH.function(
    "flash_attn_varlen_func", f"q k v {_PACKED} {_TAIL} block_table=None", "`return_attn_probs` with `dropout_p`"
)
def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
    **options: Any,
) -> Any:
    """`flashmix.softmax_attention` of packed tokens `[total, H, D]`; with `block_table` keys and values are pages `[pages, page, H, D]`."""
    _no_probabilities(dropout_p, return_attn_probs)
    if block_table is not None:
        ends = cu_seqlens_k.diff().to(torch.int64)
        k, v = (gather(x, block_table, torch.zeros_like(ends), ends) for x in (k, v))
    result = attend_packed(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        dropout_p=dropout_p,
        return_lse=return_attn_probs,
        **options_of(**options),
    )
    return _results(result, return_attn_probs)


@FLASH.function(
    "flash_attn_varlen_qkvpacked_func", f"qkv cu_seqlens ~max_seqlen {_TAIL}", "`return_attn_probs` with `dropout_p`"
)
def packed_qkv(qkv: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    """`flash_attn_varlen_func` of `[total, 3, H, D]`."""
    return packed(*qkv.unbind(1), cu_seqlens, cu_seqlens, **options)


@FLASH.function("flash_attn_varlen_kvpacked_func", f"q kv {_PACKED} {_TAIL}", "`return_attn_probs` with `dropout_p`")
def packed_kv(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any) -> Any:
    """`flash_attn_varlen_func` of queries and `[total, 2, H, D]`."""
    return packed(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, **options)


@FLASH.function(
    "flash_attn_with_kvcache",
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None "
    "block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None "
    "~num_splits=0 return_softmax_lse=False",
    "`cache_batch_idx` with `block_table`",
)
def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    rotary_interleaved: bool,
    return_softmax_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    **options: Any,
) -> Any:
    """Appends `k`, `v` to the caches in place at `cache_seqlens` and attends; rotary pairs are interleaved by default.

    `cache_seqlens` stays as it is. A query that sees nothing has an LSE of -inf. There is no gradient.
    """
    rows = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if block_table is not None:
        refuse("flash_attn_with_kvcache", "cache_batch_idx with a page table", cache_batch_idx is None)
        table = block_table
    else:
        table = torch.arange(rows, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = table[:, None]
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    lengths = lengths_of(cache_seqlens, rows, table.shape[1] * k_cache.shape[1], q.device)
    result = attend_to_cache(
        *(q, (k_cache, v_cache), (k, v), table, lengths),
        in_order=block_table is None and cache_batch_idx is None,
        rotary_table=(rotary_cos, rotary_sin),
        interleaved=rotary_interleaved,
        leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q,
        return_lse=return_softmax_lse,
        **options_of(**options),
    )
    return result if return_softmax_lse else result[0]


def _no_probabilities(dropout_p: float, return_attn_probs: bool) -> None:
    refuse("flash_attn", "return_attn_probs with dropout (the mask)", not (return_attn_probs and dropout_p > 0))


def _results(result: tuple[Tensor, Tensor | None], probabilities: bool) -> Any:
    o, lse = result
    if not probabilities or lse is None:
        return o
    return o, lse.masked_fill(lse == -torch.inf, torch.inf), None


flash_attn_layers.declare(FLASH)
globals().update(FLASH.names)
__getattr__ = FLASH.lookup
__all__ = sorted(FLASH.names)
