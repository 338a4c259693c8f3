"""Differential check of a sample: each implementation against the definition in float64, within the error budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from budget import relative_errors
from torch import Tensor

from flashmix.op.choose import explain

from .sample import OPS, Sample, Tensors, cast

NEIGHBOURS = 8  # calls beside a suspect one that say how much such a call may err
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
CANCELLED = 0.1  # a result so much smaller than the call's largest is what is left of larger numbers
TERMS = 8  # and may err by the roundings of so many of them
Errors = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Finding:
    """What is wrong with one implementation."""

    impl: str
    text: str


def implementations(sample: Sample, device: str, wants: tuple[str, ...] = ()) -> list[str]:
    """Those that run the call."""
    placed, _ = sample.place(device)
    reasons = explain(OPS[sample.op], **sample.arguments(asking(placed, wants))).reasons
    return [impl for impl, reason in reasons.items() if reason is None and sample.impl in ("", impl)]


def asking(tensors: Tensors, wants: tuple[str, ...]) -> Tensors:
    """The tensors, those named `wants` as leaves that want a gradient."""
    return {n: t.detach().requires_grad_() if n in wants else t for n, t in tensors.items()}


def leaves(sample: Sample) -> tuple[str, ...]:
    """The arguments that get a gradient."""
    if not sample.gradient:
        return ()
    return tuple(n for n, t in sample.tensors.items() if t.is_floating_point() and n not in sample.fixed)


def evaluate(
    run: Callable[[Tensors], list[Tensor]], sample: Sample, tensors: Tensors, wants: tuple[str, ...]
) -> Tensors:
    """Results by number and gradients by name, on the CPU; what flows back are numbers that the call's dtype holds."""
    given = asking(tensors, wants)
    with torch.set_grad_enabled(bool(wants)):
        results = run(given)
    generator, pairs, found = torch.Generator().manual_seed(1), [], {}
    for place, t in enumerate(results):
        found[f"result {place}"] = t.detach().cpu()
        if not t.is_floating_point():
            continue
        flow = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(sample.dtype).to(t)
        if t.requires_grad:
            pairs.append((t, flow.masked_fill(t.detach() == -torch.inf, 0.0)))
    if wants and pairs:
        grads = torch.autograd.grad(
            [t for t, _ in pairs], [given[n] for n in wants], [f for _, f in pairs], materialize_grads=True
        )
        found |= {f"gradient of {n}": grad.cpu() for n, grad in zip(wants, grads, strict=True)}
    return found


def references(sample: Sample, wants: tuple[str, ...]) -> tuple[Tensors, Tensors]:
    """The definition in float64, and the baseline: the same in the dtype of a plain evaluation."""
    exact = evaluate(sample.meaning, sample, cast(sample.tensors, torch.float64), wants)
    plain = evaluate(sample.meaning, sample, cast(sample.tensors, plain_dtype(sample)), wants)
    if any(t.isnan().any() for t in plain.values()):  # a sum of decays beyond float16
        plain = evaluate(sample.meaning, sample, cast(sample.tensors, torch.float32), wants)
    return exact, plain


def plain_dtype(sample: Sample) -> torch.dtype:
    return sample.plain_dtype or (torch.float32 if sample.dtype == torch.float64 else sample.dtype)


def differential(sample: Sample, device: str, gradient: bool = True) -> Iterator[Finding]:
    """What is wrong with the implementations that run the call."""
    wants = leaves(sample) if gradient else ()
    taken = implementations(sample, device, wants)
    exact, plain = references(sample, wants)
    for impl in taken:
        placed, bases = sample.place(device)
        before = {n: base.clone() for n, base in bases.items()}
        got = evaluate(lambda tensors, impl=impl: sample.run(tensors, impl), sample, placed, wants)  # type: ignore[misc]
        for text in (*compare(sample, impl, got, exact, plain, wants), *changed(sample, placed, bases, before)):
            yield Finding(impl, text)


def changed(sample: Sample, placed: Tensors, bases: Tensors, before: Tensors) -> Iterator[str]:
    """The arguments that were changed, and those written beyond their own numbers."""
    for name, base in bases.items():
        if base is before[name]:
            continue
        after, was = base.clone(), before[name].clone()
        if name in sample.written:
            t = placed[name]
            for memory in (after, was):
                memory.as_strided(t.shape, t.stride(), t.storage_offset()).zero_()
        if not torch.equal(bits(after), bits(was)):
            yield f"{name} was changed" if name not in sample.written else f"memory around {name} was written"


