"""`softmax_attention` under transformers' continuous batching: requests end to end in one row, their keys in blocks of one cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashmix.hf.rows import Kept
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache

PACKINGS = Kept(4)  # one for each kind of layer


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    block_table: Tensor | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """An attention as `ContinuousBatchingManager` calls it: new tokens of several requests, which see their own keys in the cache.

    Args:
        module: the attention layer; `layer_idx` is its place in the cache.
        query: `[1, HQ, T, K]`, the new tokens of all requests end to end; those of a padded batch come after the last boundary.
        key: `[1, H, T, K]` of the same tokens.
        value: `[1, H, T, K]`.
        attention_mask: None; the boundaries say what a query sees.
        cache: a `PagedAttentionCache`.
        cu_seq_lens_q: `[N + 1]`, where the tokens of each request begin and end.
        cu_seq_lens_k: `[N + 1]`, where the keys of each request begin and end among those read; in a model with windows in some layers
            a dict of both kinds.
        block_table: `[groups, T, blocks]`: the blocks of each request, where each has one new token; -1 where there is none.
        read_index: for each group of layers the places of the keys in the cache, empty where no request has any there yet.
        write_index: for each group of layers the places of the new keys.
        scaling: factor of the scores.
        sliding_window: the number of keys that a query sees, itself included.
        softcap: scores are squashed to below it.
        s_aux: `[HQ]`, a sink per head.
        told: what else transformers says.

    Raises:
        ValueError: it is called without a cache, as a model's `forward` does outside continuous batching, or with a mask or a dropout.
    """
    if cache is None:
        raise ValueError('cache must be given ("paged|" is for continuous batching: generate_batch), got None')
    for name, given in (("attention_mask", attention_mask is not None), ("dropout", told.get("dropout"))):
        if given:
            raise ValueError(f"{name} must not be given to flashmix's paged attention")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(cu_seq_lens_k, dict):
        full = cache.sliding_windows[layer] == 1
        cu_seq_lens_k = cu_seq_lens_k["full_attention" if full else "sliding_attention"]
    assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
    window = None if sliding_window is None else (sliding_window - 1, 0)
    options: dict[str, Any] = {"scale": scaling, "window": window, "softcap": softcap, "sink": s_aux}
    query, key = query.to(value.dtype), key.to(value.dtype)  # norms in float32 leave their results so
    if block_table is not None:
        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))  # [T, 1, heads, K]
        blocks = _blocks(cache, layer, block_table, cu_seq_lens_k)
        o, _ = attention_with_cache(q, blocks, k, v, **options)
        return o.transpose(0, 1), None
    k, v = cache.update(key, value, layer, read_index, write_index)
    q, k, v = query.transpose(1, 2), k[None], v[None]
    ends = (q.shape[1], k.shape[1])
    packing, packing_k = PACKINGS.of((cu_seq_lens_q, cu_seq_lens_k), ends, _packings)
    o, _ = softmax_attention(q, k, v, causal=True, cu_seqlens=packing, cu_seqlens_k=packing_k, **options)
    return o, None


def _packings(boundaries: tuple[Tensor, ...], ends: tuple[int, ...]) -> tuple[Packing, ...]:
    """The packings of queries and of keys. The tokens that pad a batch to a fixed size are one request more, the last one."""
    return tuple(Packing(F.pad(b, (0, 1), value=end), end) for b, end in zip(boundaries, ends, strict=True))


def _blocks(cache: Any, layer: int, block_table: Tensor, cu_seq_lens_k: Tensor) -> KVCache:
    """The keys and values of each request before its new token. What pads a batch writes to the cache's block for that."""
    group, place = cache.layer_index_to_group_indices[layer]
    keys, values = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    table = block_table[group]
    table = torch.where(table < 0, cache.write_trash_index // cache.block_size, table)
    return KVCache(keys, values, table, (cu_seq_lens_k.diff().to(torch.int64) - 1).clamp(min=0))
