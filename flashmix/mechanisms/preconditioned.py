"""Preconditioned DeltaNet: Gated DeltaNet and KDA with a preconditioned write key and a call of `delta_rule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.mechanisms.common import check_per_head, check_states, unrounded
from flashmix.mechanisms.deltanet import DeltaNet
from flashmix.mechanisms.gated_deltanet import GatedDeltaNet
from flashmix.mechanisms.kda import KDA
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.decay import MambaDecay
from flashmix.modules.projection import HeadProjection
from flashmix.op.checks import dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.options import hands_on
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.preconditioner.op import preconditioner
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands

States = tuple[Tensor, Tensor]
BOUND, EPS = 1.5, 1e-6
LOG_SCALE = -0.2


class PreconditionedOptions(TypedDict, total=False):
    """The options of both functions."""

    log_scale: Tensor | float
    bound: float
    eps: float
    scale: float | None
    initial_state: States | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


@unrounded("q", "k", "v")
def _preconditioned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    curvature: tuple[Tensor, Tensor],
    *,
    log_scale: Tensor | float = LOG_SCALE,
    bound: float = BOUND,
    eps: float = EPS,
    scale: float | None = None,
    initial_state: States | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, States | None]:
    """Both rules, by the shape of `log_decay`; `curvature` is `curvature_beta` and `curvature_log_decay`."""
    curvature_beta, curvature_log_decay = curvature
    if not bound > 0:
        raise ValueError(f"bound must be positive, got {bound}")
    packing = check_operands(q, v, {"k": k}, beta, log_decay, None, cu_seqlens)
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check_per_head("curvature_beta", curvature_beta, "q", q, B, T, H)
    check_per_head("curvature_log_decay", curvature_log_decay, "q", q, B, T, H)
    if not isinstance(log_scale, (int, float)):
        check_per_head("log_scale", log_scale, "q", q, H)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, K, V), (N, H, K))
    wide = state_dtype(q.dtype)
    if initial_state is None:
        S, A = None, torch.zeros(N, H, K, dtype=wide, device=q.device)
    else:
        S, A = initial_state
    if not isinstance(log_scale, Tensor):
        log_scale = torch.full((H,), log_scale, dtype=wide, device=q.device)
    keys, weight, decay, centre = (x.to(wide) for x in (k, curvature_beta, curvature_log_decay, log_scale))
    prepared = PreconditionerCall(keys, weight, decay, centre, A, float(bound), float(eps), packing)
    write, A = preconditioner(prepared, impl)
    options: dict[str, Any] = {"scale": scale, "return_state": return_state, "cu_seqlens": packing, "impl": impl}
    o, S = delta_rule(q, k, v, beta, log_decay, write=write.to(k.dtype), initial_state=S, **options)
    return o, None if S is None else (S, A)


@public
@hands_on(_preconditioned)
def preconditioned_gated_deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    curvature_beta: Tensor,
    curvature_log_decay: Tensor,
    **options: Unpack[PreconditionedOptions],
) -> tuple[Tensor, States | None]:
    """Preconditioned Gated DeltaNet: writes are weaker along channels that recent keys have used much.

        A_t = e^{g'_t} A_{t-1} + beta'_t k_t^2;  r = log(A_t + eps) - log_scale;  M_t = bound^{-r / (1 + |r|)}
        S = e^{g_t} S_{t-1};  S_t = S + (M_t * k_t) beta_t (v_t - S^T k_t)^T;  o_t = scale S_t^T q_t

    With `beta` up to `2 / bound` and keys of length 1 the state stays bounded.

    Args:
        log_decay: `g` `[B, T, HV]`.
        curvature_beta: `beta'` `[B, T, H]`.
        curvature_log_decay: `g'`, at most 0, `[B, T, H]`.
        log_scale: the logarithm of the curvature at which a key is unchanged: a number, or `[H]`.
        bound: the preconditioner `M` lies between its inverse and it.
        eps: added to the curvature before the logarithm.
        initial_state: `(S, A)`, `([N, HV, K, V], [N, H, K])`, float32 (float64 for float64 inputs).

    Source: Preconditioned DeltaNet, 2026 (arXiv 2604.21100).

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4)
        >>> o, (S, A) = preconditioned_gated_deltanet(q, k / 4, v, beta, decay, beta, decay, return_state=True)
        >>> o.shape, S.shape, A.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16, 16]), torch.Size([1, 4, 16]))
    """
    dims("log_decay", log_decay, "B T HV")
    return _preconditioned(q, k, v, beta, log_decay, (curvature_beta, curvature_log_decay), **options)


@public
@hands_on(_preconditioned)
def preconditioned_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    curvature_beta: Tensor,
    curvature_log_decay: Tensor,
    **options: Unpack[PreconditionedOptions],
) -> tuple[Tensor, States | None]:
    """Preconditioned Kimi Delta Attention: `preconditioned_gated_deltanet` with a per-channel decay, `log_decay` `[B, T, HV, K]`.

        A_t = e^{g'_t} A_{t-1} + beta'_t k_t^2;  r = log(A_t + eps) - log_scale;  M_t = bound^{-r / (1 + |r|)}
        S = diag(e^{g_t}) S_{t-1};  S_t = S + (M_t * k_t) beta_t (v_t - S^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Preconditioned DeltaNet, 2026 (arXiv 2604.21100).

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4, 16)
        >>> preconditioned_kda(q, k / 4, v, beta, decay, beta, -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    return _preconditioned(q, k, v, beta, log_decay, (curvature_beta, curvature_log_decay), **options)


class Curvature(nn.Module):
    """Inputs of the preconditioned delta rules: `beta'`, its log decay, and a learned `log_scale` per head."""

    def __init__(
        self, width: int, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.projection = HeadProjection(width, strength=(heads,), decay=(heads,), device=device, dtype=dtype)
        self.decay = MambaDecay(heads, device=device, dtype=dtype)
        self.log_scale = nn.Parameter(torch.full((heads,), LOG_SCALE, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        strength, decay = self.projection(x)
        return torch.sigmoid(strength), self.decay(decay)


class Preconditioned(DeltaNet):
    """The base of both layers: a delta rule's layer with a `Curvature`; `rule` is its function."""

    has_step = False
    rule: Callable[..., tuple[Tensor, States | None]]

    def make_parameters(self, **placement: Any) -> None:
        if self.write_strength.negative_eigenvalues:
            raise ValueError("negative_eigenvalues must be false where writes are preconditioned, got true")
        super().make_parameters(**placement)
        self.curvature = Curvature(self.width, self.heads, **placement)

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        curvature = self.curvature
        return self.rule(q, k, v, *self.beta_and_decay(x), *curvature(x), log_scale=curvature.log_scale, **options)


class PreconditionedGatedDeltaNet(Preconditioned, GatedDeltaNet):
    """Gated DeltaNet that writes less along channels that recent keys have used much.

    Args: those of `DeltaNet`; `negative_eigenvalues` must be false: the preconditioned rule needs `beta` up to `4 / 3`.

    Source: Preconditioned DeltaNet, arXiv:2604.21100.

    Example:
        >>> import torch
        >>> PreconditionedGatedDeltaNet(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    rule = staticmethod(preconditioned_gated_deltanet)


class PreconditionedKDA(Preconditioned, KDA):
    """KDA that writes less along channels that recent keys have used much.

    Args: those of `KDA`; `negative_eigenvalues` must be false: the preconditioned rule needs `beta` up to `4 / 3`.

    Source: Preconditioned DeltaNet, arXiv:2604.21100.

    Example:
        >>> import torch
        >>> PreconditionedKDA(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    rule = staticmethod(preconditioned_kda)


register(
    Mechanism(
        title="Preconditioned Gated DeltaNet",
        paper="2604.21100",
        function=preconditioned_gated_deltanet,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH curvature_beta:BTH curvature_log_decay:BTH",
        layer=PreconditionedGatedDeltaNet,
        preset=by_heads,
    )
)


register(
    Mechanism(
        title="Preconditioned KDA",
        paper="2604.21100",
        function=preconditioned_kda,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTHK curvature_beta:BTH curvature_log_decay:BTH",
        layer=PreconditionedKDA,
        preset=by_heads,
    )
)
