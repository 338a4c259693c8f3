"""ReBased: normalised linear attention whose weights are squares."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.based import check_featured, half_square
from flashmix.mechanisms.common import unrounded
from flashmix.mechanisms.linear_attention import NormalisedOptions, NormalisedStates, normalised_linear_attention
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.options import hands_on
from flashmix.op.public import public


@public
@hands_on(normalised_linear_attention)
@unrounded("q", "k", "v")
def rebased(
    q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, **options: Unpack[NormalisedOptions]
) -> tuple[Tensor, NormalisedStates | None]:
    """ReBased: linear attention with the weights `s^2`, divided by their sum.

        s_tj = q_t . k_j K^-1/2;  o_t = sum_{j <= t} s_tj^2 v_j / (sum_{j <= t} s_tj^2 + eps)

    The weight is a product of `F = K (K + 1) / 2` features, 136 for K = 16; K is up to 22 for the kernels, which hold 256. The paper
    normalises, scales and shifts queries and keys before (`flashmix.layer_norm`).

    Args:
        eps: added to the sum of the weights.
        initial_state: `(S, z)`, `([N, HV, F, V], [N, H, F])`, float32 (float64 for float64 inputs).

    Source: Aksenov et al. 2024 (arXiv 2402.10644), section 4.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> o, (S, z) = rebased(q, k, v, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 136]))
    """
    K = check_featured(q, k, v, options, lambda K: K * (K + 1) // 2)
    return normalised_linear_attention(
        half_square(q * (2**0.25 * K**-0.5)), half_square(k * 2**0.25), v, eps=eps, **options
    )


register(Mechanism(title="ReBased", paper="2402.10644", function=rebased, call="q:BTHK k:BTHK v:BTHK"))
