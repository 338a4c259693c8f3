"""The short convolution in plain PyTorch; those of q, k and v one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import compute_dtype
from flashmix.op.packing import Packing
from flashmix.ops.gated_product.portable import ACTIVATIONS
from flashmix.ops.short_conv.call import Convolutions, ShortConvCall


def forward(call: Convolutions, save: bool) -> tuple[Outputs, Outputs]:
    layout = layout_of(call)
    return _joined(call, [_forward(part, layout) for part in call.parts]), ()


def formula(call: Convolutions) -> Outputs:
    layout = PaddedLayout(call.width, call.packing)
    return _joined(call, [_formula(part, layout) for part in call.parts])


def backward(call: Convolutions, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    layout, (flows, last) = layout_of(call), call.flows(grads)
    lasts: Any = (None,) * len(flows) if last is None else last.split(call.channels, dim=2)
    found: Gradients = {}
    states = []
    for part, names, flow, d_end in zip(call.parts, call.NAMES, flows, lasts, strict=True):
        public = dict(zip(("x", "weight", "bias"), names, strict=True)) | {"initial_state": "initial_state"}
        gradients = _backward(part, layout, flow, d_end, {own for own, name in public.items() if name in wanted})
        if "initial_state" in wanted:
            states.append(gradients.pop("initial_state"))
        found |= {public[own]: gradient for own, gradient in gradients.items()}
    if states:
        found["initial_state"] = states[0] if len(states) == 1 else torch.cat(states, dim=2)
    return found


def _joined(call: Convolutions, found: Sequence[tuple[Tensor, Tensor]]) -> Outputs:
    """The outputs of the parts, and their states side by side if they are asked for."""
    outputs = tuple([y for y, _ in found])
    if not call.return_state:
        return outputs
    states = [state for _, state in found]
    return *outputs, states[0] if len(states) == 1 else torch.cat(states, dim=2)


def layout_of(call: Convolutions) -> PaddedLayout:
    """The layout of the call's tokens; that of a packed batch is made once."""
    width, packing = call.width, call.packing
    if packing is None:
        return PaddedLayout(width, None)
    # Of a packing of its own: the caller's keeps the layout, which must not keep the caller's.
    return packing.table(
        ("short_conv.layout", width), lambda: PaddedLayout(width, Packing.unchecked(packing.cu_seqlens, packing.total))
    )


class PaddedLayout:
    """Lays every sequence out with the W - 1 inputs before it, so that one convolution without bounds serves all cases.

    In a packed row this moves a token by W - 1 rows for its own and each earlier sequence. Rows are gathered, not
    scattered, which is slow on the CPU.
    """

    def __init__(self, width: int, packing: Packing | None) -> None:
        self.past, self.packing = width - 1, packing
        if packing is None:
            return
        cu_seqlens, total = packing.cu_seqlens, packing.total
        device, entries = cu_seqlens.device, packing.count + 1
        tokens = torch.arange(total, device=device)
        self.rows = tokens + (packing.sequence + 1) * self.past  # [T]: the row of each token
        self.source = torch.zeros(total + entries * self.past, dtype=torch.int64, device=device)
        self.source[self.rows] = tokens  # the token of each row; 0 in the rows before a sequence
        past, shift = torch.arange(self.past, device=device), torch.arange(entries, device=device) * self.past
        # [(N + 1) (W - 1)]: the rows before each sequence, and those past the last
        self.edges = ((cu_seqlens + shift).unsqueeze(1) + past).flatten()

    def lay_out(self, x: Tensor, state: Tensor | None) -> Tensor:
        if self.packing is None:
            return F.pad(x, (0, 0, self.past, 0)) if state is None else torch.cat([state, x], dim=1)
        tokens, channels = x.shape[1:]
        before = x.new_zeros((self.packing.count + 1) * self.past, channels)
        if state is not None:
            before = torch.cat([state.flatten(0, 1), before[: self.past]])
        if tokens == 0:
            return before.unsqueeze(0)
        return x[0].index_select(0, self.source).index_copy(0, self.edges, before).unsqueeze(0)

    def tokens(self, laid: Tensor) -> Tensor:
        """The rows of the tokens, `[B, T, D]`."""
        return laid[:, self.past :] if self.packing is None else laid[0].index_select(0, self.rows).unsqueeze(0)

    def outputs(self, y: Tensor) -> Tensor:
        """What the convolution of a layout gave for the tokens: it has no rows for the first W - 1."""
        return y if self.packing is None else y[0].index_select(0, self.rows - self.past).unsqueeze(0)

    def starts(self, laid: Tensor) -> Tensor:
        """`[N, W - 1, D]`: the rows before each sequence."""
        if self.packing is None:
            return laid[:, : self.past]
        rows = self.edges[: self.packing.count * self.past]
        return laid[0].index_select(0, rows).unflatten(0, (self.packing.count, self.past))

    def ends(self, laid: Tensor) -> Tensor:
        """`[N, W - 1, D]`: the last rows of each sequence."""
        if self.packing is None:
            return laid[:, laid.shape[1] - self.past :].clone()
        return laid[0].index_select(0, self._last_rows()).unflatten(0, (self.packing.count, self.past))

    def add_to_ends(self, laid: Tensor, values: Tensor) -> None:
        if self.packing is None:
            laid[:, laid.shape[1] - self.past :] += values
        else:
            laid[0].index_add_(0, self._last_rows(), values.flatten(0, 1).to(laid.dtype))

    def _last_rows(self) -> Tensor:
        """`[N (W - 1)]`: they lie before the rows that are before the next sequence."""
        return self.edges[self.past :] - self.past


