"""One call of the sLSTM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.packing import Packing

GATES = ("write", "forget", "candidate", "output")


@dataclass(frozen=True)
class SlstmCall(Call):
    """Logits of the four gates `[B, T, H, D]`, to which `recurrent` `[4, H, D, D]` (gate, head, to, from) times the output before is added,
    and the state `c, n, m, y` before the first token, each `[N, H, D]`. All have one dtype, float32 or float64; `recurrent` any.

    The outputs are `y` `[B, T, H, D]` and the last `c, n, m, y`; `m` is a constant in gradients.
    """

    write: Tensor
    forget: Tensor
    candidate: Tensor
    output: Tensor
    recurrent: Tensor | None
    c: Tensor
    n: Tensor
    m: Tensor
    y: Tensor
    packing: Packing | None

    @property
    def sequences(self) -> int:
        return self.c.shape[0]

    @property
    def tokens(self) -> int:
        return self.write.shape[1]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(size=shape, dtype=self.dtype, device=self.device)

    def results(self) -> Outputs:
        return self.empty(*self.write.shape), *(self.empty(*self.c.shape) for _ in range(4))

    def kept(self) -> Outputs:
        """Empty tensors like those that a backward needs: the four logits `[4, B, T, H, D]`, and `c, n, m` after each token `[3, …]`."""
        return self.empty(4, *self.write.shape), self.empty(3, *self.write.shape)


def previous(call: SlstmCall, y: Tensor) -> Tensor:
    """The output before each token `[B, T, H, D]`, from those of all tokens."""
    if not y.numel():
        return y
    if call.packing is None:
        return torch.cat([call.y.unsqueeze(1), y[:, :-1]], 1)
    first = (call.packing.positions == 0).view(1, -1, 1, 1)
    return torch.where(first, call.y[call.packing.sequence.clamp(max=call.sequences - 1)], y.roll(1, 1))


def recurrent_gradient(call: SlstmCall, d_logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of `recurrent` from those of the logits `[4, B, T, H, D]`."""
    assert call.recurrent is not None
    return torch.einsum("gbthi,bthj->ghij", d_logits, previous(call, y)).to(call.recurrent.dtype).contiguous()
