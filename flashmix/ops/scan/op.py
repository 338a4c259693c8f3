"""The scan: each channel a number that decays from token to token and is added to."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.call import Op, always, native_refuses
from flashmix.op.checks import check_floating, check_tensor
from flashmix.op.choose import Implementation
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.scan.call import ScanCall, check_decays, check_scanned, check_start, scan_dtype
from flashmix.ops.scan.native.binding import missing

PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # dtypes of the real part


def _gluon_supports(call: ScanCall) -> str | None:
    if call.maximum or call.log_decay.shape != call.x.shape:
        return "its kernels take sums whose decays have the shape of x"
    if call.log_decay.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels take log decays of 16 or 32 bits, got {call.log_decay.dtype}"
    width = call.x.shape[2:].numel()
    if width % 8:
        return f"its kernels copy 8 channels at a time, got {width}"
    return gpu.hopper_refuses(call.device, call.dtype, (torch.bfloat16, torch.float16))


def _triton_supports(call: ScanCall) -> str | None:
    return gpu.refuses(call.device, PARTS.get(call.dtype, call.dtype))


def _native_supports(call: ScanCall) -> str | None:
    return native_refuses(call, call.state_dtype, call.dtype, (torch.float32, torch.complex64)) or missing()


IMPLEMENTATIONS: tuple[Implementation[ScanCall], ...] = (
    Implementation("gluon", "flashmix.ops.scan.gluon_hopper", _gluon_supports),
    Implementation("triton", "flashmix.ops.scan.triton_gpu", _triton_supports),
    Implementation("native", "flashmix.ops.scan.native", _native_supports),
    Implementation("portable", "flashmix.ops.scan.portable", always),
)
SCAN = Op("scan", ScanCall, IMPLEMENTATIONS, sharded="flashmix.ops.scan.sharded")


@public
def scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    read_before: bool = False,
    coupling: str | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """An elementwise recurrence: each channel decays from token to token and is added to.

        h_t = e^{g_t} h_{t-1} + x_t

    With a coupling the decay also says how much is written:

        "complement":  h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t
        "root":        h_t = e^{g_t} h_{t-1} + sqrt(1 - e^{2 g_t}) x_t
        "logit":       h_t = sigmoid(-l_t) h_{t-1} + sigmoid(l_t) x_t,  with logits l in the place of g

    Computed in float32 (float64, complex) whatever comes in, autocast or not.

    Args:
        x: `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16, float64, complex64 or complex128.
        log_decay: `g`, natural logarithm, not cumulative, at most 0 (-inf forgets all): of the shape of `x`, `[B, T, H]`, or the same
            for all tokens, `[D]`, `[H, D]` or `[H]`; any floating dtype, with complex `x` also complex with a real part of at most 0.
        initial_state: `h_0` `[N, D]` or `[N, H, D]`, float32 (float64 for float64, and of complex `x` its own dtype); default zeros.
            `N` is `B`, or the number of packed sequences.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of sequences packed end to end (needs `B == 1`), or a `Packing`.
        read_before: the output is `h_{t-1}`, what the token finds.
        coupling: None or one of the three; real `x` only. With "logit" `log_decay` holds logits of any sign. In the gradient of "root"
            the derivative of the square root is at most 1000.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        `h`, of the shape and dtype of `x`, and the final state like `initial_state`, or None.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices do not fit, a decay is above 0 (where contents are checked), `cu_seqlens` does not fit, `coupling` is
            none of these, `impl` cannot run this.

    Source: Blelloch 1990, "Prefix sums and their applications", section 1.4; Martin and Cundy (arXiv 1709.04057), section 2. Couplings:
        Qin et al. 2023 (arXiv 2311.04823), section 3.2; De et al. 2024 (arXiv 2402.19427), equation 4; Feng et al. 2024
        (arXiv 2410.01201), section 3.1.

    Example:
        >>> import torch
        >>> h, state = scan(torch.ones(1, 4, 1), torch.tensor([0.5]).log(), return_state=True)
        >>> h.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75, 1.875], [[1.875]])
    """
    check_scanned(x, log_decay, coupling)
    packing = check_start(x, initial_state, cu_seqlens)
    check_decays(log_decay, coupling)
    call = ScanCall(x, log_decay, initial_state, packing, read_before, coupling=coupling)
    h, state = SCAN(call, impl, "scan")
    return h, state if return_state else None


@public
def scan_max(
    x: Tensor,
    log_decay: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    read_before: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The running maximum with a decay, without a gradient: it keeps exponentials small and cancels from what they give.

        m_t = max(m_{t-1} + g_t, x_t)

    Args:
        log_decay: `g` as in `scan`; default no decay.
        initial_state: `m_0`; default -inf.
        x, return_state, cu_seqlens, read_before, impl: as in `scan`; `x` is real.

    Returns:
        `m`, of the shape and dtype of `x`, and the last `m` `[N, D]` or `[N, H, D]`, or None.

    Raises:
        TypeError, ValueError: as `scan`.
        RuntimeError: a gradient is wanted.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3; with a decay: Beck et al. 2024 (arXiv 2405.04517), equation 15.

    Example:
        >>> import torch
        >>> scan_max(torch.tensor([[[0.0], [2.0], [1.0]]]))[0].flatten().tolist()
        [0.0, 2.0, 2.0]
    """
    check_tensor("x", x)
    decay = torch.zeros(x.shape[2:], dtype=torch.float32, device=x.device) if log_decay is None else log_decay
    check_scanned(x, decay)
    check_floating("x", x)
    packing = check_start(x, initial_state, cu_seqlens)
    check_decays(decay)
    if initial_state is None:
        shape = x.shape[0] if packing is None else packing.count, *x.shape[2:]
        initial_state = torch.full(shape, -torch.inf, dtype=scan_dtype(x.dtype), device=x.device)
    call = ScanCall(x, decay, initial_state, packing, read_before, maximum=True)
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
        raise RuntimeError("scan_max has no gradient, it is to cancel: call it under torch.no_grad(), or on x.detach()")
    m, state = SCAN(call, impl, "scan_max")
    return m, state if return_state else None


def finite(x: Tensor) -> Tensor:
    """`x` with the lowest number for -inf, for a running maximum that is subtracted in an exponent."""
    return x.clamp(min=torch.finfo(x.dtype).min)
