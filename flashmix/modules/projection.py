"""Projection of the input to named heads, one matrix for all of them."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from flashmix.modules.input_linear import InputLinear
from flashmix.op.checks import check_multiple, check_range


class HeadProjection(InputLinear):
    """One linear map without bias whose output is split into named parts, each with its own shape per token.

    Args:
        width: channels of the input.
        parts: the shape of each part by name, in the order of the matrix's rows: `(heads, channels)` or `(channels,)`; None for a part
            that is left out.

    Example:
        >>> import torch
        >>> project = HeadProjection(32, q=(4, 8), v=(4, 16), gate=None)
        >>> q, v, gate = project(torch.randn(2, 5, 32))
        >>> q.shape, v.shape, gate
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 5, 4, 16]), None)
    """

    def __init__(
        self,
        width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parts: tuple[int, ...] | None,
    ) -> None:
        sizes = [0 if shape is None else prod(shape) for shape in parts.values()]
        super().__init__(width, sum(sizes), device=device, dtype=dtype)
        self.parts, self.sizes = parts, sizes

    def forward(self, x: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The parts of `x` `[..., width]` in their order, `[..., *shape]`; None for a part that is left out."""
        split = self.whole(x).split(self.sizes, dim=-1)
        return tuple(
            None if shape is None else part if len(shape) == 1 else part.unflatten(-1, shape)
            for part, shape in zip(split, self.parts.values(), strict=True)
        )

    def whole(self, x: Tensor) -> Tensor:
        """The parts of `x` side by side, `[..., channels]`."""
        return super().forward(x)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={shape}" for name, shape in self.parts.items())
        return f"{self.in_features}, {shapes}"


class HeadLinears(nn.Module):
    """One linear map without bias for each head: block-diagonal over heads.

    Args:
        heads: number of heads.
        inputs, outputs: channels of each.

    Example:
        >>> HeadLinears(4, 8, 3)(torch.randn(2, 5, 4, 8)).shape
        torch.Size([2, 5, 4, 3])
    """

    def __init__(
        self,
        heads: int,
        inputs: int,
        outputs: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        self.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., heads, outputs]` of `x` `[..., heads, inputs]`."""
        return torch.einsum("...hi,hoi->...ho", x, self.weight)


def shared_heads(heads: int, given: int | None) -> int:
    """How many heads of keys and values there are: `given`, or one for each of `heads`; raises ValueError unless it divides them."""
    if given is not None:
        check_multiple("heads", heads, "kv_heads", given)
    return heads if given is None else given


def head_size(width: int, heads: int, given: int | None, name: str = "head_dim") -> int:
    """Channels per head: `given`, or an equal share of `width`; raises ValueError where that is not even."""
    check_range("heads", heads, 1, 65536)
    if given is None:
        if width % heads:
            raise ValueError(f"{name} must be given where heads = {heads} does not divide {width}")
        given = width // heads
    check_range(name, given, 1, 256)
    return given
