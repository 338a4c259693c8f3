"""The sLSTM in plain PyTorch: with recurrent weights token after token, for all sequences of a batch or along a packed row; without them
as three scans, which autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.op import finite, scan, scan_max
from flashmix.ops.slstm.call import GATES, SlstmCall, recurrent_gradient

State = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(call: SlstmCall, save: bool) -> tuple[Outputs, Outputs]:
    state: State = (call.c, call.n, call.m, call.y)
    if not call.write.numel():
        return (torch.empty_like(call.write), *(t.clone() for t in state)), call.kept() if save else ()
    gates = torch.stack([getattr(call, name) for name in GATES])  # [4, B, T, H, D]
    logits, states, starts, recurrent = [], [], _starts(call), _weights(call)
    c, n, m, y = (t[:1] if call.packing is not None else t for t in state)
    for t in range(call.tokens):
        if call.packing is not None:
            c, n, m, y = (
                torch.where(starts[0][t], s[starts[1][t]], old) for s, old in zip(state, (c, n, m, y), strict=True)
            )
        a = gates[:, :, t] + torch.einsum("ghij,bhj->gbhi", recurrent, y)
        keep, write, new = _factors(a, m)
        c, n, m = keep * c + write * torch.tanh(a[2]), keep * n + write, new
        y = torch.sigmoid(a[3]) * c / n
        logits.append(a)
        states.append(torch.stack([c, n, m, y]))
    every = torch.stack(states, 2)  # [4, B, T, H, D]
    last = _last(call, every, torch.stack(state))
    # Of memory of their own, for they outlive the states of all tokens.
    outputs = (every[3].clone(), *(t.clone() for t in last))
    return outputs, (torch.stack(logits, 2), every[:3].contiguous()) if save else ()


def keeps(call: SlstmCall) -> Outputs:
    return call.kept()


def backward(call: SlstmCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """From the last token to the first: with `da` the gradients of the logits, `R^T da_{t+1}` of all gates is added to `dy_t`."""
    y, logits, states = kept
    d_out, *d_last = (torch.zeros_like(r) if g is None else g for g, r in zip(grads, _like(call), strict=True))
    end = torch.stack([d_last[0], d_last[1], d_last[3]])  # of c, n, y
    if not call.write.numel():
        return _found(call, logits, end, y)
    before, recurrent = _before(call, states), _weights(call)
    d_logits, carried = torch.empty_like(logits), []
    _, sequences, ends = _starts(call)
    dc, dn, dy = (t[:1] for t in end) if call.packing is not None else end
    for t in range(call.tokens - 1, -1, -1):
        if call.packing is not None:
            dc, dn, dy = (torch.where(ends[t], e[sequences[t]], old) for e, old in zip(end, (dc, dn, dy), strict=True))
        a, (c, n, _), (c_before, n_before, m_before) = logits[:, :, t], states[:, :, t], before[:, :, t]
        keep, write, _ = _factors(a, m_before)
        z, o = torch.tanh(a[2]), torch.sigmoid(a[3])
        dy = dy + d_out[:, t]
        dc, dn = dc + dy * o / n, dn - dy * o * c / n**2
        d_logits[0, :, t] = (dc * z + dn) * write
        d_logits[1, :, t] = (dc * c_before + dn * n_before) * keep * torch.sigmoid(-a[1])
        d_logits[2, :, t] = dc * write * (1 - z * z)
        d_logits[3, :, t] = dy * c / n * o * (1 - o)
        dc, dn = keep * dc, keep * dn
        dy = torch.einsum("ghij,gbhi->bhj", recurrent, d_logits[:, :, t])
        carried.append(torch.stack([dc, dn, dy]))
    every = torch.stack(carried[::-1], 2)  # [3, B, T, H, D]
    return _found(call, d_logits, _first(call, every, end), y)


def _weights(call: SlstmCall) -> Tensor:
    assert call.recurrent is not None
    return call.recurrent.to(call.dtype)


def _like(call: SlstmCall) -> Outputs:
    """Tensors of the outputs' shapes."""
    return call.write, call.c, call.n, call.m, call.y


