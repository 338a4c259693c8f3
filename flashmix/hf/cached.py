"""One mixer's part of a transformers cache: the inputs of its convolution and its recurrent state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.hf.rows import BatchRows
from flashmix.op.dtypes import state_dtype


class Cached:
    """The states of layer `index` of a transformers `Cache`, or nothing where there is no cache.

    Args:
        cache: the `Cache`, or None.
        index: the layer.
        width: the W tokens that the convolution sees.
        place: which of the layer's convolutions it is.
    """

    def __init__(self, cache: Any, index: int, width: int, place: int = 0) -> None:
        self.cache, self.index, self.width, self.place = cache, index, width, place
        self.continues = cache is not None and bool(cache.has_previous_state(index, place))
        self.layer: Any = cache.layers[index] if self.continues else None

    @property
    def exists(self) -> bool:
        return self.cache is not None

    @property
    def inputs(self) -> Tensor:
        """The inputs of the convolution before this call, `[B, C, W]` or more, newest last."""
        states: Tensor = self.layer.conv_states[self.place]
        return states

    @property
    def state(self) -> Tensor:
        """The recurrent state before this call."""
        state: Tensor = self.layer.recurrent_states[0]
        return state

    def steps_in_place(self, x: Tensor, *also: Tensor) -> bool:
        """Whether one token `x` `[B, 1, D]` may overwrite the states: nothing is recorded, and no gradient is wanted."""
        if not self.continues or x.shape[1] != 1 or self.layer.record_past or self.inputs.dtype != x.dtype:
            return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *also)))

    def recent(self, rows: BatchRows) -> Tensor | None:
        """The W - 1 inputs before each sequence, `[N, W - 1, C]`, oldest first, or None."""
        if not self.continues or self.width == 1:
            return None
        return rows.initial(self.inputs[:, :, -(self.width - 1) :].mT.clone())

    def initial(self, rows: BatchRows, dtype: torch.dtype, *, transposed: bool = False) -> Tensor | None:
        """The state before each sequence, as inputs of `dtype` want it, or None; `transposed` swaps its last two axes.

        It is a copy where a gradient may be wanted: the cache is overwritten before the backward.
        """
        if not self.continues:
            return None
        state = self.state.mT if transposed else self.state
        return rows.initial(state.to(state_dtype(dtype), copy=torch.is_grad_enabled()))

    def keep_inputs(self, x: Tensor) -> None:
        """Adds the new inputs of the convolution, `[B, T, C]`."""
        if self.exists:
            self.cache.update_conv_state(x.mT, self.index, state_idx=self.place, conv_kernel_size=self.width)

    def keep_state(self, state: Tensor | None) -> None:
        """Replaces the recurrent state by the one after this call, `[B, ...]`."""
        if self.exists:
            self.cache.update_recurrent_state(state, self.index)
