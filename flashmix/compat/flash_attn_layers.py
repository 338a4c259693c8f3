"""The layers around the attention of flash_attn: rotary embedding, padding, norms and cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flashmix.compat.losses import RowCrossEntropy, cross_entropy_loss
from flashmix.compat.norms import ResidualNorm, normalise
from flashmix.compat.rotary import RotaryTable, rotate
from flashmix.compat.surface import Function, Surface

_NORM = (
    "x weight bias residual=None !x1=None !weight1=None !bias1=None eps=1e-06 !dropout_p=0.0 rowscale=None prenorm=False "
    "residual_in_fp32=False zero_centered_weight=False"
)
_NORM_TAIL = "!return_dropout_mask=False !out_dtype=None !out=None !residual_out=None"


def declare(surface: Surface) -> None:
    """Declares all of this file's functions and modules."""
    functions: dict[Function, tuple[str, str]] = {
        apply_rotary_emb: (
            "apply_rotary_emb apply_rotary_emb_func",
            "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None ~max_seqlen=None",
        ),
        rotate_qkv: (
            "apply_rotary_emb_qkv_",
            "qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 num_heads_q=None",
        ),
        rotate_kv: ("apply_rotary_emb_kv_", "kv cos sin interleaved=False seqlen_offsets=0"),
        unpad_input: ("unpad_input", "hidden_states attention_mask unused_mask=None"),
        pad_input: ("pad_input", "hidden_states indices batch seqlen"),
        take_rows: ("index_first_axis", "input indices"),
        put_rows: ("index_put_first_axis", "values indices first_axis_dim"),
        norm_fn: ("layer_norm_fn", f"{_NORM} is_rms_norm=False {_NORM_TAIL}"),
        rms_norm_fn: ("rms_norm_fn", f"{_NORM} {_NORM_TAIL}"),
        row_cross_entropy: (
            "cross_entropy_loss",
            "logits labels !precomputed_lse=None label_smoothing=0.0 logit_scale=1.0 lse_square_scale=0.0 ignore_index=-100 "
            "inplace_backward=False !process_group=None",
        ),
    }
    for body, (names, arguments) in functions.items():
        surface.function(names, arguments)(body)
    surface.add("RotaryEmbedding", PackedRotary, "`scale_base`")
    surface.add("RMSNorm", DropoutFreeRMSNorm, "`dropout_p`")
    surface.add("CrossEntropyLoss", RowCrossEntropy, "`process_group`, `precomputed_lse`")


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, **options: Any) -> Tensor:
    """`flashmix.rotary` of `[B, T, H, D]`, with `cu_seqlens` `[total, H, D]`; in place only where no gradient is wanted."""
    if cu_seqlens is None:
        return rotate(x, cos, sin, **options)
    return rotate(x[None], cos, sin, cu_seqlens=cu_seqlens, **options)[0]


def rotate_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    interleaved: bool,
    seqlen_offsets: int | Tensor,
    num_heads_q: int | None,
) -> Tensor:
    """Rotates queries and keys of `[B, T, 3, H, D]`, or of `[B, T, HQ + 2 H, D]` with `num_heads_q`.

    In place, unless a gradient is wanted: then the result is a new tensor.
    """
    if qkv.dim() == 5:
        parts, axis = list(qkv.split(1, 2)), 2
    else:
        if num_heads_q is None:
            raise ValueError("num_heads_q must be given with qkv of shape [B, T, HQ + 2 H, D], got None")
        heads = (qkv.shape[2] - num_heads_q) // 2
        parts, axis = list(qkv.split([num_heads_q, heads, heads], 2)), 2
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    turned = [
        rotate(part.squeeze(2) if qkv.dim() == 5 else part, *table, interleaved, seqlen_offsets=seqlen_offsets)
        for part, table in zip(parts, tables, strict=False)
    ]
    return _replace(qkv, parts, [x.view_as(p) for x, p in zip(turned, parts, strict=False)], axis)


