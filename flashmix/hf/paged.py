"""`softmax_attention` under transformers' continuous batching: requests end to end in one row, their keys in blocks of one cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.hf.rows import Kept
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache

PACKINGS = Kept(4)  # one for each kind of layer
LET_THROUGH: set[str] = set()


def let_through(name: str) -> None:
    """Makes transformers' manager of continuous batching leave a model alone that is set to the attention `name`.

    The manager knows names of its own and has no place where others are registered: it refuses them (5.23), or switches to a flash
    kernel of the hub where it finds one (5.17). Models that are set to other names are switched as before.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    switch = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if switch is not None and not LET_THROUGH:

        @wraps(switch)
        def switch_others(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
            if model.config._attn_implementation not in LET_THROUGH:
                switch(self, model, *arguments, **options)

        ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_others
    LET_THROUGH.add(name)


def is_paged(cache: Any) -> bool:
    """Whether it is the cache of continuous batching."""
    if cache is None:
        return False
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return isinstance(cache, PagedAttentionCache)


def paged_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, told: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Attention of new tokens of several requests, which see their own keys in the cache, `[1, T, HQ, V]`.

    Args:
        layer: the layer's place in the cache.
        query: `[1, HQ, T, K]`, the new tokens of all requests end to end; those of a padded batch come after the last boundary.
        key: `[1, H, T, K]` of the same tokens.
        value: `[1, H, T, V]`.
        told: what `ContinuousBatchingManager` says. `cache`; `cu_seq_lens_q` and `cu_seq_lens_k` `[N + 1]`, where the new tokens of
            each request begin and end, and its keys among those read (a dict by kinds of layers too); for each group of layers
            `read_index`, the places of the keys in the cache, empty where no request has any there yet, and `write_index`, those of
            the new keys; or `block_table` `[groups, N, blocks]`, the blocks of each request where each has one new token, -1 where
            there is none.
        options: scale, window, softcap and sink of `softmax_attention`.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # norms in float32 leave their results so
    read = _read(layer, key, value, told)
    if told.get("block_table") is not None:
        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))  # [T, 1, heads, K]
        table = torch.where(read.table < 0, read.trash, read.table)
        lengths = (read.boundaries.diff().to(torch.int64) - 1).clamp(min=0)  # before the new token
        o, _ = attention_with_cache(q, KVCache(read.keys, read.values, table, lengths), k, v, **options)
        return o.transpose(0, 1)
    q = query.transpose(1, 2)
    ends = (q.shape[1], read.keys.shape[1])
    packing, packing_k = PACKINGS.of((told["cu_seq_lens_q"], read.boundaries), ends, _packings)
    return softmax_attention(
        q, read.keys, read.values, causal=True, cu_seqlens=packing, cu_seqlens_k=packing_k, **options
    )[0]


@dataclass(frozen=True)
class _Read:
    """What the queries of one layer read.

    Attributes:
        boundaries: `[N + 1]`, where the keys of each request begin and end.
        keys: `[1, S, H, K]`, the new ones among them; with a block table the cache's pages `[pages, page size, H, K]`.
        values: the same with V channels.
        table: `[N, blocks]`, the block table, or None.
        trash: the page that the tokens which pad a batch write to.
    """

    boundaries: Tensor
    keys: Tensor
    values: Tensor
    table: Any = None
    trash: int = 0


def _read(layer: int, key: Tensor, value: Tensor, told: dict[str, Any]) -> _Read:
    """Updates the cache. All that differs between versions of transformers is here, told apart by the attributes of the cache."""
    cache = told["cache"]
    if hasattr(cache, "layer_to_allocator"):  # 5.23: `update` puts into `told` what is this layer's
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=told)
        if told.get("block_table") is None:
            return _Read(told["cu_seq_lens_k"], k.transpose(1, 2), v.transpose(1, 2))
        allocator = cache.layer_to_allocator[layer]
        trash = allocator.write_trash_index // allocator.tokens_per_page
        return _Read(told["cu_seq_lens_k"], told["k_cache"], told["v_cache"], told["block_table"], trash)
    boundaries = told["cu_seq_lens_k"]  # 5.17
    if isinstance(boundaries, dict):
        full = cache.sliding_windows[layer] == 1
        boundaries = boundaries["full_attention" if full else "sliding_attention"]
    if told.get("block_table") is None:
        k, v = cache.update(key, value, layer, told["read_index"], told["write_index"])
        return _Read(boundaries, k[None], v[None])
    group, place = cache.layer_index_to_group_indices[layer]
    k, v = (x[place].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    return _Read(boundaries, k, v, told["block_table"][group], cache.write_trash_index // cache.block_size)


def _packings(boundaries: tuple[Tensor, ...], ends: tuple[int, ...]) -> tuple[Packing, ...]:
    """The packings of queries and of keys. The tokens that pad a batch to a fixed size are one request more, the last one."""
    return tuple(Packing(F.pad(b, (0, 1), value=end), end) for b, end in zip(boundaries, ends, strict=True))
