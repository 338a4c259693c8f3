"""Attention of new tokens to a cache of keys and values: append, rotate and attend in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Op, implementations, triton_refuses_first
from flashmix.op.checks import (
    check_dtype,
    check_like,
    check_multiple,
    check_pair,
    check_range,
    check_shape,
    check_tensor,
    dims,
)
from flashmix.op.choose import preparing
from flashmix.op.packing import Packing, as_packing, check_whole
from flashmix.op.public import public
from flashmix.ops.attention.op import check_features, check_softcap, check_window
from flashmix.ops.attention_cache.call import AttentionCacheCall
from flashmix.ops.rotary.op import rotary as rotate
from flashmix.ops.rotary.op import rotary_qk


def triton_supports(call: AttentionCacheCall) -> str | None:
    """The reason why Triton cannot run the call, None if it can: a cache is used where it lies, so its channels must lie side by side."""
    apart = any(x.shape[3] > 1 and x.stride(3) != 1 for x in (call.keys, call.values))
    return triton_refuses_first(call) or (
        "the channels of the cache do not lie side by side in memory" if apart else None
    )


IMPLEMENTATIONS = implementations("attention_cache", triton_supports)
ATTENTION_CACHE = Op("attention_with_cache", AttentionCacheCall, IMPLEMENTATIONS, outputs=2)


@dataclass
class KVCache:
    """The keys and values of some sequences, in pages; a contiguous cache has one page a sequence.

    Attributes:
        keys: `[pages, page_size, H, K]`.
        values: `[pages, page_size, H, V]`.
        page_table: `[sequences, pages of one]` int32 or int64: token `t` of sequence `n` lies in page
            `page_table[n, t // page_size]`. Sequences may share full pages; entries past a sequence's end are not read.
        lengths: `[sequences]` int64, the tokens that each sequence holds. To drop the last ones, lower it.
    """

    keys: Tensor
    values: Tensor
    page_table: Tensor
    lengths: Tensor

    @classmethod
    def contiguous(
        cls,
        sequences: int,
        tokens: int,
        heads: int,
        dim_qk: int,
        dim_v: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache with room for `tokens` in each sequence."""
        table = torch.arange(sequences, device=device)[:, None]
        return cls.paged(sequences, tokens, table, heads, dim_qk, dim_v, device=device, dtype=dtype)

    @classmethod
    def paged(
        cls,
        pages: int,
        page_size: int,
        page_table: Tensor,
        heads: int,
        dim_qk: int,
        dim_v: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache of `pages` pages of `page_size` tokens, given out by `page_table`."""
        check_tensor("page_table", page_table)
        sequences = dims("page_table", page_table, "sequences pages")[0]
        return cls(
            torch.zeros(pages, page_size, heads, dim_qk, device=device, dtype=dtype),
            torch.zeros(pages, page_size, heads, dim_qk if dim_v is None else dim_v, device=device, dtype=dtype),
            page_table,
            torch.zeros(sequences, dtype=torch.int64, device=device),
        )

    @property
    def capacity(self) -> int:
        """The number of tokens that one sequence can hold."""
        return self.page_table.shape[1] * self.keys.shape[1]


@public
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal softmax attention of the newest tokens of each sequence to all that its cache holds.

    With `k` and `v`, these T tokens are rotated and appended first, in place, and the cache's lengths grow by T.
    Without, the queries belong to the last T tokens of the cache. The scores, and what a query sees, are those of
    `softmax_attention(causal=True)`: query `i` of a sequence of `n` tokens stands at position `n - T + i`.

    Args:
        q: `[B, T, HQ, K]`, one row a sequence of the cache; packed: `[1, total, HQ, K]`.
        cache: contiguous or paged, in q's dtype.
        k: `[B, T, H, K]` of the same tokens, not rotated, or None.
        v: `[B, T, H, V]`, or None.
        rotary: `(cos, sin)` of `rotary_table`, `[P, R/2]` each: rotates q and k by their positions. A cache whose keys
            were rotated when appended needs it for q even without k.
        interleaved: as in `rotary`.
        scale: factor of the scores; default `K ** -0.5`.
        window: `(left, right)`: a query sees itself and the `left` tokens before it; right is 0 in effect.
        softcap: scores are squashed into `(-softcap, softcap)`.
        sink: `[HQ]` floating, a logit per head that takes probability and gives no value.
        alibi_slopes: `[HQ]` floating.
        cu_seqlens: `[B + 1]` or `Packing`: how many new tokens each sequence has, where that differs.
        return_lse: return `lse` too.
        impl: `"auto"`, `"triton"` (on a GPU) or `"portable"`.

    Returns:
        `o` `[B, T, HQ, V]` and `lse` `[B, HQ, T]` (packed `[HQ, total]`, float32) or None.

    Raises:
        TypeError: a dtype that differs from q's.
        ValueError: shapes that do not fit; more tokens than the cache has room for, or than it holds (on a GPU, where nobody
            waits for the lengths, tokens without room are dropped, and what is not there is not seen).
        RuntimeError: an input requires a gradient: there is none through a cache.

    Source: Kwon et al., 2309.06180 (pages).

    Example:
        >>> import torch
        >>> cache = KVCache.contiguous(2, 16, heads=2, dim_qk=8)
        >>> q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
        >>> o, _ = attention_with_cache(q, cache, k, k)
        >>> o.shape, cache.lengths.tolist()
        (torch.Size([2, 3, 4, 8]), [3, 3])
    """
    packing = _check(q, cache, k, v, cu_seqlens)
    left, _ = check_window(window)
    check_features(q, sink, alibi_slopes, None, (1, 0, q.shape[2]), 0)
    check_softcap(softcap)
    table = () if rotary is None else check_pair("rotary", rotary, "tensors")
    for part in table:
        check_tensor("rotary", part)
    inputs = (q, k, v, cache.keys, cache.values, sink, alibi_slopes, *table)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError("attention_with_cache has no gradient: call it under torch.no_grad(), or softmax_attention")

    if rotary is not None:
        positions = _positions(cache.lengths, packing, q.shape[1], appends=k is not None)
        with preparing():
            if k is None:
                q = rotate(q, *table, positions=positions, interleaved=interleaved)
            else:
                q, k = rotary_qk(q, k, *table, positions=positions, interleaved=interleaved)
    call = AttentionCacheCall(
        q,
        k,
        v,
        cache.keys,
        cache.values,
        cache.page_table,
        cache.lengths,
        sink=sink,
        alibi_slopes=alibi_slopes,
        packing=packing,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        left=left,
        softcap=softcap,
        return_lse=return_lse,
    )
    o, lse = ATTENTION_CACHE(call, impl)
    return o, lse if return_lse else None


def _check(
    q: Tensor, cache: KVCache, k: Tensor | None, v: Tensor | None, cu_seqlens: Tensor | Packing | None
) -> Packing | None:
    check_whole(cu_seqlens, "attention_with_cache")
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    batch, tokens, heads_q, dim_qk = dims("q", q, "B T HQ K")
    check_dtype("q", q, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    pages, page_size, heads, _ = dims("cache.keys", cache.keys, "pages page_size H K")
    dim_v = dims("cache.values", cache.values, "pages page_size H V")[3]
    check_shape("cache.keys", cache.keys, pages, page_size, heads, dim_qk)
    check_shape("cache.values", cache.values, pages, page_size, heads, dim_v)
    check_multiple("the number of heads of q", heads_q, "that of the cache", heads)
    check_range("the head dim of q", dim_qk, 1, 256)
    check_range("the head dim of the cache's values", dim_v, 1, 256)
    check_dtype("cache.page_table", cache.page_table, torch.int32, torch.int64)
    check_dtype("cache.lengths", cache.lengths, torch.int64)
    (sequences,) = dims("cache.lengths", cache.lengths, "sequences")
    check_shape("cache.page_table", cache.page_table, sequences, dims("cache.page_table", cache.page_table, "B P")[1])
    for name, tensor in (("cache.keys", cache.keys), ("cache.values", cache.values), ("k", k), ("v", v)):
        if tensor is not None:
            check_tensor(name, tensor)
            check_like(name, tensor, "q", q)
    check_like("cache.page_table", cache.page_table, "q", q, dtype=False)
    check_like("cache.lengths", cache.lengths, "q", q, dtype=False)
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got only {'v' if k is None else 'k'}")
    if k is not None and v is not None:
        check_shape("k", k, batch, tokens, heads, dim_qk)
        check_shape("v", v, batch, tokens, heads, dim_v)
    packing = as_packing(cu_seqlens, batch, tokens, q.device)
    rows, name = (batch, "q") if packing is None else (packing.count, "cu_seqlens")
    if rows != sequences:
        raise ValueError(f"{name} must have one row a sequence of the cache, which has {sequences}, got {rows}")
    return packing


def _positions(lengths: Tensor, packing: Packing | None, tokens: int, *, appends: bool) -> Tensor:
    """The positions of the new tokens, `[B, T]`."""
    if packing is None:
        first = lengths if appends else lengths - tokens
        return first[:, None] + torch.arange(tokens, device=lengths.device)
    first = lengths if appends else lengths - packing.lengths
    return (first[packing.sequence.clamp(max=max(packing.count - 1, 0))] + packing.positions)[None]
