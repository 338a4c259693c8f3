"""The memory of one layer between calls: a recurrent state, or the keys and values of attention.

The cost of a token is constant: a state is replaced, keys and values are written into buffers that double when full, or
into a ring of `window` tokens. A cache carries no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flashmix.op.packing import Packing


class LayerCache(Protocol):
    """The operations of every layer's cache.

    Attributes:
        lengths: tokens seen, in layers that count them.
    """

    lengths: Lengths | None

    @property
    def sequences(self) -> int | None:
        """How many sequences it holds; None before the first call."""

    def snapshot(self) -> Any:
        """The present state for `restore`; later calls do not change it."""

    def restore(self, snapshot: Any) -> None:
        """Restores a snapshot, which may be restored again."""

    def reorder(self, index: Tensor) -> None:
        """Sequence `i` becomes what `index[i]` was (int64; repeats and another count are fine, as beams need)."""

    def reserve(self, longest: int) -> None:
        """Makes its tensors writable, with room for sequences of `longest` tokens."""


@dataclass(frozen=True)
class Lengths:
    """The number of tokens that each sequence has seen.

    Attributes:
        tokens: `[N]` int64.
        longest: the largest of them, known to the host.
        equal: whether the host knows that all are the same.
        limit: None, or what no length passes while the device alone counts: the host then does the same for every token, as a CUDA graph
            needs it.
        overwritten: whether steps write into `tokens`: a snapshot takes a copy.
    """

    tokens: Tensor
    longest: int
    equal: bool
    limit: int | None = None
    overwritten: bool = False

    @classmethod
    def zero(cls, sequences: int, device: torch.device) -> Lengths:
        return cls(torch.zeros(sequences, dtype=torch.int64, device=device), 0, True)

    def advanced(self, packing: Packing | None, tokens: int) -> Lengths:
        """The lengths after `tokens` more in each sequence, or after those of a packing, which waits for the device."""
        if self.limit is not None and packing is None:
            return replace(self, tokens=self.tokens + tokens)
        if packing is None:
            return Lengths(self.tokens + tokens, self.longest + tokens, self.equal)
        added = packing.lengths.tolist()
        longest = self.longest + max(added, default=0)
        return Lengths(self.tokens + packing.lengths, longest, self.equal and len(set(added)) <= 1)

    def positions(self, packing: Packing | None, tokens: int) -> int | Tensor:
        """Positions of the next `tokens` for the rotary embedding: of the first where all are equal, or `[B, T]`."""
        if packing is not None:
            return (self.tokens[packing.sequence] + packing.positions)[None]
        if self.known:
            return self.longest
        place = self.tokens[:, None]
        return place if tokens == 1 else place + torch.arange(tokens, device=self.tokens.device)

    @property
    def known(self) -> bool:
        """Whether the host knows the length of every sequence."""
        return self.equal and self.limit is None

    def reach(self, tokens: int) -> int:
        """What no length passes with `tokens` more."""
        return self.longest + tokens if self.limit is None else self.limit

    def reordered(self, index: Tensor) -> Lengths:
        return replace(self, tokens=self.tokens.index_select(0, index), overwritten=False)

    def kept(self) -> Lengths:
        """The same for a snapshot."""
        return replace(self, tokens=self.tokens.clone(), overwritten=False) if self.overwritten else self


@dataclass
class RecurrentCache:
    """The memory of a recurrent layer. A call of one token may write into its tensors, others replace them.

    Attributes:
        state: `[N, H, K, V]` float32, after the last token; in layers with several states a tuple of such tensors.
        recent: `[N, W - 1, D]`, the last inputs of the short convolution or token shift, in layers that have one.
        lengths: tokens seen, in layers that need positions.
    """

    state: Any = None
    recent: Tensor | None = None
    lengths: Lengths | None = None
    _shared: bool = False  # with a snapshot

    @property
    def sequences(self) -> int | None:
        states = _states(self.state)
        return states[0].shape[0] if states else None

    def snapshot(self) -> RecurrentCache:
        self._shared = True
        return replace(self, lengths=None if self.lengths is None else self.lengths.kept())

    def restore(self, snapshot: RecurrentCache) -> None:
        self.state, self.recent, self.lengths, self._shared = snapshot.state, snapshot.recent, snapshot.lengths, True

    def can_step(self, x: Tensor, packing: Packing | None) -> bool:
        """Whether `x` `[B, T, D]` is one token of each sequence, and no gradient is recorded: the states may be written."""
        return packing is None and x.shape[1] == 1 and self.state is not None and not torch.is_grad_enabled()

    def own(self) -> None:
        """Makes the tensors writable: copies them where a snapshot shares them."""
        if self._shared:
            self._replace(Tensor.clone)

    def reserve(self, longest: int) -> None:
        self.own()

    def reorder(self, index: Tensor) -> None:
        self._replace(lambda tensor: tensor.index_select(0, index))
        self.lengths = None if self.lengths is None else self.lengths.reordered(index)

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor by `change(tensor)`, which no snapshot shares."""
        changed = tuple(change(state) for state in _states(self.state))
        self.state = changed if isinstance(self.state, tuple) else next(iter(changed), None)
        self.recent = None if self.recent is None else change(self.recent)
        self._shared = False


