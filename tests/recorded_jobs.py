"""Jobs of `recorded_hashes.py`: calls of public ops with inputs that the names of the jobs determine.

The cases are written out in `recorded_*.py` and not taken from the other tests, because the same files must run against two
versions of flashmix whose internal modules have other names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import flashmix

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
# Dtypes by device; a job that has none on a device is not run there.
SOME = {"cpu": "f32 f64", "cuda": "f32 bf16"}
MOST = {"cpu": "f32 f64 bf16", "cuda": "f32 bf16 f64"}
ALL = {"cpu": "f32 f64 bf16 f16", "cuda": "f32 bf16 f16 f64"}
SWEEP = {"cpu": "f32 f64", "cuda": "bf16"}
LAYER = {"cpu": "f32 f64 bf16", "cuda": "bf16"}
HALF_ON_CUDA = {"cuda": "bf16"}
SIZES = {"B": 2, "T": 70, "H": 2, "h": 4, "K": 16, "V": 8, "D": 24, "W": 4, "M": 50, "E": 12, "S": 5, "n": 2, "N": 2}


class Job(Protocol):
    """What is recorded under one name; jobs of a group share kernels."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    def dtypes_on(self, device: str) -> list[str]:
        """The names of the dtypes to run on a device."""

    def implementations(self, dtype: torch.dtype, device: str) -> list[str]:
        """The implementations that run the call."""

    def results(self, dtype: torch.dtype, device: str, impl: str) -> dict[str, Any]:
        """Outputs, written inputs and gradients."""


class Draw:
    """Numbers from a generator that a name seeds, drawn in float64 on the CPU; `share` and `removed` refer to the last ones."""

    def __init__(self, name: str) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        self.generator = torch.Generator().manual_seed(seed)
        self.last = torch.zeros(0)

    def __call__(self, kind: str, *shape: int) -> Tensor:
        self.last = self._draw(kind, shape)
        return self.last

    def _draw(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        if kind.startswith("="):
            return torch.full(shape, float(kind[1:]), dtype=torch.float64)
        if kind.startswith("below"):
            return torch.randint(int(kind[5:]), shape, generator=self.generator)
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        if kind in ("uniform", "twice"):  # in (0, 1), (0, 2)
            return uniform * (2 if kind == "twice" else 1)
        if kind == "decay":
            return -uniform
        if kind == "resets":
            often = torch.rand(shape, generator=self.generator, dtype=torch.float64) < 0.1
            return (-uniform).masked_fill(often, -torch.inf)
        if kind == "walls":
            often = torch.rand(shape, generator=self.generator, dtype=torch.float64) < 0.02
            return (-0.01 * uniform).masked_fill(often, -40.0)
        if kind == "mask":
            return uniform < 0.8
        if kind in ("share", "removed"):
            return self.last * uniform[..., :1] * (1 if kind == "share" else -1)
        normal = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if kind in ("unit", "away"):
            return torch.nn.functional.normalize(normal, dim=-1) * (1 if kind == "unit" else -1)
        return normal


@dataclass(frozen=True)
class OpJob:
    """One call of an op of the package.

    Attributes:
        spec: "name:AXES:kind" of each tensor; `!` after the axes: at least float32, `%`: bfloat16.
        sizes: of the axes, where they differ from `SIZES`.
        options: the other arguments; tensors are moved to the device.
        wanted: the tensors whose gradients are recorded; None: of all that are floating.
        written: the tensors that the op writes; such an op has no gradient.
        layout: "sliced" or "transposed": how tensors of three and more axes lie in memory.
        chain: whether the op is called again from the state that it returned.
    """

    name: str
    op: str
    spec: str
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=lambda: MOST)
    wanted: tuple[str, ...] | None = None
    written: tuple[str, ...] = ()
    layout: str = ""
    chain: bool = False
    only: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        sizes, last = SIZES | self.sizes, self.name.rsplit("/", 1)[1]
        kind = "T" if re.fullmatch("T[0-9]+", last) else "long" if last.startswith("long") else ""
        return f"{self.name.rsplit('/', 1)[0]} K{sizes['K']}V{sizes['V']}{kind}"

    def dtypes_on(self, device: str) -> list[str]:
        return self.dtypes.get(device, "").split()

    def arguments(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        draw, sizes = Draw(self.name), SIZES | self.sizes
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for entry in self.spec.split():
            name, axes, kind = (*entry.split(":"), "normal")[:3]
            target = wide if axes.endswith("!") else torch.bfloat16 if axes.endswith("%") else dtype
            value = draw(kind, *(sizes[axis] for axis in axes.rstrip("!%")))
            if value.is_floating_point():
                value = self._laid_out(value.to(target)).to(device)
                value.requires_grad_(not self.written and (self.wanted is None or name in self.wanted))
            found[name] = value.to(device)
        for name, option in self.options.items():
            found[name] = option.to(device) if isinstance(option, Tensor) else option
            if isinstance(option, tuple) and option and isinstance(option[0], Tensor):
                found[name] = tuple(part.to(device) for part in option)
        return found

    def _laid_out(self, value: Tensor) -> Tensor:
        if value.dim() < 3 or not self.layout:
            return value
        if self.layout == "sliced":
            return torch.cat([value, value], -1)[..., : value.shape[-1]]
        return value.transpose(1, 2).contiguous().transpose(1, 2)

    def implementations(self, dtype: torch.dtype, device: str) -> list[str]:
        reasons = flashmix.explain(getattr(flashmix, self.op), **self.arguments(dtype, device)).reasons
        return [name for name, why in reasons.items() if why is None and (not self.only or name in self.only)]

    def results(self, dtype: torch.dtype, device: str, impl: str) -> dict[str, Any]:
        def call(x: dict[str, Any]) -> Any:
            torch.manual_seed(0)
            got = getattr(flashmix, self.op)(**x, impl=impl)
            again = x | {"initial_state": got[-1]} if self.chain else {}
            return (got, getattr(flashmix, self.op)(**again, impl=impl)) if self.chain else got

        x = self.arguments(dtype, device)
        with torch.no_grad():
            found = {"inference": call(x)} | {name: x[name] for name in self.written}
        leaves = {n: t for n, t in x.items() if isinstance(t, Tensor) and t.requires_grad}
        if not leaves:
            return found
        found["o"] = call(x)
        return found | gradients(self.name, found["o"], leaves)


def gradients(name: str, outputs: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the leaves for random gradients of the outputs; none flows into an infinite output."""
    roots = [t for t in _tensors(outputs) if t.requires_grad]
    draw = Draw(f"{name}/gradients")
    flows = [draw("normal", *t.shape).to(t.dtype).to(t.device).masked_fill(t.detach().isinf(), 0) for t in roots]
    found = torch.autograd.grad(roots, list(leaves.values()), flows, allow_unused=True)
    return {f"d_{n}": torch.zeros(0) if g is None else g for n, g in zip(leaves, found, strict=True)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def boundaries(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)
