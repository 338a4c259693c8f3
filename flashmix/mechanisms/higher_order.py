"""Higher-order linear attention: the weights of attention multiplied with their own transpose, two calls of `linear_attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashmix.mechanisms.common import check_states, unrounded
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands

HigherOrderStates = tuple[Tensor, Tensor]


@public
@unrounded("q", "k", "v")
def higher_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    masked: bool = True,
    scale: float = 1.0,
    initial_state: HigherOrderStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, HigherOrderStates | None]:
    """Second-order linear attention: queries meet through the keys that both have seen.

        A_t = A_{t-1} + k_t k_t^T;  y_t = A_t q_t
        masked:    S_t = S_{t-1} + y_t v_t^T;  o_t = scale S_t^T q_t = scale sum_{i <= j <= t} (q_t . k_i) (q_j . k_i) v_j
        otherwise: S_t = S_{t-1} + q_t v_t^T;  o_t = scale S_t^T y_t = scale sum_{i, j <= t} (q_t . k_i) (q_j . k_i) v_j

    Args:
        masked: whether a token counts the keys up to its own, or all that the query has seen.
        initial_state: `(A, S)`, `([N, H, K, K], [N, HV, K, V])`, float32 (float64 for float64 inputs).

    Source: Zhang, Qin, Gu 2025 (arXiv 2510.27258), section 3; theorem 3.1 for the mask.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> higher_order(q, k, v)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, H, K, K), (N, HV, K, V))
    A, S = (None, None) if initial_state is None else initial_state
    options: dict[str, Any] = {"return_state": return_state, "cu_seqlens": packing, "impl": impl}
    y, A = linear_attention(q, k, k, scale=1.0, initial_state=A, **options)
    y = y.to(q.dtype)  # of autocast
    o, S = linear_attention(*((q, y) if masked else (y, q)), v, scale=scale, initial_state=S, **options)
    return o, None if A is None or S is None else (A, S)


register(
    Mechanism(
        title="Higher-order linear attention", paper="2510.27258", function=higher_order, call="q:BTHK k:BTHK v:BTHK"
    )
)
