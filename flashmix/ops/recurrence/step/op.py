"""The recurrence a token at a time, for generation: states are updated in place, in a batch or in a pool of slots."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, always, triton_refuses_first
from flashmix.op.choose import Implementation
from flashmix.op.dtypes import autocast
from flashmix.op.public import public
from flashmix.op.remember import Remembered
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.recurrence.step.call import StepCall, check_history, check_indices, check_state

IMPLEMENTATIONS: tuple[Implementation[StepCall], ...] = (
    Implementation("triton", "flashmix.ops.recurrence.step.triton_gpu", triton_refuses_first),
    Implementation("portable", "flashmix.ops.recurrence.step.portable.in_place", always),
)
STEP = Op("recurrent_step", StepCall, IMPLEMENTATIONS, outputs=1)
STEPS = Remembered(STEP)


@public
def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    read_before: bool = False,
    state_indices: Tensor | None = None,
    history: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`linear_attention` of one token (or a few) of each sequence; the state is updated in place.

        S <- diag(e^{g_t}) S + k_t v_t^T;    o_t = scale S^T q_t

    One launch on a GPU, nothing allocated but the output, so that it captures into a CUDA graph.

    Args:
        q: queries `[B, T, H, K]` with T from 1 to 16, float32, bfloat16, float16 or float64.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`.
        state: `S`, `[B, HV, K, V]`, or with `state_indices` a pool `[P, HV, K, V]`; float32 or bfloat16 (float64 for float64
            inputs). Written. It is computed in float32 (float64) whatever it is kept in.
        log_decay: `g`, natural logarithm, at most 0: None, `[HV]`, `[B, T, HV]` or `[B, T, HV, K]`, any floating dtype.
        scale: factor of the output; default `K ** -0.5`.
        read_before: whether `q` reads the state before the token is written.
        state_indices: `[B]` int32 or int64, the slot of each sequence in the pool, each at most once. A sequence with -1, or
            any number that is no slot, is idle: its output is 0 and no state is touched.
        history: `[B, n, HV, K, V]` like `state`, `n <= T`. Written: the states after each of the last n tokens, so that
            drafted tokens can be taken back; idle sequences are left as they are.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, T is not 1 to 16, `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 1, 4, 32)
        >>> state = torch.zeros(2, 4, 32, 32)
        >>> linear_attention_step(q, k, v, state).shape, bool(state.any())
        (torch.Size([2, 1, 4, 32]), True)
    """
    tensors = {"q": q, "k": k, "v": v, "a": None, "b": None, "beta": None, "log_decay": log_decay, "state": state}
    tensors["history"], tensors["state_indices"] = history, state_indices
    options = {"scale": scale, "read_before": read_before, "minus_a": False}
    return STEPS("linear_attention_step", impl, _ready, tensors, options)


