"""`softmax_attention` as an attention that transformers models can be set to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashmix.hf.paged import paged_attention
from flashmix.hf.rows import BatchRows, Boundaries, Kept
from flashmix.op.choose import AVOIDED
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention

BOUNDARIES = Boundaries()
# The parts of masks that options of `softmax_attention` say: causal, windows; packed sequences by their positions.
SAID = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
}


def register_attention(name: str = "fmx") -> str:
    """Registers flashmix's softmax attention with transformers, its mask function and its form for continuous batching too.

        flashmix.hf.register_attention();    model.set_attn_implementation("fmx")

    Serves full and windowed attention, padded batches, packed rows by `cu_seq_lens_q` or by restarting `position_ids`, dynamic and
    static caches, sinks, softcaps, shared key heads and dropout. `"paged|fmx"` is its form for continuous batching (`generate_batch`).

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

    for registered, function in ((name, attention), (f"paged|{name}", paged_attention)):
        AttentionInterface.register(registered, function)
        AttentionMaskInterface.register(registered, attention_mask_2d)
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
        module: the attention layer; its `is_causal` holds where `is_causal` is None.
        query: `[B, HQ, T, K]`.
        key: `[B, H, Tk, K]`; a static cache's unused keys come last.
        value: `[B, H, Tk, V]`.
        attention_mask: `[B, S]` with S <= Tk: which of the first S keys are tokens; the others are unused. None: all are.
        dropout: share of the probabilities that is dropped.
        scaling: factor of the scores.
        is_causal: whether a query sees no later keys.
        sliding_window: the number of keys that a query sees, itself included.
        softcap: scores are squashed to below it.
        s_aux: `[HQ]`, a sink per head.
        told: what else transformers says; boundaries are read (`cu_seq_lens_q`, `cu_seq_lens_k`, `position_ids`).

    Raises:
        ValueError: attention weights are wanted, or scores are biased, or the mask is not `[B, S]`.
    """
    if told.get("output_attentions") or told.get("position_bias") is not None:
        asked = "output_attentions" if told.get("output_attentions") else "position_bias"
        raise ValueError(f"{asked} must not be given to flashmix's attention, which never holds the probabilities")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape [B, S], got {list(attention_mask.shape)}")
    if query.shape[2] == 1 and query.is_cpu and not (dropout or sliding_window or softcap or s_aux is not None):
        o = _newest_token(query, key, value, attention_mask, scaling)
        if o is not None:
            return o, None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"causal": causal, "scale": scaling, "softcap": softcap, "sink": s_aux}
    options["dropout_p"] = dropout
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms in float32 leave their results so
    if attention_mask is not None:
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
        ranges = ranges_of(attention_mask)
        if ranges is None:
            return softmax_attention(q, k, v, **options)[0], None
        return _padded(q, k, v, attention_mask.bool(), ranges, options), None
    return _packed(q, k, v, told, options), None


class RealKeys:
    """Where the real keys of each row of a mask `[B, S]` start and end, `[B]` each.

    Attributes:
        gaps: whether some row has padding between real keys, which no range says.
        ends: whether some row ends with padding.
    """

    def __init__(self, mask: Tensor) -> None:
        width, places = mask.shape[1], torch.arange(mask.shape[1], device=mask.device)
        self.starts = torch.where(mask, places, width).amin(1)
        self.lengths = torch.where(mask, places + 1, 0).amax(1)
        gaps = (mask.sum(1) < self.lengths - self.starts).any()
        self.gaps, self.ends = torch.stack([gaps, (self.lengths < width).any()]).tolist()


RANGES = Kept(4)  # one for each kind of layer


def ranges_of(mask: Tensor) -> RealKeys | None:
    """None where no token is padding; a mask that is one expanded True (a static cache's length) is not read."""
    if not any(mask.stride()):
        return None
    return RANGES.of((mask,), None, lambda masks, _: None if bool(masks[0].all()) else RealKeys(masks[0].bool()))


def _newest_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor | None:
    """Plain attention of one query on a CPU by torch's own, as `softmax_attention` has it, in the layout that is given.

    The checks of a public op take Python three times as long. None where it is not to be taken, or would have nothing to see.
    """
    if "sdpa" in AVOIDED:
        return None
    if mask is not None:
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        ranges = ranges_of(mask)
        if ranges is not None and ranges.ends:
            return None
        mask = None if ranges is None else mask[:, None, None].bool()
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
    if not ranges.gaps and (causal or not ranges.ends or "window" not in options):
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


def attention_mask_2d(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **told: Any,
) -> Tensor | None:
    """The mask that `attention` takes: None, or `[B, S]`, where the keys past S of a static cache are unused.

    Raises:
        ValueError: the mask is more than causal, windowed, packed and padded (chunks, blocks, a function of the user).
    """
    for part in _parts(mask_function):
        if part not in SAID:
            raise ValueError(f"the mask must be causal, windowed or full for flashmix's attention, got {part}")
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        return None if attention_mask.shape[1] == kv_length and bool(attention_mask.all()) else attention_mask
    used = int(q_offset) + q_length - int(kv_offset)
    return None if used >= kv_length else torch.ones((), dtype=torch.bool, device=device).expand(batch_size, used)


def _parts(function: Any) -> Iterator[str]:
    """The names of the functions that transformers made a mask function of."""
    if function is None:
        return
    maker = function.__qualname__.split(".")[0]
    if maker != "and_masks":
        yield maker
        return
    for cell in function.__closure__ or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else ():
            yield from _parts(part)
