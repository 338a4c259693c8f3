"""Diagonal state spaces as their papers write them: the token loops of S4D, S5 and the LRU."""

from __future__ import annotations

import torch
from paper_cases import H, K, Mechanism, T, rows, zeros
from torch import Tensor


def number(pairs: Tensor) -> Tensor:
    return torch.complex(pairs[..., 0], pairs[..., 1])


def run(
    x: Tensor, S: Tensor, factor: Tensor, B: Tensor, C: Tensor, D: Tensor | None, times: int
) -> tuple[Tensor, Tensor]:
    """h_t = factor h_{t-1} + B x_t, y_t = times Re(C h_t) + D x_t, with matrices B and C."""
    h, y = number(S), []
    for t in range(len(x)):
        h = factor * h + B @ x[t].to(B.dtype)
        y.append(times * (C @ h).real + (0 if D is None else D * x[t]))
    return rows(y, x), torch.stack([h.real, h.imag], -1)


def s4d(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    A_imag: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """2206.11893, section 3: each channel x_d has h = e^{dt A} h + A^-1 (e^{dt A} - I) B x_d, y_d = 2 Re(C^T h) + D x_d."""
    A = torch.complex(-torch.exp(A_log), A_imag)
    found = []
    for d in range(x.shape[1]):
        factor = torch.exp(dt[d] * A[d])
        held = (torch.expm1(dt[d] * A[d]) / A[d] * number(B[d]))[:, None]
        skip = None if D is None else D[d : d + 1]
        found.append(run(x[:, d : d + 1], S[d], factor, held, number(C[d])[None], skip, 2))
    return torch.cat([y for y, _ in found], 1), torch.stack([h for _, h in found])


def s5(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    A_imag: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """2208.04933, equations 2, 5 and 6: h = e^{dt A} h + A^-1 (e^{dt A} - I) B x, y = 2 Re(C h) + D x (half of the conjugate pairs)."""
    A = torch.complex(-torch.exp(A_log), A_imag)
    held = (torch.expm1(dt * A) / A)[:, None] * number(B)
    return run(x, S, torch.exp(dt * A), held, number(C), D, 2)


def lru(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    gamma_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """2303.06349, equation 5 and appendix A: lambda = e^{-e^nu + i e^theta}, h = lambda h + e^gamma B x, y = Re(C h) + D x."""
    size, angle = torch.exp(-torch.exp(nu_log)), torch.exp(theta_log)
    factor = torch.complex(size * torch.cos(angle), size * torch.sin(angle))
    return run(x, S, factor, torch.exp(gamma_log)[:, None] * number(B), number(C), D, 1)


INPUT, MATRICES, SKIP = {"x": "B T HV V"}, {"B": "HV M V two", "C": "HV V M two"}, {"D": "HV V"}
CHANNELS = {"dt": "HV V", "A_log": "HV V M", "A_imag": "HV V M", "B": "HV V M two", "C": "HV V M two"}
SHARED = {"dt": "HV M", "A_log": "HV M", "A_imag": "HV M", **MATRICES}
POLAR = {"nu_log": "HV M", "theta_log": "HV M", "gamma_log": "HV M", **MATRICES}
CASES = {
    "s4d": Mechanism(
        s4d,
        INPUT | CHANNELS | SKIP,
        ("D",),
        scale=1.0,
        grouped=False,
        states=("N HV V M two",),
        errors=[
            ({"dt": zeros(H)}, ValueError, "dt must have shape [2, 8], got [2]"),
            ({"D": zeros(1)}, ValueError, "D must have shape [2, 8], got [1]"),
        ],
    ),
    "s5": Mechanism(
        s5,
        INPUT | SHARED | SKIP,
        ("D",),
        scale=1.0,
        grouped=False,
        states=("N HV M two",),
        errors=[
            ({"C": zeros(H, K, 4)}, ValueError, "C must have shape [2, 8, 8, 2], got [2, 8, 4]"),
            ({"x": zeros(1, T, K)}, ValueError, "x must have shape [B, T, H, P], got [1, 6, 8]"),
        ],
    ),
    "lru": Mechanism(
        lru,
        INPUT | POLAR | SKIP,
        ("D",),
        scale=1.0,
        grouped=False,
        states=("N HV M two",),
        errors=[
            ({"gamma_log": zeros(H)}, ValueError, "gamma_log must have shape [2, 8], got [2]"),
            ({"B": zeros(H, K, 4, 2)}, ValueError, "B must have shape [2, 8, 8, 2], got [2, 8, 4, 2]"),
        ],
    ),
}
