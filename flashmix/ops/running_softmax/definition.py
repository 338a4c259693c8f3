"""The meaning of the running softmax: a loop over tokens, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def running_softmax(s: Tensor, z: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`e^{s_t - z_t}`, `z_{t-1} - z_t` and the last `z_t = log(e^{z_{t-1}} + e^{s_t})` of every sequence; 0 and 0 where `z_t` is -inf."""
    rows = list(s) if lengths is None else list(s[0].split(lengths))
    weights, decays, last = [], [], []
    for row, before in zip(rows, z, strict=True):
        for logit in row:
            after = torch.logaddexp(before, logit)
            none = after == -torch.inf
            weights.append(torch.where(none, 0.0, torch.exp(logit - torch.where(none, 0.0, after))))
            decays.append(torch.where(none, 0.0, before - torch.where(none, 0.0, after)))
            before = after
        last.append(before)
    weight, decay = (torch.stack(t).view(s.shape) if t else torch.zeros_like(s) for t in (weights, decays))
    return weight, decay, torch.stack(last)
