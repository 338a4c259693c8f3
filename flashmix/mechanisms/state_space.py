"""State spaces whose transition is diagonal, complex and the same for all tokens: S4D, S5 and the LRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import Result, StateOptions, check_per_head, scan_options
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.checks import (
    FLOATING,
    check_dtype,
    check_like,
    check_shape,
    contents_are_checked,
    dims,
    have_addresses,
)
from flashmix.op.dtypes import state_dtype, without_autocast
from flashmix.op.packing import as_packing
from flashmix.op.public import public
from flashmix.ops.scan.op import scan


@public
@scan_options
def s4d(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    A_imag: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    **options: Unpack[StateOptions],
) -> Result:
    """S4D: each channel has a diagonal state of its own, discretised by zero-order hold.

        A = -e^{A_log} + i A_imag;  h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1) / A B x_t;  y_t = 2 Re(C . h_t) + D x_t

    It is computed as a scan, which writes the states of all tokens: `2 S` numbers for each of the input.

    Args:
        x: inputs `[B, T, H, P]`, float32, bfloat16, float16 or float64; the paper's channels are `H P`.
        dt: step sizes `[H, P]`, at least 0, any floating dtype.
        A_log, A_imag: logarithm of the decay rate and the frequency, `[H, P, S]`, any floating dtype.
        B, C: input and output weights `[H, P, S, 2]`, real and imaginary parts, any floating dtype.
        D: skip weight `[H, P]`, or None.
        initial_state: `h` `[N, H, P, S, 2]`, float32 (float64 for float64 inputs); default zeros.

    Source: Gu et al. 2022 (arXiv 2206.11893), sections 3.1 and 3.2.

    Example:
        >>> x, dt, A, B = torch.randn(1, 10, 2, 4), torch.rand(2, 4), torch.zeros(2, 4, 8), torch.randn(2, 4, 8, 2)
        >>> y, h = s4d(x, dt, A, A + 1, B, B, return_state=True)
        >>> y.shape, h.shape
        (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 8, 2]))
    """
    H, P = dims("x", x, "B T H P")[2:]
    S = dims("A_log", A_log, "H P S")[2]
    pairs = {"B": (B, (H, P, S, 2)), "C": (C, (H, P, S, 2))}
    _check(x, {"dt": (dt, (H, P)), "A_log": (A_log, (H, P, S)), "A_imag": (A_imag, (H, P, S)), **pairs}, D)
    given = _started(x, options, H, P, S)
    step = _steps(x, dt).unsqueeze(-1)
    g = _rates(x, A_log, A_imag) * step
    weight = _held(g) * step * _complex(x, B)
    u = (x.to(weight.real.dtype).unsqueeze(-1) * weight).flatten(3)
    h, state = scan(u, g.flatten(1), **given)
    h, weight = h.unflatten(-1, (P, S)), 2 * _complex(x, C)
    y = (h.real * weight.real - h.imag * weight.imag).sum(-1)
    return _skipped(y, x, D), _pairs(state, P, S)


@public
@scan_options
def s5(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    A_imag: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    **options: Unpack[StateOptions],
) -> Result:
    """S5: all channels of a head share one diagonal state, between dense input and output matrices.

        A = -e^{A_log} + i A_imag;  h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1) / A (B x_t);  y_t = 2 Re(C h_t) + D x_t

    Args:
        x: inputs `[B, T, H, P]`, float32, bfloat16, float16 or float64; the paper has one head.
        dt: step sizes `[H, S]`, at least 0, any floating dtype.
        A_log, A_imag: logarithm of the decay rate and the frequency, `[H, S]`, any floating dtype.
        B: input matrices `[H, S, P, 2]`, real and imaginary parts, any floating dtype.
        C: output matrices `[H, P, S, 2]`, like `B`.
        D: skip weight `[H, P]`, or None.
        initial_state: `h` `[N, H, S, 2]`, float32 (float64 for float64 inputs); default zeros.

    Source: Smith et al. 2022 (arXiv 2208.04933), equations 2, 5 and 6.

    Example:
        >>> x, dt, B = torch.randn(1, 10, 1, 4), torch.rand(1, 8), torch.randn(1, 8, 4, 2)
        >>> y, h = s5(x, dt, torch.zeros(1, 8), torch.ones(1, 8), B, B.transpose(1, 2), return_state=True)
        >>> y.shape, h.shape
        (torch.Size([1, 10, 1, 4]), torch.Size([1, 1, 8, 2]))
    """
    H, P = dims("x", x, "B T H P")[2:]
    S = dims("A_log", A_log, "H S")[1]
    pairs = {"B": (B, (H, S, P, 2)), "C": (C, (H, P, S, 2))}
    _check(x, {"dt": (dt, (H, S)), "A_log": (A_log, (H, S)), "A_imag": (A_imag, (H, S)), **pairs}, D)
    given = _started(x, options, H, S)
    step = _steps(x, dt)
    g = _rates(x, A_log, A_imag) * step
    h, state = scan(_product(x, B) * (_held(g) * step), g, **given)
    return _skipped(2 * _real_product(h, C), x, D), _pairs(state, S)


@public
@scan_options
def lru(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    gamma_log: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    **options: Unpack[StateOptions],
) -> Result:
    """LRU, the linear recurrent unit: a diagonal state on the unit disc, between dense input and output matrices.

        h_t = e^{-e^nu + i e^theta} h_{t-1} + e^gamma (B x_t);  y_t = Re(C h_t) + D x_t

    Args:
        x: inputs `[B, T, H, P]`, float32, bfloat16, float16 or float64; the paper has one head.
        nu_log, theta_log: logarithms `nu` of the decay rate and `theta` of the angle, `[H, S]`, any floating dtype.
        gamma_log: `gamma`, logarithm of the input's factor, like them; the paper's starts at `log(1 - e^{-2 e^nu}) / 2`.
        B: input matrices `[H, S, P, 2]`, real and imaginary parts, any floating dtype.
        C: output matrices `[H, P, S, 2]`, like `B`.
        D: skip weight `[H, P]`, or None.
        initial_state: `h` `[N, H, S, 2]`, float32 (float64 for float64 inputs); default zeros.

    Source: Orvieto et al. 2023 (arXiv 2303.06349), equations 4 to 7 and appendix A.

    Example:
        >>> x, nu, B = torch.randn(1, 10, 1, 4), torch.zeros(1, 8), torch.randn(1, 8, 4, 2)
        >>> y, h = lru(x, nu, nu, nu, B, B.transpose(1, 2), return_state=True)
        >>> y.shape, h.shape
        (torch.Size([1, 10, 1, 4]), torch.Size([1, 1, 8, 2]))
    """
    H, P = dims("x", x, "B T H P")[2:]
    S = dims("nu_log", nu_log, "H S")[1]
    vectors = {"nu_log": nu_log, "theta_log": theta_log, "gamma_log": gamma_log}
    pairs = {"B": (B, (H, S, P, 2)), "C": (C, (H, P, S, 2))}
    _check(x, {**{name: (t, (H, S)) for name, t in vectors.items()}, **pairs}, D)
    given = _started(x, options, H, S)
    g = torch.complex(-_wide(x, nu_log).exp(), _wide(x, theta_log).exp())
    h, state = scan(_product(x, B) * _wide(x, gamma_log).exp(), g, **given)
    return _skipped(_real_product(h, C), x, D), _pairs(state, S)


def _check(x: Tensor, weights: dict[str, tuple[Tensor, tuple[int, ...]]], D: Tensor | None) -> None:
    """Raises unless the weights have these shapes, any floating dtype and the device of `x`."""
    check_dtype("x", x, *FLOATING)
    for name, (weight, shape) in weights.items():
        check_per_head(name, weight, "x", x, *shape)
    if D is not None:
        check_per_head("D", D, "x", x, *x.shape[2:])


def _started(x: Tensor, options: StateOptions, *sizes: int) -> dict[str, Any]:
    """The options for the scan: a packing, and the state in complex numbers `[N, H, channels]`, from pairs `[N, *sizes, 2]`."""
    packing = as_packing(options.get("cu_seqlens"), x.shape[0], x.shape[1], x.device)
    state = options.get("initial_state")
    if state is not None:
        check_shape("initial_state", state, x.shape[0] if packing is None else packing.count, *sizes, 2)
        check_dtype("initial_state", state, state_dtype(x.dtype))
        check_like("initial_state", state, "x", x, dtype=False)
        state = torch.complex(*state.unbind(-1)).flatten(2)
    return {**options, "cu_seqlens": packing, "initial_state": state}


def _complex(x: Tensor, pairs: Tensor) -> Tensor:
    """Weights in complex numbers, of the precision that inputs `x` are computed in."""
    return torch.complex(*_wide(x, pairs).unbind(-1))


def _pairs(state: Tensor | None, *sizes: int) -> Tensor | None:
    """The scan's state `[N, H, channels]` as `[N, H, *sizes, 2]`."""
    return None if state is None else torch.stack([state.real, state.imag], -1).unflatten(2, sizes)


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """A weight in the dtype that inputs `x` are computed in; contiguous, as the bits of its exponential depend on its place in memory."""
    return weight.to(state_dtype(x.dtype)).contiguous()


