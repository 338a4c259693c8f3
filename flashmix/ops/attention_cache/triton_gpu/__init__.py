"""Attention of new tokens to a cache, in Triton: append, attend to pieces of the cache, combine the pieces.

Lengths and pages are read on the device; what leaves the cache is not written and not seen.
"""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.attention.triton_gpu.spec import aligned
from flashmix.ops.attention_cache.call import AttentionCacheCall
from flashmix.ops.attention_cache.triton_gpu.append import cache_append
from flashmix.ops.attention_cache.triton_gpu.attend import cache_attend


def forward(call: AttentionCacheCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o [B, T, HQ, V]` and `lse` `[B, HQ, T]`, packed `[HQ, total]`, or `[0]` where it is not wanted."""
    o, lse = call.results()
    call = call.but(q=aligned(call.q), page_table=call.page_table.contiguous())
    if call.k is not None and call.k.numel() > 0:
        cache_append(call)
    if o.numel() > 0 and call.sequences > 0:
        cache_attend(call, o, lse if call.return_lse else None)
    return (o, lse), ()