def bits(t: Tensor) -> Tensor:
    """The numbers as integers, in which NaN is itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])


def compare(
    sample: Sample, impl: str, got: Tensors, exact: Tensors, plain: Tensors, wants: tuple[str, ...]
) -> Iterator[str]:
    """The results that are not within the budget; a suspect one is looked at again beside neighbouring calls."""
    around: Errors | None = None
    for name, value in got.items():
        if name not in exact:
            continue
        have, want, base = value, exact[name], plain[name]
        if have.shape != want.shape:
            yield f"{name} has shape {list(have.shape)}, not {list(want.shape)}"
            continue
        if not have.is_floating_point():
            if not torch.equal(have, want):
                yield f"{name} is not the definition's"
            continue
        have, want, base = finite_part(sample, name, have, want, base)
        if not torch.isfinite(have).all():
            yield f"{name} is not finite"
            continue
        errors, steps = relative_errors(have, want), steps_of(sample, name)
        base_errors = relative_errors(base.to(have.dtype), want)
        step = step_of(sample, impl, have.dtype)
        if within(errors, base_errors, steps, step, sample.bound):
            continue
        around = neighbours(sample, exact, wants) if around is None else around
        base_errors = tuple(max(pair) for pair in zip(base_errors, around[name], strict=True))  # type: ignore[assignment]
        if cancelled(have, want, exact, steps * step * sample.bound):
            continue
        if not within(errors, base_errors, steps, step, sample.bound):
            yield f"{name}: errors {errors[0]:.1e} RMS, {errors[1]:.1e} max, plain evaluation {base_errors[0]:.1e}, {base_errors[1]:.1e}"


def cancelled(have: Tensor, want: Tensor, exact: Tensors, budget: float) -> bool:
    """Whether a result is nothing but what is left where the call's numbers cancel (a softmax over one key), and small enough for that."""
    scale = max(
        (t[t.isfinite()].abs().max().item() for t in exact.values() if t.is_floating_point() and t.isfinite().any()),
        default=0.0,
    )
    scale = max(scale, 1.0)  # that of what flows back
    largest = max(t.numel() for t in exact.values())
    scale *= max(1.0, largest / max(1, want.numel())) ** 0.5  # a sum of so many of them
    return (
        want.abs().max().item() <= CANCELLED * scale
        and (have.double() - want).abs().max().item() <= TERMS * budget * scale
    )


def finite_part(sample: Sample, name: str, have: Tensor, want: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers that are compared: not those beyond float16, of the plain evaluation too, nor logarithms that are rightly -inf.

    No gradient is: one that is infinite is beyond every dtype.
    """
    largest = torch.finfo(have.dtype).max
    fits = (want.abs() <= largest) & (base.abs() <= largest)
    if not name.startswith("gradient"):
        fits |= want == -torch.inf
    if not fits.all():
        have, want, base = have[fits], want[fits], base[fits]
    seen = want != -torch.inf
    if seen.all() or not torch.equal(have != -torch.inf, seen):
        return have, want, base
    return have[seen], want[seen], base[seen].nan_to_num(neginf=0.0)


def step_of(sample: Sample, impl: str, dtype: torch.dtype) -> float:
    """One rounding step: of the result, and of the call unless the op keeps its results finer."""
    return EPS[dtype] if sample.own_dtype and impl != "triton" else max(EPS[dtype], EPS[sample.dtype])


def steps_of(sample: Sample, name: str) -> int:
    """A gradient passes the stages of the forward and of the backward."""
    return sample.steps * (2 if name.startswith("gradient") else 1)


def within(errors: tuple[float, float], baseline: tuple[float, float], steps: int, step: float, bound: float) -> bool:
    """Twice the baseline and the steps; the baseline of float64 is float32's, as much smaller, and the reference rounds as well."""
    errors = errors[0] / bound, errors[1] / bound
    if step == EPS[torch.float64]:
        ratio = step / EPS[torch.float32]
        return all(e <= 2 * (2 * base * ratio + steps * step) for e, base in zip(errors, baseline, strict=True))
    return all(e <= 2 * base + steps * step for e, base in zip(errors, baseline, strict=True))


def neighbours(sample: Sample, exact: Tensors, wants: tuple[str, ...]) -> Errors:
    """The largest errors of the plain evaluation of calls that differ by half a rounding step: how much such a call is known to err.

    One evaluation is right by luck where numbers cancel; eight are not.
    """
    generator = torch.Generator().manual_seed(2)
    dtype = plain_dtype(sample)
    step = EPS[torch.float32 if sample.dtype == torch.float64 else sample.dtype] / 2
    found: Errors = dict.fromkeys(exact, (0.0, 0.0))
    for _ in range(NEIGHBOURS):
        moved = {}
        for name, t in sample.tensors.items():
            if t.is_floating_point():
                own = min(step, EPS[t.dtype] / 2) if t.dtype != torch.float64 else step
                t = t.double() * (1 + own * (2 * torch.rand(t.shape, generator=generator, dtype=torch.float64) - 1))
            moved[name] = t
        for name, value in evaluate(sample.meaning, sample, cast(moved, dtype), wants).items():
            if not value.is_floating_point():
                continue
            seen = exact[name] != -torch.inf
            errors = relative_errors(value[seen].nan_to_num(), exact[name][seen])
            found[name] = (max(found[name][0], errors[0]), max(found[name][1], errors[1]))
    return found
