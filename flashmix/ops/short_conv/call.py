"""One call of the short convolution, and one of the convolutions of q, k and v together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, triton_refuses
from flashmix.op.packing import Packing

KERNEL_WIDTH = 8  # the kernels hold that many inputs of a channel in registers


class Convolutions(Call):
    """One or several convolutions of the same tokens, its parts; their channels lie side by side in the state.

    `NAMES` are, of each part, the fields of its input `[B, T, D_i]`, its weight `[D_i, W]` and its bias `[D_i]`.
    """

    initial_state: Tensor | None  # [N, W - 1, D], D = sum of D_i
    packing: Packing | None
    activation: str | None
    return_state: bool
    skips: Tensor | None  # [N] bool: sequences whose first W - 1 outputs another call makes; they may stay unwritten

    NAMES: ClassVar[tuple[tuple[str, str, str], ...]]

    @property
    def parts(self) -> tuple[ShortConvCall, ...]:
        """Each convolution as a call of its own."""
        raise NotImplementedError

    @property
    def added(self) -> Tensor | None:
        """What is added to the output of the only part."""
        return None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple([getattr(self, x) for x, _, _ in self.NAMES])

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple([getattr(self, weight) for _, weight, _ in self.NAMES])

    @property
    def biases(self) -> tuple[Tensor, ...] | None:
        found = tuple([getattr(self, bias) for _, _, bias in self.NAMES])
        return None if found[0] is None else found

    @property
    def channels(self) -> tuple[int, ...]:
        """D_i of each part."""
        return tuple([x.shape[2] for x in self.inputs])

    @property
    def width(self) -> int:
        return self.weights[0].shape[1]

    @property
    def sequences(self) -> int:
        """N: the sequences of the batch, or the packed ones."""
        q, *_ = self.inputs
        return q.shape[0] if self.packing is None else self.packing.count

    def results(self) -> Outputs:
        outputs = [torch.empty(size=x.shape, dtype=x.dtype, device=x.device) for x in self.inputs]
        if self.return_state:
            shape = self.sequences, self.width - 1, sum(self.channels)
            outputs.append(torch.empty(size=shape, dtype=self.dtype, device=self.device))
        return tuple(outputs)

    def flows(self, grads: Any) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """The gradients of the outputs of each part, and that of the final state."""
        parts = len(self.NAMES)
        return tuple(grads[:parts]), grads[parts] if self.return_state else None


@dataclass(frozen=True)
class ShortConvCall(Convolutions):
    """`y_t = act(sum_i weight[:, W-1-i] x_{t-i} + bias) + residual_t` of `x [B, T, D]`; the residual is like `x`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    initial_state: Tensor | None
    packing: Packing | None
    activation: str | None
    return_state: bool
    skips: Tensor | None = None

    NAMES: ClassVar[tuple[tuple[str, str, str], ...]] = (("x", "weight", "bias"),)

    @property
    def parts(self) -> tuple[ShortConvCall, ...]:
        return (self,)

    @property
    def added(self) -> Tensor | None:
        return self.residual

    def for_backward(self, outputs: Outputs) -> ShortConvCall:
        """Without the residual, whose gradient is that of `y`."""
        return self if self.residual is None else self.but(residual=None)


@dataclass(frozen=True)
class ShortConvQKVCall(Convolutions):
    """The convolutions of `q [B, T, DQ]`, `k [B, T, DK]` and `v [B, T, DV]`, each with its own weight; biases for all or for none."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    initial_state: Tensor | None
    packing: Packing | None
    activation: str | None
    return_state: bool
    skips: Tensor | None = None

    NAMES: ClassVar[tuple[tuple[str, str, str], ...]] = tuple([(x, f"{x}_weight", f"{x}_bias") for x in "qkv"])

    @property
    def parts(self) -> tuple[ShortConvCall, ...]:
        states: Any = (None,) * 3 if self.initial_state is None else self.initial_state.split(self.channels, dim=2)
        biases = self.biases or (None,) * 3
        options = self.packing, self.activation, self.return_state
        found = zip(self.inputs, self.weights, biases, states, strict=True)
        return tuple([ShortConvCall(x, weight, bias, None, state, *options) for x, weight, bias, state in found])


def triton_supports(call: Convolutions) -> str | None:
    reason = triton_refuses(call)
    if reason is None and call.width > KERNEL_WIDTH:
        return f"its kernels take widths up to {KERNEL_WIDTH}, got {call.width}"
    return reason
