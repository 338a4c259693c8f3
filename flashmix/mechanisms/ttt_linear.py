"""TTT-Linear: a linear model that is trained on the sequence, a gradient step per mini-batch of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.mechanisms.common import check_per_head, check_states
from flashmix.mechanisms.momentum import IMPLEMENTATIONS
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.checks import check_range, check_shape
from flashmix.op.choose import choose
from flashmix.op.dtypes import state_dtype, without_autocast
from flashmix.op.packing import Packing, check_whole
from flashmix.op.public import public
from flashmix.ops.recurrence.call import check_operands

TTTStates = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@public
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    token_scales: Tensor | None = None,
    mini_batch: int = 16,
    eps: float = 1e-6,
    initial_state: TTTStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, TTTStates | None]:
    """TTT-Linear: a linear model with a layer norm that learns, as it reads, to make of each key its value.

        Z_s = k_s W + b;  U_s = gradient at Z_s of |LN(Z_s) - (v_s - k_s)|^2 / 2,  with W and b of the mini-batch's start
        W_t = W - tau_i sum_{s <= t} beta_s k_s U_s^T;  b_t alike with 1 for k;  o_t = q_t + LN(q_t W_t + b_t)

    `i` is the token's place in its mini-batch, sums are over the mini-batch's tokens, and the next one starts from its last W and b.
    `LN` normalises the channels of a head, times `norm_weight` plus `norm_bias`. Plain PyTorch on any device.

    Args:
        q, k, v: `[B, T, H, D]`, of one shape.
        beta: learning rates `[B, T, H]`, any floating dtype; the paper's are a sigmoid over `D`.
        norm_weight, norm_bias: `[H, D]`.
        token_scales: `tau`, `[mini_batch]`; default `1 / (i + 1)`.
        mini_batch: tokens per gradient step.
        eps: of the layer norm.
        initial_state: W, b, the sums of the mini-batch that is not full, and how many tokens there were: `([N, H, D, D], [N, H, D],
            [N, H, D, D], [N, H, D], [N, 1])`, float32 (float64 for float64 inputs). A sequence begins with the learned W and b.
        cu_seqlens: as everywhere; its lengths must be on the host.

    Source: Sun et al. 2024 (arXiv 2407.04620), sections 2.3, 2.4 and 2.7.

    Example:
        >>> q, k, v = torch.randn(3, 1, 40, 4, 16)
        >>> ttt_linear(q, k, v, torch.rand(1, 40, 4) / 16, torch.ones(4, 16), torch.zeros(4, 16))[0].shape
        torch.Size([1, 40, 4, 16])
    """
    check_whole(cu_seqlens, "ttt_linear")
    check_range("mini_batch", mini_batch, 1, 4096)
    packing = check_operands(q, v, {"k": k}, beta, None, None, cu_seqlens)
    check_shape("v", v, *q.shape)
    (B, T, H, D), wide = q.shape, state_dtype(q.dtype)
    for name, weight in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        check_per_head(name, weight, "q", q, H, D)
    if token_scales is not None:
        check_per_head("token_scales", token_scales, "q", q, mini_batch)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, H, D, D), (N, H, D), (N, H, D, D), (N, H, D), (N, 1))
    choose("ttt_linear", IMPLEMENTATIONS, q, impl)
    places = (
        1 / torch.arange(1, mini_batch + 1, device=q.device, dtype=wide)
        if token_scales is None
        else token_scales.to(wide)
    )
    if initial_state is None:
        W = sums = q.new_zeros(N, H, D + 1, D, dtype=wide)
        count = q.new_zeros(N, 1, dtype=wide)
    else:
        W, sums = (torch.cat([w, b.unsqueeze(2)], 2) for w, b in (initial_state[:2], initial_state[2:4]))
        count = initial_state[4]
    with without_autocast(q):
        row, place, longest = _rows(count.long() % mini_batch, T, packing, initial_state is not None, mini_batch)
        tiles = [_tiled(x.to(wide), row, place, N, longest, mini_batch) for x in (q, k, v, beta)]
        ends = count.long() % mini_batch + (T if packing is None else packing.lengths[:, None])
        norm = norm_weight.to(wide).unsqueeze(1), norm_bias.to(wide).unsqueeze(1), eps
        o, W, sums = _mini_batches(tiles, W, sums, ends, places, norm)
        o = o[row, place].view(q.shape)
    if not return_state:
        return o.to(v.dtype), None
    lengths = T if packing is None else packing.lengths[:, None]
    W, b, sums, b_sums = (t.clone() for part in (W, sums) for t in (part[:, :, :D], part[:, :, D]))
    return o.to(v.dtype), (W, b, sums, b_sums, count + lengths)


def _rows(before: Tensor, T: int, packing: Packing | None, begun: bool, mini_batch: int) -> tuple[Tensor, Tensor, int]:
    """The row and place of each token where sequence n begins at `before[n]`, and the length of such rows, in mini-batches."""
    if packing is None:
        row = torch.arange(before.shape[0], device=before.device).unsqueeze(1).expand(-1, T)
        place, longest = before + torch.arange(T, device=before.device), T
    else:
        row, bounds = packing.sequence, packing.on_host()
        place = before[row, 0] + packing.positions
        longest = max([0, *[bounds[n + 1] - bounds[n] for n in range(len(bounds) - 1)]])
    tokens = longest + (mini_batch - 1 if begun else 0)
    return row.flatten(), place.flatten(), -(-tokens // mini_batch)


def _tiled(x: Tensor, row: Tensor, place: Tensor, N: int, count: int, mini_batch: int) -> Tensor:
    """`[B, T, H, ...]` in mini-batches `[count, N, H, mini_batch, ...]`; 0 where there is no token."""
    tiles = x.new_zeros(N, count * mini_batch, *x.shape[2:]).index_put((row, place), x.flatten(0, 1))
    return tiles.unflatten(1, (count, mini_batch)).movedim(1, 0).transpose(2, 3)


def _mini_batches(
    tiles: list[Tensor], W: Tensor, sums: Tensor, ends: Tensor, places: Tensor, norm: tuple[Tensor, Tensor, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[N, tokens, H, D]`, the last weights and the sums of the mini-batch that is not full; b is the last row of W."""
    C, o = len(places), []
    ones = torch.ones_like(tiles[1][..., :1])
    queries, keys = (torch.cat([x, ones], -1) for x in tiles[:2])
    for n, (query, key, value, rate) in enumerate(zip(queries, keys, tiles[2], tiles[3], strict=True)):
        U = rate.unsqueeze(-1) * _gradient(key @ W, value - key[..., :-1], norm)
        step = query @ sums + torch.tril(query @ key.mT) @ U
        Z = query @ W - places.unsqueeze(-1) * step
        o.append(query[..., :-1] + _normalised(Z, norm[2])[0] * norm[0] + norm[1])
        sums = sums + key.mT @ U
        full = (ends >= (n + 1) * C)[:, :, None, None]
        W, sums = torch.where(full, W - places[-1] * sums, W), sums.masked_fill(full, 0.0)
    if not o:
        return tiles[0].new_zeros(W.shape[0], 0, *W.shape[1:2], W.shape[3]), W, sums
    return torch.cat(o, 2).transpose(1, 2), W, sums


def _normalised(Z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(Z - mean) / std` over the channels, and `1 / std`."""
    centred = Z - Z.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * scale, scale


def _gradient(Z: Tensor, target: Tensor, norm: tuple[Tensor, Tensor, float]) -> Tensor:
    """The gradient at Z of `|LN(Z) - target|^2 / 2`."""
    x, scale = _normalised(Z, norm[2])
    g = (x * norm[0] + norm[1] - target) * norm[0]
    return (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True)) * scale


register(
    Mechanism(
        title="TTT-Linear",
        paper="2407.04620",
        function=ttt_linear,
        call="q:BTHK k:BTHK v:BTHK beta:BTH norm_weight:HK norm_bias:HK",
        options={"mini_batch": 4},
        positive=("norm_weight",),
        wide=("norm_weight", "norm_bias"),
    )
)
