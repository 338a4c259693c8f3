"""The functions of flash_attn_interface, generation 3 of flash_attn: no dropout, no ALiBi, an LSE of -inf where nothing is seen.

Example:
    >>> import torch
    >>> from flashmix.compat.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 5, 4, 16)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashmix.compat.attend import attend, attend_packed, options_of
from flashmix.compat.flash_attn import with_kvcache
from flashmix.compat.surface import Surface, refuse

FLASH_3 = Surface(
    "flash_attn_interface",
    {
        "flash_attn_combine": "softmax_attention returns a differentiable LSE, with which results over disjoint keys merge",
        "get_scheduler_metadata": "nothing is scheduled ahead",
    },
)

_SCALES = "!q_descale=None !k_descale=None !v_descale=None"
_HEAD = f"softmax_scale=None causal=False !qv=None {_SCALES} window_size=(-1,-1) !attention_chunk=0 softcap=0.0"
_TAIL = f"{_HEAD} ~num_splits=1 ~pack_gqa=None ~deterministic=False ~sm_margin=0 return_attn_probs=False"
_CACHE = (
    "q k_cache v_cache k=None v=None !qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
    "cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None ~max_seqlen_q=None !rotary_seqlens=None "
    f"{_SCALES} softmax_scale=None causal=False window_size=(-1,-1) !attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "~scheduler_metadata=None ~num_splits=0 ~pack_gqa=None ~sm_margin=0 return_softmax_lse=False"
)


@FLASH_3.function("flash_attn_func", f"q k v {_TAIL}")
def dense(q: Tensor, k: Tensor, v: Tensor, return_attn_probs: bool, **options: Any) -> Any:
    """`flashmix.softmax_attention`; the result is `out`, with `return_attn_probs` `(out, lse)`."""
    result = attend(q, k, v, return_lse=return_attn_probs, **options_of(**options, alibi_slopes=None))
    return result if return_attn_probs else result[0]


@FLASH_3.function(
    "flash_attn_qkvpacked_func",
    f"qkv softmax_scale=None causal=False {_SCALES} window_size=(-1,-1) !attention_chunk=0 softcap=0.0 ~deterministic=False "
    "num_heads_q=None ~sm_margin=0 return_attn_probs=False",
)
def dense_qkv(qkv: Tensor, num_heads_q: int | None, **options: Any) -> Any:
    """`flash_attn_func` of `[B, T, 3, H, D]`, or of `[B, T, HQ + 2 H, D]` with `num_heads_q`."""
    if num_heads_q is None:
        return dense(*qkv.unbind(2), **options)
    heads = (qkv.shape[2] - num_heads_q) // 2
    return dense(*qkv.split([num_heads_q, heads, heads], 2), **options)


@FLASH_3.function(
    "flash_attn_varlen_func",
    f"q k v cu_seqlens_q cu_seqlens_k ~max_seqlen_q ~max_seqlen_k !seqused_q=None !seqused_k=None {_TAIL}",
)
def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, return_attn_probs: bool, **options: Any
) -> Any:
    """`flashmix.softmax_attention` of packed tokens `[total, H, D]`."""
    result = attend_packed(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k), return_lse=return_attn_probs, **options_of(**options, alibi_slopes=None)
    )
    return result if return_attn_probs else result[0]


@FLASH_3.function(
    "flash_attn_with_kvcache",
    _CACHE,
    "packed queries that are not causal or with `cache_leftpad`, unlike boundaries of queries and new keys",
)
def cached(
    q: Tensor, k: Tensor | None, page_table: Tensor | None, cu_seqlens_k_new: Tensor | None, **options: Any
) -> Any:
    """Generation 2's function with packed queries: as many new keys as queries, with the same boundaries."""
    alike = k is None or k.shape[:-2] == q.shape[:-2]
    refuse("flash_attn_interface.flash_attn_with_kvcache", "more or fewer new keys than queries", alike)
    known = cu_seqlens_k_new is None or options["cu_seqlens_q"] is not None
    refuse("flash_attn_interface.flash_attn_with_kvcache", "cu_seqlens_k_new without cu_seqlens_q", known)
    return with_kvcache(q=q, k=k, block_table=page_table, alibi_slopes=None, **options)


globals().update(FLASH_3.names)
__getattr__ = FLASH_3.lookup
__all__ = sorted(FLASH_3.names)
