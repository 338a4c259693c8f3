"""The rotary embedding with the arguments that fla and flash_attn share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.compat.surface import refuse
from flashmix.op.packing import as_packing
from flashmix.ops.rotary.op import rotary, rotary_table


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`flashmix.rotary` of `[B, T, H, D]`, whose sequence `n` starts at position `seqlen_offsets[n]`."""
    inplace = inplace and not (torch.is_grad_enabled() and x.requires_grad)
    options: dict[str, Any] = {"interleaved": interleaved, "inplace": inplace}
    if isinstance(seqlen_offsets, Tensor):
        packing = as_packing(cu_seqlens, x.shape[0], x.shape[1], x.device)
        if packing is None:
            positions = seqlen_offsets[:, None] + torch.arange(x.shape[1], device=x.device)
        else:
            positions = (seqlen_offsets[packing.sequence] + packing.positions)[None]
        return rotary(x, cos, sin, positions=positions, **options)
    return rotary(x, cos, sin, positions=seqlen_offsets or None, cu_seqlens=cu_seqlens, **options)


class RotaryTable(nn.Module):
    """The base of the rotary modules: cosines and sines of the inputs' dtype, which grow with the positions asked for.

    Args:
        dim: channels that are rotated, even.
        base: the longest wavelength is about `2 pi base` tokens.
        interleaved: the pairs are neighbours.
        scale_base: only None (xPos is not there).
    """

    def __init__(self, dim: int, base: float, interleaved: bool, scale_base: float | None) -> None:
        super().__init__()
        refuse("RotaryEmbedding", "scale_base (xPos)", scale_base is None)
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, x: Tensor, offset: int | Tensor, max_seqlen: int | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the positions of `x` `[B, T, ...]`."""
        if max_seqlen is None:
            if isinstance(offset, Tensor):
                raise ValueError("max_seqlen must be given with a tensor of offsets, got None")
            max_seqlen = x.shape[1] + offset
        key = (x.device, x.dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < max_seqlen:
            with torch.inference_mode(False), torch.no_grad():
                self._tables[key] = rotary_table(max_seqlen, self.dim, self.base, device=x.device, dtype=x.dtype)
        return self._tables[key]
