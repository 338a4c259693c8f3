"""The selective scan over a shard: a piece multiplies the state that enters it by `e^{A sum dt}`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flashmix.op.call import Outputs
from flashmix.ops.selective_scan import op
from flashmix.ops.selective_scan.call import SelectiveScanCall
from flashmix.ops.selective_scan.extras import finite_rates
from flashmix.parallel import joined
from flashmix.parallel.exchange import Moved
from flashmix.parallel.joined import CallHalves, StateMap, summed


def run(call: SelectiveScanCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return joined.run(call, ACTS, impl, asked)


def exchange(call: SelectiveScanCall) -> Moved:
    """What the ranks exchange."""
    return joined.exchange(call, ACTS)


def shapes(call: SelectiveScanCall) -> dict[str, torch.Size]:
    """Of the maps of a piece, both `[D, S]`."""
    return dict.fromkeys("NM", call.A.shape)


def products(halves: CallHalves, pieces: Sequence[int]) -> list[Tensor]:
    """The products of the decays of some pieces."""
    call, own = halves.call, halves.shard.pieces[halves.shard.rank]
    step = call.dt
    if call.softplus:
        step = softplus(step.to(call.state_dtype) + (0.0 if call.dt_bias is None else call.dt_bias))
    return [(summed(step, own[i]).unsqueeze(-1) * finite_rates(call.A)).exp().to(call.state_dtype) for i in pieces]


ACTS = StateMap(op.SELECTIVE_SCAN, shapes, lambda M, S, N: M * S + N, torch.mul, products)
