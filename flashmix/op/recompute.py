"""Outputs that autograd does not keep: the backward makes them again from inputs that are kept anyway, with the same bits.

    with recomputing(x, ["norms"]):                  # where x is large, and autograd records
        y = recomputed("norms", rms_norm, x)         # y as always
        z = linear(y)                                # keeps how y was made, not y

Within the scope autograd's saved tensors go through a hook, which keeps, in place of an output of `recomputed` or a view of it, a
reference to its inputs. The first use in the backward makes it again; it is freed after the last one. As with any hook on saved
tensors, writing into a saved tensor before the backward is not noticed. Nothing is done under torch.compile, which chooses itself what it
computes again, under autocast, within other hooks (activation checkpointing, tensors saved on the CPU), and under torch.func.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])

# Bytes of the tensor that a scope is opened for, by device: below it memory is no matter, and the host's time is. On a CPU all is kept.
LEAST = {"cuda": 1 << 22}
KINDS = ("norms", "gated_norms", "convolutions", "rotary", "products")
"""Of outputs: norms of the residual stream and of queries and keys; a layer's output, normalised and gated; queries, keys and values behind
the short convolution; rotated queries and keys; the gated products of MLPs."""
MADE_AGAIN = ("norms", "convolutions", "rotary", "products")
"""Those that are made again where nothing else is said."""
_NOTHING: AbstractContextManager[None] = nullcontext()
_current = threading.local()  # .scope


class Origin:
    """How some outputs were made: again on demand, until each kept reference to them was used."""

    def __init__(self, make: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.make, self.inputs = make, inputs
        self.kept = self.used = 0
        self.made: tuple[Tensor, ...] = ()

    def output(self, index: int) -> Tensor:
        if not self.made:
            with torch.no_grad():
                made = self.make(*[x() if isinstance(x, Reference) else x for x in self.inputs])
            self.made = (made,) if isinstance(made, Tensor) else tuple(made)
        found = self.made[index]
        self.used += 1
        if self.used >= self.kept:
            self.used, self.made = 0, ()
        return found


class Reference:
    """A view of an output of an `Origin`, in the place of a saved tensor; called, it is that tensor."""

    def __init__(self, origin: Origin, index: int, view: Tensor) -> None:
        self.origin, self.index = origin, index
        self.shape = view.size(), view.stride(), view.storage_offset()
        self.dtype = view.dtype
        origin.kept += 1

    def __call__(self) -> Tensor:
        return self.origin.output(self.index).as_strided(*self.shape)


class Scope:
    """The outputs of `recomputed` so far, by their memory: they live until the scope ends, so that no address is used twice."""

    def __init__(self, kinds: Collection[str] = KINDS) -> None:
        self.kinds = kinds
        self.outputs: dict[int, tuple[Origin, int, Tensor]] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self) -> None:
        self.hooks.__enter__()
        _current.scope = self

    def __exit__(self, *error: object) -> None:
        _current.scope = None
        self.outputs.clear()
        self.hooks.__exit__(*error)

    def reference(self, x: Tensor) -> Reference | None:
        """How a tensor is made again, None of one that is not of `recomputed`."""
        found = self.outputs.get(x.untyped_storage().data_ptr()) if type(x) in (Tensor, torch.nn.Parameter) else None
        if found is None or x.dtype != found[2].dtype:
            return None
        return Reference(found[0], found[1], x)

    def pack(self, x: Tensor) -> Any:
        return self.reference(x) or x

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        found: Tensor = kept() if isinstance(kept, Reference) else kept
        return found

    def record(self, made: Tensor | tuple[Tensor, ...], make: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        # an input that is made again itself is not held either
        held = [(self.reference(x) or x.detach()) if isinstance(x, Tensor) else x for x in inputs]
        origin = Origin(make, tuple(held))
        for index, y in enumerate((made,) if isinstance(made, Tensor) else made):
            storage = y.untyped_storage()
            if y.is_contiguous() and storage.nbytes() == y.numel() * y.element_size():
                self.outputs[storage.data_ptr()] = origin, index, y


def recomputing(x: Tensor, kinds: Collection[str] = KINDS) -> AbstractContextManager[None]:
    """A scope in which autograd keeps no output of `recomputed` of these kinds, if `x`, whose size says how large they are, is large."""
    least = LEAST.get(x.device.type)
    if least is None or x.numel() * x.element_size() < least or not torch.is_grad_enabled() or not can_recompute(x):
        return _NOTHING
    return Scope(kinds) if kinds else _NOTHING


def can_recompute(x: Tensor) -> bool:
    """Whether the hooks of a scope may be set here."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or torch.is_autocast_enabled(x.device.type):
        return False
    hooks: Any = torch._C._autograd
    if getattr(_current, "scope", None) is not None or not hooks._saved_tensors_hooks_is_enabled():
        return False
    return hooks._top_saved_tensors_default_hooks(False) is None


def recomputed(kind: str, make: Callable[..., Outputs], *inputs: Any) -> Outputs:
    """`make(*inputs)`, which the backward makes again if it needs it; `make` is a function of its tensors alone, without randomness.

    `kind` is one of `KINDS`.
    """
    made = make(*inputs)
    recompute(kind, made, make, *inputs)
    return made


def recompute(kind: str, made: Tensor | tuple[Tensor, ...], make: Callable[..., Any], *inputs: Any) -> None:
    """Says that `made` is what `make(*inputs)` would be."""
    scope: Scope | None = getattr(_current, "scope", None)
    if scope is not None and kind in scope.kinds:
        scope.record(made, make, inputs)
