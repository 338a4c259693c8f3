"""Choosing an implementation of softmax attention and calling it, as operators that autograd and torch.compile know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.choose import Implementation, choose
from flashmix.op.operator import differentiable, once_differentiable, operator
from flashmix.ops.attention import sdpa
from flashmix.ops.attention.call import Problem, Score

MOST_CHANNELS_BACKWARD = 256


def _triton_supports(problem: Problem) -> str | None:
    channels = max(problem.dim_qk, problem.dim_v)
    if problem.gradient and channels > MOST_CHANNELS_BACKWARD:
        return f"its backward takes head dims up to {MOST_CHANNELS_BACKWARD}, got {channels}"
    return gpu.refuses(torch.device(problem.device), problem.dtype)


def _sdpa_supports(problem: Problem) -> str | None:
    score = problem.score
    extras = {
        "a window": score.left is not None or score.right not in (None, 0),
        "softcap": score.softcap is not None,
        "dropout": score.dropout_p > 0,
        "a sink": problem.sink,
        "ALiBi": problem.alibi,
        "log_decay": problem.decay,
        "packed sequences": problem.packed,
        "return_lse": problem.lse,
    }
    for extra, wanted in extras.items():
        if wanted:
            return f"torch's scaled_dot_product_attention does not take {extra}"
    if problem.dim_qk != problem.dim_v:
        return f"torch holds [Tq, Tk] scores when the head dims differ, got {problem.dim_qk} and {problem.dim_v}"
    if score.right == 0 and problem.tokens_q not in (1, problem.tokens_k):
        return "torch aligns the causal mask to the first key, not to the last"
    if min(problem.batch, problem.tokens_q, problem.tokens_k) == 0:
        return "the inputs are empty"
    if problem.device != "cpu" and problem.gradient:
        return f"torch's backward on {problem.device} is not deterministic"
    return None


def _portable_supports(problem: Problem) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("triton", "flashmix.ops.attention.triton_gpu", _triton_supports),
    Implementation("sdpa", "flashmix.ops.attention.sdpa", _sdpa_supports),
    Implementation("portable", "flashmix.ops.attention.portable", _portable_supports),
)


def attend(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    boundaries: tuple[Tensor | None, Tensor | None],
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """`(o, lse)` of a checked call; `features`: sink, ALiBi slopes, log decay, dropout seed."""
    chosen = choose("softmax_attention", IMPLEMENTATIONS, problem, impl)
    if chosen.name == "sdpa":
        return sdpa.attend(q, k, v, problem), None
    score = problem.score
    o, lse, _ = _forward(
        q,
        k,
        v,
        *features,
        *boundaries,
        score.scale,
        score.left,
        score.right,
        score.softcap,
        score.dropout_p,
        chosen.name,
    )
    return o, lse if problem.lse else None


def _load(impl: str) -> Any:
    return next(implementation for implementation in IMPLEMENTATIONS if implementation.name == impl).load()


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    log_decay: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`o`, `lse`, and what the implementation keeps for its backward: two numbers a row, `[B, HQ, Tq]` each."""
    score = Score(scale, left, right, softcap, dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        return _load(impl).forward(q, k, v, (sink, alibi_slopes, log_decay, seed), (cu_seqlens, cu_seqlens_k), score)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    log_decay: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    batch, tokens, heads, _ = q.shape
    o = q.new_empty(batch, tokens, heads, v.shape[3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((batch, heads, tokens) if cu_seqlens is None else (heads, tokens), dtype=dtype)
    return o, lse, [q.new_empty(batch, heads, tokens, dtype=dtype) for _ in range(2)]


def _run_backward(
    d_o: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    kept: list[Tensor],
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    log_decay: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_p: float,
    impl: str,
) -> list[Tensor]:
    """Gradients of q, k, v and of each of sink, alibi_slopes, log_decay that is given, in this order."""
    score = Score(scale, left, right, softcap, dropout_p)
    features, boundaries = (sink, alibi_slopes, log_decay, seed), (cu_seqlens, cu_seqlens_k)
    with torch.autocast(q.device.type, enabled=False):
        return _load(impl).backward(d_o, d_lse, q, k, v, o, kept, features, boundaries, score)


def _fake_backward(
    d_o: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    kept: list[Tensor],
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    log_decay: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    inputs = (q, k, v, sink, alibi_slopes, log_decay)
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    ctx.set_materialize_grads(False)
    o, _, kept = output
    ctx.save_for_backward(*inputs[:9], o, *kept)
    ctx.scalars = inputs[9:]


def _autograd(
    ctx: Any, d_o: Tensor | None, d_lse: Tensor | None, d_kept: list[Tensor | None] | None
) -> tuple[Tensor | None, ...]:
    if d_o is None and d_lse is None:
        return (None,) * 15
    q, k, v, *optional, o, top, total = ctx.saved_tensors
    found = iter(_backward(d_o, d_lse, q, k, v, o, [top, total], *optional, *ctx.scalars))
    features = optional[:3]
    gradients = [next(found), next(found), next(found)]
    gradients += [None if feature is None else next(found) for feature in features]
    return (*gradients, *(None,) * 9)


_forward = operator("softmax_attention", _run_forward, _fake_forward)
_backward = operator("softmax_attention_backward", _run_backward, _fake_backward)
differentiable("softmax_attention", _autograd, _setup_context)
once_differentiable("softmax_attention")
