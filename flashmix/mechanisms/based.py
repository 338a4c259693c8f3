"""Based: normalised linear attention whose weights are the second-order Taylor polynomial of the exponential."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import check_states, unrounded
from flashmix.mechanisms.linear_attention import NormalisedOptions, NormalisedStates, normalised_linear_attention
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.options import hands_on
from flashmix.op.public import public
from flashmix.ops.recurrence.call import check_operands


@public
@hands_on(normalised_linear_attention)
@unrounded("q", "k", "v")
def based(
    q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, **options: Unpack[NormalisedOptions]
) -> tuple[Tensor, NormalisedStates | None]:
    """Based: linear attention with the weights `1 + s + s^2 / 2`, a polynomial close to `e^s`, divided by their sum.

        s_tj = q_t . k_j K^-1/2;  w_tj = 1 + s_tj + s_tj^2 / 2;  o_t = sum_{j <= t} w_tj v_j / (sum_{j <= t} w_tj + eps)

    The weight is a product of features `[1, x_i, x_i^2 / sqrt 2, x_i x_j (i < j)]`, `F = 1 + K + K (K + 1) / 2` of them: 153 for the
    paper's K = 16. K is up to 21 for the kernels, which hold 256.

    Args:
        eps: added to the sum of the weights.
        initial_state: `(S, z)`, `([N, HV, F, V], [N, H, F])`, float32 (float64 for float64 inputs).

    Source: Arora et al. 2024 (arXiv 2402.18668), section 4.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> o, (S, z) = based(q, k, v, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 153]))
    """
    K = check_featured(q, k, v, options, lambda K: 1 + K + K * (K + 1) // 2)
    return normalised_linear_attention(_taylor(q * K**-0.5), _taylor(k), v, eps=eps, **options)


def _taylor(x: Tensor) -> Tensor:
    """Features whose products are `1 + s + s^2 / 2` of products `s` of the arguments."""
    return torch.cat([torch.ones_like(x[..., :1]), x, half_square(x)], -1)


def half_square(x: Tensor) -> Tensor:
    """Features `[x_i^2 / sqrt 2, x_i x_j (i < j)]`, whose products are `s^2 / 2` of products `s` of the arguments.

    Chosen from all products, each at most once: the gradient of a choice that repeats entries is a sort on a GPU.
    """
    K = x.shape[-1]
    first, second = torch.triu_indices(K, K, 1, device=x.device).unbind()
    products = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return torch.cat([x.square() * 0.5**0.5, products.index_select(-1, first * K + second)], -1)


def check_featured(q: Tensor, k: Tensor, v: Tensor, options: NormalisedOptions, features: Callable[[int], int]) -> int:
    """Raises unless tokens and states of that many features for `K` channels fit one another; returns `K`."""
    packing = check_operands(q, v, {"k": k}, None, None, None, options.get("cu_seqlens"))
    (B, _, H, K), F = q.shape, features(q.shape[3])
    N = B if packing is None else packing.count
    check_states(options.get("initial_state"), q, (N, v.shape[2], F, v.shape[3]), (N, H, F))
    return K


register(Mechanism(title="Based", paper="2402.18668", function=based, call="q:BTHK k:BTHK v:BTHK"))
