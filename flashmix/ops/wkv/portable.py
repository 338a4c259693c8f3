"""RWKV-4's averages as three scans, in plain PyTorch or kernels, which autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch

from flashmix.op.call import Outputs
from flashmix.ops.scan.op import finite, scan, scan_max
from flashmix.ops.wkv.call import WkvCall

FAR = 60.0  # e^-60 of a token's own weight is less than the rounding of the past's


def formula(call: WkvCall, impl: str) -> Outputs:
    """With `m_t = max(m_{t-1} + w, k_t)` the sums, divided by `e^m`, decay by `e^{w + m_{t-1} - m_t}` and take `e^{k_t - m_t} (v_t, 1)`.

    The average is divided by the own token's weight: `(r a + v) / (r b + 1)` with `r = e^{m_{t-1} - u - k_t}`, which beyond e^60 hides `v`.
    """
    key, value, decay, m = call.k.to(call.a.dtype), call.v.to(call.a.dtype), call.log_decay, call.m.detach()
    past = torch.exp(call.m - finite(m))  # 1, through which the gradient of m_0 passes
    given: dict[str, Any] = {"return_state": True, "cu_seqlens": call.packing, "read_before": True, "impl": impl}
    before, last = scan_max(key.detach(), decay.detach(), initial_state=m, **given)
    aged = decay + before
    base = finite(torch.maximum(aged.detach(), key.detach()))
    weight, ages = torch.exp(key - base), aged - base
    b_before, b = scan(weight, ages, initial_state=call.b * past, **given)
    a_before, a = scan(weight * value, ages, initial_state=call.a * past, **given)
    past = torch.exp((before - (key + call.bonus)).clamp(max=FAR))
    assert a is not None and b is not None and last is not None
    o = torch.addcmul(value, past, a_before) / torch.addcmul(torch.ones_like(call.bonus), past, b_before)
    return o.to(call.k.dtype), a, b, last