def _rates(x: Tensor, A_log: Tensor, A_imag: Tensor) -> Tensor:
    return torch.complex(-_wide(x, A_log).exp(), _wide(x, A_imag))


def _steps(x: Tensor, dt: Tensor) -> Tensor:
    """The step sizes in the dtype that is computed in; raises ValueError if one is below 0, where contents are looked at."""
    if dt.numel() and contents_are_checked(dt) and have_addresses(dt):
        least = float(dt.detach().min())
        if not least >= 0:
            raise ValueError(f"dt must be at least 0 (a step size), got {least:g}")
    return _wide(x, dt)


def _held(g: Tensor) -> Tensor:
    """`(e^g - 1) / g`, zero-order hold over a step of 1; 1 where `g` is 0."""
    still = g == 0
    g = torch.where(still, torch.ones_like(g), g)
    return torch.where(still, torch.ones_like(g), torch.expm1(g) / g)


def _by_row(x: Tensor, matrix: Tensor) -> Tensor:
    """`[B, T, H, N]` from `[B, T, H, M]` and `[H, N, M]`, a product for each row of the batch: a product of all rows at once may have other
    bits for each number of rows, as was seen on a Xeon with torch 2.13; on an EPYC as many products at once do too."""
    rows = x.transpose(1, 2)
    if x.is_cpu and x.shape[0] > 1 and not torch.compiler.is_compiling():
        return torch.stack([row @ matrix.mT for row in rows]).transpose(1, 2)
    return (rows @ matrix.mT).transpose(1, 2)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """`B x` in complex numbers `[B, T, H, S]`, from `[H, S, P, 2]`."""
    wide = _wide(x, x)
    with without_autocast(x):
        return torch.complex(*(_by_row(wide, part) for part in _wide(x, matrix).unbind(-1)))


