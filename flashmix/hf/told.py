"""Small things that every replaced `forward` does first: padding is zeroed, hooks of submodules run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` `[B, T, D]` with zeros where the mask `[B, T]` is 0."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


NOTHING = nullcontext()


def hooks_of(mixer: Any, *children: str) -> AbstractContextManager[None]:
    """Runs the hooks of the package `accelerate` on the children whose parameters are read without calling them.

    With a `device_map` that offloads, such a hook brings the parameters to the device and takes them away again.
    """
    hooked = []
    for name in children:
        child = mixer._modules.get(name)
        if child is not None and (hook := child.__dict__.get("_hf_hook")) is not None:
            hooked.append((child, hook))
    return around(hooked) if hooked else NOTHING


@contextmanager
def around(hooked: list[tuple[Any, Any]]) -> Iterator[None]:
    for child, hook in hooked:
        hook.pre_forward(child)
    try:
        yield
    finally:
        for child, hook in reversed(hooked):
            hook.post_forward(child, ())
