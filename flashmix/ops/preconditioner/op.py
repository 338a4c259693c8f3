"""The preconditioner of keys, an op of the preconditioned delta rules, which check its arguments."""

from __future__ import annotations

import math
from functools import partial

from flashmix.op.call import Op, Outputs, always, native_refuses, triton_refuses_first
from flashmix.op.choose import Implementation, preparing
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.preconditioner.native.binding import missing
from flashmix.ops.preconditioner.portable import formula

LARGEST = 80.0  # logarithm of a bound whose powers the exponential in C reaches
LEAST = 1e-30  # eps with which the logarithm in C sees no subnormal number


def _native_supports(call: PreconditionerCall) -> str | None:
    reason = native_refuses(call, call.dtype)
    if reason is not None:
        return reason
    if abs(math.log(call.bound)) > LARGEST:
        return f"it takes a bound between e^-80 and e^80, got {call.bound}"
    if call.eps < LEAST:
        return f"it takes an eps of {LEAST} at least, got {call.eps}"
    return missing()


_PORTABLE = "flashmix.ops.preconditioner.portable"
IMPLEMENTATIONS: tuple[Implementation[PreconditionerCall], ...] = (
    Implementation("triton", _PORTABLE, triton_refuses_first, partial(formula, impl="auto")),
    Implementation("native", "flashmix.ops.preconditioner.native", _native_supports),
    Implementation("portable", _PORTABLE, always, partial(formula, impl="portable")),
)
PRECONDITIONER = Op(
    "preconditioner",
    PreconditionerCall,
    IMPLEMENTATIONS,
    formula=partial(formula, impl="portable"),
    sharded="flashmix.ops.preconditioner.sharded",
)


def preconditioner(call: PreconditionerCall, impl: str) -> Outputs:
    """Write keys and the last curvature of a checked call, beside another op, which `explain` and an `impl` that cannot run are about."""
    with preparing():
        able = [one.name for one in IMPLEMENTATIONS if one.name == impl and one.supports(call) is None]
        return PRECONDITIONER(call, *able or ["auto"])
