"""The base of token-mixing layers: their call, their checks and the removal of padding."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from flashmix.layer.cache import LayerCache, RecurrentCache
from flashmix.layer.padding import Padding, padding_of
from flashmix.op.checks import check_shape, dims
from flashmix.op.packing import Packing, as_packing, check_whole
from flashmix.op.public import Public

Cache = TypeVar("Cache", bound=LayerCache)


class Mixer(Public, nn.Module, Generic[Cache]):
    """A layer that mixes tokens. A family writes `__init__` and `mix`; `output` is its last projection.

    Args:
        width: channels of the layer's input and output.

    Attributes:
        shares: None, or the option with which a layer reads the values of the model's first layer of its kind. Such a class
            returns its values from `forward(..., return_values=True)` and takes those of the first as `first_values`.
    """

    shares: str | None = None
    cache_class: type[LayerCache] = RecurrentCache
    output: nn.Linear

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def new_cache(self) -> Cache:
        """An empty cache, to be passed to `forward` and filled there."""
        return self.cache_class()  # type: ignore[return-value]

    def mix(self, x: Tensor, packing: Packing | None, cache: Cache | None) -> Tensor:
        """The layer itself, on checked inputs without padding."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Mixes the tokens of each sequence.

        Args:
            x: `[B, T, width]`.
            cu_seqlens: `[N + 1]` boundaries of packed sequences or their `Packing`; needs `B == 1`.
            attention_mask: `[B, T]`, non-zero where `x` is a token; the others are padding, wherever they are.
            cache: the memory of the tokens before `x`, updated in place. For inference only.

        Returns:
            `[B, T, width]`, zero at the padding.

        Raises:
            ValueError: `x` has another width, both `cu_seqlens` and `attention_mask` are given, the cache holds another
                number of sequences, or a cache is used while gradients are recorded (it carries none).
        """
        x, packing, padding = self.prepare(x, cu_seqlens, attention_mask, cache)
        y = self.mix(x, packing, cache)
        return y if padding is None else padding.restore(y)

    def prepare(
        self, x: Tensor, cu_seqlens: Tensor | Packing | None, attention_mask: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Packing | None, Padding | None]:
        """Checks the arguments of `forward` and removes padding: `x` as `mix` takes it, its packing, the padding."""
        B, T, _ = dims("x", x, "B T D")
        if x.shape[2] != self.width:
            check_shape("x", x, B, T, self.width)
        packing = as_packing(cu_seqlens, B, T, x.device)
        padding = padding_of(attention_mask, cu_seqlens, B, T)
        if padding is not None:
            packing = padding.packing
            x = padding.remove(x)
        if cache is not None:
            check_whole(packing, "a cache")
            self._check_cache(cache, B if packing is None else packing.count, x)
        return x, packing, padding

    def _check_cache(self, cache: Cache, sequences: int, x: Tensor) -> None:
        if not isinstance(cache, self.cache_class):
            wanted = self.cache_class.__name__
            article = "an" if wanted[0] in "AEIOU" else "a"
            raise TypeError(f"cache must be {article} {wanted}, got {type(cache).__name__}")
        if cache.sequences not in (None, sequences):
            raise ValueError(f"cache must hold {sequences} sequences like x, got {cache.sequences}")
        if torch.is_grad_enabled() and (x.requires_grad or self.output.weight.requires_grad):
            raise ValueError("cache must be used under torch.no_grad(): it carries no gradient")