def _states(state: Any) -> tuple[Tensor, ...]:
    """The tensors of a state: none, one or several."""
    return () if state is None else state if isinstance(state, tuple) else (state,)


@dataclass
class AttentionCache:
    """Keys and values of a softmax attention layer; token `t` of a sequence is in slot `t`, or `t % window` of a ring.

    Attributes:
        window: how many last tokens a query sees, itself included; None: all of them.
        keys, values: `[N, slots, H, D]`.
        lengths: tokens seen by each sequence.
    """

    window: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    lengths: Lengths | None = None
    _shared: bool = False  # with a snapshot

    @property
    def sequences(self) -> int | None:
        return None if self.keys is None else self.keys.shape[0]

    def snapshot(self) -> AttentionCache:
        self._shared = self._shared or self.window is not None  # a ring is overwritten; elsewhere tokens are only added
        return replace(self, lengths=None if self.lengths is None else self.lengths.kept(), _shared=True)

    def restore(self, snapshot: AttentionCache) -> None:
        self.keys, self.values, self.lengths, self._shared = snapshot.keys, snapshot.values, snapshot.lengths, True

    def reorder(self, index: Tensor) -> None:
        if self.keys is not None and self.values is not None and self.lengths is not None:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
            self.lengths, self._shared = self.lengths.reordered(index), False

    def reserve(self, longest: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._room(self.keys, self.values, self.keys.shape[0], longest)
            self._shared = False

    def append(self, k: Tensor, v: Tensor, packing: Packing | None) -> Lengths:
        """Writes the keys and values `[B, T, H, D]` of new tokens (packed: `B == 1`); returns the lengths after."""
        B, T = k.shape[:2]
        before = self.lengths or Lengths.zero(B if packing is None else packing.count, k.device)
        after = before.advanced(packing, T)
        keys, values = self._room(k, v, before.tokens.shape[0], after.longest)
        slots = keys.shape[1]
        start = before.longest % slots if T == 1 and self.window is not None else before.longest
        if packing is None and before.known and start + T <= slots:
            keys[:, start : start + T] = k
            values[:, start : start + T] = v
        elif packing is None and T == 1:
            place = torch.arange(B, device=k.device), before.tokens if self.window is None else before.tokens % slots
            keys[place], values[place] = k[:, 0], v[:, 0]
        else:
            sequence, position, token = self._places(packing, before, after, B, T)
            keys[sequence, position % slots] = k.flatten(0, 1)[token]
            values[sequence, position % slots] = v.flatten(0, 1)[token]
        self.keys, self.values, self.lengths, self._shared = keys, values, after, False
        return after

    def _room(self, k: Tensor, v: Tensor, sequences: int, longest: int) -> tuple[Tensor, Tensor]:
        """Writable buffers that hold `longest` tokens, or the window."""
        needed = longest if self.window is None else min(longest, self.window)
        if self.keys is None or self.values is None or self.keys.shape[1] < needed:
            slots = max(16, 1 << max(needed - 1, 0).bit_length())
            slots = slots if self.window is None else min(slots, self.window)
            return _grown(self.keys, k, sequences, slots), _grown(self.values, v, sequences, slots)
        if self._shared:
            return self.keys.clone(), self.values.clone()
        return self.keys, self.values

    def _places(
        self, packing: Packing | None, before: Lengths, after: Lengths, B: int, T: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence, position and index of those new tokens that the window keeps: no two of them share a slot."""
        device = before.tokens.device
        if packing is None:
            kept = T if self.window is None else min(T, self.window)
            token = torch.arange(B * T, device=device).view(B, T)[:, T - kept :].flatten()
            sequence = token // max(T, 1)
            return sequence, before.tokens[sequence] + token % max(T, 1), token
        token, sequence = torch.arange(packing.total, device=device), packing.sequence
        position = before.tokens[sequence] + packing.positions
        if self.window is not None:
            token = (position >= after.tokens[sequence] - self.window).nonzero().squeeze(1)
        return sequence[token], position[token], token

    def joined(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Packing]:
        """Past and new keys and values of each sequence in order, packed `[1, tokens, H, D]`, and their packing."""
        assert self.keys is not None and self.values is not None and self.lengths is not None
        sequences, slots = self.keys.shape[:2]
        past = self.lengths.tokens if self.window is None else self.lengths.tokens.clamp(max=self.window - 1)
        both = Packing.from_lengths(past + packing.lengths)
        sequence, place = both.sequence, both.positions
        old = sequence * slots + ((self.lengths.tokens - past)[sequence] + place) % slots
        new = sequences * slots + packing.cu_seqlens[sequence] + place - past[sequence]
        index = torch.where(place < past[sequence], old, new)
        keys = torch.cat([self.keys.flatten(0, 1), k[0]]).index_select(0, index)
        values = torch.cat([self.values.flatten(0, 1), v[0]]).index_select(0, index)
        return keys[None], values[None], both


def _grown(buffer: Tensor | None, like: Tensor, sequences: int, slots: int) -> Tensor:
    grown = like.new_zeros(sequences, slots, *like.shape[2:])
    if buffer is not None:
        grown[:, : buffer.shape[1]] = buffer
    return grown
