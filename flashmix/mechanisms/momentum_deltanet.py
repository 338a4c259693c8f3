"""Momentum DeltaNet: a delta rule whose corrections pass through a momentum."""

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
def momentum_deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    gradient_beta: Tensor,
    momentum_log_decay: Tensor,
    **options: Unpack[MomentumOptions],
) -> tuple[Tensor, MomentumStates | None]:
    """Momentum DeltaNet: corrections of the delta rule gather in a second state, from which the memory takes its step.

        M_t = e^{mu_t} M_{t-1} + eta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T;  S_t = e^{g_t} S_{t-1} + beta_t M_t;  o_t = scale S_t^T q_t

    With `mu = -inf` it is `gated_deltanet` with the strength `beta eta`. Plain PyTorch on any device. Keys have length 1 in the paper
    (`flashmix.l2_norm`).

    Args:
        beta: how much of the momentum goes into the memory, `[B, T, HV]`.
        log_decay: `g`, of the memory, at most 0, `[B, T, HV]`.
        gradient_beta: `eta`, the strength of the correction, `[B, T, HV]`.
        momentum_log_decay: `mu`, of the momentum, at most 0, `[B, T, HV]`.
        initial_state: `(S, M)`, each `[N, HV, K, V]`, float32 (float64 for float64 inputs). The authors' code has `-M`.
        cu_seqlens: as everywhere; its lengths must be on the host.

    Source: Huang et al. 2026 (arXiv 2605.05838), section 3, and the authors' recurrent reference.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4)
        >>> o, (S, M) = momentum_deltanet(q, k / 4, v, beta, decay, beta, decay, return_state=True)
        >>> o.shape, M.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    gates = {
        "log_decay": log_decay,
        "momentum_log_decay": momentum_log_decay,
        "beta": beta,
        "gradient_beta": gradient_beta,
    }
    return momentum_rule("momentum_deltanet", q, k, v, gates, reads_decayed=True, **options)


register(
    Mechanism(
        title="Momentum DeltaNet",
        paper="2605.05838",
        function=momentum_deltanet,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH gradient_beta:BTH momentum_log_decay:BTH",
        wide=("gradient_beta", "momentum_log_decay"),
    )
)
