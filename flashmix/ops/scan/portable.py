"""The scan in plain PyTorch: chunks of tokens side by side, their states joined by doubling spans, then every chunk from its own state.

All factors are products of single ones. A chunk begins where its sequence does, so that nothing depends on what else is in the batch.
Shapes: `c` chunks of `n` tokens, `N` sequences, `...` that of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing
from flashmix.ops.scan.call import STEEPEST, ScanCall

CHUNK = 64


@dataclass(frozen=True)
class Chunks:
    """The chunks of a batch: of each its sequence and its place there from the front and from the back, `[c]`; of each sequence its first
    and its last chunk and whether it is empty, `[N]`.
    """

    size: int
    most: int  # chunks of a sequence, at most
    sequence: Tensor
    place: Tensor
    place_from_end: Tensor
    first: Tensor
    last: Tensor
    empty: Tensor
    tokens: Tensor | None = None  # packed: the token of each row [c, n] …
    outside: Tensor | None = None  # … which is past its sequence's end
    rows: Tensor | None = None  # packed: the row of each token, counted over all chunks

    def tiles(self, t: Tensor, fill: float) -> Tensor:
        """`t` `[B, T, ...]` as `[c, n, ...]`, with `fill` in the padding."""
        if self.tokens is not None and self.outside is not None:
            if not t.shape[1]:
                return t.new_full((*self.tokens.shape, *t.shape[2:]), fill)
            return t[0][self.tokens].masked_fill(_over(self.outside, t), fill)
        missing = -t.shape[1] % self.size
        if missing:
            t = torch.cat([t, t.new_full((t.shape[0], missing, *t.shape[2:]), fill)], 1)
        return t.reshape(t.shape[0] * (t.shape[1] // self.size), self.size, *t.shape[2:])

    def flat(self, tiles: Tensor, batch: int, tokens: int) -> Tensor:
        """Tiles `[c, n, ...]` as `[B, T, ...]`."""
        rows = tiles.flatten(0, 1)
        if self.rows is not None:
            return rows[self.rows].unsqueeze(0)
        return (
            rows.unflatten(0, (batch, -1))[:, :tokens]
            if batch and tokens
            else rows.view(batch, tokens, *rows.shape[1:])
        )


def _over(mask: Tensor, t: Tensor) -> Tensor:
    """A mask of the first axes of `t` as it broadcasts."""
    return mask.view(*mask.shape, *(1,) * (t.dim() - mask.dim()))


def chunks_of(x: Tensor, packing: Packing | None) -> Chunks:
    """The chunks of a batch `x` `[B, T, ...]`."""
    device = x.device
    if packing is not None:
        return packing.table((_packed_chunks, CHUNK), lambda: _packed_chunks(packing))
    batch, tokens = x.shape[:2]
    size = min(CHUNK, max(tokens, 1))
    each = -(-tokens // size)
    sequence, place = torch.arange(batch, device=device), torch.arange(each, device=device)
    first = sequence * each
    return Chunks(
        size,
        each,
        sequence.repeat_interleave(each),
        place.repeat(batch),
        (each - 1 - place).repeat(batch),
        first,
        first + (each - 1),
        torch.full((batch,), tokens == 0, device=device),
    )


def _packed_chunks(packing: Packing) -> Chunks:
    """The same of packed sequences: as many chunks as their lengths may need; those past the last one are empty."""
    bounds, device = packing.cu_seqlens.to(torch.int64), packing.cu_seqlens.device
    total, count = packing.total, packing.count
    each = (bounds.diff() + (CHUNK - 1)) // CHUNK
    ends = each.cumsum(0)
    at = torch.arange(total // CHUNK + count, device=device)
    sequence = torch.searchsorted(ends, at, right=True)
    idle = sequence >= count
    sequence = sequence.clamp(max=max(count - 1, 0))
    first = ends - each
    place = (at - first[sequence]).masked_fill(idle, 0)
    token = (bounds[sequence] + place * CHUNK)[:, None] + torch.arange(CHUNK, device=device)
    outside = idle[:, None] | (token >= bounds[sequence + 1][:, None])
    rows = first[packing.sequence] * CHUNK + packing.positions if count else packing.positions
    return Chunks(
        CHUNK,
        total // CHUNK + 1,
        sequence,
        place,
        place_from_end=(each[sequence] - 1 - place).masked_fill(idle, 0),
        first=first.clamp(max=max(len(at) - 1, 0)),
        last=(ends - 1).clamp(min=0),
        empty=each == 0,
        tokens=token.clamp(min=0, max=max(total - 1, 0)),
        outside=outside,
        rows=rows,
    )


def forward(call: ScanCall, save: bool) -> tuple[Outputs, Outputs]:
    chunks, wide = chunks_of(call.x, call.packing), call.state_dtype
    factor, weight = _factors(call)
    x = call.x.to(wide) if weight is None else weight * call.x
    start = call.initial_state
    if start is None:
        start = x.new_zeros(call.sequences, *x.shape[2:])
    nothing, one = (-torch.inf, 0) if call.maximum else (0, 1)
    tiles = chunks.tiles(x, nothing), chunks.tiles(factor, one)
    h, state = _scan(chunks, *tiles, start, call.read_before, maximum=call.maximum)
    h = chunks.flat(h, *x.shape[:2]).to(call.dtype)
    return (h.contiguous(), state.contiguous()), ()


def _factors(call: ScanCall) -> tuple[Tensor, Tensor | None]:
    """`e^g` of each token, with `maximum` g, and what a coupling multiplies `x` by; `[B, T, ...]` as they broadcast to `x`."""
    g = call.decay
    wide = call.state_dtype if g.is_complex() or not call.x.is_complex() else call.state_dtype.to_real()
    factor, weight = (g.to(wide), None) if call.maximum else factors(g.to(wide), call.coupling)
    sizes = *call.x.shape[:2], *factor.shape[-(call.x.dim() - 2) :]
    return factor.expand(sizes), None if weight is None else weight.expand(sizes)


def factors(g: Tensor, coupling: str | None) -> tuple[Tensor, Tensor | None]:
    """`e^g` and what a coupling multiplies `x` by."""
    if coupling == "logit":
        # as from exp, without torch's sigmoid, whose result depends on a number's place in memory
        small = torch.exp(-g.abs())
        large = 1 / (1 + small)
        small = small * large
        return torch.where(g > 0, small, large), torch.where(g > 0, large, small)
    factor = g.exp()
    if coupling == "complement":
        return factor, -torch.expm1(g)
    return factor, (-torch.expm1(2 * g)).sqrt() if coupling == "root" else None


def _scan(
    chunks: Chunks,
    x: Tensor,
    factor: Tensor,
    start: Tensor,
    read_before: bool,
    reverse: bool = False,
    maximum: bool = False,
) -> tuple[Tensor, Tensor]:
    """`h` of tiles `[c, n, ...]` and the last states `[N, ...]`; `reverse`: of the tokens from the last to the first."""
    rows = range(chunks.size)[:: -1 if reverse else 1]
    times, plus = _operations(maximum)
    h = _begins(chunks, x, factor, start, reverse, maximum)
    out = torch.empty_like(x)
    for row in rows:
        if read_before:
            out[:, row] = h
            h = plus(times(factor[:, row], h), x[:, row])
        else:
            h = plus(times(factor[:, row], h), x[:, row], out=out[:, row])
    if not len(x):
        return out, start.clone()
    state = h[chunks.first if reverse else chunks.last]
    return out, torch.where(_over(chunks.empty, start), start, state)


def _operations(maximum: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """How factors combine, and what is added: products and sums, or sums and maxima."""
    return (torch.add, torch.maximum) if maximum else (torch.mul, torch.add)


def _begins(chunks: Chunks, x: Tensor, factor: Tensor, start: Tensor, reverse: bool, maximum: bool) -> Tensor:
    """The state that each chunk starts from, `[c, ...]`."""
    if chunks.most <= 1 or not len(x):
        return begins(chunks, x[:, 0], x[:, 0], start)
    times, plus = _operations(maximum)
    first, *rest = range(chunks.size)[:: -1 if reverse else 1]
    h, total = x[:, first].clone(), factor[:, first].clone()
    for row in rest:
        times(h, factor[:, row], out=h)
        plus(h, x[:, row], out=h)
        times(total, factor[:, row], out=total)
    return begins(chunks, h, total, start, reverse, maximum)


def begins(
    chunks: Chunks, h: Tensor, total: Tensor, start: Tensor, reverse: bool = False, maximum: bool = False
) -> Tensor:
    """The state that each chunk starts from, `[c, ...]`: `total` is the product of its factors, `h` its last state from zero."""
    if not len(h):
        return torch.empty_like(h)
    begin = start[chunks.sequence]
    if chunks.most <= 1:
        return begin
    times, plus = _operations(maximum)
    place = chunks.place
    if reverse:
        h, total, begin, place = h.flip(0), total.flip(0), begin.flip(0), chunks.place_from_end.flip(0)
    is_first = _over(place == 0, h)
    h = torch.where(is_first, plus(times(total, begin), h), h)
    span = 1
    while span < chunks.most:
        reached = _over(place[span:] >= span, h)
        joined = torch.where(reached, plus(times(total[span:], h[:-span]), h[span:]), h[span:])
        total = torch.cat([total[:span], torch.where(reached, times(total[span:], total[:-span]), total[span:])])
        h = torch.cat([h[:span], joined])
        span *= 2
    begin = torch.where(is_first, begin, h.roll(1, 0))
    return begin.flip(0) if reverse else begin


def backward(call: ScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """With `c_t = e^{g_{t+1}} (dh_{t+1} + c_{t+1})`, a scan from the last token to the first:

        dx_t = dh_t + c_t;    dg_t = e^{g_t} h_{t-1} dx_t;    the gradient of the initial state is c_0

    read_before: `c_t = e^{g_{t+1}} c_{t+1} + do_{t+1}` and `dx_t = c_t`. Complex: with conjugates of `e^g` and of `e^g h`.
    With a coupling this is the gradient of `w x`, so that `dx` is `w` times it; `dg` see `_through_weights`.
    """
    d_h, d_state = grads
    h, wide, chunks = call.x, call.state_dtype, chunks_of(call.x, call.packing)
    sizes = h.shape[:2]
    d_h = torch.zeros_like(h, dtype=wide) if d_h is None else d_h.to(wide)
    if d_state is None:
        d_state = h.new_zeros((call.sequences, *h.shape[2:]), dtype=wide)
    factor, weight = _factors(call)
    factor = factor.conj().resolve_conj()
    x = d_h if call.read_before else factor * d_h
    c, d_start = _scan(chunks, chunks.tiles(x, 0), chunks.tiles(factor, 1), d_state, True, reverse=True)
    d_x = chunks.flat(c, *sizes)
    if not call.read_before:
        d_x = d_x + d_h
    found = {"x": (d_x if weight is None else weight * d_x).to(h.dtype).contiguous()}
    if "initial_state" in wanted:
        found["initial_state"] = d_start.contiguous()
    if "log_decay" in wanted:
        d_g = factor * before(call).to(wide).conj() * d_x
        if weight is not None:
            d_g = _through_weights(call, factor, weight, d_g, d_x)
        found["log_decay"] = _as_decay(call, d_g if call.log_decay.is_complex() or not d_g.is_complex() else d_g.real)
    return found


def _through_weights(call: ScanCall, factor: Tensor, weight: Tensor, d_g: Tensor, d_wx: Tensor) -> Tensor:
    """The gradient of `g` from `d_g`, that through the factor alone, and `d_wx`, the gradient of `w x`:

    complement: `-e^g x d_wx` more; root: `-e^{2g} / w x d_wx` more, with `1 / w` bounded; logit: `e^g w (x d_wx) - w d_g`.
    """
    assert call.source is not None
    through = factor * d_wx * call.source
    if call.coupling == "logit":
        return weight * (through - d_g)
    return d_g - (through if call.coupling == "complement" else through * factor * (1 / weight).clamp(max=STEEPEST))


def before(call: ScanCall) -> Tensor:
    """`h_{t-1}` of each token `[B, T, ...]`, from the outputs in the place of `x`."""
    h, start, packing = call.x, call.initial_state, call.packing
    if call.read_before or not h.numel():
        return h
    if start is None:
        start = h.new_zeros(call.sequences, *h.shape[2:])
    if packing is None:
        return torch.cat([start.to(h.dtype).unsqueeze(1), h[:, :-1]], 1)
    first = _over((packing.positions == 0)[None], h)
    start = start.to(h.dtype)[packing.sequence.clamp(max=packing.count - 1)]
    return torch.where(first, start, h.roll(1, 1))


def _as_decay(call: ScanCall, d_g: Tensor) -> Tensor:
    """The gradient of the log decay from that of every token's and channel's own."""
    if call.by_head:
        d_g = d_g.sum(-1)
    if call.constant:
        d_g = d_g.sum((0, 1), dtype=torch.complex128 if d_g.is_complex() else torch.float64)
    return d_g.to(call.log_decay.dtype).contiguous()
