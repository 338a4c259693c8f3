"""Attention to a fixed number of slots, `M` a head: two passes of `linear_attention` with a softmax between them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_like, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.ops.named._common import check_per_head, check_states, scan
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands

SlotStates = tuple[Tensor, Tensor]
NormalisedStates = tuple[Tensor, Tensor, Tensor]


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, *, scale: float | None = None,
    initial_state: SlotStates | None = None, return_state: bool = False, cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, SlotStates | None]:  # fmt: skip
    """Gated slot attention: softmax attention over slots that forget, each written to as far as it forgot.

        K~_t = K~_{t-1} diag(e^{g_t}) + k_t s_t^T;  V~_t = diag(e^{g_t}) V~_{t-1} + s_t v_t^T
        o_t  = V~_t^T softmax(scale K~_t^T q_t)

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        s: how much is written to each slot, `[B, T, HV, M]`; the paper's is `1 - e^g`.
        log_decay: `g`, at most 0, `[B, T, HV, M]`.
        initial_state: keys and values of the slots, `([N, HV, K, M], [N, HV, M, V])`, float32 (float64 for float64 inputs).

    Source: Zhang et al. 2024 (arXiv 2409.07146), section 3.

    Example:
        >>> q, k, v, s = torch.randn(4, 1, 10, 4, 16)
        >>> o, (keys, values) = gsa(q, k, v, s, -torch.rand(1, 10, 4, 16), return_state=True)
        >>> o.shape, keys.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    packing = _check(q, k, v, s, cu_seqlens)
    check_per_head("log_decay", log_decay, "q", q, *s.shape)
    check_states(initial_state, q, *_state_shapes(q, v, s, packing))
    return _two_passes(q, k, v, s, log_decay, scale, initial_state, return_state, packing, impl)


def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, scale: float | None = None, initial_state: NormalisedStates | None = None,
    return_state: bool = False, cu_seqlens: Tensor | Packing | None = None, impl: str = "auto",
) -> tuple[Tensor, NormalisedStates | None]:  # fmt: skip
    """Attention with bounded memory control: each slot holds a softmax over the past, by a learned logit `s`.

        z_t = log sum_{j <= t} e^{s_j};  K~_t = sum_{j <= t} k_j e^{s_j - z_t}^T;  V~_t = sum_{j <= t} e^{s_j - z_t} v_j^T
        o_t = V~_t^T softmax(scale K~_t^T q_t)

    It is `gsa` with `s' = e^{s_t - z_t}` and `g_t = z_{t-1} - z_t`, made here from the running normaliser `z` without overflow.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        s: logits `[B, T, HV, M]`.
        initial_state: keys and values of the slots and `z`, `([N, HV, K, M], [N, HV, M, V], [N, HV, M])`, float32 (float64 for
            float64 inputs); by default zeros, zeros and -inf.

    Source: Peng et al. 2021 (arXiv 2110.02488), section 3.

    Example:
        >>> q, k, v, s = torch.randn(4, 1, 10, 4, 16)
        >>> o, (keys, values, z) = abc(q, k, v, s, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]))
    """
    packing = _check(q, k, v, s, cu_seqlens)
    shapes = _state_shapes(q, v, s, packing)
    normaliser = (shapes[1][0], *s.shape[2:])
    check_states(initial_state, q, *shapes, normaliser)
    if initial_state is None:
        slots, start = None, torch.full(normaliser, -torch.inf, dtype=state_dtype(q.dtype), device=q.device)
    else:
        *pair, start = initial_state
        slots = (pair[0], pair[1])
    before, z = _running_normaliser(s.to(start.dtype), start, packing, impl)
    # s_t - z_t = -softplus(-ahead) and z_{t-1} - z_t = -softplus(ahead); the first token is infinitely ahead
    ahead = s.to(start.dtype) - before
    weight = torch.exp(-_softplus(-ahead)).to(q.dtype)
    o, states = _two_passes(q, k, v, weight, -_softplus(ahead), scale, slots, return_state, packing, impl)
    return o, None if states is None else (*states, z)


