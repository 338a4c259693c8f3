"""The scan over a shard: a piece multiplies the state that enters it by the product of its decays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flashmix.op.call import Outputs
from flashmix.ops.scan import op
from flashmix.ops.scan.call import ScanCall
from flashmix.parallel import joined
from flashmix.parallel.exchange import Moved
from flashmix.parallel.joined import CallHalves, StateMap, summed


def run(call: ScanCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return joined.run(call, acts(call), impl, asked)


def exchange(call: ScanCall) -> Moved:
    """What the ranks exchange."""
    return joined.exchange(call, acts(call))


def acts(call: ScanCall) -> StateMap:
    """How its tokens act on the state."""
    return MAXIMUM if call.maximum else SUM


def shapes(call: ScanCall) -> dict[str, torch.Size]:
    """Of the maps of a piece: `N` like a state, `M` the decay as it broadcasts to one."""
    return {"N": call.x.shape[2:], "M": call.decay.shape[2 if call.decay.dim() > 2 else 0 :]}


def sums(halves: CallHalves, pieces: Sequence[int]) -> list[Tensor]:
    """The sums of the log decays of some pieces, in the dtype of states."""
    call, own = halves.call, halves.shard.pieces[halves.shard.rank]
    return [summed(call.decay, own[i]).to(call.state_dtype) for i in pieces]


def products(halves: CallHalves, pieces: Sequence[int]) -> list[Tensor]:
    """The products of the decays of some pieces."""
    call, own = halves.call, halves.shard.pieces[halves.shard.rank]
    g = logsigmoid(-call.decay.to(call.state_dtype)) if call.coupling == "logit" else call.decay
    return [_exp(summed(g, own[i])).to(call.state_dtype) for i in pieces]


def _exp(total: Tensor) -> Tensor:
    """`e^total`; of complex numbers 0 where the real part is -inf, whatever the other."""
    return torch.polar(total.real.exp(), total.imag) if total.is_complex() else total.exp()


SUM = StateMap(op.SCAN, shapes, lambda M, S, N: M * S + N, lambda M, E: M.conj() * E, products)
MAXIMUM = StateMap(op.SCAN, shapes, lambda M, S, N: torch.maximum(M + S, N), torch.mul, sums, nothing=-torch.inf)