@public
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    read_before: bool = False,
    state_indices: Tensor | None = None,
    history: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`delta_rule` of one token (or a few) of each sequence; the state is updated in place.

        u_t = beta_t v_t - S^T erase_t        erase_t = beta_t e^{g_t} k_t by default
        S <- diag(e^{g_t}) S + write_t u_t^T        write_t = k_t by default
        o_t = scale S^T q_t

    One launch on a GPU, nothing allocated but the output, so that it captures into a CUDA graph.

    Args:
        q: queries `[B, T, H, K]` with T from 1 to 16, float32, bfloat16, float16 or float64.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`.
        beta: write strength `[B, T, HV]`, any floating dtype.
        state: `S`, `[B, HV, K, V]`, or with `state_indices` a pool `[P, HV, K, V]`; float32 or bfloat16 (float64 for float64
            inputs). Written. It is computed in float32 (float64) whatever it is kept in.
        log_decay: `g`, natural logarithm, at most 0: None, `[HV]`, `[B, T, HV]` or `[B, T, HV, K]`, any floating dtype.
        erase: the vector that reads what is to be corrected, `[B, T, H or HV, K]`.
        write: the key of the write, `[B, T, H or HV, K]`.
        scale: factor of the output; default `K ** -0.5`.
        read_before: whether `q` reads the state before the token is written.
        state_indices: `[B]` int32 or int64, the slot of each sequence in the pool, each at most once. A sequence with -1, or
            any number that is no slot, is idle: its output is 0 and no state is touched.
        history: `[B, n, HV, K, V]` like `state`, `n <= T`. Written: the states after each of the last n tokens, so that
            drafted tokens can be taken back; idle sequences are left as they are.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, T is not 1 to 16, `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), equation 10.

    Example:
        Three drafted tokens, of which the first sequence keeps one and the second all:

        >>> import torch, flashmix
        >>> q, k, v = torch.randn(3, 2, 3, 4, 32)
        >>> state, history = torch.zeros(2, 4, 32, 32), torch.empty(2, 3, 4, 32, 32)
        >>> o = delta_rule_step(q, flashmix.l2_norm(k), v, torch.rand(2, 3, 4), state, history=history)
        >>> _ = state.copy_(history[torch.arange(2), torch.tensor([1, 3]) - 1])
    """
    tensors = {"q": q, "k": k, "v": v, "a": erase, "b": write, "beta": beta, "log_decay": log_decay, "state": state}
    tensors["history"], tensors["state_indices"] = history, state_indices
    options = {"scale": scale, "read_before": read_before, "minus_a": erase is not None}
    return STEPS("delta_rule_step", impl, _delta_ready, tensors, options)


@public
def dplr_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    read_before: bool = False,
    state_indices: Tensor | None = None,
    history: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`dplr` of one token (or a few) of each sequence; the state is updated in place.

        S <- (diag(e^{g_t}) + b_t a_t^T) S + k_t v_t^T;    o_t = scale S^T q_t

    One launch on a GPU, nothing allocated but the output, so that it captures into a CUDA graph.

    Args:
        q: queries `[B, T, H, K]` with T from 1 to 16, float32, bfloat16, float16 or float64.
        k: keys of the raw write `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, where `HV` is a multiple of `H`.
        a: the vector that reads the state before its decay, `[B, T, H or HV, K]`.
        b: the key under which what was read is written back, `[B, T, H or HV, K]`.
        state: `S`, `[B, HV, K, V]`, or with `state_indices` a pool `[P, HV, K, V]`; float32 or bfloat16 (float64 for float64
            inputs). Written. It is computed in float32 (float64) whatever it is kept in.
        log_decay: `g`, natural logarithm, at most 0: None, `[HV]`, `[B, T, HV]` or `[B, T, HV, K]`, any floating dtype.
        scale: factor of the output; default `K ** -0.5`.
        read_before: whether `q` reads the state before the token is written.
        state_indices: `[B]` int32 or int64, the slot of each sequence in the pool, each at most once. A sequence with -1, or
            any number that is no slot, is idle: its output is 0 and no state is touched.
        history: `[B, n, HV, K, V]` like `state`, `n <= T`. Written: the states after each of the last n tokens, so that
            drafted tokens can be taken back; idle sequences are left as they are.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        Output `[B, T, HV, V]` in the dtype of `v`.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes or devices do not fit, T is not 1 to 16, `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Peng et al. 2025, RWKV-7 (arXiv 2503.14456), equation 17.

    Example:
        >>> import torch, flashmix
        >>> q, k, v, removal = torch.randn(4, 2, 1, 4, 32)
        >>> removal, pool = flashmix.l2_norm(removal), torch.zeros(8, 4, 32, 32)
        >>> o = dplr_step(q, k, v, -removal, 0.5 * removal, pool, state_indices=torch.tensor([5, -1]))
        >>> pool.flatten(1).any(1).tolist(), bool(o[1].any())
        ([False, False, False, False, False, True, False, False], False)
    """
    tensors = {"q": q, "k": k, "v": v, "a": a, "b": b, "beta": None, "log_decay": log_decay, "state": state}
    tensors["history"], tensors["state_indices"] = history, state_indices
    options = {"scale": scale, "read_before": read_before, "minus_a": False}
    return STEPS("dplr_step", impl, _dplr_ready, tensors, options)


def _ready(call: StepCall, **keys: Tensor | None) -> StepCall:
    """The call in the autocast dtype; raises unless its tensors fit one another. `keys` are further ones, by the caller's names."""
    q, v = call.q, call.v
    check_operands(q, v, {"k": call.k, **keys}, call.beta, call.log_decay, None, None)  # type: ignore[dict-item]
    B, T, HV, V = v.shape
    check_state(call.state, call.state_indices, q, B, heads=HV, K=q.shape[-1], V=V)
    check_indices(call.state_indices, q, B, call.state.shape[0])
    check_history(call.history, call.state, q, T)
    q, k, v, a, b = autocast(q, call.k, v, call.a, call.b)
    return call if q is call.q and v is call.v else call.but(q=q, k=k, v=v, a=a, b=b)


def _delta_ready(call: StepCall) -> StepCall:
    return _ready(call, **{n: t for n, t in (("erase", call.a), ("write", call.b)) if t is not None})


def _dplr_ready(call: StepCall) -> StepCall:
    return _ready(call, a=call.a, b=call.b)
