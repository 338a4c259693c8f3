"""The sequences in a batch of transformers: where one ends and the next begins, and which state belongs to which row."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.op.packing import Packing

BOUNDARIES = ("cu_seq_lens_q", "seq_idx", "position_ids")  # the first that is given tells


class BatchRows:
    """A batch `[B, T]`, or with a packing the same tokens end to end as one row `[1, B T]` of N sequences.

    Each row begins a sequence; more begin where the boundaries say so. The first sequence of a row continues the row's state in
    a cache, and the state after the last one is what the cache keeps.
    """

    def __init__(self, batch: int, tokens: int, packing: Packing | None) -> None:
        self.batch, self.tokens, self.packing = batch, tokens, packing

    def join(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` as the ops take it: `[1, B T, ...]` if packed."""
        return x if self.packing is None else x.reshape(1, self.batch * self.tokens, *x.shape[2:])

    def part(self, x: Tensor) -> Tensor:
        """The inverse of `join`."""
        return x if self.packing is None else x.reshape(self.batch, self.tokens, *x.shape[2:])

    def initial(self, state: Tensor | None) -> Tensor | None:
        """The state `[B, ...]` of each row as the state `[N, ...]` of each sequence: zeros but for the first of a row."""
        if state is None or self.packing is None:
            return state
        first = torch.arange(self.batch, device=state.device) * self.tokens
        zeros = state.new_zeros(self.packing.count, *state.shape[1:])
        return zeros.index_copy(0, self.packing.sequence[first], state)

    def final(self, state: Tensor | None) -> Tensor | None:
        """The state `[N, ...]` after each sequence as the state `[B, ...]` after each row."""
        if state is None or self.packing is None:
            return state
        last = torch.arange(1, self.batch + 1, device=state.device) * self.tokens - 1
        return state[self.packing.sequence[last]]


class Kept:
    """What was made of a forward's tensors, kept for its other layers: while the tensors live and are not overwritten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: list[tuple[list[weakref.ref[Tensor]], Any, Any]] = []  # newest last

    def __reduce__(self) -> tuple[type[Kept], tuple[int]]:
        """A copy of a model, or a file of one, begins with nothing."""
        return Kept, (self.most,)

    def of(self, sources: tuple[Tensor, ...], about: Any, make: Callable[[tuple[Tensor, ...], Any], Any]) -> Any:
        """`make(sources, about)`; `about` is compared by its value."""
        if torch.compiler.is_compiling():  # which traces no weak references
            return make(sources, about)
        for t in sources:
            if t.is_inference():  # which counts no versions
                return make(sources, about)
        key = (about, [t._version for t in sources])
        for known, of, value in reversed(self.found):
            if of == key and all(ref() is t for ref, t in zip(known, sources, strict=True)):
                return value
        value = make(sources, about)
        self.found = [*self.found[1 - self.most :], ([weakref.ref(t) for t in sources], key, value)]
        return value


class Boundaries:
    """The packings of a model's batches: made once for all layers of a forward, by the tensor that they are read from."""

    def __init__(self) -> None:
        self.kept = Kept(2)

    def packing_of(self, given: dict[str, Any], batch: int, tokens: int, masked: bool) -> Packing | None:
        """The packing by `cu_seq_lens_q`, else by changes of `seq_idx`, else by positions that begin again at 0.

        Positions tell nothing in a batch with padding (`masked`), whose padding tokens have position 0 too.
        """
        if tokens == 1:
            return None
        name = next((name for name in BOUNDARIES if isinstance(given.get(name), Tensor)), None)
        if name is None or (masked and name == "position_ids"):
            return None
        return self.kept.of((given[name],), (name, batch, tokens), _packing)


def _packing(sources: tuple[Tensor, ...], about: tuple[str, int, int]) -> Packing | None:
    """The packing by one of `BOUNDARIES` of rows `[batch, tokens]`, or None where each row is one sequence."""
    (source,), (name, batch, tokens) = sources, about
    by_lengths = name == "cu_seq_lens_q"
    cu_seqlens = _from_lengths(source, batch, tokens) if by_lengths else _from_tokens(name, source, batch, tokens)
    return None if cu_seqlens is None else Packing(cu_seqlens, batch * tokens)


