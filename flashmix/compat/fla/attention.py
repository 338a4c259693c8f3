"""Softmax attention of fla.ops, and its helpers for packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.compat.fla.common import FLA
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention


@FLA.function(
    "parallel_attn", "q k v g=None scale=None window_size=None cu_seqlens=None ~chunk_indices=None * sink_bias=None"
)
@FLA.function("parallel_forgetting_attn", "q k v g scale=None window_size=None cu_seqlens=None")
def parallel_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    window_size: int | None,
    cu_seqlens: Tensor | None,
    sink_bias: Tensor | None = None,
) -> Tensor:
    """`flashmix.softmax_attention(causal=True, log_decay=g)`; a query sees `window_size` tokens, its own included."""
    return softmax_attention(
        q,
        k,
        v,
        causal=True,
        scale=scale,
        window=None if window_size is None else (window_size - 1, 0),
        sink=sink_bias,
        log_decay=g,
        cu_seqlens=cu_seqlens,
    )[0]


@FLA.function("prepare_lens", "cu_seqlens")
def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """The lengths of packed sequences."""
    return cu_seqlens.diff()


@FLA.function("prepare_cu_seqlens_from_lens", "lens dtype=None")
def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The boundaries of packed sequences, int32 unless a dtype is given."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32 if dtype is None else dtype)


@FLA.function("prepare_position_ids", "cu_seqlens ~cu_seqlens_cpu=None")
def prepare_position_ids(cu_seqlens: Tensor) -> Tensor:
    """The place of each token in its sequence."""
    return _packing(cu_seqlens).positions.to(cu_seqlens.dtype)


@FLA.function("prepare_sequence_ids", "cu_seqlens ~cu_seqlens_cpu=None")
def prepare_sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """The number of the sequence of each token."""
    return _packing(cu_seqlens).sequence.to(cu_seqlens.dtype)


def _packing(cu_seqlens: Tensor) -> Packing:
    return Packing(cu_seqlens, int(cu_seqlens[-1]))
