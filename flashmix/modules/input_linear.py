"""Linear maps of one input, made as one node of autograd whose backward adds up the input's gradient within its matrix products.

Apart, each map makes a gradient of the input, and autograd adds them, each sum a pass over three tensors; and each map of few channels is a
pass over the input for itself, three with the backward. Here the maps of few channels are one product, and a product adds to what is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from flashmix.op.recompute import LEAST

FEW = 256  # channels of a map that is made with others as one product
_NOTHING: AbstractContextManager[None] = nullcontext()
_current = threading.local()  # .products


class InputLinear(nn.Linear):
    """A linear map without bias of a layer's input, which within `as_one_node` is made with the others.

    Example:
        >>> InputLinear(32, 8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self, width: int, out: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width, out, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        made = None if torch.compiler.is_compiling() else getattr(_current, "products", None)
        y = None if made is None else made.take(self, x)
        return super().forward(x) if y is None else y


class Products:
    """The products of one input, each until its map asks for it; a scope."""

    def __init__(self, x: Tensor, maps: Sequence[InputLinear]) -> None:
        made = InputProducts.apply(x, *[one.weight for one in maps])
        self.x, self.made = x, {id(one): y for one, y in zip(maps, made, strict=True)}

    def __enter__(self) -> None:
        self.before = getattr(_current, "products", None)
        _current.products = self

    def __exit__(self, *error: object) -> None:
        _current.products = self.before

    def take(self, one: InputLinear, x: Tensor) -> Tensor | None:
        return self.made.pop(id(one), None) if x is self.x else None


def as_one_node(x: Tensor, layer: nn.Module) -> AbstractContextManager[None]:
    """A scope within which the maps `InputLinear` of a layer are made of `x`, the layer's input, as one node of autograd.

    It is so for large tensors of a GPU where autograd records; a map that has hooks, or another dtype, stays apart.
    """
    maps = [one for one in layer.modules() if isinstance(one, InputLinear) and plain(one, x)] if may_join(x) else []
    return Products(x, maps) if len(maps) > 1 else _NOTHING


def may_join(x: Tensor) -> bool:
    least = None if torch.compiler.is_compiling() else LEAST.get(x.device.type)
    if least is None or x.numel() * x.element_size() < least or not torch.is_grad_enabled() or type(x) is not Tensor:
        return False
    return not (torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active())


def plain(one: InputLinear, x: Tensor) -> bool:
    """Whether a map is called for its product alone."""
    return unobserved(one) and type(one.weight) in (nn.Parameter, Tensor) and one.weight.dtype == x.dtype


def unobserved(module: nn.Module) -> bool:
    """Whether a module has no hooks."""
    before, after = (
        module._forward_pre_hooks or module._backward_pre_hooks,
        module._forward_hooks or module._backward_hooks,
    )
    return not (before or after)


def groups_of(weights: Sequence[Tensor]) -> list[list[int]]:
    """Which maps are one product: those of few channels, and each other alone; the smallest product comes first."""
    few = [index for index, weight in enumerate(weights) if weight.shape[0] <= FEW]
    alone = [[index] for index, weight in enumerate(weights) if weight.shape[0] > FEW]
    few.sort(key=lambda index: -weights[index].shape[0])  # the parts begin at multiples of what vectors need
    return [*([few] if few else []), *sorted(alone, key=lambda group: weights[group[0]].shape[0])]


class InputProducts(torch.autograd.Function):
    """`x weight^T` of several weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        found: dict[int, Tensor] = {}
        for group in groups_of(weights):
            y = linear(x, joined([weights[index] for index in group]))
            parts = y.split([weights[index].shape[0] for index in group], dim=-1)
            found |= zip(group, [y] if len(group) == 1 else [part.detach() for part in parts], strict=True)
        return tuple(found[index] for index in range(len(weights)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, dx = x.reshape(-1, x.shape[-1]), None
        found: list[Tensor | None] = [None] * len(weights)
        wanted = [needed and dy is not None for needed, dy in zip(ctx.needs_input_grad[1:], grads, strict=True)]
        for group in groups_of(weights):
            if all(grads[index] is None for index in group):
                continue
            given = [
                x.new_zeros(*x.shape[:-1], weights[index].shape[0]) if (dy := grads[index]) is None else dy
                for index in group
            ]
            dy = joined(given, -1).reshape(len(rows), -1)
            if ctx.needs_input_grad[0]:
                weight = joined([weights[index] for index in group])
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if any(wanted[index] for index in group):
                made = (dy.T @ rows).split([weights[index].shape[0] for index in group])
                for index, dweight in zip(group, made, strict=True):
                    found[index] = dweight if wanted[index] else None
        return None if dx is None else dx.view_as(x), *found


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One tensor as it is, several side by side."""
    first, *others = tensors
    return torch.cat([first, *others], dim=dim) if others else first
