"""Operators that autograd and torch.compile know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("flashmix", "FRAGMENT")  # the operators are there as long as it is


def operator(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`flashmix::name`, which calls `run`; `fake` makes outputs of the same shapes.

    As `torch.library.custom_op`, but without importing all of torch's compiler at the first call (3 s on a fresh machine), and
    with less work at each call: nothing checks that outputs do not alias inputs (torch.library.opcheck does).
    """
    schema = torch.library.infer_schema(run, mutates_args=())
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashmix::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.flashmix, name).default


def differentiable(name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None) -> None:
    """Gives an operator its backward, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(f"flashmix::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def once_differentiable(name: str) -> None:
    """Gives the backward `flashmix::{name}_backward` of an operator one of its own, which raises."""

    def no_double_backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError(f"{name} has no second derivative")

    differentiable(f"{name}_backward", no_double_backward)


def only_data(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the tensors are torch's own, not fake ones or another subclass that has to see the operator."""
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def bump_versions(*written: Tensor | None) -> None:
    """Tells autograd that these were written: what it saved of them before is no longer theirs."""
    for t in written:
        if t is not None:
            torch.autograd.graph.increment_version(t)
