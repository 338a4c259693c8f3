"""`softmax_attention` as an attention that transformers models can be set to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashmix.hf.mask import RealKeys, key_mask, ranges_of, said_of, window_of_layer
from flashmix.hf.paged import is_paged, let_through, paged_attention
from flashmix.hf.rows import BatchRows, Boundaries
from flashmix.op.choose import AVOIDED
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention

BOUNDARIES = Boundaries()
# What some models tell their attention that changes its result (weights, biases, selected keys, sinks of each token), and is not served.
REFUSED = {"output_attentions", "position_bias", "indices", "block_indices", "sinks"}


def register_attention(name: str = "fmx") -> str:
    """Registers flashmix's softmax attention with transformers, and its mask function.

        flashmix.hf.register_attention();    model.set_attn_implementation("fmx")

    Serves full and windowed attention, padded batches, packed rows by `cu_seq_lens_q` or by restarting `position_ids`, dynamic and
    static caches, sinks, softcaps, shared key heads and dropout; continuous batching too (`generate_batch`), whose manager is made
    to let the name through (`flashmix.hf.paged`). `"paged|fmx"`, which transformers 5.17 knows, is the same attention.

    Args:
        name: what models are set to. transformers takes every name with "flash" in it for a kernel of its hub.

    Returns:
        `name`.

    Raises:
        ValueError: "flash" is in the name.
        ImportError: transformers is not installed.
    """
    if "flash" in name:
        raise ValueError(f'name must not have "flash" in it (transformers takes it for a hub kernel), got {name!r}')
    from transformers import AttentionInterface, AttentionMaskInterface

    for registered in (name, f"paged|{name}"):
        AttentionInterface.register(registered, attention)
        AttentionMaskInterface.register(registered, key_mask)
        let_through(registered)
    return name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """An attention as transformers calls it: `[B, H, T, D]` in, `[B, T, H, D]` out.

    Args:
        module: the attention layer; its `is_causal` holds where neither the mask nor `is_causal` says.
        query: `[B, HQ, T, K]`.
        key: `[B, H, Tk, K]`; a static cache's unused keys come last.
        value: `[B, H, Tk, V]`.
        attention_mask: `[B, S]` or `[B, 1, 1, S]` with S <= Tk: which of the first S keys are tokens; the others are unused. None: all
            are. What its function said of causality, windows and packed sequences (`said_of`) comes before what the layer says.
        dropout: share of the probabilities that is dropped.
        scaling: factor of the scores.
        is_causal: whether a query sees no later keys.
        sliding_window: the number of keys that a query sees, itself included.
        softcap: scores are squashed to below it.
        s_aux: `[HQ]`, a sink per head.
        told: what else transformers says; boundaries are read (`cu_seq_lens_q`, `cu_seq_lens_k`, `position_ids`), and with a
            `PagedAttentionCache` as `cache` what `paged_attention` reads.

    Raises:
        ValueError: attention weights are wanted, or scores are biased, or keys selected, or the mask is of other than keys.
    """
    if not REFUSED.isdisjoint(told):
        for name in sorted(REFUSED):
            if told.get(name) is not None and told[name] is not False:
                raise ValueError(f"{name} must not be given to flashmix's attention")
    said = said_of(attention_mask)
    if said is not None:
        causal, window = said.causal, said.window
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = window_of_layer(sliding_window, causal)
    if "cache" in told and is_paged(told["cache"]):
        if dropout or (attention_mask is not None and any(attention_mask.stride())):
            raise ValueError(f"{'dropout' if dropout else 'attention_mask'} must not be given with a paged cache")
        options: dict[str, Any] = {"scale": scaling, "window": window, "softcap": softcap, "sink": s_aux}
        return paged_attention(int(module.layer_idx), query, key, value, told, options), None  # type: ignore[arg-type]
    if attention_mask is not None and attention_mask.dim() != 2 and not _of_keys(attention_mask):
        found = f"{list(attention_mask.shape)} {str(attention_mask.dtype).removeprefix('torch.')}"
        raise ValueError(f"attention_mask must have shape [B, S], or [B, 1, 1, S] and be bool, got {found}")
    if query.shape[2] == 1 and query.is_cpu and not (dropout or window or softcap or s_aux is not None):
        o = _newest_token(query, key, value, attention_mask, scaling)
        if o is not None:
            return o, None
    options = {"scale": scaling, "window": window, "softcap": softcap, "sink": s_aux}
    options |= {"causal": causal, "dropout_p": dropout}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms in float32 leave their results so
    if attention_mask is not None:
        k, v = k[:, : attention_mask.shape[-1]], v[:, : attention_mask.shape[-1]]
        ranges = ranges_of(attention_mask)
        if ranges is not None:
            return _padded(q, k, v, attention_mask.flatten(1).bool(), ranges, options), None
    if said is not None and said.sequences is not None:
        told["seq_idx"] = said.sequences
    return _packed(q, k, v, told, options), None


def _of_keys(mask: Tensor) -> bool:
    return mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool


def _newest_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor | None:
    """Plain attention of one query on a CPU by torch's own, as `softmax_attention` has it, in the layout that is given.

    The checks of a public op take Python three times as long. None where it is not to be taken, or would have nothing to see.
    """
    if "sdpa" in AVOIDED:
        return None
    if mask is not None:
        key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
        ranges = ranges_of(mask)
        if ranges is not None and ranges.ends:
            return None
        mask = None if ranges is None else mask.flatten(1)[:, None, None].bool()
    if query.dtype is not value.dtype or key.dtype is not value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped).transpose(1, 2)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ranges: RealKeys, options: dict[str, Any]) -> Tensor:
    """Attention among the real tokens of each row; padding queries give 0.

    Keys are read where they lie. Only padding between real keys, and a window over both sides of rows that end with padding, have
    the real tokens gathered into one packed row.
    """
    tokens, causal = q.shape[1], options["causal"]
    real = mask[:, -tokens:] if causal else mask.new_ones(q.shape[:2])
    if not causal and mask.shape[1] == tokens:
        real = mask
    if not ranges.gaps and (causal or not ranges.ends or options["window"] is None):
        # a query stands where the mask has it, also in a row that ends with padding, which no real query sees then
        lengths = None if causal or not ranges.ends else ranges.lengths
        o, _ = softmax_attention(q, k, v, key_starts=ranges.starts, key_lengths=lengths, **options)
        return o if causal and not ranges.ends else o.masked_fill(~real[:, :, None, None], 0)
    packings = [Packing.from_lengths(which.sum(1)) for which in (real, mask)]
    q, k, v = (x[which][None] for x, which in ((q, real), (k, mask), (v, mask)))
    o, _ = softmax_attention(q, k, v, cu_seqlens=packings[0], cu_seqlens_k=packings[1], **options)
    out = o.new_zeros(*real.shape, *o.shape[2:])
    return out.masked_scatter(real[:, :, None, None], o)


def _packed(q: Tensor, k: Tensor, v: Tensor, told: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Attention of rows without padding, each one sequence or several."""
    batch, tokens = q.shape[:2]
    lengths_q, lengths_k = told.get("cu_seq_lens_q"), told.get("cu_seq_lens_k")
    if batch == 1 and lengths_q is not None and lengths_k is not None:
        return softmax_attention(q, k, v, cu_seqlens=lengths_q, cu_seqlens_k=lengths_k, **options)[0]
    packing = None if k.shape[1] != tokens else BOUNDARIES.packing_of(told, batch, tokens, False)
    rows = BatchRows(batch, tokens, packing)
    o, _ = softmax_attention(*(rows.join(x) for x in (q, k, v)), cu_seqlens=packing, **options)
    return rows.part(o)
