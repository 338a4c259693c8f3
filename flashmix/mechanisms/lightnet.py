"""LightNet: gated linear attention whose keys are a running softmax over the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.mechanisms.common import check_states, unrounded
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.running_softmax import running_softmax

LightNetStates = tuple[Tensor, Tensor]


@public
@unrounded("q", "k", "v")
def lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: LightNetStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, LightNetStates | None]:
    """LightNet: each channel of the keys is a softmax over all tokens up to now, by the logits `k`.

        z_t = log sum_{j <= t} e^{k_j};  S_t = diag(e^{z_{t-1} - z_t}) S_{t-1} + e^{k_t - z_t} v_t^T;  o_t = scale S_t^T q_t

    It is `gla` with keys and decays from the running normaliser `z`, computed without overflow.

    Args:
        q: queries `[B, T, H, K]`.
        k: logits of the keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        initial_state: `(S, z)`, `([N, HV, K, V], [N, H, K])`, float32 (float64 for float64 inputs); by default zeros and -inf.

    Source: Qin et al. 2024 (arXiv 2405.21022), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> o, (S, z) = lightnet(q, k, v, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]))
    """
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, K, V), (N, H, K))
    if initial_state is None:
        S, start = None, torch.full((N, H, K), -torch.inf, dtype=state_dtype(q.dtype), device=q.device)
    else:
        S, start = initial_state
    weight, decay, z = running_softmax(k, start, packing, impl)
    o, S = linear_attention(
        q,
        weight.to(q.dtype),
        v,
        repeat_heads(decay, HV),
        scale=scale,
        initial_state=S,
        return_state=return_state,
        cu_seqlens=packing,
        impl=impl,
    )
    return o, None if S is None else (S, z)


register(Mechanism(title="LightNet", paper="2405.21022", function=lightnet, call="q:BTHK k:BTHK v:BTHK"))
