"""The registry of mechanisms: one record per published mechanism, from which every list of them is derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashmix.layer.mixer import Mixer

Options = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Channels of the residual stream, number of blocks, channels per head, and the window of windowed attention."""

    width: int
    depth: int
    head_dim: int
    window: int

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One published mechanism: its paper, its function, and its layer where it has one.

    Attributes:
        title: its name in the tables of the documents.
        paper: its arXiv number, or the address of a paper that has none.
        function: the function under the paper's name; None for a layer on an op that is no mechanism of its own.
        call: the arguments of a tiny call of the function and their axes, as in `flashmix.capabilities`.
        options: further arguments of that call.
        positive: its arguments that are positive, because a sum of them divides.
        wide: its arguments that stay float32 with 16-bit inputs, beyond those called `beta` and `log_decay`.
        layer: its token-mixing layer.
        mixer: the layer's name in a model's configuration; default the function's.
        preset: the options of each layer of a model of one `Size`, from the embedding up; None: no preset of this name.
    """

    title: str
    paper: str
    function: Callable[..., Any] | None = None
    call: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    layer: type[Mixer[Any]] | None = None
    mixer: str = ""
    preset: Callable[[Size], list[Options]] | None = None

    @property
    def link(self) -> str:
        """The link to its paper in the documents."""
        address = self.paper if "/" in self.paper else f"arxiv.org/abs/{self.paper}"
        return f"[{self.paper}](https://{address})"

    @property
    def name(self) -> str:
        """The function's name, or the mixer's where there is no function."""
        return self.mixer if self.function is None else self.function.__name__


MECHANISMS: dict[str, Mechanism] = {}


def register(mechanism: Mechanism) -> None:
    """Adds a mechanism, which its own file does once.

    Raises ValueError: another one has its name.
    """
    if mechanism.name in MECHANISMS:
        raise ValueError(f"{mechanism.name} must be registered once, got a second mechanism of this name")
    MECHANISMS[mechanism.name] = mechanism


def by_heads(size: Size) -> list[Options]:
    """The preset of a mechanism whose heads are its only option."""
    return size.depth * [{"heads": size.heads}]


def functions() -> dict[str, Callable[..., Any]]:
    """The function of each mechanism, by name."""
    return {name: entry.function for name, entry in MECHANISMS.items() if entry.function is not None}


def mixers() -> dict[str, type[Mixer[Any]]]:
    """The layer class of each mechanism that has one, by its name in a model's configuration."""
    return {entry.mixer or name: entry.layer for name, entry in MECHANISMS.items() if entry.layer is not None}


def presets() -> dict[str, Callable[[Size], list[Options]]]:
    """The preset of each mechanism that has one, by its name in a model's configuration."""
    return {entry.mixer or name: entry.preset for name, entry in MECHANISMS.items() if entry.preset is not None}
