"""Titans with a linear memory: gradient descent with momentum and weight decay, a step per token."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.momentum import MomentumOptions, MomentumStates, momentum_rule
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.options import hands_on
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention


@public
@hands_on(linear_attention, MomentumOptions.__annotations__)
def titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    momentum_log_decay: Tensor,
    **options: Unpack[MomentumOptions],
) -> tuple[Tensor, MomentumStates | None]:
    """The long-term memory of Titans with a matrix as memory: it learns at test time to give each value for its key.

        Z_t = e^{mu_t} Z_{t-1} - theta_t k_t (M_{t-1}^T k_t - v_t)^T;  M_t = e^{g_t} M_{t-1} + Z_t;  o_t = scale M_t^T q_t

    The gradient is that of `|M^T k - v|^2 / 2` at the memory before the token, which the paper's chunks of one token have; longer chunks
    take it at the chunk's start. Plain PyTorch on any device.

    Args:
        beta: `theta`, the step size, `[B, T, HV]`.
        log_decay: `g = log(1 - alpha)` of the paper's forgetting gate `alpha`, at most 0, `[B, T, HV]`.
        momentum_log_decay: `mu = log eta` of the paper's momentum gate `eta`, at most 0, `[B, T, HV]`.
        initial_state: `(M, Z)`, each `[N, HV, K, V]`, float32 (float64 for float64 inputs).
        cu_seqlens: as everywhere; its lengths must be on the host.

    Source: Behrouz, Zhong, Mirrokni 2025 (arXiv 2501.00663), equations 13 and 14 with a linear memory.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> theta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4)
        >>> titans_linear(q, k / 4, v, theta, decay, decay)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    gates = {"log_decay": log_decay, "momentum_log_decay": momentum_log_decay, "beta": beta}
    return momentum_rule("titans_linear", q, k, v, gates, reads_decayed=False, **options)


register(
    Mechanism(
        title="Titans, linear memory",
        paper="2501.00663",
        function=titans_linear,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH momentum_log_decay:BTH",
        wide=("momentum_log_decay",),
    )
)
