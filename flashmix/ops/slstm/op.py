"""The sLSTM, an op of the mechanism `slstm`, which checks its arguments."""

from __future__ import annotations

from functools import partial

from flashmix.op.call import Op, Outputs, always, native_refuses, triton_refuses_first
from flashmix.op.choose import Implementation
from flashmix.ops.slstm.call import SlstmCall
from flashmix.ops.slstm.native.binding import missing
from flashmix.ops.slstm.portable import formula

WIDEST = 512  # channels of a head of the GPU's kernels


def _native_supports(call: SlstmCall) -> str | None:
    return native_refuses(call, call.dtype) or missing()


def _triton_supports(call: SlstmCall) -> str | None:
    channels = call.write.shape[-1]
    if call.recurrent is not None and channels > WIDEST:
        return f"its kernels take heads of at most {WIDEST} channels, got {channels}"
    return triton_refuses_first(call)


IMPLEMENTATIONS: tuple[Implementation[SlstmCall], ...] = (
    Implementation("triton", "flashmix.ops.slstm.triton_gpu", _triton_supports, partial(formula, impl="triton")),
    Implementation("native", "flashmix.ops.slstm.native", _native_supports),
    Implementation("portable", "flashmix.ops.slstm.portable", always, partial(formula, impl="portable")),
)
SLSTM = Op("slstm_cell", SlstmCall, IMPLEMENTATIONS, keeps_outputs=(0,))


def slstm_cell(call: SlstmCall, impl: str) -> Outputs:
    """`y` `[B, T, H, D]` and the last `c, n, m, y` of a checked call."""
    return SLSTM(call, impl, "slstm")