def _found(call: SlstmCall, d_logits: Tensor, d_start: Tensor, y: Tensor) -> Gradients:
    """The gradients by name; through `m` before the first token the states count `e^m` times."""
    dc, dn, dy = d_start.contiguous().unbind(0)
    found = dict(zip(GATES, d_logits.contiguous().unbind(0), strict=True))
    found |= {"c": dc, "n": dn, "m": dc * call.c + dn * call.n, "y": dy}
    return found | {"recurrent": recurrent_gradient(call, d_logits, y)}


def _factors(a: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept, the weight of what is written, and the new maximum, from logits `[4, ...]` and the maximum before."""
    log_keep = logsigmoid(a[1]) + m
    new = torch.maximum(log_keep, a[0])
    return torch.exp(log_keep - new), torch.exp(a[0] - new), new


def _starts(call: SlstmCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of each packed token whether it is the first, its sequence, whether it is the last."""
    if call.packing is None:
        return call.c, call.c, call.c
    first = call.packing.positions == 0
    sequence = call.packing.sequence.clamp(max=call.sequences - 1)
    return first, sequence[:, None], torch.cat([first[1:], first.new_ones(1)])


def _last(call: SlstmCall, every: Tensor, state: Tensor) -> Tensor:
    """The state after each sequence `[4, N, H, D]`, from those after each token."""
    if call.packing is None:
        return every[:, :, -1]
    ends = (call.packing.cu_seqlens[1:] - 1).clamp(min=0).long()
    empty = (call.packing.lengths == 0).view(1, -1, 1, 1)
    return torch.where(empty, state, every[:, 0, ends])


def _first(call: SlstmCall, every: Tensor, end: Tensor) -> Tensor:
    """What reaches each sequence's start `[3, N, H, D]`, from what reaches the state before each token."""
    if call.packing is None:
        return every[:, :, 0]
    begins = call.packing.cu_seqlens[:-1].clamp(max=call.tokens - 1).long()
    empty = (call.packing.lengths == 0).view(1, -1, 1, 1)
    return torch.where(empty, end, every[:, 0, begins])


def _before(call: SlstmCall, states: Tensor) -> Tensor:
    """`c, n, m` before each token `[3, B, T, H, D]`."""
    start = torch.stack([call.c, call.n, call.m])
    if call.packing is None:
        return torch.cat([start.unsqueeze(2), states[:, :, :-1]], 2)
    first, sequence, _ = _starts(call)
    return torch.where(first.view(1, 1, -1, 1, 1), start[:, sequence[:, 0]].unsqueeze(1), states.roll(1, 2))


def formula(call: SlstmCall, impl: str) -> Outputs | None:
    """`m`, and two scans with its weights; None of a call with recurrent weights, which is no scan."""
    if call.recurrent is not None:
        return None
    # Contiguous, for the bits of an exponential depend on its place in memory.
    write, forget, candidate, output = (getattr(call, name).contiguous() for name in GATES)
    m = call.m.detach()
    decay, past = logsigmoid(forget), torch.exp(call.m - finite(m))  # past: 1, through which the gradient of m_0 passes
    given: dict[str, Any] = {"return_state": True, "cu_seqlens": call.packing, "impl": impl}
    before, last = scan_max(write.detach(), decay.detach(), initial_state=m, read_before=True, **given)
    base = finite(torch.maximum(before + decay.detach(), write.detach()))
    weight, log_keep = torch.exp(write - base), decay + before - base
    n_t, n = scan(weight, log_keep, initial_state=call.n * past, **given)
    c_t, c = scan(weight * torch.tanh(candidate), log_keep, initial_state=call.c * past, **given)
    assert c is not None and n is not None and last is not None
    y = torch.sigmoid(output) * c_t / n_t
    return y, c, n, last, last_output(call, y)


def last_output(call: SlstmCall, y: Tensor) -> Tensor:
    """The last output of each sequence `[N, H, D]`; of one without tokens that before."""
    if not call.tokens:
        return call.y.clone()
    if call.packing is None:
        return y[:, -1].clone()
    ends = (call.packing.cu_seqlens[1:] - 1).clamp(min=0).long()
    return torch.where((call.packing.lengths == 0).view(-1, 1, 1), call.y, y[0, ends])