def _formula(call: ShortConvCall, layout: PaddedLayout) -> tuple[Tensor, Tensor]:
    """`y` and the state after it, as autograd and compilers see them."""
    wide = compute_dtype(call.x, call.weight, call.bias)
    laid = layout.lay_out(call.x, call.initial_state)
    tokens = laid.shape[1] - layout.past
    taps = call.weight.to(wide).unbind(1)
    y = torch.stack([laid[:, i : i + tokens].to(wide) * tap for i, tap in enumerate(taps)]).sum(0)
    y = y if call.bias is None else y + call.bias
    y = layout.outputs(y if call.activation is None else ACTIVATIONS[call.activation].formula(y))
    y = y if call.residual is None else y + call.residual
    return y.to(call.x.dtype), layout.ends(laid)


def _forward(call: ShortConvCall, layout: PaddedLayout) -> tuple[Tensor, Tensor]:
    """`_formula` with fewer passes over memory; autograd cannot differentiate it."""
    wide = compute_dtype(call.x, call.weight, call.bias)
    laid = layout.lay_out(call.x, call.initial_state)
    y = _convolve(laid.to(wide), call.weight.T.to(wide).contiguous().unbind(), call.bias)
    y = layout.outputs(y if call.activation is None else ACTIVATIONS[call.activation].value(y))
    y = y if call.residual is None else y + call.residual
    return y.to(call.x.dtype).contiguous(), layout.ends(laid)


def _convolve(laid: Tensor, taps: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The convolution before its activation; `taps` are `[D]` each, oldest first."""
    tokens = laid.shape[1] - (len(taps) - 1)
    y = laid.narrow(1, 0, tokens) * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        y.addcmul_(laid.narrow(1, i, tokens), tap)
    return y if bias is None else y.add_(bias)


def _backward(
    call: ShortConvCall, layout: PaddedLayout, flow: Tensor | None, d_end: Tensor | None, wanted: Collection[str]
) -> Gradients:
    """The gradients of one part, from those of its output and of the state after it.

    du_t = dy_t act'(u_t),    dx_t = sum_i weight[:, W-1-i] du_{t+i},    dweight[:, k] = sum_t du_t x_{t-W+1+k}
    """
    if not wanted:
        return {}
    x, weight, bias = call.x, call.weight, call.bias
    wide = compute_dtype(x, weight, bias)
    laid, taps = layout.lay_out(x, call.initial_state).to(wide), weight.T.to(wide).contiguous().unbind()
    d_laid, found = torch.zeros_like(laid), {}
    if flow is not None:
        du = flow.to(wide) if layout.packing is None else layout.lay_out(flow, None)[:, layout.past :].to(wide)
        if call.activation is not None:
            du = ACTIVATIONS[call.activation].value_and_slope(_convolve(laid, taps, bias))[1].mul_(du)
        tokens = du.shape[1]
        for i, tap in enumerate(taps):
            d_laid[:, i : i + tokens].addcmul_(du, tap)
        if "weight" in wanted:
            room = torch.empty_like(du)
            columns = [torch.mul(du, laid[:, i : i + tokens], out=room).sum((0, 1)) for i in range(len(taps))]
            found["weight"] = torch.stack(columns, dim=1).to(weight.dtype)
        if "bias" in wanted and bias is not None:
            found["bias"] = du.sum((0, 1)).to(bias.dtype)
    if d_end is not None:
        layout.add_to_ends(d_laid, d_end)
    if "x" in wanted:
        found["x"] = layout.tokens(d_laid).to(x.dtype).contiguous()
    if "initial_state" in wanted:
        found["initial_state"] = layout.starts(d_laid).to(x.dtype, copy=True).contiguous()
    missing = {name: getattr(call, name) for name in wanted if name not in found}  # nothing came back through `y`
    return found | {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in missing.items()}
