"""The meaning of softmax attention, dense and plain; in float64 the reference. Only tests, the self-test and docs import this."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    log_decay: Tensor | None = None,
    dropout: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(o [B,Tq,HQ,V], lse [B,HQ,Tq])` of q `[B,Tq,HQ,K]`, k `[B,Tk,H,K]`, v `[B,Tk,H,V]`.

    `dropout` `[B,HQ,Tq,Tk]` holds what each probability is multiplied with: 0 or `1 / (1 - dropout_p)`. With `key_starts` or
    `key_lengths` `[B]` each sequence is its own call, with the keys from the one to the other.
    """
    if key_starts is not None or key_lengths is not None:
        options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
        options |= {"sink": sink, "alibi_slopes": alibi_slopes}
        return _by_sequence(q, k, v, log_decay, dropout, key_starts, key_lengths, options)
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]  # the newest query sees all keys
    j = torch.arange(k.shape[1], device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * (i - j).abs()
    if log_decay is not None and k.shape[1] > 0:
        g = log_decay.cumsum(1).transpose(1, 2)
        s = s + g[:, :, i.clamp(min=0)[:, 0], None] - g[:, :, None, :]

    left, right = window if window is not None else (None, None)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    visible = visible & (i - j >= 0) if causal else visible
    visible = visible & (i - j <= left) if left is not None else visible
    visible = visible & (j - i <= right) if right is not None else visible
    empty = ~visible.any(1)

    if sink is None:  # rows that see nothing are set below; unmasked here, they stay finite
        s = s.masked_fill(~(visible | empty[:, None]), -torch.inf)
    else:
        s = s.masked_fill(~visible, -torch.inf)
        s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1).to(s.dtype)], -1)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    p = torch.softmax(s, -1)[..., : k.shape[1]]
    p = p if dropout is None else p * dropout
    o = torch.einsum("bhij,bjhd->bihd", p, v)
    if sink is None:
        lse = lse.masked_fill(empty, -torch.inf)
        o = o.masked_fill(empty[:, None, None], 0)
    return o, lse


def _by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    dropout: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Each sequence with the keys from its start to its length."""
    batch, total, found = q.shape[0], k.shape[1], []
    for b in range(batch):
        end = total if lengths is None else min(max(int(lengths[b]), 0), total)
        keys = slice(0 if starts is None else min(max(int(starts[b]), 0), end), end)
        one, count = slice(b, b + 1), end - keys.start
        own: dict[str, Any] = {"log_decay": None if log_decay is None else log_decay[one, keys]}
        if (slopes := options["alibi_slopes"]) is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[one]
        own |= {"dropout": None if dropout is None else dropout[one, :, :, :count]}
        found.append(softmax_attention(q[one], k[one, keys], v[one, keys], **options | own))
    if not found:
        return softmax_attention(q, k, v, log_decay=log_decay, dropout=dropout, **options)
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])
