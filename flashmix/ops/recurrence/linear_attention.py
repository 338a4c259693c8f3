"""Linear attention with any decay: the raw rule of the recurrence."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import Operands, check_operands
from flashmix.ops.recurrence.engine import run


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    read_before: bool = False,
    value_log_decay: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with an optional decay of its matrix state.

        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t                      (read_before: scale S_{t-1}^T q_t)

    With `value_log_decay` the decay is on the other axis: S_t = S_{t-1} diag(e^{g_t}) + k_t v_t^T.

    Args:
        q: queries `[B, T, H, K]`, float32, bfloat16, float16 or float64.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`: value head `h` reads query head `h // (HV / H)`.
        log_decay: `g`, natural logarithm, not cumulative, at most 0 (-inf forgets all): None, `[HV]`, `[B, T, HV]` or
            `[B, T, HV, K]`, any floating dtype.
        scale: factor of the output; default `K ** -0.5`.
        initial_state: `S_0` `[N, HV, K, V]` float32 (float64 for float64 inputs); default zeros. `N` is `B`, or the number
            of packed sequences.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of sequences packed end to end (needs `B == 1`), or a `Packing`.
        read_before: the output reads the state before the token's decay and write (RWKV-6).
        value_log_decay: instead of `log_decay`, a decay of each channel of the values, `[B, T, HV, V]`, any floating dtype.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`, and the final state like `initial_state`, or None.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, `cu_seqlens` is not sorted or does not end at `T`, `impl` cannot run this.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 10-12; decay: Yang et al. 2023 (arXiv 2312.06635), equation 3;
    on values: Zhang et al. 2024 (arXiv 2409.07146), section 3.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 100, 4, 32)
        >>> o, state = linear_attention(q, k, v, return_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    cu = check_operands(q, v, {"k": k}, None, log_decay, initial_state, cu_seqlens, value_log_decay=value_log_decay)
    g, on_values = (log_decay, False) if value_log_decay is None else (value_log_decay, True)
    x = Operands(q, k, v, None, None, None, g, initial_state, cu, on_values)
    o, state = run("linear_attention", x, scale, read_before, impl)
    return o, state if return_state else None
