"""The running softmax as a scan of the maximum and one of sums, in plain PyTorch or kernels, which autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.softplus import invariant_softplus
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.scan.op import finite, scan, scan_max


def formula(call: RunningSoftmaxCall, impl: str) -> Outputs:
    """`s_t - z_t = -softplus(-ahead)` and `z_{t-1} - z_t = -softplus(ahead)` with `ahead = s_t - z_{t-1}`, inf at a first token.

    As in online softmax `z = m + log c` with the running maximum `m`, which takes no part in gradients, and
    `c_t = e^{m_{t-1} - m_t} c_{t-1} + e^{s_t - m_t}`, a scan.
    """
    start, s = call.z, call.s.to(call.z.dtype)
    given: dict[str, Any] = {"return_state": True, "cu_seqlens": call.packing, "read_before": True, "impl": impl}
    before, last = scan_max(s.detach(), None, initial_state=start.detach(), **given)
    m = torch.maximum(before, s.detach())
    decay = torch.where(before == m, 0.0, before - m)
    first = torch.exp(start - finite(start.detach()))
    c_before, c = scan(torch.exp(s - finite(m)), decay, initial_state=first, **given)
    assert c is not None and last is not None
    z_before = before + _log(c_before)
    ahead = torch.where(m == -torch.inf, s, s - z_before)  # no token has a weight yet
    return torch.exp(-invariant_softplus(-ahead)).to(call.s.dtype), -invariant_softplus(ahead), last + _log(c)


def _log(c: Tensor) -> Tensor:
    """`log c`, and 0 where nothing has been summed yet (the running maximum is -inf there)."""
    return torch.where(c == 0, torch.ones_like(c), c).log()