def _check(q: Tensor, k: Tensor, v: Tensor, s: Tensor, cu_seqlens: Tensor | Packing | None) -> Packing | None:
    """Raises unless the tokens fit one another; returns the packing."""
    check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    check_per_head("s", s, "q", q, *v.shape[:3], dims("s", s, "B T HV M")[3])
    check_like("s", s, "q", q)
    if s.shape[3] < 1:
        raise ValueError("s must have shape [B, T, HV, M] with M >= 1, got M = 0")
    return as_packing(cu_seqlens, q.shape[0], q.shape[1], q.device)


def _state_shapes(q: Tensor, v: Tensor, s: Tensor, packing: Packing | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    N, (HV, M) = q.shape[0] if packing is None else packing.count, s.shape[2:]
    return (N, HV, q.shape[3], M), (N, HV, M, v.shape[3])


def _two_passes(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, scale: float | None, states: SlotStates | None,
    return_state: bool, packing: Packing | None, impl: str,
) -> tuple[Tensor, SlotStates | None]:  # fmt: skip
    keys, values = (None, None) if states is None else states
    scores, keys = linear_attention(
        q, k, s, value_log_decay=log_decay, scale=scale, initial_state=keys, return_state=return_state, cu_seqlens=packing, impl=impl
    )  # fmt: skip
    p = torch.softmax(scores.to(state_dtype(v.dtype)), -1).to(v.dtype)
    o, values = linear_attention(
        p, s, v, log_decay, scale=1.0, initial_state=values, return_state=return_state, cu_seqlens=packing, impl=impl
    )
    return o, None if keys is None or values is None else (keys, values)


def _running_normaliser(s: Tensor, start: Tensor, packing: Packing | None, impl: str) -> tuple[Tensor, Tensor]:
    """`z_{t-1}` for each token `[B, T, HV, M]` and the last `z` `[N, HV, M]`, from logits and the first `z`.

    As in online softmax `z = m + log c` with the running maximum `m`, which takes no part in gradients, and
    `c_t = e^{m_{t-1} - m_t} c_{t-1} + e^{s_t - m_t}`, a scan.
    """
    before, m, last = _running_maximum(s.detach(), start.detach(), packing)
    decay = torch.where(before == m, 0.0, before - m)
    first = torch.exp(start - _finite(start.detach()))
    c_before, c = scan(
        torch.exp(s - _finite(m)), decay, initial_state=first, cu_seqlens=packing, read_before=True, impl=impl
    )
    return before + _log(c_before), last + _log(c)


def _running_maximum(s: Tensor, start: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of `start` and all `s` before each token, the same with its own, and after the last token `[N, HV, M]`.

    Packed sequences by doubling spans. A maximum rounds nothing: both ways give the same bits.
    """
    if packing is None:
        m = torch.cat([start.unsqueeze(1), s], 1).cummax(1).values
        return m[:, :-1], m[:, 1:], m[:, -1]
    row, place, N = s[0], packing.positions[:, None, None], start.shape[0]
    sequence = packing.sequence.clamp(max=max(N - 1, 0))
    m = row if N == 0 else torch.where(place == 0, torch.maximum(row, start[sequence]), row)
    span = 1
    while span < m.shape[0]:
        m = torch.cat([m[:span], torch.where(place[span:] >= span, torch.maximum(m[span:], m[:-span]), m[span:])])
        span *= 2
    if N == 0:
        return m[None], m[None], start
    padded = torch.cat([m[:1], m]) if len(m) else start[:1]  # the row of token t - 1
    before = torch.where(place == 0, start[sequence], padded[: len(m)])
    ends = packing.cu_seqlens[1:].to(torch.int64).clamp(max=max(len(padded) - 1, 0))
    last = torch.where((packing.lengths == 0)[:, None, None], start, padded[ends])
    return before[None], m[None], last


def _softplus(x: Tensor) -> Tensor:
    """`log(1 + e^x)`, of functions that torch evaluates alike wherever a number lies in memory (its softplus and sigmoid do not)."""
    return torch.maximum(x, torch.zeros_like(x)) + torch.log1p(torch.exp(-x.abs()))


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, for what is subtracted in an exponent."""
    return x.masked_fill(x == -torch.inf, 0.0)


def _log(c: Tensor) -> Tensor:
    """`log c`, and 0 where nothing has been summed yet (the maximum there is -inf and says it all)."""
    return torch.where(c == 0, torch.ones_like(c), c).log()
