"""One call of the rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written, triton_refuses
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class RotaryCall(Call):
    """Queries `q [B, T, HQ, D]` and, if given, keys `k [B, T, HK, D]`, turned by the table `cos, sin [P, R/2]`.

    A token reads the row `start` plus its place: in `positions [B, T]`, in its packed sequence, or in the row; with `axes`, each pair of
    channels reads its own row of `positions [B, T, A]`.
    """

    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    packing: Packing | None
    start: int
    axes: tuple[int, ...]
    interleaved: bool
    inverse: bool

    in_place: ClassVar[bool] = False

    @property
    def turned(self) -> tuple[Tensor, ...]:
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def places(self) -> Tensor | None:
        """The place of each token, `[B, T]`, `[1, T]` of a packed row, or `[B, T, A]`; None: its own place in the row."""
        return self.positions if self.packing is None else self.packing.positions.unsqueeze(0)

    def results(self) -> Outputs:
        return tuple([torch.empty(size=x.shape, dtype=x.dtype, device=x.device) for x in self.turned])

    def for_backward(self, outputs: Outputs) -> RotaryCall:
        """Without queries and keys, which the gradient of neither needs."""
        if self.cos.requires_grad or self.sin.requires_grad:
            return self
        return self.but(q=None, k=None)


@dataclass(frozen=True)
class RotaryInPlaceCall(RotaryCall):
    """The same, written into `q` and `k`."""

    q: Written
    k: Written | None

    in_place: ClassVar[bool] = True

    def results(self) -> Outputs:
        return ()


def triton_supports(call: RotaryCall) -> str | None:
    if torch.is_grad_enabled() and (call.cos.requires_grad or call.sin.requires_grad):
        return triton_refuses(call) or "it has no gradient of cos and sin"
    return triton_refuses(call)
