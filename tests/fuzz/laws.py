"""Metamorphic checks of a sample: a call and other calls of the same op that must agree.

Where docs/numerics.md says that a law holds bit for bit for an implementation, the bits are compared; else both calls are within the
budget of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .check import Finding, bits, compare, differential, evaluate, implementations, leaves, references
from .draw import Draw
from .sample import Sample, Tensors

EXACT = (
    "portable",
    "native",
)  # the implementations whose bits the laws are about, besides "repeat", which holds for all
RULES = ("linear_attention", "delta_rule", "dplr")
PLAIN = (  # products and powers of plain PyTorch, whatever `impl` is
    "s4d",
    "s5",
    "lru",
    "rodimus",
    "ttt_linear",
    "titans_linear",
    "momentum_deltanet",
    "slstm",  # torch's sigmoid rounds by the place of a number in its tensor
)
Law = Callable[[Sample, Draw, str], Iterator[Finding]]


def exact(sample: Sample, law: str, *others: Sample, device: str = "cpu", wants: tuple[str, ...] = ()) -> list[str]:
    """The implementations that keep a law bit for bit, and run all the calls."""
    names = EXACT if law not in sample.loose else EXACT[1:]
    if sample.op in PLAIN:
        names = ()
    elif device != "cpu":  # cuBLAS promises nothing; of the recurrence's kernels docs/numerics.md says it of the batch
        names = ("triton",) if law == "batch" and sample.op in RULES else ()
    taken = [implementations(one, device, wants) for one in (sample, *others)]
    return [impl for impl in names if all(impl in own for own in taken)]


def same(impl: str, what: str, got: Tensor, want: Tensor) -> Iterator[Finding]:
    """A finding if the bits differ."""
    if got.shape != want.shape:
        yield Finding(impl, f"{what}: shape {list(got.shape)}, not {list(want.shape)}")
    elif not torch.equal(
        bits(got + 0.0 if got.is_floating_point() else got), bits(want + 0.0 if want.is_floating_point() else want)
    ):
        share = (got != want).double().mean().item()
        largest = (got.double() - want.double()).abs().max().item()
        yield Finding(impl, f"{what}: {share:.0%} of the numbers have other bits, by up to {largest:.1e}")


def results(sample: Sample, impl: str, device: str, contiguous: bool = False, gradient: bool = False) -> Tensors:
    placed, _ = sample.place(device, contiguous or "layout" in sample.loose)
    wants = leaves(sample) if gradient else ()
    return evaluate(lambda tensors: sample.run(tensors, impl), sample, placed, wants)


def repeat(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """The same call gives the same bits, gradients too."""
    for impl in implementations(sample, device, leaves(sample)):
        first, second = (results(sample, impl, device, gradient=True) for _ in range(2))
        for name, value in first.items():
            yield from same(impl, f"again, {name}", second[name], value)


def layout(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """Strides change no bit."""
    for impl in exact(sample, "layout", device=device):
        plain = results(sample, impl, device, contiguous=True)
        for name, value in results(sample, impl, device).items():
            yield from same(impl, f"strided, {name}", value, plain[name])
    yield from differential(sample, device, gradient=False)


def row(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """A sequence alone is the same as in a batch."""
    B = next(t.shape[0] for n, t in sample.tensors.items() if n in sample.per_row)
    n = draw.free.randrange(B)
    alone = sample.cut(slice(n, n + 1), states=slice(n, n + 1))
    for impl in exact(sample, "batch", alone, device=device):
        together = results(sample, impl, device)
        for name, value in results(alone, impl, device).items():
            yield from same(impl, f"row {n} alone, {name}", value, together[name][n : n + 1])
    yield from differential(alone, device, gradient=False)


def packed(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """Packed sequences are the same as one by one; one of a single token alone is packed too, as it would be a step."""
    assert sample.lengths is not None
    for impl in exact(sample, "packed", device=device):
        together = results(sample, impl, device)
        for n, (first, last) in enumerate(pairwise(accumulate((0, *sample.lengths)))):
            if first == last:
                continue
            alone = sample.cut(tokens=slice(first, last), states=slice(n, n + 1))
            alone = replace(alone, lengths=(1,) if last == first + 1 else None)
            if impl not in implementations(alone, device):
                continue
            for place, (name, value) in enumerate(results(alone, impl, device).items()):
                axis = sample.axes[place]
                whole = together[name]
                part = whole[:, first:last] if axis in ("token", "lse") else whole[n : n + 1]
                part = part[None] if axis == "lse" and value.dim() == 3 else part
                yield from same(impl, f"sequence {n} alone, {name}", value, part)


def prefix(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """The first tokens alone give the same outputs, and the same gradients of a loss on them."""
    T = next(t.shape[1] for n, t in sample.tensors.items() if n in sample.per_token)
    upto = draw.free.randint(2, T)
    part = sample.cut(tokens=slice(0, upto))
    token = [place for place, axis in enumerate(sample.axes) if axis == "token"]
    wants = tuple(n for n in leaves(sample) if n in sample.per_token)
    for impl in exact(sample, "prefix", part, device=device, wants=wants):
        found = []
        for one in (sample, part):
            placed, _ = one.place(device, contiguous="layout" in sample.loose)

            def first_tokens(tensors: Tensors, one: Sample = one, impl: str = impl) -> list[Tensor]:
                got = one.run(tensors, impl)
                return [got[place][:, :upto] for place in token]

            found.append(evaluate(first_tokens, one, placed, wants))
        for name, value in found[1].items():
            whole = found[0][name]
            whole = whole[:, :upto] if name.startswith("gradient") else whole
            yield from same(impl, f"first {upto} of {T} tokens, {name}", value, whole)
    yield from differential(part, device, gradient=False)


def split(sample: Sample, draw: Draw, device: str) -> Iterator[Finding]:
    """Parts with the state carried along are the whole, within the budget of both."""
    T = next(t.shape[1] for n, t in sample.tensors.items() if n in sample.per_token)
    cuts = [0, *sorted(draw.free.randint(0, T) for _ in range(draw.free.choice((1, 1, 2, 3)))), T]
    exact, plain = references(sample, ())
    for impl in implementations(sample, device):
        outputs, states = [], None
        for first, last in pairwise(cuts):
            part = sample.cut(tokens=slice(first, last))
            if states is not None:
                part.tensors |= dict(zip(sample.states, states, strict=True))
                part.layouts = {n: at for n, at in sample.layouts.items() if n not in sample.states}
            if impl not in implementations(part, device):
                break
            placed, _ = part.place(device)
            got = [t.cpu() for t in part.run(placed, impl)]
            count = len(got) - len(sample.states)
            outputs.append(got[:count])
            states = got[count:]
        else:
            assert states is not None
            joined = [*(torch.cat(list(parts), 1) for parts in zip(*outputs, strict=True)), *states]
            whole = replace(sample, steps=sample.steps * len(cuts))
            for text in compare(whole, impl, {f"result {i}": t for i, t in enumerate(joined)}, exact, plain, ()):
                yield Finding(impl, f"cut at {cuts[1:-1]}: {text}")


LAWS: dict[str, Law] = {
    "repeat": repeat,
    "layout": layout,
    "batch": row,
    "packed": packed,
    "prefix": prefix,
    "split": split,
}


def applicable(sample: Sample) -> list[str]:
    """The laws that say something about this sample."""
    names = {name for name in sample.laws if name in ("repeat", "layout")}
    sizes = [t.shape for n, t in sample.tensors.items() if n in sample.per_token]
    if not sizes:
        return sorted(names)
    B, T = sizes[0][:2]
    if sample.lengths is not None:
        return sorted(names | ({"packed"} & sample.laws))
    if "batch" in sample.laws and B > 1:
        names.add("batch")
    if "prefix" in sample.laws and sample.causal and T > 2 and B:
        names.add("prefix")
    if sample.states and T and B and "prefix" in sample.laws:
        names.add("split")
    return sorted(names)
