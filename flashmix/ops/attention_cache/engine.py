"""Choosing and calling an implementation of `attention_with_cache`, as an operator that torch.compile knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.choose import Implementation, choose
from flashmix.ops.attention.call import CacheProblem, Score

Held = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, page table, lengths

IMPLEMENTATIONS: tuple[Implementation[CacheProblem], ...] = (
    Implementation(
        "triton",
        "flashmix.ops.attention_cache.triton_gpu",
        lambda problem: gpu.refuses(torch.device(problem.device), problem.dtype),
    ),
    Implementation("portable", "flashmix.ops.attention_cache.portable", lambda problem: None),
)


def attend(
    problem: CacheProblem,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    held: Held,
    features: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """`(o, lse)` of a checked call; appends `k` and `v` to what is held."""
    chosen = choose("attention_with_cache", IMPLEMENTATIONS, problem, impl)
    score = problem.score
    scalars = (score.scale, score.left, score.softcap, problem.lse, chosen.name)
    o, lse = _attend(q, k, v, *held, *features, cu_seqlens, *scalars)
    return o, lse if problem.lse else None


@torch.library.custom_op("flashmix::attention_with_cache", mutates_args=("keys", "values", "lengths"))
def _attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    left: int | None,
    softcap: float | None,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    module: Any = next(i for i in IMPLEMENTATIONS if i.name == impl).load()
    held, features = (keys, values, page_table, lengths), (sink, alibi_slopes)
    score = Score(scale, left, 0, softcap)
    with torch.autocast(q.device.type, enabled=False):
        return module.attend(q, k, v, held, features, cu_seqlens, score, return_lse)


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    left: int | None,
    softcap: float | None,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    lse_shape = (0,) if not return_lse else (heads, tokens) if cu_seqlens is not None else (batch, heads, tokens)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, tokens, heads, values.shape[3]), q.new_empty(lse_shape, dtype=lse_dtype)