def rotate_kv(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seqlen_offsets: int | Tensor) -> Tensor:
    """Rotates the keys of `[B, T, 2, H, D]`, in place unless a gradient is wanted."""
    parts = list(kv.split(1, 2))
    k = rotate(parts[0].squeeze(2), cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    return _replace(kv, parts, [k.unsqueeze(2)], 2)


def _replace(whole: Tensor, parts: list[Tensor], first: list[Tensor], axis: int) -> Tensor:
    """`whole` with its first parts replaced."""
    if torch.is_grad_enabled() and whole.requires_grad:
        return torch.cat([*first, *parts[len(first) :]], axis)
    for part, new in zip(parts, first, strict=False):
        part.copy_(new)
    return whole


class PackedRotary(RotaryTable):
    """flash_attn's `RotaryEmbedding`: rotates queries and keys of a packed `qkv`, or `q` and a packed `kv`.

    Args:
        dim: channels that are rotated, even.
        base: the longest wavelength is about `2 pi base` tokens.
        interleaved: the pairs are neighbours.
        scale_base: only None.
        device: not used; the table follows the inputs.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, base, interleaved, scale_base)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """The rotated `qkv` (see `apply_rotary_emb_qkv_`), or `(q, kv)`; in place unless a gradient is wanted."""
        cos, sin = self.table(qkv, seqlen_offset, max_seqlen)
        if kv is None:
            return rotate_qkv(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = rotate(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, rotate_kv(kv, cos, sin, self.interleaved, seqlen_offset)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that the mask `[B, T]` (or the unused one) keeps: `(x, indices, cu_seqlens int32, longest, used lengths)`.

    The lengths in `cu_seqlens` count both masks, the used lengths only the first.
    """
    both = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = both.sum(-1, dtype=torch.int32)
    indices = both.flatten().nonzero().flatten()
    boundaries = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, boundaries, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`[B, T, ...]` with the tokens at `indices` and zeros elsewhere."""
    return put_rows(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def take_rows(input: Tensor, indices: Tensor) -> Tensor:
    """`input[indices]`."""
    return input[indices]


def put_rows(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros `[first_axis_dim, ...]` with `values` at `indices`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    rowscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    zero_centered_weight: bool,
    is_rms_norm: bool,
) -> Any:
    """`flashmix.layer_norm` or `rms_norm` of `x rowscale + residual`; with `prenorm` the pair of it and the sum."""
    return normalise(
        x if rowscale is None else (x * rowscale.unsqueeze(-1)).to(x.dtype),
        weight + 1 if zero_centered_weight else weight,
        bias,
        eps=eps,
        center=not is_rms_norm,
        residual=residual,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
    )


def rms_norm_fn(**options: Any) -> Any:
    """`layer_norm_fn` with `is_rms_norm=True`."""
    return norm_fn(is_rms_norm=True, **options)


class DropoutFreeRMSNorm(ResidualNorm):
    """flash_attn's `RMSNorm`, without its dropout.

    Args:
        hidden_size: channels of the last axis.
        eps: added to the mean square.
        dropout_p: only 0.
        zero_centered_weight: the weight is stored less 1.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)
        if dropout_p:
            raise NotImplementedError("flash_attn.RMSNorm: flashmix has no dropout_p")
        self.zero_centered_weight = zero_centered_weight
        if zero_centered_weight:
            nn.init.zeros_(self.weight)  # type: ignore[arg-type]

    def normalise(self, x: Tensor, **options: Any) -> Any:
        weight = self.weight
        assert weight is not None
        weight_of_one = weight + 1 if self.zero_centered_weight else weight
        return normalise(x, weight_of_one, None, eps=self.eps, center=False, **options)


def row_cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`(losses, z_losses)` of rows, float32; the z-loss is in the loss too."""
    return cross_entropy_loss(logits, labels, **options)
