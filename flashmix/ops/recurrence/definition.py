"""The meaning of the recurrence: one token loop a rule, in the form of its paper. Run it in float64.

Nothing in the library calls these loops; tests and documentation compare everything else with them. Shapes are those of
the public ops; `S` is the state `[B, HV, K, V]`, decayed by `e^g` before the write.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, read_before: bool = False,
    value_log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, with `value_log_decay` S_{t-1} diag(e^{g_t}) + k_t v_t^T;
    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t when `read_before`."""
    (q, k), decay, S = _prepare([q, k], v, log_decay, initial_state)
    if value_log_decay is not None:
        decay = value_log_decay.exp().unsqueeze(-2)
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        before = S
        S = decay[:, t] * S + _outer(k[:, t], v[:, t])
        o[:, t] = _scale(scale, q) * _read(q[:, t], before if read_before else S)
    return o, S


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, read_before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S = diag(e^{g_t}) S_{t-1};  u_t = beta_t (v_t - S^T k_t);  S_t = S + k_t u_t^T;
    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t when `read_before`."""
    (q, k), decay, S = _prepare([q, k], v, log_decay, initial_state)
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        before, S = S, decay[:, t] * S
        u = beta[:, t, :, None] * (v[:, t] - _read(k[:, t], S))
        S = S + _outer(k[:, t], u)
        o[:, t] = _scale(scale, q) * _read(q[:, t], before if read_before else S)
    return o, S


def delta_rule_untied(
    q: Tensor, erase: Tensor, write: Tensor, v: Tensor, log_decay: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, read_before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u_t = v_t - S_{t-1}^T erase_t;  S_t = diag(e^{g_t}) S_{t-1} + write_t u_t^T;
    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t when `read_before`."""
    (q, erase, write), decay, S = _prepare([q, erase, write], v, log_decay, initial_state)
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        before, u = S, v[:, t] - _read(erase[:, t], S)
        S = decay[:, t] * S + _outer(write[:, t], u)
        o[:, t] = _scale(scale, q) * _read(q[:, t], before if read_before else S)
    return o, S


def dplr(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T;  o_t = scale S_t^T q_t."""
    (q, k, a, b), decay, S = _prepare([q, k, a, b], v, log_decay, initial_state)
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S = decay[:, t] * S + _outer(b[:, t], _read(a[:, t], S)) + _outer(k[:, t], v[:, t])
        o[:, t] = _scale(scale, q) * _read(q[:, t], S)
    return o, S


def _prepare(
    keys: list[Tensor], v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Keys repeated to the value heads, the decay as a factor `[B, T, HV, K or 1, 1]`, and the first state."""
    B, T, HV, V = v.shape
    keys = [key.repeat_interleave(HV // key.shape[2], dim=2) for key in keys]
    if log_decay is None:
        decay = v.new_ones(1, 1, 1, 1, 1).expand(1, T, 1, 1, 1)
    elif log_decay.dim() == 1:
        decay = log_decay.exp()[None, None, :, None, None].expand(B, T, HV, 1, 1)
    else:
        decay = log_decay.exp().unsqueeze(-1)
        decay = decay.unsqueeze(-1) if log_decay.dim() == 3 else decay
    if initial_state is None:
        initial_state = v.new_zeros(B, HV, keys[0].shape[-1], V)
    return keys, decay, initial_state


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key[..., :, None] * value[..., None, :]


def _read(key: Tensor, S: Tensor) -> Tensor:
    return (key[..., :, None] * S).sum(-2)
