"""Log-linear attention: a state for each power of two of the past, each read with its own weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from typing_extensions import Unpack

from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import check_per_head, check_states, unrounded
from flashmix.mechanisms.mamba2 import Mamba2, two_by_width
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.modules.projection import HeadProjection
from flashmix.op.checks import check_range, contents_are_checked, dims
from flashmix.op.dtypes import at_least_float32, state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.options import hands_on
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule, linear_attention
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.token_shift import shifted
from flashmix.parallel.joined import of_sequences

LevelStates = tuple[Tensor, Tensor]


class LevelOptions(TypedDict, total=False):
    """The options of both functions."""

    scale: float
    initial_state: LevelStates | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


def _by_levels(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    level_scales: Tensor,
    *,
    scale: float = 1.0,
    initial_state: LevelStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, LevelStates | None]:
    """Both functions: `rule` with levels as heads; `gates` are the log decay and, of a delta rule, `beta` before it.

    The head of level l holds the left half of the block of `2^l` tokens that a token is in: it writes there (bit l - 1 of the position
    is 0), is read in the right half, and forgets all where a block begins.
    """
    *beta, log_decay = gates
    packing = check_operands(q, v, {"k": k}, beta[0] if beta else None, None, None, cu_seqlens)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    check_per_head("log_decay", log_decay, "q", q, B, T, HV)
    L = dims("level_scales", level_scales, "B T HV L")[3]
    check_per_head("level_scales", level_scales, "q", q, B, T, HV, L)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, L, K, V), (N, 1))
    _check_levels(L, T, packing, initial_state)
    wide = state_dtype(q.dtype)
    before = _tokens_before(q, N, packing, initial_state)
    place = (
        before + torch.arange(T, device=q.device)
        if packing is None
        else (before[packing.sequence.clamp(max=max(N - 1, 0))] + packing.positions[:, None]).T
    )
    level = torch.arange(1, L, device=q.device)
    right, begins = _in_right_half(place, level), (place.unsqueeze(-1) % (1 << level)) == 0
    by_level = [t.unsqueeze(3).expand(*t.shape[:3], L - 1, *t.shape[3:]) for t in (v, *gates)]
    by_level[0] = by_level[0].masked_fill(right[:, :, None, :, None], 0.0)
    by_level[-1] = by_level[-1].masked_fill(begins[:, :, None], -torch.inf)
    heads = None if initial_state is None else _heads_of_levels(initial_state[0], before, level)
    options: dict[str, Any] = {"return_state": return_state, "cu_seqlens": packing, "impl": impl, "scale": scale}
    o, heads = rule(q, k, *[t.flatten(2, 3) for t in by_level], initial_state=heads, **options)
    weights = level_scales.to(wide)
    far = weights[..., 1:].masked_fill(~right[:, :, None], 0.0)
    written = v.to(wide) if not beta else beta[0].to(wide).unsqueeze(-1) * v.to(wide)
    near = (q.to(wide) * k.to(wide)).contiguous().sum(-1, keepdim=True) * scale
    o = (far.unsqueeze(-1) * o.unflatten(2, (HV, L - 1))).contiguous().sum(3) + weights[..., :1] * repeat_heads(
        near, HV
    ) * written
    o = o.to(v.dtype)
    if packing is not None:
        o = o.masked_fill((packing.sequence == N)[:, None, None], 0.0)  # tokens past the last sequence
    if heads is None:
        return o, None
    last_k, last_v = shifted(k.to(wide), None, packing)[1], shifted(written, None, packing)[1]
    newest = last_k.repeat_interleave(HV // k.shape[2], 1).unsqueeze(-1) * last_v.unsqueeze(-2)
    lengths = torch.full_like(before, T) if packing is None else packing.elapsed[:, None].to(before.dtype)
    full = _in_right_half(before + lengths - 1, level)[:, :, None, :, None]  # [N, 1, 1, L - 1, 1]
    heads = heads.unflatten(1, (HV, L - 1)) * full.transpose(1, 2).transpose(2, 3)
    levels = torch.cat([newest.unsqueeze(2), heads], 2)
    if initial_state is not None:
        levels = torch.where(lengths[:, :, None, None, None] > 0, levels, initial_state[0])
    count = before if initial_state is None or (packing is not None and packing.sharded) else initial_state[1]
    return o, (levels, count.to(wide) + lengths)


def _tokens_before(q: Tensor, N: int, packing: Packing | None, state: LevelStates | None) -> Tensor:
    """How many tokens the states that come in hold, `[N, 1]`; over a shard those of a sequence for each of its pieces."""
    if state is None:
        return torch.zeros(N, 1, dtype=torch.int64, device=q.device)
    before = state[1].long()
    return of_sequences(packing, before) if packing is not None and packing.sharded else before


def _check_levels(L: int, T: int, packing: Packing | None, state: LevelStates | None) -> None:
    """Raises unless the levels reach the first token of each sequence, as far as the host knows."""
    if L < 2:
        raise ValueError(f"level_scales must have shape [B, T, HV, L] with L >= 2, got L = {L}")
    longest = T if packing is None else 0
    if packing is not None and packing.count and contents_are_checked(packing.cu_seqlens):
        longest = int(packing.elapsed.max())
    if state is not None and state[1].numel() and contents_are_checked(state[1]):
        longest += int(state[1].max())
    if longest > 1 << (L - 1):
        raise ValueError(f"level_scales must have shape [B, T, HV, L] with 2^(L - 1) >= {longest} tokens, got L = {L}")


def _in_right_half(place: Tensor, level: Tensor) -> Tensor:
    """Whether a position is in the right half of its block of `2^level` tokens, `[..., L - 1]`."""
    return ((place.unsqueeze(-1) >> (level - 1)) & 1) == 1


def _heads_of_levels(levels: Tensor, before: Tensor, level: Tensor) -> Tensor:
    """The heads' states `[N, HV (L - 1), K, V]` from those of the levels `[N, HV, L, K, V]` after `before` tokens.

    A token in the right half has its left half in one level; for one in the left half it is all lower levels. Levels that hold nothing
    after so many tokens are not read.
    """
    full = (_in_right_half(before[:, 0] - 1, level) & (before > 0))[:, None, :, None, None]  # [N, 1, L - 1, 1, 1]
    newest, far = levels[:, :, :1] * (before > 0)[:, :, None, None, None], levels[:, :, 1:]
    lower = torch.cat([newest, far.masked_fill(~full, 0.0)], 2).cumsum(2)[:, :, :-1]
    return torch.where(full, far, lower).flatten(1, 2)


@public
@hands_on(_by_levels)
@unrounded("q", "k", "v")
def log_linear(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, level_scales: Tensor, **options: Unpack[LevelOptions]
) -> tuple[Tensor, LevelStates | None]:
    """Log-linear attention: simple GLA (Mamba-2) that weighs the past by its distance, in `log2 T` levels.

        o_t = scale sum_{j <= t} lambda_t^{(l)} e^{g_{j+1} + ... + g_t} (q_t . k_j) v_j,    l = bit_length(t xor j)

    Level 0 is the token itself, level l the left half of the block of `2^l` tokens in whose right half `t` is. It costs `L - 1` times
    `simple_gla`.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        log_decay: `g`, at most 0, `[B, T, HV]`.
        level_scales: `lambda`, `[B, T, HV, L]`, for sequences of at most `2^(L - 1)` tokens, any floating dtype. Where only a device
            knows their lengths longer ones are not refused: tokens beyond the last level are not seen.
        scale: factor of the output, 1 by default.
        initial_state: the levels and how many tokens they hold, `([N, HV, L, K, V], [N, 1])`, float32 (float64 for float64 inputs).

    Source: Guo et al. 2025 (arXiv 2506.04761), section 3.2, equation 6.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> o, (levels, tokens) = log_linear(q, k, v, -torch.rand(1, 10, 4), torch.rand(1, 10, 4, 5), return_state=True)
        >>> o.shape, levels.shape, tokens
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 5, 16, 16]), tensor([[10.]]))
    """
    return _by_levels(linear_attention, q, k, v, (log_decay,), level_scales, **options)


@public
@hands_on(_by_levels)
@unrounded("q", "k", "v")
def log_linear_gated_deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    level_scales: Tensor,
    **options: Unpack[LevelOptions],
) -> tuple[Tensor, LevelStates | None]:
    """Log-linear Gated DeltaNet: `log_linear` with the transitions and writes of `gated_deltanet`.

        o_t = scale sum_{j <= t} lambda_t^{(l)} q_t^T A_t ... A_{j+1} beta_j k_j v_j^T,    A_i = e^{g_i} (I - beta_i k_i k_i^T)

    with `l = bit_length(t xor j)`. Keys have length 1 in the paper (`flashmix.l2_norm`).

    Args:
        beta: write strengths `[B, T, HV]`; the other arguments are those of `log_linear`.

    Source: Guo et al. 2025 (arXiv 2506.04761), section 3.4.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, scales = torch.rand(1, 10, 4), torch.rand(1, 10, 4, 5)
        >>> log_linear_gated_deltanet(q, k / 4, v, beta, -torch.rand(1, 10, 4), scales)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    return _by_levels(delta_rule, q, k, v, (beta, log_decay), level_scales, **options)


