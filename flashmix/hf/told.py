"""Small things that every replaced `forward` does first: padding is zeroed, hooks of submodules run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` `[B, T, D]` with zeros where the mask `[B, T]` is 0."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


@contextmanager
def hooks_of(mixer: Any, *children: str) -> Iterator[None]:
    """Runs the hooks of the package `accelerate` on the children whose parameters are read without calling them.

    With a `device_map` that offloads, such a hook brings the parameters to the device and takes them away again.
    """
    found = [child for name in children if (child := mixer._modules.get(name)) is not None]
    hooked = [(child, hook) for child in found if (hook := getattr(child, "_hf_hook", None)) is not None]
    for child, hook in hooked:
        hook.pre_forward(child)
    try:
        yield
    finally:
        for child, hook in reversed(hooked):
            hook.post_forward(child, ())