def _real_product(h: Tensor, matrix: Tensor) -> Tensor:
    """`Re(C h)` `[B, T, H, P]` of states `[B, T, H, S]`, from `[H, P, S, 2]`."""
    real, imag = _wide(h.real, matrix).unbind(-1)
    with without_autocast(h.real):
        return _by_row(h.real, real) - _by_row(h.imag, imag)


def _skipped(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """`y + D x` in the dtype of `x`."""
    return (y if D is None else y + D.to(y.dtype) * x).to(x.dtype)


register(
    Mechanism(
        title="S4D",
        paper="2206.11893",
        function=s4d,
        call="x:BTHK dt:HK A_log:HKK A_imag:HKK B:HKKn C:HKKn",
        wide=("dt", "A_imag", "B", "C"),
    )
)
register(
    Mechanism(
        title="S5",
        paper="2208.04933",
        function=s5,
        call="x:BTHK dt:HK A_log:HK A_imag:HK B:HKKn C:HKKn",
        wide=("dt", "A_imag", "B", "C"),
    )
)
register(
    Mechanism(
        title="LRU",
        paper="2303.06349",
        function=lru,
        call="x:BTHK nu_log:HK theta_log:HK gamma_log:HK B:HKKn C:HKKn",
        wide=("nu_log", "theta_log", "gamma_log", "B", "C"),
    )
)
