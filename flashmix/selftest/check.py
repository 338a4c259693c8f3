"""`flashmix doctor --check`: each op's each implementation that runs here, forward and backward, within the error budget.

The cases follow from the code: the public ops, the implementations that take a call on the device (`explain`), the tiny call of each op.
The reference is the definition in float64 and the baseline its evaluation in float32, rounded to the dtype under test; for a mechanism,
which has no definition of its own, both are plain PyTorch (`impl="portable"`).
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from flashmix.capabilities import public_ops, tiny_call
from flashmix.gpu import arch
from flashmix.mechanisms.registry import functions
from flashmix.op.choose import explain
from flashmix.selftest.budget import Spent, spend
from flashmix.selftest.definitions import DEFINITIONS, flattened, packed

Results = dict[str, Tensor]
# Convolution, length, gates, write, read, norm: the most stages that an op rounds after. A gradient passes them twice.
STAGES = 6
PROCESSES = 12  # that compile at once for a GPU
# Axes of the tiny call: channels per head, positions, half of a rotated head, channels of rows, a vocabulary, levels for all tokens; q, k
# and v of two heads.
SIZES = {"K": 32, "P": 256, "R": 16, "D": 64, "M": 100, "L": 9, "C": 192}
OWN_SIZES = {"based": {"K": 16}, "rebased": {"K": 16}}  # whose features of more channels are too many for C and kernels
ENDS = (0, 5, 5, 69, 150)  # of packed sequences: short, empty, one of a chunk's length, a longer one


@dataclass(frozen=True)
class Trial:
    """One call of an op: how many tokens, in which dtype, packed or not, causal or not."""

    op: str
    dtype: torch.dtype
    tokens: int
    packed: bool = False
    causal: bool = False

    def __str__(self) -> str:
        marks = ", packed" * self.packed + ", causal" * self.causal
        return f"{str(self.dtype).removeprefix('torch.')}, {self.tokens} tokens{marks}"

    def arguments(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
        """The arguments: numbers that the trial's dtype holds, as tensors of `dtype` (float32 arguments stay at least that)."""
        rounded = self._tiny(self.dtype, "cpu")
        found = self._tiny(dtype, device)
        for name, t in rounded.items():
            if isinstance(t, Tensor) and t.is_floating_point():
                found[name] = t.to(found[name])
        return found

    def _tiny(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
        sizes = SIZES | OWN_SIZES.get(self.op, {})
        call = tiny_call(self.op, dtype, device, self.tokens, batch=1 if self.packed else 2, sizes=sizes)
        for name, t in call.items():
            if isinstance(t, Tensor) and t.dim() > 3 and not name.endswith("log_decay"):
                call[name] = t * (2 / t.shape[-1] ** 0.5)  # keys shorter than 1, with which no state grows
        if self.causal:
            call["causal"] = True
        return call

    def per_token(self) -> set[str]:
        """The arguments with one entry per token."""
        whole, part = (tiny_call(self.op, tokens=n) for n in (self.tokens, self.tokens - 1))
        return {name for name, t in whole.items() if isinstance(t, Tensor) and t.shape != part[name].shape}


def trials(op: str) -> Iterator[Trial]:
    """The calls that an op is checked with; a mechanism, whose kernels are mostly another op's, with the first of them."""
    names = set(inspect.signature(public_ops()[op]).parameters)
    tokens = 16 if {"cache", "state"} & names else 150  # steps take at most 16, and so many the tiny call's cache holds
    yield Trial(op, torch.float32, tokens)
    if op in functions():
        return
    if "causal" in names:
        yield Trial(op, torch.float32, tokens, causal=True)
    if "cu_seqlens" in names and "cache" not in names:
        yield Trial(op, torch.float32, tokens, packed=True)
    yield Trial(op, torch.bfloat16, tokens, causal="causal" in names)


def leaves_of(call: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments that get a gradient: not a teacher's, nor the table of a rotation, to which kernels give none."""
    floating = {n: t for n, t in call.items() if isinstance(t, Tensor) and t.is_floating_point()}
    return {
        n: t.detach().requires_grad_()
        for n, t in floating.items()
        if not n.startswith("teacher_") and n not in ("cos", "sin")
    }


def evaluate(run: Callable[..., Any], call: dict[str, Any], dtype: torch.dtype, backward: bool) -> Results:
    """Results, tensors that were written, and gradients of a call by name, on the CPU; what flows back are numbers of `dtype`."""
    leaves = leaves_of(call) if backward else {}
    with torch.set_grad_enabled(backward):
        outputs = flattened(run(**{**call, **leaves}))
    generator = torch.Generator().manual_seed(1)
    flows = [torch.rand(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t) for t in outputs]
    found = {f"result {i + 1}": t.detach() for i, t in enumerate(outputs)}
    if backward:
        flowing = [
            (y, flow) for y, flow in zip(outputs, flows, strict=True) if y.requires_grad
        ]  # a stabiliser has no gradient
        ys, into = zip(*flowing, strict=True)
        grads = torch.autograd.grad(ys, list(leaves.values()), into, allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
    return {name: t.cpu() for name, t in found.items()}


def public(trial: Trial, impl: str, **call: Any) -> list[Tensor]:
    """The results of the public op, and the tensors that it has written."""
    op = public_ops()[trial.op]
    names = inspect.signature(op).parameters
    options: dict[str, Any] = {"impl": impl}
    if "return_state" in names:
        options["return_state"] = True
    if trial.packed:
        options["cu_seqlens"] = torch.tensor(ENDS, device=next(iter(call.values())).device)
    results = flattened(op(**call, **options))
    if trial.op == "attention_with_cache":
        results = results[:1]  # the second one is there on request
    return results + [call[name] for name in ("state", "conv_state") if name in call]


def expected(trial: Trial, backward: bool) -> tuple[Results, Results]:
    """The reference in float64 and the baseline in float32."""
    run: Callable[..., Any] = partial(public, trial, "portable")
    if trial.op in DEFINITIONS:
        run = DEFINITIONS[trial.op]
        if trial.packed:
            run = partial(_packed, trial)
    exact, plain = (
        evaluate(run, trial.arguments(dtype, "cpu"), trial.dtype, backward) for dtype in (torch.float64, torch.float32)
    )
    return exact, plain


def _packed(trial: Trial, **call: Any) -> list[Tensor]:
    return packed(DEFINITIONS[trial.op], call, trial.per_token(), ENDS)


def differentiable(trial: Trial) -> bool:
    """Whether the op has a gradient: asked for one, it refuses otherwise."""
    call = trial.arguments(torch.float32, "cpu")
    first = next(t for t in call.values() if isinstance(t, Tensor))
    first.requires_grad_()
    try:
        explain(public_ops()[trial.op], **call)
    except RuntimeError:
        return False
    return True


@dataclass
class Verdict:
    """What came of one implementation of an op: its largest share of the budget, and the first case that failed."""

    impl: str
    share: float = 0.0
    failure: str | None = None

    def __str__(self) -> str:
        return f"{self.impl} {'FAILED' if self.failure else f'{self.share:.2f}'}"

    def add(self, trial: Trial, name: str, got: Tensor, spent: list[Spent]) -> None:
        worst = max(spent, key=lambda s: s.share)
        self.share = max(self.share, worst.share)
        if self.failure is None and not torch.isfinite(got).all():
            self.failure = f"{trial}: {name}: not finite"
        elif self.failure is None and not worst.within:
            self.failure = (
                f"{trial}: {name}: {worst.kind} error {worst.error:.1e} is over the budget {worst.budget:.1e}"
            )


def check_op(op: str, device: torch.device) -> list[Verdict]:
    """A verdict for each implementation of `op` that runs on `device`; none for a mechanism that only plain PyTorch runs there.

    Example:
        >>> [str(verdict) for verdict in check_op("token_shift", torch.device("cpu"))]
        ['portable 0.00']
    """
    verdicts: dict[str, Verdict] = {}
    for trial in trials(op):
        call = trial.arguments(trial.dtype, device)
        backward = differentiable(trial)
        asked = call | leaves_of(call) if backward else call
        reasons = explain(partial(public, trial, "auto"), **asked).reasons
        taken = [impl for impl, reason in reasons.items() if reason is None]
        if op in functions():  # its plain PyTorch is the reference
            taken = [impl for impl in taken if impl != "portable"] if device.type == "cpu" else taken
        if not taken:
            continue
        exact, plain = expected(trial, backward)
        for impl in taken:
            verdict = verdicts.setdefault(impl, Verdict(impl))
            try:
                _compare(verdict, trial, device, backward, exact, plain)
            except Exception as error:  # whatever a broken kernel, compiler or driver raises is the finding
                verdict.failure = verdict.failure or f"{trial}: {type(error).__name__}: {first_line(error)}"
    return list(verdicts.values())


def _compare(
    verdict: Verdict, trial: Trial, device: torch.device, backward: bool, exact: Results, plain: Results
) -> None:
    call = trial.arguments(trial.dtype, device)
    for name, got in evaluate(partial(public, trial, verdict.impl), call, trial.dtype, backward).items():
        nothing = exact[name].isinf() & (got == exact[name])  # the maximum of no numbers
        got, want, base = (t.masked_fill(nothing, 0.0) for t in (got, exact[name], plain[name]))
        steps = 2 * STAGES if name.startswith("gradient") else STAGES
        verdict.add(trial, name, got, spend(got, want, base.to(got.dtype), trial.dtype, steps))


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def around(op: str, impl: str) -> str:
    """How to do without an implementation that is wrong here."""
    if impl == "portable":
        return "this is plain PyTorch: another version of torch may be right"
    return f"""go around it: {op}(..., impl="portable"), or FLASHMIX_AVOID={impl} in the environment for all ops and models"""


def verdicts_of(op: str, device: torch.device) -> list[Verdict]:
    """`check_op`, where an error of the reference or of the choice is a verdict too."""
    try:
        return check_op(op, device)
    except Exception as error:
        return [Verdict("portable", failure=f"{type(error).__name__}: {first_line(error)}")]


def begun(device: torch.device, pool: Executor) -> Iterator[tuple[str, list[Verdict]]]:
    """The verdicts op by op on a GPU, where nearly all the time is the kernels' compilation: all wait for a process from now on.

    The ops with most calls begin first, so that none of them is what the others wait for at the end.
    """
    ops = list(public_ops())
    calls = {op: len(list(trials(op))) for op in ops}
    waiting = {op: pool.submit(verdicts_of, op, device) for op in sorted(ops, key=lambda op: -calls[op])}
    return ((op, awaited(waiting[op])) for op in ops)


def awaited(verdicts: Future[list[Verdict]]) -> list[Verdict]:
    """What a process found; that it died, if it did."""
    try:
        return verdicts.result()
    except Exception as error:
        return [Verdict("triton", failure=f"{type(error).__name__}: {first_line(error)}")]


def processes() -> Executor:
    """Those that check on GPUs: each of one thread, for the references are of a few numbers."""
    number, context = min(PROCESSES, os.cpu_count() or 1), get_context("spawn")
    return ProcessPoolExecutor(number, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


def check(write: Callable[[str], None] = print) -> bool:
    """Checks all ops on the CPU and each GPU, one line per op as soon as it is done; True if all are within their budgets."""
    start, done, failed = time.perf_counter(), 0, 0
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", gpu.index) for gpu in arch.gpus()]
    with ExitStack() as stack:
        found: dict[torch.device, Iterator[tuple[str, list[Verdict]]]]
        found = {cpu: ((op, verdicts_of(op, cpu)) for op in public_ops())}
        if gpus:  # which compile while the CPU's are checked
            pool = stack.enter_context(processes())
            found |= {gpu: begun(gpu, pool) for gpu in gpus}
        for device, ops in found.items():
            write(f"on {device}: the largest error of each implementation, as a part of its budget (1.00 is all of it)")
            for op, verdicts in ops:
                if not verdicts:
                    continue
                done += 1
                failures = [verdict for verdict in verdicts if verdict.failure]
                failed += bool(failures)
                write(f"  {op:30}{', '.join(map(str, verdicts))}")
                for verdict in failures:
                    write(f"    {op}, {verdict.impl}, {verdict.failure}; {around(op, verdict.impl)}")
    seconds = time.perf_counter() - start
    total = f"all of {done} ops are" if not failed else f"{failed} of {done} ops are not"
    write(f"{total} within the error budget ({seconds:.0f} s)")
    return not failed
