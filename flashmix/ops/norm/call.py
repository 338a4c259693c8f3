"""One call of a norm."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Gradients, Outputs


@dataclass(frozen=True)
class NormCall(Call):
    """The norm `y` of `h = x + residual`, in `groups` equal blocks of the last axis; outputs `y`, and `h` if it `sums`.

    In the backward `x` is `h` and the residual is None; `y` has the dtype `y_dtype`.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    eps: float
    groups: int
    center: bool  # the mean is taken off
    mean: bool  # squares are averaged, not summed
    activation: str  # of the gate
    y_dtype: torch.dtype
    sums: bool  # h is an output: there is, or was, a residual, or x goes on and its gradients meet here

    @property
    def width(self) -> int:
        """Channels of a group."""
        return self.x.shape[-1] // self.groups

    @property
    def divisor(self) -> int:
        """What the sum of squares is divided by."""
        return self.width if self.mean else 1

    def results(self) -> Outputs:
        x = self.x
        y = torch.empty(size=x.shape, dtype=self.y_dtype, device=x.device)
        if not self.sums:
            return (y,)
        dtype = x.dtype if self.residual is None else torch.promote_types(x.dtype, self.residual.dtype)
        return y, torch.empty(size=x.shape, dtype=dtype, device=x.device)

    def for_backward(self, outputs: Outputs) -> NormCall:
        """With `h` in place of `x` and the residual."""
        return self if self.residual is None else self.but(x=outputs[1], residual=None)

    def gradients_of_sum(self, dh: Tensor | None, wanted: Collection[str]) -> Gradients:
        """The gradients where only `h`, the sum, has one: nothing depends on `y`."""
        found = {}
        for name in wanted:
            like = getattr(self, name)
            found[name] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if dh is not None and "x" in wanted:
            found["x"].copy_(dh)
        return found


def norm_call(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    *,
    eps: float,
    groups: int,
    center: bool,
    activation: str,
    mean: bool = True,
) -> NormCall:
    """The call of a norm that is not checked."""
    made: NormCall = NormCall.make(
        {
            "x": x,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "gate": gate,
            "eps": eps,
            "groups": groups,
            "center": center,
            "mean": mean,
            "activation": activation,
            "y_dtype": x.dtype,
            "sums": residual is not None,
        }
    )
    return made
