"""Erase-then-Delta Attention: a delta rule before which the state is erased under a key of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, at_step, check_per_head, engine_options
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.checks import dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
def erase_then_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase_key: Tensor,
    erase_gate: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    **options: Unpack[EngineOptions],
) -> Result:
    """Erase-then-Delta Attention: each token erases under one key, then corrects and writes under another.

        S = diag(e^{g_t}) S_{t-1};  S' = S - gamma_t e_t (S^T e_t)^T;  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    With `gamma = 0` it is `kda`. Keys, queries and erase keys have length 1 in the paper (`flashmix.l2_norm`). It runs as the paper's
    two interleaved tokens for each one: the first has the decay and a value of 0, the second the query.

    Args:
        erase_key: `e`, like `k`.
        erase_gate: `gamma`, in [0, 1] (or 2), `[B, T, HV]`, any floating dtype.
        log_decay: `g`, at most 0, `[B, T, HV, K]`.

    Source: Li et al. 2026 (arXiv 2606.26560), equation 8; the interleaved tokens: section 3.4.

    Example:
        >>> import torch
        >>> q, k, v, e, g = torch.randn(5, 1, 10, 4, 16)
        >>> gamma, beta = torch.rand(2, 1, 10, 4)
        >>> erase_then_delta(q, k / 4, v, e / 4, gamma, beta, -g.square())[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    state, packing = options.get("initial_state"), options.get("cu_seqlens")
    packing = check_operands(q, v, {"k": k, "erase_key": erase_key}, beta, log_decay, state, packing)
    check_per_head("erase_gate", erase_gate, "q", q, *v.shape[:3])
    options["cu_seqlens"] = None if packing is None else packing.repeat(2)
    strength = torch.stack([gate.to(state_dtype(q.dtype)) for gate in (erase_gate, beta)], 2).flatten(1, 2)
    keys = torch.stack([erase_key, k], 2).flatten(1, 2)
    q, v, log_decay = at_step(q, 2, 1), at_step(v, 2, 1), at_step(log_decay, 2, 0)
    o, state = delta_rule(q, keys, v, strength, log_decay, **options)
    return o.unflatten(1, (o.shape[1] // 2, 2))[:, :, 1], state


register(
    Mechanism(
        title="Erase-then-Delta",
        paper="2606.26560",
        function=erase_then_delta,
        call="q:BTHK k:BTHK v:BTHK erase_key:BTHK erase_gate:BTH beta:BTH log_decay:BTHK",
        wide=("erase_gate",),
    )
)
