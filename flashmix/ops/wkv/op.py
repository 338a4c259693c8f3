"""RWKV-4's averages, an op of the mechanism `rwkv4`, which checks its arguments."""

from __future__ import annotations

from functools import partial

import torch

from flashmix.op.call import Op, Outputs, always, triton_refuses_first
from flashmix.op.choose import Implementation
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.native.binding import missing
from flashmix.ops.wkv.portable import formula


def _native_supports(call: WkvCall) -> str | None:
    if call.device.type != "cpu":
        return f"it needs tensors on a CPU, got {call.device.type}"
    if call.a.dtype != torch.float32:
        return f"it computes in float32, got {str(call.a.dtype).removeprefix('torch.')}"
    return missing()


_PORTABLE = "flashmix.ops.wkv.portable"
IMPLEMENTATIONS: tuple[Implementation[WkvCall], ...] = (
    Implementation("triton", "flashmix.ops.wkv.triton_gpu", triton_refuses_first),
    Implementation("native", "flashmix.ops.wkv.native", _native_supports),
    Implementation("portable", _PORTABLE, always, partial(formula, impl="portable")),
)
WKV = Op("wkv", WkvCall, IMPLEMENTATIONS, sharded="flashmix.ops.wkv.sharded")


def wkv(call: WkvCall, impl: str) -> Outputs:
    """Averages `[B, T, ...]` and the last `a e^{-m}, b e^{-m}, m` of a checked call."""
    return WKV(call, impl, "rwkv4")
