"""The selective scan in plain PyTorch: chunks of tokens side by side, from states that are joined by doubling spans.

Nothing is as large as all states: the forward holds one token of every chunk at a time, the backward recomputes a few chunks at a time.
Shapes: `c` chunks of `n` tokens, channels `D` in `G` groups, states `S`; in tiles the channels are `[G, D / G]`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.portable import Chunks, begins, chunks_of
from flashmix.ops.selective_scan.call import SelectiveScanCall

RECOMPUTED = 1 << 22  # numbers of the states that the backward holds at a time


class Operands(NamedTuple):
    """The operands of chunks: `u`, `dt` `[c, n, G, E]` with `E = D / G`, `A` `[G, E, S]`, `B`, `C` `[c, n, G, S]`."""

    u: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    def factor(self, row: int) -> Tensor:
        """`e^{dt A}` of one token of each chunk, `[c, G, E, S]`."""
        return torch.exp(self.dt[:, row].unsqueeze(-1) * self.A)

    def write(self, row: int) -> Tensor:
        return (self.dt[:, row] * self.u[:, row]).unsqueeze(-1) * self.B[:, row].unsqueeze(-2)

    def parts(self, size: int) -> Iterator[tuple[slice, Operands]]:
        """A few chunks at a time."""
        for first in range(0, len(self.u), size):
            own = slice(first, first + size)
            yield own, Operands(self.u[own], self.dt[own], self.A, self.B[own], self.C[own])


def _tiles(call: SelectiveScanCall, chunks: Chunks) -> Operands:
    wide, groups = call.state_dtype, (call.groups, -1)
    u, dt, B, C = (chunks.tiles(t.to(wide).contiguous(), 0) for t in (call.u, call.dt, call.B, call.C))
    shape = (groups[0], call.A.shape[0] // max(groups[0], 1))
    return Operands(
        u.unflatten(-1, shape), dt.unflatten(-1, shape), call.A.to(wide).contiguous().unflatten(0, shape), B, C
    )


def _start(call: SelectiveScanCall, state: Tensor | None) -> Tensor:
    """A state `[N, D, S]`, zeros by default, as `[N, G, E, S]`."""
    if state is None:
        state = call.A.new_zeros((call.sequences, *call.A.shape), dtype=call.state_dtype)
    return state.unflatten(1, (call.groups, call.A.shape[0] // max(call.groups, 1)))


def _total(tiles: Operands) -> Tensor:
    """The product of a chunk's factors, `[c, G, E, S]`."""
    return torch.exp(tiles.dt.sum(1).unsqueeze(-1) * tiles.A)


def forward(call: SelectiveScanCall, save: bool) -> tuple[Outputs, Outputs]:
    chunks = chunks_of(call.u, call.packing)
    tiles, start = _tiles(call, chunks), _start(call, call.initial_state)
    h = torch.zeros_like(start[:1]).expand(len(tiles.u), *start.shape[1:]).clone()
    for row in range(chunks.size) if chunks.most > 1 else ():
        h = tiles.factor(row) * h + tiles.write(row)
    begin = begins(chunks, h, _total(tiles), start)
    h, y = begin, torch.empty_like(tiles.u)
    for row in range(chunks.size):
        h = tiles.factor(row) * h + tiles.write(row)
        y[:, row] = (h * tiles.C[:, row].unsqueeze(-2)).sum(-1)
    state = start.clone()
    if len(h):
        state = torch.where(chunks.empty.view(-1, 1, 1, 1), start, h[chunks.last])
    y = chunks.flat(y.flatten(2), *call.u.shape[:2]).to(call.dtype)
    return (y.contiguous(), state.flatten(1, 2).contiguous()), (begin.flatten(1, 2).contiguous(),) if save else ()


def keeps(call: SelectiveScanCall) -> Outputs:
    return (call.kept_states(),)


def backward(
    call: SelectiveScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]
) -> Gradients:
    """From the last token to the first, with `l` the gradient of the state and `e = e^{dt A}`:

    l_t = dy_t C_t + c;  dC_t = dy_t h_t;  dB_t = dt u l_t;  c = e l_t
    dx = sum_s l_t B_t;  du = dt dx;  ddt = u dx + sum_s A e h_{t-1} l_t;  dA = dt e h_{t-1} l_t
    """
    d_y, d_state = grads
    chunks, wide = chunks_of(call.u, call.packing), call.state_dtype
    tiles = _tiles(call, chunks)
    d_y = torch.zeros_like(call.u, dtype=wide) if d_y is None else d_y.to(wide)
    flow = chunks.tiles(d_y, 0).view_as(tiles.u)
    d_end, begin = _start(call, d_state), kept[0].view(len(tiles.u), *tiles.A.shape)
    c = torch.zeros_like(begin)
    for row in reversed(range(chunks.size)) if chunks.most > 1 else ():
        c = tiles.factor(row) * (c + flow[:, row].unsqueeze(-1) * tiles.C[:, row].unsqueeze(-2))
    c = begins(chunks, c, _total(tiles), d_end, reverse=True).clone()
    found = Operands(*(torch.zeros_like(t) for t in tiles))
    size = max(1, RECOMPUTED // max(1, chunks.size * call.A.numel()))
    for own, part in tiles.parts(size):
        c[own] = _recomputed(
            part, begin[own], c[own], flow[own], Operands(*(t if t is found.A else t[own] for t in found))
        )
    gradients = {"A": found.A.flatten(0, 1).to(call.A.dtype)}
    for name, d in (("u", found.u.flatten(2)), ("dt", found.dt.flatten(2)), ("B", found.B), ("C", found.C)):
        t = getattr(call, name)
        gradients[name] = chunks.flat(d, *call.u.shape[:2]).to(t.dtype).contiguous()
    if "initial_state" in wanted:
        d_start = d_end.clone()
        if len(c):
            d_start = torch.where(chunks.empty.view(-1, 1, 1, 1), d_end, c[chunks.first])
        gradients["initial_state"] = d_start.flatten(1, 2).contiguous()
    return gradients


def _recomputed(tiles: Operands, h: Tensor, c: Tensor, flow: Tensor, found: Operands) -> Tensor:
    """The gradients of a few chunks from their first states and from `c` at their ends; returns `c` at their starts."""
    tokens = range(tiles.u.shape[1])
    states = [h]
    for row in tokens:
        states.append(tiles.factor(row) * states[-1] + tiles.write(row))
    for row in reversed(tokens):
        factor, dy, u, dt = tiles.factor(row), flow[:, row].unsqueeze(-1), tiles.u[:, row], tiles.dt[:, row]
        now = c + dy * tiles.C[:, row].unsqueeze(-2)  # [c, G, E, S]
        found.C[:, row] = (dy * states.pop()).sum(-2)
        found.B[:, row] = ((dt * u).unsqueeze(-1) * now).sum(-2)
        decayed = factor * states[-1] * now
        dx = (now * tiles.B[:, row].unsqueeze(-2)).sum(-1)
        found.u[:, row] = dt * dx
        found.dt[:, row] = u * dx + (tiles.A * decayed).sum(-1)
        found.A.add_((dt.unsqueeze(-1) * decayed).sum(0))
        c = factor * now
    return c
