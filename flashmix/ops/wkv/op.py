"""RWKV-4's averages, an op of the mechanism `rwkv4`, which checks its arguments."""

from __future__ import annotations

from functools import partial

from flashmix.op.call import Op, Outputs, always, native_refuses, triton_refuses_first
from flashmix.op.choose import Implementation
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.native.binding import missing
from flashmix.ops.wkv.portable import formula


def _native_supports(call: WkvCall) -> str | None:
    return native_refuses(call, call.a.dtype) or missing()


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
