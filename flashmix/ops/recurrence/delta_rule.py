"""The delta rule with any decay: the corrected rule of the recurrence."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import Operands, check_operands
from flashmix.ops.recurrence.engine import run


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    read_before: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The (gated) delta rule: each token replaces what the state holds under its key, by the fraction `beta`.

        u_t = beta_t (v_t - S_{t-1}^T diag(e^{g_t}) k_t)
        S_t = diag(e^{g_t}) S_{t-1} + k_t u_t^T
        o_t = scale S_t^T q_t                      (read_before: scale S_{t-1}^T q_t)

    Untied, the correction reads the state (before its decay) with its own vector and the write goes to its own key:

        u_t = beta_t v_t - S_{t-1}^T erase_t        erase_t = beta_t e^{g_t} k_t by default
        S_t = diag(e^{g_t}) S_{t-1} + write_t u_t^T      write_t = k_t by default

    Keys are not normalised here; the recurrence is stable for `|k| <= 1` and `0 <= beta <= 2` (`flashmix.l2_norm`).

    Args:
        q: queries `[B, T, H, K]`, float32, bfloat16, float16 or float64.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`: value head `h` reads query head `h // (HV / H)`.
        beta: write strength `[B, T, HV]`, any floating dtype; up to 2 for negative eigenvalues.
        log_decay: `g`, natural logarithm, not cumulative, at most 0 (-inf forgets all): None, `[HV]`, `[B, T, HV]` or
            `[B, T, HV, K]`, any floating dtype.
        erase: the vector that reads what is to be corrected, `[B, T, H or HV, K]`.
        write: the key of the write, `[B, T, H or HV, K]`.
        scale: factor of the output; default `K ** -0.5`.
        initial_state: `S_0` `[N, HV, K, V]` float32 (float64 for float64 inputs); default zeros. `N` is `B`, or the number
            of packed sequences.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of sequences packed end to end (needs `B == 1`), or a `Packing`.
        read_before: the output reads the state before the token's decay and write.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`, and the final state like `initial_state`, or None.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, `cu_seqlens` is not sorted or does not end at `T`, `impl` cannot run this.

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 4; decay: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), equation 10;
    decay a channel: Kimi Team 2025 (arXiv 2510.26692), equation 1.

    Example:
        >>> import torch, flashmix
        >>> q, k, v = torch.randn(3, 2, 100, 4, 32)
        >>> beta, decay = torch.rand(2, 100, 4), -torch.rand(2, 100, 4)
        >>> o, state = delta_rule(q, flashmix.l2_norm(k), v, beta, decay, return_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    keys = {"k": k} | ({"erase": erase} if erase is not None else {}) | ({"write": write} if write is not None else {})
    cu = check_operands(q, v, keys, beta, log_decay, initial_state, cu_seqlens)
    if erase is None and write is None:
        x = Operands(q, k, v, beta, None, None, log_decay, initial_state, cu)
    else:
        a = _default_erase(k, v, beta, log_decay) if erase is None else -erase
        target = (v * beta.unsqueeze(-1)).to(v.dtype)
        x = Operands(q, None, target, None, a, k if write is None else write, log_decay, initial_state, cu)
    o, state = run("delta_rule", x, scale, read_before, impl)
    return o, state if return_state else None


def _default_erase(k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> Tensor:
    """`-beta e^g k` at the value heads, `[B, T, HV, K]`: the tied correction, written as a vector that reads the undecayed state."""
    HV = v.shape[2]
    key = k.repeat_interleave(HV // k.shape[2], dim=2)
    strength = beta.unsqueeze(-1)
    if log_decay is not None:
        decay = log_decay.exp()
        strength = strength * (decay if decay.dim() == 4 else decay.unsqueeze(-1))
    return (-strength * key).to(k.dtype)
