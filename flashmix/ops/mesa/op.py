"""MesaNet's solution and output, an op of the mechanism `mesa_net`, which checks its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flashmix.gpu import device as gpu
from flashmix.op.call import Op, Outputs, always
from flashmix.op.choose import Implementation
from flashmix.ops.mesa.call import MesaCall
from flashmix.ops.mesa.portable import formula
from flashmix.ops.recurrence import op as recurrence

_PORTABLE = "flashmix.ops.mesa.portable"
WIDEST = 128  # channels of a key whose state a kernel holds beside a chunk


def _supported_by(name: str) -> Callable[[MesaCall], str | None]:
    """Whether an implementation of the recurrence can run its passes."""
    supports = next(one.supports for one in recurrence.IMPLEMENTATIONS if one.name == name)
    return lambda call: supports(call.read) or supports(call.product)


def _gluon_supports(call: MesaCall) -> str | None:
    if not 32 < call.K <= WIDEST or call.V > 256:
        return (
            f"its tiles hold keys of 33 to {WIDEST} channels and values of up to 256, got K = {call.K} and V = {call.V}"
        )
    return gpu.hopper_refuses(call.device, call.dtype, (torch.bfloat16,))


IMPLEMENTATIONS: tuple[Implementation[MesaCall], ...] = (
    Implementation("gluon", "flashmix.ops.mesa.gluon_hopper", _gluon_supports),
    Implementation("triton", _PORTABLE, _supported_by("triton"), partial(formula, impl="triton")),
    Implementation("native", _PORTABLE, _supported_by("native"), partial(formula, impl="native")),
    Implementation("portable", _PORTABLE, always, partial(formula, impl="portable")),
)
MESA = Op("mesa", MesaCall, IMPLEMENTATIONS, sharded="flashmix.ops.mesa.sharded")


def mesa(call: MesaCall, impl: str) -> Outputs:
    """Outputs `[B, T, HV, V]` and the last `R` and `S` of a checked call."""
    return MESA(call, impl, "mesa_net")
