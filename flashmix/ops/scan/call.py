"""One call of the scan, and the checks that it shares with its steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.checks import (
    check_dtype,
    check_floating,
    check_like,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
    have_addresses,
)
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing

COMPLEX = (torch.complex64, torch.complex128)
COUPLINGS = ("complement", "root", "logit")
STEEPEST = 2000.0  # of "root": the largest `1 / sqrt(1 - e^{2g})` that gradients see, twice the largest derivative of the square root
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *COMPLEX)


@dataclass(frozen=True)
class ScanCall(Call):
    """`h_t = e^{g_t} h_{t-1} + x_t` of `x` `[B, T, D]` or `[B, T, H, D]`, from states `[N, D]` or `[N, H, D]`; `read_before`: `h_{t-1}`.

    `maximum`: `h_t = max(h_{t-1} + g_t, x_t)`, which has no gradient, from states that are given.
    The log decay `g` is of the shape of `x`, `[B, T, H]`, or a constant `[D]`, `[H, D]` or `[H]`. The outputs are `h` and the last states.
    `coupling`: `x` is multiplied by `1 - e^g` ("complement"; "logit", with `g = log sigmoid(-log_decay)`) or `sqrt(1 - e^{2g})` ("root").
    """

    x: Tensor
    log_decay: Tensor
    initial_state: Tensor | None
    packing: Packing | None
    read_before: bool
    maximum: bool = False
    coupling: str | None = None
    source: Tensor | None = None  # of the backward with a coupling: x, in whose place is h

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.packing is None else self.packing.count

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the states and of everything computed inside."""
        return scan_dtype(self.dtype)

    @property
    def constant(self) -> bool:
        """Whether all tokens decay alike."""
        return self.log_decay.dim() < 3

    @property
    def by_head(self) -> bool:
        """Whether all channels of a head decay alike."""
        return self.x.dim() == 4 and self.log_decay.dim() in (1, 3)

    @property
    def decay(self) -> Tensor:
        """The log decay (or logits) as it broadcasts to `x`."""
        return self.log_decay.unsqueeze(-1) if self.by_head else self.log_decay

    def results(self) -> Outputs:
        x = self.x
        state = torch.empty((self.sequences, *x.shape[2:]), dtype=self.state_dtype, device=x.device)
        return torch.empty(size=x.shape, dtype=x.dtype, device=x.device), state

    def for_backward(self, outputs: Outputs) -> ScanCall:
        """With `h` in the place of `x`, which no gradient needs but that of a coupling."""
        return self.but(x=outputs[0], source=self.x if self.coupling else None)


def scan_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the states of `x` of this dtype: float32 or wider, complex of complex ones."""
    return dtype if dtype in COMPLEX else state_dtype(dtype)


def check_scanned(x: Tensor, log_decay: Tensor, coupling: str | None = None) -> tuple[int, ...]:
    """Raises unless all fit one another; returns the sizes of `x`."""
    check_tensor("x", x)
    sizes = dims("x", x, "B T H D" if x.dim() == 4 else "B T D")
    check_dtype("x", x, *DTYPES)
    check_tensor("log_decay", log_decay)
    shapes = [sizes, sizes[2:]]
    if x.dim() == 4:
        shapes += [sizes[:3], sizes[2:3]]
    if tuple(log_decay.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"log_decay must have shape {wanted}, got {list(log_decay.shape)}")
    if x.dtype not in COMPLEX or log_decay.dtype not in COMPLEX:
        check_floating("log_decay", log_decay)
    check_like("log_decay", log_decay, "x", x, dtype=False)
    if coupling is not None:
        if coupling not in COUPLINGS:
            raise ValueError(f"coupling must be one of {', '.join(map(repr, COUPLINGS))} or None, got {coupling!r}")
        check_floating("x", x)
    return sizes


def check_start(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | Packing | None, name: str = "x"
) -> Packing | None:
    """Raises unless boundaries and the state fit `x`, which the caller calls `name`; returns the packing."""
    batch, tokens, *rest = x.shape
    packing = as_packing(cu_seqlens, batch, tokens, x.device)
    if initial_state is not None:
        check_shape("initial_state", initial_state, batch if packing is None else packing.count, *rest)
        check_dtype("initial_state", initial_state, scan_dtype(x.dtype))
        check_like("initial_state", initial_state, name, x, dtype=False)
    return packing


def check_decays(log_decay: Tensor, coupling: str | None = None) -> None:
    """Raises ValueError if a factor is larger than 1, where contents are looked at. Logits may be anything."""
    if coupling == "logit" or not contents_are_checked(log_decay) or not have_addresses(log_decay):
        return
    real = log_decay.detach().real if log_decay.is_complex() else log_decay.detach()
    if real.numel() and float(real.max()) > 0:
        raise ValueError(f"log_decay must be at most 0 (a factor e^g of the state), got {float(real.max()):g}")
