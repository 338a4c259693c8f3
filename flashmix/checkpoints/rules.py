"""Rules of a conversion: how the rows of some weights of one format lie in some weights of another, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor


class ConversionError(ValueError):
    """A checkpoint or a configuration that cannot be converted; the message says why, of every weight at once."""


@dataclass(frozen=True)
class WeightRows:
    """One weight of a rule: `repeat` times the same row of segments, one after the other.

    Attributes:
        name: of the weight.
        shape: of the weight.
        segments: name and rows of each segment, in their order; parts of both formats share these names.
        repeat: how often the segments come, as where a matrix holds query, key and value of one head after the other.
        aliases: other names under which files have it.
        axes: None, or the weight as a view of this shape with its axes in this order has the rows.
    """

    name: str
    shape: tuple[int, ...]
    segments: dict[str, int]
    repeat: int = 1
    aliases: tuple[str, ...] = ()
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def rows(self) -> int:
        return self.repeat * sum(self.segments.values())

    def take_apart(self, tensor: Tensor) -> dict[str, Tensor]:
        """The segments, each `[rows, elements of a row]`."""
        if self.axes is not None:
            view, order = self.axes
            tensor = tensor.reshape(view).permute(order)
        blocks = tensor.reshape(self.repeat, sum(self.segments.values()), -1)
        pieces = blocks.split(list(self.segments.values()), dim=1)
        return {name: piece.flatten(0, 1) for name, piece in zip(self.segments, pieces, strict=True)}

    def put_together(self, segments: dict[str, Tensor]) -> Tensor:
        """The weight, from the segments of `take_apart`."""
        pieces = [segments[name].unflatten(0, (self.repeat, rows)) for name, rows in self.segments.items()]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if self.axes is not None:
            view, order = self.axes
            tensor = tensor.reshape([view[axis] for axis in order]).permute([order.index(a) for a in range(len(order))])
        return tensor.reshape(self.shape).contiguous()


@dataclass(frozen=True)
class WeightRule:
    """The same rows in two formats: every segment of `ours` is one of `theirs`, and the other way round.

    Attributes:
        ours, theirs: the weights of each format.
        others: further ways in which files of theirs have these rows; the first one, `theirs`, is written.
        any_cut: the weights of theirs are one after the other; where a file cuts them is of no importance.

    Raises:
        ValueError: the two sides do not have the same segments.
    """

    ours: tuple[WeightRows, ...]
    theirs: tuple[WeightRows, ...]
    others: tuple[tuple[WeightRows, ...], ...] = ()
    any_cut: bool = False

    def __post_init__(self) -> None:
        wanted = _segments(self.ours)
        for side in (self.theirs, *self.others):
            if _segments(side) != wanted:
                raise ValueError(f"both sides of a rule must have the same rows, got {wanted} and {_segments(side)}")


def _segments(parts: Iterable[WeightRows]) -> dict[str, tuple[int, int]]:
    """Rows, and elements of a row, of every segment of a side."""
    return {
        name: (part.repeat * rows, prod(part.shape) // part.rows)
        for part in parts
        for name, rows in part.segments.items()
    }


def carry_over(tensors: Sequence[Tensor], source: Sequence[WeightRows], target: Sequence[WeightRows]) -> list[Tensor]:
    """The weights of `target`, from those of `source`."""
    segments: dict[str, Tensor] = {}
    for tensor, part in zip(tensors, source, strict=True):
        segments |= part.take_apart(tensor)
    return [part.put_together(segments) for part in target]


def same(
    ours: str, theirs: str, *shape: int, as_shape: tuple[int, ...] | None = None, aliases: Sequence[str] = ()
) -> WeightRule:
    """A weight that both formats have; theirs with the shape `as_shape` where that is another."""
    theirs_part = WeightRows(theirs, as_shape or shape, {"all": 1}, aliases=tuple(aliases))
    return WeightRule((WeightRows(ours, shape, {"all": 1}),), (theirs_part,))


def joined(ours: str, theirs: dict[str, int], *columns: int, aliases: dict[str, str] | None = None) -> WeightRule:
    """A matrix whose rows are those of several matrices of theirs, one after the other: name and rows of each."""
    segments = dict(theirs)
    parts = tuple(
        WeightRows(name, (rows, *columns), {name: rows}, aliases=tuple(filter(None, [(aliases or {}).get(name)])))
        for name, rows in theirs.items()
    )
    return WeightRule((WeightRows(ours, (sum(segments.values()), *columns), segments),), parts)


@dataclass
class Mapped:
    """One line of a report: the weights of one rule on both sides."""

    source: list[str]
    target: list[str]
    shapes: list[tuple[int, ...]]
    numbers: int


@dataclass
class Report:
    """What a conversion did.

    Attributes:
        family: the format that is not ours.
        direction: "to flashmix" or "from flashmix".
        mapped: the weights of each rule.
        left_out: weights of the source that the target has no place for, by intention.
    """

    family: str
    direction: str
    mapped: list[Mapped] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def numbers(self) -> int:
        """How many parameters were converted."""
        return sum(line.numbers for line in self.mapped)

    def __str__(self) -> str:
        lines = [f"{self.family}, {self.direction}: {len(self.mapped)} rules, {self.numbers:,} numbers"]
        for line in self.mapped:
            shapes = ", ".join(str(list(shape)) for shape in line.shapes)
            lines.append(f"  {_some(line.source)} -> {', '.join(line.target)} {shapes}")
        if self.left_out:
            lines.append(f"  left out: {_some(self.left_out)}")
        return "\n".join(lines)


def _some(names: list[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
