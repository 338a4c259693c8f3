"""What the row-wise ops share: their portable implementation, the dtype they compute in, when a gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashmix._dispatch import Implementation


def portable(module: str) -> Implementation[Tensor]:
    """The plain PyTorch implementation of the row-wise op in `module`; it runs anything that passed the op's checks."""
    return Implementation("portable", module, lambda problem: None)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What a row-wise op computes in: float64 if any input is, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def differentiable_gradients(
    formula: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of `formula(*inputs)` that can be differentiated again; None where an input needs none.

    The hand-written backwards work in place and keep no graph. When a backward runs under `create_graph=True`, the op's
    plain formula is differentiated instead. `grads` has one entry for each result of the formula, or None for it.
    """
    # Views: fresh nodes, so that the gradients stop at the op's inputs when one input is computed from another.
    fresh = [value if value is None else value.view_as(value) for value in inputs]
    results = formula(*fresh)
    asked = [
        (result, grad)
        for result, grad in zip(results if isinstance(results, tuple) else (results,), grads, strict=True)
        if grad is not None
    ]
    wanted = {index: value for index, value in enumerate(fresh) if value is not None and value.requires_grad}
    found = torch.autograd.grad(
        [result for result, _ in asked],
        list(wanted.values()),
        [grad for _, grad in asked],
        create_graph=True,
        allow_unused=True,
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for index, gradient in zip(wanted, found, strict=True):
        gradients[index] = gradient
    return tuple(gradients)
