"""The recurrence: one matrix state per head that decays, is written to, and corrects itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.call import Op, always, native_refuses
from flashmix.op.choose import Implementation
from flashmix.op.dtypes import autocast, product_dtype, state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.kind import ByKind
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule, check_operands
from flashmix.ops.recurrence.native.binding import missing


def _triton_supports(call: RecurrenceCall) -> str | None:
    if max(call.K, call.V) > 256:
        return f"its kernels hold head dimensions up to 256, got K = {call.K} and V = {call.V}"
    return gpu.refuses(call.device, call.dtype)


def _has_tiles(K: int, V: int, decay: Decay) -> bool:
    """Whether the Hopper kernels of linear attention and the delta rule have tiles for heads of these sizes."""
    if K % 8 or V % 8:
        return False
    if decay is Decay.CHANNEL:
        return min(K, V) > 64 and max(K, V) <= 128
    return K == V == 256 or (min(K, V) > 32 and max(K, V) <= 128)


def _gluon_supports(call: RecurrenceCall) -> str | None:
    rule, decay, K, V = call.rule, call.decay, call.K, call.V
    if rule is Rule.DPLR and decay is Decay.CHANNEL:
        if K % 8 or not 32 < K <= 128 or V > 256:
            return f"of DPLR it has K of 33 to 128, a multiple of 8, and V up to 256, got K = {K} and V = {V}"
    elif (rule is not Rule.TIED and rule is not Rule.LINEAR) or decay is Decay.VALUE or call.read_before:
        return (
            "it has linear attention and the tied delta rule, read after the write, without a decay on the value axis, "
            "and DPLR with a decay per channel"
        )
    elif not _has_tiles(K, V, decay):
        held = "its tiles hold head dimensions of 33 to 128, multiples of 8, and 256 of both"
        if decay is Decay.CHANNEL:
            held = "with a decay per channel its tiles hold head dimensions of 65 to 128, multiples of 8"
        return f"{held}, got K = {K} and V = {V}"
    if call.dtype == torch.float16:
        return "it scales operands by decays, of which float16 has none below 2^-24"
    if call.tokens >= 2**28:
        return f"its coordinates reach 2^28 tokens, got {call.tokens}"
    return gpu.hopper_refuses(call.device, call.dtype, (torch.bfloat16,))


def _native_supports(call: RecurrenceCall) -> str | None:
    reason = native_refuses(call, call.state_dtype)
    if reason is not None:
        return reason
    if call.decay is Decay.VALUE:
        return "it has no decay on the value axis"
    if call.is_step:
        return "one token is a step, which it has none for"
    if max(call.K, call.V) > 256:
        return f"its tiles hold head dimensions up to 256, got K = {call.K} and V = {call.V}"
    return missing()


IMPLEMENTATIONS: tuple[Implementation[RecurrenceCall], ...] = (
    Implementation("gluon", "flashmix.ops.recurrence.gluon_hopper", _gluon_supports),
    Implementation("triton", "flashmix.ops.recurrence.triton_gpu", _triton_supports),
    Implementation("native", "flashmix.ops.recurrence.native", _native_supports),
    Implementation("portable", "flashmix.ops.recurrence.portable", always),
)
RECURRENCE = Op("recurrence", RecurrenceCall, IMPLEMENTATIONS, sharded="flashmix.ops.recurrence.sharded")


def fit(values: dict[str, Any]) -> None:
    """Gives fields of a call their packing and scale, and the autocast dtype; raises unless the operands fit one another."""
    q, k, v, a, b = values["q"], values["k"], values["v"], values["a"], values["b"]
    keys = {name: t for name, t in (("k", k), ("a", a), ("b", b)) if t is not None}
    decay, state, cu_seqlens = values["log_decay"], values["initial_state"], values["packing"]
    decay, of_values = (None, decay) if values["value_decay"] else (decay, None)
    values["packing"] = check_operands(q, v, keys, values["beta"], decay, state, cu_seqlens, value_log_decay=of_values)
    values["q"], values["k"], values["v"], values["a"], values["b"] = autocast(q, k, v, a, b)
    values["scale"] = _scale(values["scale"], q)


CALLS = ByKind(RECURRENCE, fit)


@public
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
    if log_decay is not None and value_log_decay is not None:
        check_operands(q, v, {"k": k}, None, log_decay, None, None, value_log_decay=value_log_decay)  # raises
    decay = log_decay if value_log_decay is None else value_log_decay
    fields = _fields(
        q, k, v, decay, initial_state, cu_seqlens, scale, read_before, value_decay=value_log_decay is not None
    )
    o, state = CALLS(fields, impl, "linear_attention")
    return o, state if return_state else None


@public
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
    per-channel decay: Kimi Team 2025 (arXiv 2510.26692), equation 1.

    Example:
        >>> import torch, flashmix
        >>> q, k, v = torch.randn(3, 2, 100, 4, 32)
        >>> beta, decay = torch.rand(2, 100, 4), -torch.rand(2, 100, 4)
        >>> o, state = delta_rule(q, flashmix.l2_norm(k), v, beta, decay, return_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    if erase is None and write is None:
        fields = _fields(q, k, v, log_decay, initial_state, cu_seqlens, scale, read_before, beta=beta)
        o, state = CALLS(fields, impl, "delta_rule")
        return o, state if return_state else None
    keys = {"k": k}
    if erase is not None:
        keys["erase"] = erase
    if write is not None:
        keys["write"] = write
    packing = check_operands(q, v, keys, beta, log_decay, initial_state, cu_seqlens)
    dtype, exact = v.dtype, product_dtype(q, impl)
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    a = _default_erase(k, v, beta, log_decay) if erase is None else -erase.to(exact)
    b = k if write is None else write.to(exact)
    v = (v * beta.unsqueeze(-1)).to(v.dtype)
    q, v, a, b = autocast(q, v, a, b)
    scale = _scale(scale, q)
    fields = _fields(q, None, v, log_decay, initial_state, packing, scale, read_before, a=a, b=b)
    o, state = RECURRENCE(RecurrenceCall.make(fields), impl, "delta_rule")
    return o if exact == dtype else o.to(dtype), state if return_state else None


@public
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
    fields = _fields(q, k, v, log_decay, initial_state, cu_seqlens, scale, a=a, b=b)
    o, state = CALLS(fields, impl, "dplr")
    return o, state if return_state else None


def _fields(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    packing: Tensor | Packing | None,
    scale: float | None,
    read_before: bool = False,
    *,
    a: Tensor | None = None,
    b: Tensor | None = None,
    beta: Tensor | None = None,
    value_decay: bool = False,
) -> dict[str, Any]:
    """The fields of a `RecurrenceCall`."""
    return {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "beta": beta,
        "log_decay": log_decay,
        "initial_state": initial_state,
        "packing": packing,
        "scale": scale,
        "read_before": read_before,
        "value_decay": value_decay,
    }


def _default_erase(k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> Tensor:
    """`-beta e^g k` at the value heads, `[B, T, HV, K]`: the tied correction, written as a vector that reads the undecayed state."""
    key = repeat_heads(k, v.shape[2])
    wide = state_dtype(k.dtype)
    factor = beta.to(wide).unsqueeze(-1)
    if log_decay is not None:
        decay = log_decay.to(wide).exp()
        factor = factor * (decay if decay.dim() == 4 else decay.unsqueeze(-1))
    return (-factor * key).to(k.dtype)


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)
