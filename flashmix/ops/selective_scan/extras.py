"""Step sizes from logits, skip and gate around the selective scan, for whole sequences and single tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.op.checks import (
    FLOATING,
    check_dtype,
    check_floating,
    check_like,
    check_multiple,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
    have_addresses,
)
from flashmix.op.choose import preparing
from flashmix.op.dtypes import state_dtype
from flashmix.ops.decay.op import softplus_decay
from flashmix.ops.gated_product.op import swiglu


def by_groups(t: Tensor) -> Tensor:
    """`B` or `C` with an axis of groups."""
    return t if t.dim() == 4 else t.unsqueeze(2)


def finite_rates(A: Tensor) -> Tensor:
    """`A` without -inf, which a step of 0 would make nan; the kernels for GPUs do so themselves."""
    return A.clamp(min=torch.finfo(A.dtype).min)


class Extras(NamedTuple):
    """The options of `selective_scan` that are not the scan itself, by its names."""

    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    softplus: bool

    def check(self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[int, int, int]:
        """Raises unless all tensors fit one another and no state grows; returns the sizes of a batch of states."""
        batch, tokens, channels = dims("u", u, "B T D")
        check_dtype("u", u, *FLOATING)
        S = dims("A", A, "D S")[1]
        check_shape("dt", dt, batch, tokens, channels)
        check_shape("A", A, channels, S)
        check_tensor("B", B)
        groups = B.shape[2:3] if B.dim() == 4 else ()
        for name, t in (("B", B), ("C", C)):
            check_shape(name, t, batch, tokens, *groups, S)
            check_like(name, t, "u", u)
        if groups:
            check_multiple("the number of channels of u", channels, "the number of groups of B", groups[0])
        if self.z is not None:
            check_shape("z", self.z, batch, tokens, channels)
            check_like("z", self.z, "u", u)
        weights = {"dt": dt, "A": A, "D": self.D, "dt_bias": self.dt_bias}
        for name, weight in weights.items():
            if weight is not None:
                check_shape(name, weight, *((channels,) if name in ("D", "dt_bias") else weight.shape))
                check_floating(name, weight)
                check_like(name, weight, "u", u, dtype=False)
        if self.dt_bias is not None and not self.softplus:
            raise ValueError("dt_bias must be given with softplus=True, got softplus=False")
        return batch, channels, S

    def check_contents(self, A: Tensor, dt: Tensor) -> None:
        """Raises ValueError if a state would grow, where contents are looked at."""
        if not contents_are_checked(A) or not have_addresses(A, dt):
            return
        largest = float(A.detach().max()) if A.numel() else 0.0
        if largest > 0:
            raise ValueError(f"A must be at most 0 (a rate of decay), got {largest:g}")
        least = float(dt.detach().min()) if dt.numel() and not self.softplus else 0.0
        if least < 0:
            raise ValueError(f"dt must be at least 0 (a step size), got {least:g}")

    def step(self, dt: Tensor) -> Tensor:
        """Step sizes, with `softplus` in float32 or float64."""
        if not self.softplus:
            return dt
        zeros = torch.zeros(dt.shape[-1:], dtype=dt.dtype, device=dt.device)
        with preparing():
            return -softplus_decay(dt, zeros, zeros if self.dt_bias is None else self.dt_bias)

    def after(self, y: Tensor, u: Tensor) -> Tensor:
        """`(y + D u) silu(z)`."""
        if self.D is not None:
            wide = state_dtype(u.dtype)
            y = torch.addcmul(y.to(wide), u.to(wide), self.D.to(wide)).to(u.dtype)
        return y if self.z is None else swiglu(self.z, y)