def _from_lengths(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor | None:
    """Boundaries over all tokens, `[N + 1]`, with those of the rows added; None for one sequence."""
    if batch > 1:
        edges = torch.arange(batch + 1, device=cu_seqlens.device) * tokens
        cu_seqlens = torch.cat([cu_seqlens.flatten(), edges]).unique()
    return cu_seqlens if cu_seqlens.shape[0] > 2 else None


def _from_tokens(name: str, marks: Tensor, batch: int, tokens: int) -> Tensor | None:
    """Boundaries where the marks of tokens `[B, T]` or `[1, T]` begin anew; None where they never do within a row."""
    if marks.dim() != 2 or marks.shape[-1] != tokens:
        return None
    marks = marks.expand(batch, tokens)
    begins = marks[:, 1:] == 0 if name == "position_ids" else marks[:, 1:] != marks[:, :-1]
    if not begins.any():
        return None
    starts = nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    return nn.functional.pad(starts, (0, 1), value=batch * tokens)


@lru_cache
def names_of(forward: Callable[..., Any]) -> list[str]:
    """The arguments of a class's `forward`, after self."""
    return list(inspect.signature(forward).parameters)[1:]


class Given:
    """What the layers around a mixer are told of the boundaries and do not tell the mixer: kept from their call to the mixer's."""

    def __init__(self, boundaries: Boundaries, layers: Sequence[nn.Module]) -> None:
        self.boundaries = boundaries
        self.kept = Kept(1)  # what the mixer makes of its own buffers
        self.found: dict[str, Any] = {}
        self.layers = list(layers)
        self.hooks = [
            layer.register_forward_pre_hook(self.keep_first if layer is layers[0] else self.keep, with_kwargs=True)
            for layer in layers
        ]

    def forget(self) -> None:
        """The layers are as they were."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            checkpointed = layer.__dict__.get("_gradient_checkpointing_func")
            if not isinstance(checkpointed, Checkpointed):
                continue
            checkpointed.mixers = [mixer for mixer in checkpointed.mixers if mixer is not self]
            if not checkpointed.mixers:
                layer._gradient_checkpointing_func = checkpointed.function  # type: ignore[assignment]

    def keep_first(self, layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook of the outermost layer: what an earlier call left is forgotten."""
        self.found = {}
        self.keep(layer, arguments, options)

    def keep(self, layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook of a layer around the mixer."""
        checkpointed = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpointed is not None:
            mixers = Checkpointed.of(layer, checkpointed).mixers
            if self not in mixers:
                mixers.append(self)
        x = arguments[0] if arguments else options.get("hidden_states")
        if isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == 1:  # [B, 1, D]: no sequence begins within one token
            return
        named = options
        if len(arguments) > 1:
            named = dict(zip(names_of(type(layer).forward), arguments, strict=False)) | options
        self.found = self.found | {name: named[name] for name in BOUNDARIES if named.get(name) is not None}

    def rows(self, x: Tensor, mask: Tensor | None, options: dict[str, Any]) -> BatchRows:
        """The rows of the mixer's input `[B, T, D]`; its own options come before those of the layers around it."""
        found = self.found | {name: options[name] for name in BOUNDARIES if options.get(name) is not None}
        self.found = {}
        batch, tokens = x.shape[0], x.shape[1]
        return BatchRows(batch, tokens, self.boundaries.packing_of(found, batch, tokens, mask is not None))


class Checkpointed:
    """A layer's `_gradient_checkpointing_func`, by which its mixers are told the same boundaries when they are computed again.

    transformers 5.17 checkpoints the call of a layer, whose hooks so run again; later versions checkpoint its `forward`, and no
    hook runs again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.mixers: list[Given] = []

    @staticmethod
    def of(layer: Any, function: Callable[..., Any]) -> Checkpointed:
        """That of the layer, in whose place it is put."""
        if not isinstance(function, Checkpointed):
            layer._gradient_checkpointing_func = function = Checkpointed(function)
        return function

    def __call__(self, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        told = [(mixer, mixer.found) for mixer in self.mixers]
        return self.function(partial(tell, told, forward), *arguments, **options)


def tell(told: list[tuple[Given, dict[str, Any]]], forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The output of `forward`, whose mixers are told `told`."""
    for mixer, found in told:
        mixer.found = found
    return forward(*arguments, **options)
