"""Draws of one case: sizes, dtypes, layouts and numbers, all a function of a seed and an index.

What decides which kernel runs (sizes of heads, dtypes, options, layouts) is drawn by `fixed`, which a GPU run seeds by one of a few
structures, so that compiled kernels are used again; lengths and numbers are drawn by `free`, which the index seeds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LAYOUTS = ("contiguous", "inside a larger one", "axes swapped", "every second")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Draw:
    """The numbers of one case. `structure` None: everything follows from the index. `on_gpu`: sizes that kernels like."""

    seed: int
    index: int
    structure: int | None = None
    on_gpu: bool = False
    correlated: bool = False  # keys may be parallel
    interpreted: bool = False  # kernels run in Triton's interpreter, which does not know bfloat16
    fixed: random.Random = field(init=False)
    free: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        one = f"structure {self.structure}" if self.structure is not None else f"index {self.index}"
        self.fixed = random.Random(f"{self.seed} {one}")
        self.free = random.Random(f"{self.seed} numbers {self.index}")
        self.generator = torch.Generator().manual_seed(self.free.getrandbits(60))

    # ---- what decides the kernel

    def chance(self, share: float) -> bool:
        return self.fixed.random() < share

    def pick(self, options: Sequence[T]) -> T:
        return options[self.fixed.randrange(len(options))]

    def weighted(self, options: dict[Any, float]) -> Any:
        return self.fixed.choices(list(options), list(options.values()))[0]

    def dtype(self) -> torch.dtype:
        if self.on_gpu:
            half = torch.float16 if self.interpreted else torch.bfloat16
            return self.weighted({half: 5, torch.float32: 3, torch.float16: 2})
        return self.weighted({torch.float32: 4, torch.bfloat16: 2, torch.float16: 1, torch.float64: 2})

    def channels(self) -> int:
        """The size of a head: mostly small, up to 256."""
        if self.on_gpu:
            return self.weighted({16: 3, 32: 3, 64: 3, 128: 2, 1: 1, 24: 1, 100: 1, 256: 0.5})
        small = self.weighted({"tiny": 6, "small": 3, "middle": 1, "large": 0.3})
        low, high = {"tiny": (1, 8), "small": (9, 17), "middle": (24, 72), "large": (96, 256)}[small]
        return self.fixed.randint(low, high)

    def heads(self) -> tuple[int, int]:
        """Heads of keys, and how many heads of values each has."""
        return self.weighted({1: 4, 2: 4, 3: 2}), self.weighted({1: 5, 2: 3, 3: 1})

    # ---- how much of it

    def tokens(self, most: int = 200) -> int:
        drawn: str = self.free.choices(
            ["few", "some", "edges", "more", "none", "one", "long"], [30, 36, 10, 9, 3, 9, 2]
        )[0]
        low, high = {
            "few": (2, 8),
            "some": (9, 30),
            "more": (31, 70),
            "none": (0, 0),
            "one": (1, 1),
            "long": (71, 200),
        }.get(drawn, (0, 0))
        size = self.free.choice((31, 32, 33, 63, 64, 65)) if drawn == "edges" else self.free.randint(low, high)
        return min(size, most)

    def batch(self, most: int = 5) -> int:
        return min(self.free.choices((0, 1, 2, 3, 5), (2, 45, 36, 12, 5))[0], most)

    def lengths(self, total: int) -> tuple[int, ...]:
        """Lengths of packed sequences, `total` tokens together, some of them empty and some of one token."""
        found: list[int] = []
        while total > 0:
            kind = self.free.choice(("none", "one", "some", "some"))
            length = {"none": 0, "one": 1}.get(kind, self.free.randint(1, max(1, total)))
            found.append(length)
            total -= length
        return (*found, *[0] * self.free.choice((0, 0, 1, 2)))

    # ---- numbers, in float64

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length 1; where keys may be correlated, sometimes nearly parallel ones."""
        x = self.normal(*shape)
        if self.correlated and self.free.random() < 0.3 and len(shape) > 2 and shape[1]:
            x = x[:, :1].sign() + self.free.choice((0.0, 0.1)) * x
        return torch.nn.functional.normalize(x, dim=-1)

    def strength(self, *shape: int, most: float = 2.0) -> Tensor:
        """Write strengths from 0 to `most`."""
        kind = self.free.choice(("any", "any", "any", "none", "one", "most", "few"))
        x = most * self.uniform(*shape)
        if kind == "few":
            return x.masked_fill(self.uniform(*shape) < 0.7, 0.0)
        return x if kind == "any" else torch.full_like(x, {"none": 0.0, "one": 1.0, "most": most}[kind])

    def decay(self, *shape: int) -> Tensor:
        """Log decays from 0 to -inf."""
        kind = self.free.choice(
            ("mild", "mild", "mild", "weak", "none", "strong", "stronger", "-inf", "resets", "mixed")
        )
        mild = -self.uniform(*shape)
        if kind == "resets":
            return mild.masked_fill(self.uniform(*shape) < 0.1, -torch.inf)
        if kind == "mixed":
            return mild * 10 ** (6 * self.uniform(*shape) - 2)
        size = {"mild": 1.0, "weak": 0.01, "none": 0.0, "strong": 20.0, "stronger": 1e4, "-inf": torch.inf}[kind]
        return torch.full_like(mild, -size) if kind == "-inf" else mild * size

    def scale(self) -> float | None:
        return self.free.choice((None, None, 1.0, 0.3, -0.7, 0.0))

    # ---- strides

    def layout(self, written: bool = False) -> Layout:
        """How a tensor lies in memory; one that is written is never expanded."""
        kinds = (*LAYOUTS, *(() if written else ("expanded",)))
        kind = "contiguous" if self.chance(0.6) else self.pick(kinds)
        return Layout(kind, self.fixed.randrange(8), self.fixed.randrange(1, 4))


@dataclass(frozen=True)
class Layout:
    """The place of a tensor in memory: its kind, an axis (modulo the tensor's), and an offset of elements."""

    kind: str = "contiguous"
    axis: int = 0
    offset: int = 1

    def values(self, t: Tensor) -> Tensor:
        """`t`, made the same along the axis that is expanded."""
        if self.kind != "expanded" or t.dim() == 0 or t.shape[self.axis % t.dim()] == 0:
            return t
        axis = self.axis % t.dim()
        return t.narrow(axis, 0, 1).expand(t.shape).contiguous()

    def place(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of `t` that lies so, and the memory that it is part of, NaN (or 7) elsewhere."""
        rest = float("nan") if t.is_floating_point() else 0 if t.dtype == torch.bool else 7
        if t.dim() == 0 or self.kind == "contiguous":
            base = t.contiguous().clone()
            return base, base
        axis = self.axis % t.dim()
        shape = list(t.shape)
        if self.kind == "expanded":
            base = t.narrow(axis, 0, min(1, shape[axis])).contiguous().clone()
            return (base.expand(shape) if shape[axis] else base), base
        if self.kind == "axes swapped":
            other = (axis + 1) % t.dim()
            base = t.transpose(axis, other).contiguous().clone()
            return base.transpose(axis, other), base
        if self.kind == "every second":
            shape[axis] = 2 * shape[axis] + 1
            base = t.new_full(shape, rest)
            view = base.narrow(axis, 1, shape[axis] - 1)[(slice(None),) * axis + (slice(None, None, 2),)]
        else:
            shape[axis] += self.offset + 1
            base = t.new_full(shape, rest)
            view = base.narrow(axis, self.offset, t.shape[axis])
        return view.copy_(t), base
