"""The meaning of the scan: token loops, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor

STEEPEST = 1000.0  # the largest derivative of the square root that gradients see


def scan(
    x: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    read_before: bool = False,
    coupling: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`h_t = e^{g_t} h_{t-1} + x_t` for `x` `[B, T, D]` or `[B, T, H, D]`, and the last `h`; `read_before`: `h_{t-1}`.

    `coupling`: `x_t` times `1 - e^{g_t}` ("complement") or `sqrt(1 - e^{2 g_t})` ("root"), or with `g_t = log sigmoid(-log_decay_t)`
    times `1 - e^{g_t}` ("logit").
    """
    g = _per_token(x, log_decay)
    if coupling == "complement":
        x = -torch.expm1(g) * x
    elif coupling == "root":
        x = _bounded_root(-torch.expm1(2 * g)) * x
    elif coupling == "logit":
        x, g = torch.sigmoid(g) * x, torch.nn.functional.logsigmoid(-g)
    h = x.new_zeros(x.shape[0], *x.shape[2:]) if initial_state is None else initial_state
    outputs = []
    for g_t, x_t in zip(g.unbind(1), x.unbind(1), strict=True):
        before, h = h, torch.exp(g_t) * h + x_t
        outputs.append(before if read_before else h)
    return (torch.stack(outputs, 1) if outputs else x + 0), h


def scan_max(
    x: Tensor, log_decay: Tensor, initial_state: Tensor | None = None, read_before: bool = False
) -> tuple[Tensor, Tensor]:
    """`m_t = max(m_{t-1} + g_t, x_t)` and the last `m`, from -inf; `read_before`: `m_{t-1}`."""
    g = _per_token(x, log_decay)
    m = x.new_full((x.shape[0], *x.shape[2:]), -torch.inf) if initial_state is None else initial_state
    outputs = []
    for g_t, x_t in zip(g.unbind(1), x.unbind(1), strict=True):
        before, m = m, torch.maximum(m + g_t, x_t)
        outputs.append(before if read_before else m)
    return (torch.stack(outputs, 1) if outputs else x + 0), m


def _bounded_root(x: Tensor) -> Tensor:
    """`sqrt(x)`, with a derivative of at most `STEEPEST`."""
    steep = x < (2 * STEEPEST) ** -2
    root = x.detach().sqrt() + STEEPEST * (x - x.detach())
    return torch.where(steep, root, torch.where(steep, torch.ones_like(x), x).sqrt())


def _per_token(x: Tensor, log_decay: Tensor) -> Tensor:
    """The decay as it broadcasts to `x`, one for each token."""
    if x.dim() == 4 and log_decay.dim() in (1, 3):
        log_decay = log_decay.unsqueeze(-1)
    return log_decay.expand(*x.shape[:2], *log_decay.shape[-(x.dim() - 2) :])
