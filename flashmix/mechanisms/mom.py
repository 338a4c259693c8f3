"""Mixture of memories: each token reads and writes a few of many delta rule memories, one packed call of `delta_rule`."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, check_per_head, engine_options
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.checks import check_dtype, check_like, check_shape, dims, is_mapped
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, check_whole
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
def mom(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scores: Tensor, **options: Unpack[EngineOptions]
) -> Result:
    """Mixture of memories: a router sends each token to `n` of `M` states, each a Gated DeltaNet of the tokens that come to it.

        p = softmax(scores_t);  m_1 ... m_n: the memories of the largest p;  for each of them, the others stay as they are:
        S_m <- e^{g_tj} S_m;  S_m <- S_m + beta_tj k_tj (v_tj - S_m^T k_tj)^T
        o_t = scale sum_j (p_{m_j} / sum_i p_{m_i}) S_{m_j}^T q_t

    Entry `j` of keys, values, strengths and decays belongs to the memory with the `j`-th largest score (`torch.topk`).

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, n, H, K]`, with `n <= M`.
        v: values `[B, T, n, HV, V]`; `HV` is a multiple of `H`.
        beta: write strengths `[B, T, n, HV]`.
        log_decay: `g`, at most 0, `[B, T, n, HV]`.
        scores: logits of the memories `[B, T, M]`, the same for all heads, any floating dtype.
        initial_state: `[N, HV, M, K, V]`, float32 (float64 for float64 inputs).

    Source: Du et al. 2025 (arXiv 2502.13685), section 3.

    Example:
        >>> q, k, v = torch.randn(1, 10, 4, 16), torch.randn(1, 10, 2, 4, 16) / 4, torch.randn(1, 10, 2, 4, 16)
        >>> mom(q, k, v, torch.rand(1, 10, 2, 4), -torch.rand(1, 10, 2, 4), torch.randn(1, 10, 8))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    check_whole(options.get("cu_seqlens"), "mom")
    packing, M = _checked(q, k, v, beta, log_decay, scores, options)
    (B, T), (n, HV, V), K = q.shape[:2], v.shape[2:], q.shape[3]
    if is_mapped(scores):
        raise NotImplementedError("mom: vmap must not map scores, which memories a token visits makes the shapes")
    share, memory = torch.softmax(scores.to(state_dtype(q.dtype)), -1).topk(n, dim=-1)
    sequence = torch.arange(B, device=q.device).unsqueeze(1) if packing is None else packing.sequence
    N = B if packing is None else packing.count
    place = (sequence.unsqueeze(-1) * M + memory).flatten()  # the state of each visit
    place, order = place.sort(stable=True)
    starts = torch.searchsorted(place, torch.arange(N * M + 1, device=q.device))
    visits = [x.flatten(0, 2)[order].unsqueeze(0) for x in (q.unsqueeze(2).expand_as(k), k, v, beta, log_decay)]
    state = options.get("initial_state")
    options["initial_state"] = None if state is None else state.transpose(1, 2).flatten(0, 1)
    options["cu_seqlens"] = Packing(starts, B * T * n)
    o, state = delta_rule(*visits, **options)
    read = o[0][order.argsort()].view(B, T, n, HV, V)
    share = (share / share.sum(-1, keepdim=True)).view(B, T, n, 1, 1)
    o = (share * read).sum(2).to(v.dtype)
    return o, None if state is None else state.view(N, M, HV, K, V).transpose(1, 2)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scores: Tensor, options: EngineOptions
) -> tuple[Packing | None, int]:
    """Raises unless the arguments fit one another; returns the packing and the number of memories."""
    B, T, H, K = dims("q", q, "B T H K")
    n = dims("k", k, "B T n H K")[2]
    HV, V = dims("v", v, "B T n HV V")[3:]
    check_shape("k", k, B, T, n, H, K)
    check_shape("v", v, B, T, n, HV, V)
    for name, gate in (("beta", beta), ("log_decay", log_decay)):
        check_per_head(name, gate, "q", q, B, T, n, HV)
    M = dims("scores", scores, "B T M")[2]
    check_per_head("scores", scores, "q", q, B, T, M)
    if not 1 <= n <= M:
        raise ValueError(f"k must have shape [B, T, n, H, K] with n from 1 to {M}, got {list(k.shape)}")
    packing = check_operands(q, v[:, :, 0], {"k": k[:, :, 0]}, None, None, None, options.get("cu_seqlens"))
    state = options.get("initial_state")
    if state is not None:
        check_shape("initial_state", state, B if packing is None else packing.count, HV, M, K, V)
        check_dtype("initial_state", state, state_dtype(q.dtype))
        check_like("initial_state", state, "q", q, dtype=False)
    return packing, M


register(
    Mechanism(
        title="Mixture of memories",
        paper="2502.13685",
        function=mom,
        call="q:BTHK k:BTnHK v:BTnHK beta:BTnH log_decay:BTnH scores:BTM",
        wide=("scores",),
    )
)
