"""Multi-head latent attention: keys and values of all heads are made from one short vector per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.layer.cache import AttentionCache
from flashmix.layer.cached_attention import CachedAttention
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.op.checks import check_range
from flashmix.op.packing import Packing


class LatentAttention(CachedAttention):
    """Causal softmax attention whose keys and values come from one vector of `rank` channels per token, without positions.

    A key is `head_dim` channels of its own head and `shared_dim` channels that all heads share. The cache holds keys and values.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        rank: channels of the vector that keys and values come from.
        query_rank: channels of the vector that queries come from; None: they come from the input.
        head_dim: channels of a key that its head has for itself; default `width / heads`.
        shared_dim: channels of a key that all heads share.
        value_dim: channels of a value; default `head_dim`.
        eps: of the norms of both vectors.

    Source: DeepSeek-AI, arXiv:2405.04434, section 2.1; without positions: Kimi Linear, arXiv:2510.26692, section 4.

    Example:
        >>> import torch
        >>> LatentAttention(32, heads=4, rank=16, shared_dim=4)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rank: int,
        query_rank: int | None = None,
        head_dim: int | None = None,
        shared_dim: int = 64,
        value_dim: int | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, self.head_dim if value_dim is None else value_dim, "value_dim")
        check_range("rank", rank, 1, 2**16)
        check_range("shared_dim", shared_dim, 1, 256 - self.head_dim)
        self.shared_dim = shared_dim
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        queries: dict[str, Any] = {"q": (heads, self.head_dim + shared_dim)}
        self.query_down: nn.Linear | None = None
        self.query_norm: RMSNorm | None = None
        if query_rank is not None:
            self.query_down = nn.Linear(width, query_rank, bias=False, **placement)
            self.query_norm = RMSNorm(query_rank, eps, **placement)
        self.query = HeadProjection(width if query_rank is None else query_rank, **queries, **placement)
        self.down = HeadProjection(width, latent=(rank,), shared=(1, shared_dim), **placement)
        self.norm = RMSNorm(rank, eps, **placement)
        self.up = HeadProjection(rank, kv=(heads, self.head_dim + self.value_dim), **placement)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: AttentionCache | None) -> Tensor:
        queries = x
        if self.query_down is not None and self.query_norm is not None:
            queries = self.query_norm(self.query_down(x))
        (q,) = self.query(queries)
        latent, shared = self.down(x)
        (kv,) = self.up(self.norm(latent))
        k, v = kv.split([self.head_dim, self.value_dim], dim=-1)
        k = torch.cat([k, shared.expand(-1, -1, self.heads, -1)], dim=-1)
        return self.output(self.attend(q, k, v, packing, cache).flatten(2))


register(
    Mechanism(title="Multi-head latent attention", paper="2405.04434", layer=LatentAttention, mixer="latent_attention")
)
