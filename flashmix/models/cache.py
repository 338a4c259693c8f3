"""The memory of a model between calls: the caches of its layers, snapshots, and rolling back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.layer.cache import LayerCache
from flashmix.op.checks import check_range


class ModelCache:
    """The decode state of a model, made by `Decoder.new_cache` and updated by every call that takes it.

    Args:
        layers: the cache of each layer, then that of each MLP that looks at the token before.
        history: how many of the last tokens `Decoder.roll_back` can take back; each call since then keeps a snapshot.
    """

    def __init__(self, layers: list[LayerCache], history: int = 0) -> None:
        check_range("history", history, 0, 2**31)
        self.layers = layers
        self.history = history
        self._calls: list[tuple[Tensor, list[Any]]] = []  # tokens [B, T] of the last calls, snapshots before them

    @property
    def sequences(self) -> int | None:
        """How many sequences it holds; None before the first call."""
        return self.layers[0].sequences if self.layers else None

    def snapshot(self) -> list[Any]:
        """The present state for `restore`; later calls do not change it."""
        return [layer.snapshot() for layer in self.layers]

    def restore(self, snapshot: list[Any]) -> None:
        """Restores a snapshot, which may be restored again; the tokens after it can no longer be rolled back."""
        for layer, state in zip(self.layers, snapshot, strict=True):
            layer.restore(state)
        self._calls.clear()

    def reorder(self, index: Tensor) -> None:
        """Sequence `i` becomes what `index[i]` was (int64; repeats and another count are fine, as beams need)."""
        for layer in self.layers:
            layer.reorder(index)
        self._calls.clear()

    def record(self, tokens: Tensor, rolls_back: bool) -> None:
        """Records a call before it runs; a packed or padded one ends the history."""
        if not self.history:
            return
        if not rolls_back:
            self._calls.clear()
            return
        self._calls.append((tokens, self.snapshot()))
        while sum(call.shape[1] for call, _ in self._calls[1:]) >= self.history:
            del self._calls[0]

    def take_back(self, count: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Restores a snapshot at least `count` tokens ago; returns the tokens to be read again, and their mask."""
        if isinstance(count, Tensor):
            least, most = int(count.min()), int(count.max())
        else:
            least = most = count
        taken: list[Tensor] = []
        calls = list(self._calls)
        snapshot: list[Any] | None = None
        while sum(tokens.shape[1] for tokens in taken) < most and calls:
            tokens, snapshot = calls.pop()
            taken.insert(0, tokens)
        available = sum(tokens.shape[1] for tokens in taken)
        if least < 0 or most > available or snapshot is None:
            raise ValueError(f"count must be between 0 and the {available} tokens of the history, got {most}")
        self.restore(snapshot)
        self._calls = calls
        tokens = torch.cat(taken, dim=1)[:, : available - least]
        if least == most:
            return tokens, None
        kept = available - torch.as_tensor(count, device=tokens.device)
        return tokens, torch.arange(tokens.shape[1], device=tokens.device) < kept[:, None]
