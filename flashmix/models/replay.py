"""One token after another of each sequence, as replays of a CUDA graph.

A token of a small batch takes a GPU less time than Python needs to launch its kernels. `FixedStep` is a token over fixed memory, of which
the host does the same every time: it reads the last tokens and the cache where they lie, and writes the next state to the same place.
So it can be captured once and replayed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from flashmix.layer.cache import LayerCache
from flashmix.models.cache import ModelCache
from flashmix.models.decoder import Decoder
from flashmix.op.checks import contents_everywhere

ROOM = 256  # tokens that a step has room for at least; then as many as there are already
PAYS = 4  # tokens that a capture costs about as much as: fewer are not captured unless asked for
_refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class TokenSteps:
    """The logits after each next token of the sequences of a cache.

    Args:
        asked: `cuda_graph` of `generate`. Raises ValueError: it is True, and the model or its cache cannot be captured.
    """

    def __init__(self, model: Decoder, cache: ModelCache, asked: bool | None) -> None:
        self.model, self.cache, self.asked = model, cache, asked
        self.fixed: FixedStep | None = None
        self.reason = "it is not wanted" if asked is False else why_not(model, cache)
        self._raise_if_asked()

    def __call__(self, last: Tensor, left: int, attention_mask: Tensor | None = None) -> Tensor:
        """Logits `[B, vocab_size]` after the tokens `last` `[B]`; `left` tokens are wanted, this one included."""
        if self.fixed is not None and not self.fixed.holds():
            self.fixed = None
        if self.fixed is None and self._begins(left, attention_mask):
            self.fixed = FixedStep(self.model, self.cache, last, left)
        if self.fixed is None or attention_mask is not None:
            return self.model.logits(
                self.model.hidden(last[:, None], attention_mask=attention_mask, cache=self.cache)[:, -1]
            )
        logits = self.fixed(last)
        self.reason = self.fixed.problem
        if self.reason is not None:
            self.fixed = None
            _refused[self.model] = self.reason
            self._raise_if_asked()
        return logits

    def _begins(self, left: int, attention_mask: Tensor | None) -> bool:
        return self.reason is None and attention_mask is None and (left >= PAYS or self.asked is True)

    def _raise_if_asked(self) -> None:
        if self.asked and self.reason is not None:
            raise ValueError(f"cuda_graph=True cannot run this: {self.reason}")


class FixedStep:
    """The step of a model over the memory of its cache. The first call runs it, the second captures it, later ones replay it.

    Attributes:
        problem: None, or why the step cannot be captured; the calls so far are right, and the cache can be used without the step.
    """

    def __init__(self, model: Decoder, cache: ModelCache, last: Tensor, left: int) -> None:
        self.model, self.cache = model, cache
        self.problem: str | None = None
        self.logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        with torch.inference_mode(False):
            self.token = torch.empty_like(last[:, None], memory_format=torch.contiguous_format)
        longest = max((c.lengths.longest for c in cache.layers if c.lengths is not None), default=0)
        self.limit = longest + min(left, max(longest, ROOM))
        for layer in cache.layers:
            layer.reserve(self.limit)
            if layer.lengths is not None:
                layer.lengths = replace(layer.lengths, tokens=layer.lengths.tokens.clone(), overwritten=True)
        self._memory = [dict(vars(layer)) for layer in cache.layers]

    def holds(self) -> bool:
        """Whether the cache is as the last call left it, with room for a token."""
        counted = [layer.lengths for layer in self.cache.layers if layer.lengths is not None]
        return all(c.longest < self.limit for c in counted) and all(
            value is memory[name]
            for layer, memory in zip(self.cache.layers, self._memory, strict=True)
            for name, value in vars(layer).items()
        )

    def __call__(self, last: Tensor) -> Tensor:
        """Logits `[B, vocab_size]` after the tokens `last` `[B]`, valid until the next call."""
        self.token.copy_(last[:, None])
        if self.logits is None:
            with waits_noticed() as waits:
                self.step()
            self.problem = self.problem or next((f"a layer waits for the device: {text}" for text in waits), None)
        else:
            if self._replay is None:
                self._capture()
            self.step() if self._replay is None else self._replay()
        self._count()
        assert self.logits is not None
        return self.logits

    def step(self) -> None:
        """One token, from `token` to `logits`; the state after it is in the memory of the state before, else there is a `problem`."""
        layers = self.cache.layers
        try:
            for layer in layers:
                if layer.lengths is not None:
                    layer.lengths = replace(layer.lengths, limit=self.limit)
            self.logits = self.model.logits(self.model.hidden(self.token, cache=self.cache)[:, -1])
        except BaseException:
            for layer, memory in zip(layers, self._memory, strict=True):
                vars(layer).update(memory)
            raise
        for index, (layer, memory) in enumerate(zip(layers, self._memory, strict=True)):
            changed = moved_into(memory, layer)
            if changed is None:
                vars(layer).update(memory)
                continue
            self.problem = self.problem or f"the cache of layer {index} changes with a token: {changed}"
            if layer.lengths is not None:
                layer.lengths = replace(layer.lengths, limit=None, overwritten=False)

    def _capture(self) -> None:
        """Captures the step, or notes why that failed; the memory is not touched."""
        try:
            self._replay = captured(self.step, self.token.device)
        except RuntimeError as error:  # of the driver
            self.problem = f"it cannot be captured: {' '.join(str(error).split())[:200]}"
        self._alive = alive(self.model)

    def _count(self) -> None:
        """Counts a token on the host."""
        for layer, memory in zip(self.cache.layers, self._memory, strict=True):
            if layer.lengths is not None:
                layer.lengths = memory["lengths"] = replace(layer.lengths, longest=layer.lengths.longest + 1)


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A call that does on the device what `run` does there, without Python; `run` itself is captured, not executed."""
    graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph.replay


