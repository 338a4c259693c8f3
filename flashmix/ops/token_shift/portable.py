"""The token shift in plain PyTorch."""

from __future__ import annotations

import torch

from flashmix.op.call import Outputs
from flashmix.ops.token_shift.call import ShiftCall


def forward(call: ShiftCall, save: bool) -> tuple[Outputs, Outputs]:
    return formula(call), ()


def formula(call: ShiftCall) -> Outputs:
    if call.packing is None:
        return _shifted(call)
    y, last = _shifted_in_sequences(call)
    return (y, last) if call.return_state else (y,)


def _shifted(call: ShiftCall) -> Outputs:
    x, tokens = call.x, call.x.shape[1]
    state = x.new_zeros(x.shape[0], 1, x.shape[2]) if call.initial_state is None else call.initial_state
    if call.reverse:
        joined = torch.cat([x, state], dim=1)
        y, last = joined[:, 1:], joined[:, :1]
    else:
        joined = torch.cat([state, x], dim=1)
        y, last = joined[:, :tokens], joined[:, tokens:]
    y = y.contiguous()
    return (y, last.clone(memory_format=torch.contiguous_format)) if call.return_state else (y,)


def _shifted_in_sequences(call: ShiftCall) -> Outputs:
    x, packing = call.x, call.packing
    assert packing is not None
    tokens, channels = x.shape[1:]
    state = x.new_zeros(call.count, 1, channels) if call.initial_state is None else call.initial_state
    bounds, filled = packing.cu_seqlens.to(torch.int64), packing.lengths > 0
    empty = x.new_zeros(1, 1, channels)
    # The states go before the sequences' first tokens (in reverse: after the last), those of empty sequences to a row that is cut off.
    if call.reverse:
        joined = torch.cat([x, empty], dim=1)
        last = torch.where(filled[:, None, None], joined[0, bounds[:-1]].unsqueeze(1), state)
        after = torch.where(filled, bounds[1:], 0)
        return joined.index_copy(1, after, state.transpose(0, 1))[:, 1:], last
    joined = torch.cat([empty, x], dim=1)  # row t + 1 is token t
    last = torch.where(filled[:, None, None], joined[0, bounds[1:]].unsqueeze(1), state)
    first = torch.where(filled, bounds[:-1], tokens)
    return joined.index_copy(1, first, state.transpose(0, 1))[:, :tokens], last
