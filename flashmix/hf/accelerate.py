"""`flashmix.accelerate`: the recurrent mixers of one transformers model computed by flashmix, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from flashmix.hf.families import KNOWN, looks_like_a_mixer
from flashmix.hf.rows import Boundaries, Given


class Accelerated:
    """What `accelerate` did to a model: `str()` of it is the report, `undo()` puts everything back.

    As a context manager it undoes at the end of the block.

    Attributes:
        replaced: the name of each mixer that flashmix computes now, and its class.
        left: the name of each mixer that stays as it was, and why.
    """

    def __init__(self, replaced: dict[str, str], left: dict[str, str], patches: list[Patch]) -> None:
        self.replaced, self.left = replaced, left
        self._patches = patches

    def undo(self) -> None:
        """Puts back every `forward`; the model computes what it computed before, bit for bit. Twice is no error."""
        while self._patches:
            self._patches.pop().undo()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.replaced and not self.left:
            return (
                "flashmix found no recurrent mixer in this model; softmax attention: flashmix.hf.register_attention()"
            )
        by_class: dict[str, list[str]] = {}
        for name, kind in self.replaced.items():
            by_class.setdefault(kind, []).append(name)
        lines = [f"flashmix computes {len(self.replaced)} of {len(self.replaced) + len(self.left)} mixers"]
        for kind, names in by_class.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"  {kind}: {', '.join(names[:2])}{more}")
        lines += [f"  left alone: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


class Patch:
    """One mixer whose `forward` is replaced, in the instance only.

    The package `accelerate` puts a wrapper into an instance's `forward` and what it wraps into `_old_forward`: there the wrapper
    stays, and what it wraps is replaced.
    """

    def __init__(self, mixer: nn.Module, layers: Sequence[nn.Module], boundaries: Boundaries) -> None:
        self.mixer = mixer
        self.slot = "_old_forward" if "_old_forward" in mixer.__dict__ else "forward"
        self.before = mixer.__dict__.get(self.slot)
        self.given = Given(boundaries, layers)
        mixer.__dict__["flashmix_given"] = self.given
        # no bound method: a file would find it by its name, which is that of the class's own
        mixer.__dict__[self.slot] = partial(KNOWN[type(mixer).__name__].forward, mixer)

    def undo(self) -> None:
        """Puts back what was in the instance's place, which usually is nothing."""
        self.given.forget()
        self.mixer.__dict__.pop("flashmix_given", None)
        self.mixer.__dict__.pop(self.slot, None)
        if self.before is not None:
            self.mixer.__dict__[self.slot] = self.before


def around(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """The layers around the mixer, the outermost first: its parents below the model's list of layers."""
    layers: list[nn.Module] = []
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            break
        layers.insert(0, modules[name])
    return layers


def refusal(mixer: nn.Module) -> str | None:
    """None if flashmix can compute this mixer, else why it is left alone."""
    family = KNOWN.get(type(mixer).__name__)
    if family is None:
        return f"{type(mixer).__name__} is no class that flashmix knows"
    if "flashmix_given" in mixer.__dict__:
        return "flashmix computes it already"
    if "forward" in mixer.__dict__ and "_old_forward" not in mixer.__dict__:
        return "something else replaced its forward"
    return family.refuses(mixer)


def accelerate(model: nn.Module, *, strict: bool = False, quiet: bool = False) -> Accelerated:
    """Lets flashmix compute the delta rules, scans, lightning attention and short convolutions of one transformers model.

        model = AutoModelForCausalLM.from_pretrained(...);    flashmix.accelerate(model)

    The `forward` of each such mixer is replaced in this instance: weights, projections (with LoRA on them), caches and all that
    lies around the mixers stay as they are, and no other model changes. Training, prefill and decoding on the model's own cache
    are served. Packed samples do not see each other where `cu_seq_lens_q`, `seq_idx` or restarting `position_ids` tell them
    apart; transformers' own torch path mixes them.

    A mixer is known by the name of its class and by its signature, attributes and shapes: Qwen3-Next, Qwen3.5, Qwen3.5-MoE,
    Qwen4, OLMo-hybrid, Kimi-Linear, GLM-5-Next, Ling-3, Mamba, Falcon-Mamba, Jamba, Zamba, Mamba-2, Bamba, Falcon-H1,
    Granite-MoE-hybrid, Nemotron-H, Zamba-2, LFM-2, LFM-3, MiniMax, Inkling, Inkling-2.

    Args:
        model: a transformers model, or any module with such mixers in it. Changed in place.
        strict: raise if a recurrent mixer has to stay as it is.
        quiet: do not print the report.

    Returns:
        An `Accelerated`: what was replaced, what was left and why; `undo()` puts all back, as does leaving a `with` block.

    Raises:
        TypeError: `model` is not a module.
        ValueError: with `strict`, a mixer is not known; nothing was replaced.

    Example:
        >>> from torch import nn
        >>> with accelerate(nn.Linear(8, 8)) as accelerated:
        ...     accelerated.replaced
        flashmix found no recurrent mixer in this model; softmax attention: flashmix.hf.register_attention()
        {}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules: dict[str, Any] = dict(model.named_modules())
    known: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in modules.items():
        if any(not outer or name.startswith(f"{outer}.") for outer in (*known, *left)):
            continue  # a part of a mixer
        if type(module).__name__ in KNOWN or looks_like_a_mixer(module):
            reason = refusal(module)
            if reason is None:
                known[name] = module
            else:
                left[name] = reason
    if strict and left:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise ValueError(f"model must have mixers that flashmix knows (strict=True), got {reasons}")
    boundaries = Boundaries()
    patches = [Patch(mixer, around(modules, name), boundaries) for name, mixer in known.items()]
    accelerated = Accelerated({name: type(mixer).__name__ for name, mixer in known.items()}, left, patches)
    if not quiet:
        print(accelerated)
    return accelerated