def moved_into(memory: dict[str, Any], layer: LayerCache) -> str | None:
    """Copies the tensors of a cache to those of its fields `memory`; returns what else of it changed, None if nothing did."""
    before, after = list(leaves(memory)), list(leaves(vars(layer)))
    if len(before) != len(after):
        return f"{len(before)} parts become {len(after)}"
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                return f"a tensor {list(old.shape)} of {old.dtype} becomes {list(new.shape)} of {new.dtype}"
        elif old is not new and old != new:
            return f"{old} becomes {new}"
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old is not new:
            old.copy_(new)
    return None


def leaves(x: Any) -> Iterator[Any]:
    """The parts of nested dicts, tuples and dataclasses, in order; whether the host counts is no part of `Lengths`."""
    if isinstance(x, dict):
        x = tuple(x.values())
    elif is_dataclass(x):
        x = tuple(getattr(x, field.name) for field in fields(x) if field.name != "limit")
    if not isinstance(x, tuple):
        yield x
        return
    for part in x:
        yield from leaves(part)


def alive(model: nn.Module) -> list[Any]:
    """All that the modules hold now, parameters and tables: a graph reads it where it lies, also after a module has replaced it."""
    held = (parts for m in model.modules() for parts in (m._parameters, m._buffers, vars(m)))
    return [list(parts.values()) for parts in held]


def why_not(model: Decoder, cache: ModelCache) -> str | None:
    """Why the steps of a model cannot be replayed; None where nothing is known to be in the way."""
    device = model.embedding.weight.device
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if model in _refused:
        return _refused[model]
    if cache.history:
        return "the cache keeps a history, which takes a snapshot of every token"
    if any(type(p) is not nn.Parameter or p.device != device for p in model.parameters()):
        return "a parameter is no plain tensor on the device of the embedding"
    if (
        any(has_hooks(m) for m in model.modules())
        or torch_modules._global_forward_hooks
        or torch_modules._global_forward_pre_hooks
    ):
        return "a module has hooks, which a replay does not call"
    if contents_everywhere():
        return "flashmix.checks(True) reads the contents of tensors"
    if torch.is_autocast_enabled("cuda"):
        return "autocast keeps copies of the parameters"
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return "a transform looks at every operation"
    return "another graph is being captured" if torch.cuda.is_current_stream_capturing() else None


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def waits_noticed() -> Iterator[list[str]]:
    """The list is filled with where the host waited for the device within."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode is a prototype" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
