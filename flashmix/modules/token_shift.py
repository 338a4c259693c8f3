"""The token before each token, across packed sequences and cached steps."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix._checks import check_shape, dims
from flashmix.ops.packing import Packing, as_packing


def token_shift(
    x: Tensor, last: Tensor | None = None, cu_seqlens: Tensor | Packing | None = None
) -> tuple[Tensor, Tensor]:
    """Each token's predecessor in its sequence: `y_t = x_{t-1}`, `y_0 = last` (0 without `last`).

    Args:
        x: `[B, T, D]`.
        last: `[N, 1, D]`, the token before the first of each sequence.
        cu_seqlens: boundaries of packed sequences (`B == 1`).

    Returns:
        `(y, last)`: `[B, T, D]`, and the last token of each sequence `[N, 1, D]` for the next call.

    Source: Peng et al., arXiv:2503.14456, equation 3.

    Example:
        >>> import torch
        >>> y, last = token_shift(torch.tensor([[[1.0], [2.0], [3.0]]]))
        >>> y.flatten().tolist(), last.flatten().tolist()
        ([0.0, 1.0, 2.0], [3.0])
    """
    B, T, D = dims("x", x, "B T D")
    packing = as_packing(cu_seqlens, B, T, x.device)
    sequences = B if packing is None else packing.count
    if last is None:
        last = x.new_zeros(sequences, 1, D)
    check_shape("last", last, sequences, 1, D)
    if T == 0:
        return x, last
    if packing is None:
        return torch.cat([last, x[:, :-1]], dim=1), x[:, -1:].clone()
    before = torch.cat([x.new_zeros(1, 1, D), x[:, :-1]], dim=1)
    first = (packing.positions == 0)[None, :, None]
    y = torch.where(first, last[packing.sequence.clamp(max=sequences - 1)].transpose(0, 1), before)
    ends = (packing.cu_seqlens[1:].to(torch.int64) - 1).clamp(min=0)
    new_last = torch.where((packing.lengths > 0)[:, None, None], x[0, ends][:, None], last)
    return y, new_last
