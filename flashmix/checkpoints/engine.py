"""The engine of a conversion: it carries the weights of a folder over by the rules of a family, in either direction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flashmix.checkpoints.files import Planned, WeightFiles, write_weights
from flashmix.checkpoints.rules import ConversionError, Mapped, Report, WeightRows, WeightRule, carry_over

Side = tuple[WeightRows, ...]


@dataclass(frozen=True)
class Step:
    """One rule with the files' names of its source: source parts, their names, target parts."""

    source: Side
    names: tuple[str, ...]
    target: Side


class Conversion:
    """The weights of `checkpoint` in the other format.

    Args:
        checkpoint: the source.
        rules: of the family.
        back: whether the source is ours.
        renames: patterns of the source's names and what stands for them in the rules.
        ignored: patterns of names of the source that are left out.

    Raises:
        ConversionError: it names every weight that no rule knows, that is missing or that has another shape, at once.
    """

    def __init__(
        self,
        checkpoint: WeightFiles,
        rules: Sequence[WeightRule],
        *,
        back: bool,
        renames: Sequence[tuple[str, str]] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.files: dict[str, str] = {}  # name in the rules -> name in the files
        self.left_out: list[str] = []
        for name in checkpoint.entries:
            known = name
            for pattern, replacement in renames:
                known = re.sub(pattern, replacement, known)
            if any(re.search(pattern, known) for pattern in ignored):
                self.left_out.append(name)
            else:
                self.files[known] = name
        self.errors: list[str] = []
        used: set[str] = set()
        self.steps = [self._step(rule, back, used) for rule in rules]
        self.errors += [f"unknown: {self.files[name]}" for name in self.files if name not in used]
        if self.errors:
            raise ConversionError("\n  ".join(["these weights do not fit:", *self.errors]))

    def _step(self, rule: WeightRule, back: bool, used: set[str]) -> Step:
        """The rule with names; notes errors."""
        ways = (rule.ours,) if back else (rule.theirs, *rule.others)
        side = next((way for way in ways if all(self._name(part) for part in way)), ways[0])
        target = rule.theirs if back else rule.ours
        names: list[str] = []
        dtypes = set()
        for part in side:
            name = self._name(part)
            if name is None:
                self.errors.append(f"missing: {part.name}, which {_names(target)} needs")
                continue
            used.add(name)
            entry = self.checkpoint.entries[self.files[name]]
            names.append(self.files[name])
            dtypes.add(entry.dtype)
            if entry.shape != part.shape and not (rule.any_cut and entry.shape[1:] == part.shape[1:]):
                self.errors.append(f"shape: {names[-1]} must have {list(part.shape)}, got {list(entry.shape)}")
        if len(dtypes) > 1:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes))
            self.errors.append(f"dtype: the weights of {_names(target)} must have one dtype, got {found}")
        if rule.any_cut and not back and len(names) == len(side):
            side = self._recut(side, names)
        return Step(side, tuple(names), target)

    def _name(self, part: WeightRows) -> str | None:
        return next((name for name in (part.name, *part.aliases) if name in self.files), None)

    def _recut(self, side: Side, names: list[str]) -> Side:
        """The parts as the files cut them, if they are as long together."""
        shapes = [self.checkpoint.entries[name].shape for name in names]
        got, wanted = sum(shape[0] for shape in shapes), sum(part.shape[0] for part in side)
        if got != wanted:
            self.errors.append(f"shape: {', '.join(names)} must have {wanted} rows together, got {got}")
        return side

    def tensors(self, step: Step) -> list[Tensor]:
        """The target's weights of one step."""
        found = [self.checkpoint.tensor(name) for name in step.names]
        if any(tensor.shape != part.shape for tensor, part in zip(found, step.source, strict=True)):
            found = list(torch.cat(found).split([part.shape[0] for part in step.source]))
        return carry_over(found, step.source, step.target)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of the target, one rule at a time."""
        for step in self.steps:
            yield from zip((part.name for part in step.target), self.tensors(step), strict=True)

    def write(self, folder: Path, prefix: str = "") -> None:
        """Writes the target's files; `prefix` comes before every name."""
        groups = []
        for step in self.steps:
            dtype = self.checkpoint.entries[step.names[0]].dtype
            groups.append([Planned(prefix + part.name, part.shape, dtype) for part in step.target])
        write_weights(folder, groups, lambda index: self.tensors(self.steps[index]))

    def report(self, family: str, back: bool) -> Report:
        """What is converted."""
        report = Report(family, "from flashmix" if back else "to flashmix", left_out=self.left_out)
        for step in self.steps:
            shapes = [part.shape for part in step.target]
            numbers = sum(prod(part.shape) for part in step.target)
            report.mapped.append(Mapped(list(step.names), [p.name for p in step.target], shapes, numbers))
        return report


def _names(parts: Sequence[WeightRows]) -> str:
    return ", ".join(part.name for part in parts)
