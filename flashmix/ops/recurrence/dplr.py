"""Diagonal plus low rank: the rule with a raw and a corrected write."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import Operands, check_operands
from flashmix.ops.recurrence.engine import run


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """A state transition that is diagonal plus low rank, and a raw write.

        S_t = (diag(e^{g_t}) + b_t a_t^T) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Args:
        q: queries `[B, T, H, K]`, float32, bfloat16, float16 or float64.
        k: keys of the raw write `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`: value head `h` reads query head `h // (HV / H)`.
        a: the vector that reads the state before its decay, `[B, T, H or HV, K]`.
        b: the key under which what was read is written back, `[B, T, H or HV, K]`.
        log_decay: `g`, natural logarithm, not cumulative, at most 0 (-inf forgets all): None, `[HV]`, `[B, T, HV]` or
            `[B, T, HV, K]`, any floating dtype.
        scale: factor of the output; default `K ** -0.5`.
        initial_state: `S_0` `[N, HV, K, V]` float32 (float64 for float64 inputs); default zeros. `N` is `B`, or the number
            of packed sequences.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of sequences packed end to end (needs `B == 1`), or a `Packing`.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`, and the final state like `initial_state`, or None.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, `cu_seqlens` is not sorted or does not end at `T`, `impl` cannot run this.

    Source: Peng et al. 2025, RWKV-7 (arXiv 2503.14456), equation 17.

    Example:
        >>> import torch, flashmix
        >>> q, k, v, removal = torch.randn(4, 2, 100, 4, 32)
        >>> removal = flashmix.l2_norm(removal)
        >>> o, _ = dplr(q, k, v, -removal, 0.5 * removal, -torch.rand(2, 100, 4, 32))
        >>> o.shape
        torch.Size([2, 100, 4, 32])
    """
    cu = check_operands(q, v, {"k": k, "a": a, "b": b}, None, log_decay, initial_state, cu_seqlens)
    x = Operands(q, k, v, None, a, b, log_decay, initial_state, cu)
    o, state = run("dplr", x, scale, False, impl)
    return o, state if return_state else None
