"""The static facts of one attention call: what an implementation looks at before it accepts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and features of a `softmax_attention` call; nothing that only the device knows."""

    batch: int
    tokens_q: int
    tokens_k: int
    heads_q: int
    heads: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype
    device: str
    score: Score
    sink: bool
    alibi: bool
    decay: bool
    packed: bool
    lse: bool
    gradient: bool


@dataclass(frozen=True)
class Score:
    """How one score becomes one probability.

    Query `i` stands at position `i + Tk - Tq` and sees the keys from `left` before to `right` after it (None: all of
    them); causal attention is `right = 0`.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0


@dataclass(frozen=True)
class CacheProblem:
    """Static facts of an `attention_with_cache` call."""

    sequences: int
    pages: int
    page_size: int
    tokens: int
    heads_q: int
    heads: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype
    device: str
    score: Score
    packed: bool
    appends: bool
    lse: bool