class LogLinearMamba2(Mamba2):
    """The Mamba-2 block with log-linear attention: the weights of the levels are `softplus(L * W x)`, with learned `L` and `W`.

    Args: those of `Mamba2`, and
        levels: of the past; sequences have at most `2^(levels - 1)` tokens.

    Source: Guo et al., arXiv:2506.04761, section 3.3.

    Example:
        >>> LogLinearMamba2(32, heads=4, state_dim=16, levels=4)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    @hands_on(Mamba2.__init__, first=True)
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        levels: int = 15,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_range("levels", levels, 2, 63)
        super().__init__(width, heads, device=device, dtype=dtype, **options)
        self.level_projection = HeadProjection(width, levels=(heads, levels), device=device, dtype=dtype)
        self.level_weight = nn.Parameter(torch.ones(heads, levels, device=device, dtype=dtype))

    def recurrence(self, x: Tensor, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, **memory: Any) -> Tensor:
        (levels,) = self.level_projection(x)
        scales = softplus(at_least_float32(levels) * self.level_weight)
        return carried(log_linear, C, B, v, log_decay, scales, **memory)


register(
    Mechanism(
        title="Log-linear attention",
        paper="2506.04761",
        function=log_linear,
        call="q:BTHK k:BTHK v:BTHK log_decay:BTH level_scales:BTHL",
        wide=("level_scales",),
        layer=LogLinearMamba2,
        preset=two_by_width,
    )
)
register(
    Mechanism(
        title="Log-linear Gated DeltaNet",
        paper="2506.04761",
        function=log_linear_gated_deltanet,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH level_scales:BTHL",
        wide=("level_scales",),
    )
)
