"""One call of attention to a cache, and who can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class AttentionCacheCall(Call):
    """New queries `q [B, T, HQ, K]` over the tokens of a `KVCache`, after `k [B, T, H, K]` and `v [B, T, H, V]` were appended to it.

    The cache: `keys [pages, page_size, H, K]`, `values`, `page_table [B, P]` and `lengths [B]`. `left`: how far a query sees back.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    keys: Written
    values: Written
    page_table: Tensor
    lengths: Written
    sink: Tensor | None
    alibi_slopes: Tensor | None
    packing: Packing | None
    scale: float
    left: int | None
    softcap: float | None
    return_lse: bool

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[2]

    @property
    def heads(self) -> int:
        return self.keys.shape[2]

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """The number of tokens that one sequence can hold."""
        return self.page_table.shape[1] * self.page_size

    @property
    def packed(self) -> bool:
        return self.packing is not None

    def results(self) -> Outputs:
        """`o [B, T, HQ, V]` and `lse [B, HQ, T]`, packed `[HQ, total]`; `[0]` where it is not wanted."""
        batch, tokens, heads_q, _ = self.q.shape
        shape = (0,) if not self.return_lse else (heads_q, tokens) if self.packed else (batch, heads_q, tokens)
        o = torch.empty(batch, tokens, heads_q, self.values.shape[3], dtype=self.dtype, device=self.device)
        return o, torch.empty(size=shape, dtype=state_dtype(self.dtype), device=self.device)
