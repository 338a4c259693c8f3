"""How the row-wise ops are compared with their definitions: outputs and gradients, in each dtype, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from budget import assert_within_budget
from torch import Tensor

from flashmix.op.autograd import all_kept

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Op = Callable[..., Tensor | tuple[Tensor | None, ...]]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same for every dtype up to its rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(op: Op, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of `op(*inputs)` and the gradients of the inputs for random gradients of the outputs."""
    leaves = [value.detach().clone(memory_format=torch.preserve_format).requires_grad_() for value in inputs]
    got = op(*leaves)
    outputs = [got] if isinstance(got, Tensor) else [value for value in got if value is not None]
    grads = [random(*y.shape, dtype=y.dtype, seed=100 + i).to(y.device) for i, y in enumerate(outputs)]
    return [y.detach() for y in outputs], list(torch.autograd.grad(outputs, leaves, grads, materialize_grads=True))


def assert_matches(op: Op, definition: Op, *inputs: Tensor, steps: int = 1) -> None:
    """Outputs and gradients of `op` against `definition` in float64; budget: `definition` in the inputs' dtype."""
    dtype = inputs[0].dtype
    exact = results(definition, [value.double() for value in inputs])
    for kind, have, want, baseline in zip(
        ("output", "gradient"), results(op, inputs), exact, plain_results(definition, inputs), strict=True
    ):
        for index, (h, w, b) in enumerate(zip(have, want, baseline, strict=True)):
            assert_within_budget(f"{kind} {index}", h, w, b, dtype, steps)


def plain_results(definition: Op, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`definition` in the inputs' dtype; for float64, the reference itself, its float32 error scaled to float64's."""
    if inputs[0].dtype != torch.float64:
        return results(definition, inputs)
    narrow = [value.float() for value in inputs]
    exact = results(definition, [value.double() for value in narrow])
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    outputs, gradients = (
        [w + (h.double() - w) * ratio for h, w in zip(have, want, strict=True)]
        for have, want in zip(results(definition, narrow), exact, strict=True)
    )
    return outputs, gradients


def assert_same_bits(name: str, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    different = (got != want).sum().item()
    assert torch.equal(got, want), f"{name}: {different} of {got.numel()} elements differ"


def assert_compiles(op: Op, *inputs: Tensor) -> None:
    """`torch.compile(fullgraph=True)` gives what the op gives, gradients too, up to the order of rounding."""
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for have, want in zip(results(compiled, inputs), results(op, inputs), strict=True):
        for h, w in zip(have, want, strict=True):
            torch.testing.assert_close(h, w)


def assert_sound_operator(op: Any, call: Any, *wanted: str, impl: str = "portable") -> None:
    """The operator of an `Op` and that of its backward, for the gradients of all fields `wanted` and of the first alone."""
    torch.library.opcheck(op.operator, (*op.flat(call), True, impl))
    flat = [value.detach() if isinstance(value, Tensor) else value for value in op.flat(call)]
    outputs, kept = op.operator(*flat, True, impl)
    kept, grads = list(all_kept(op, outputs, kept)), [torch.ones_like(y) for y in outputs]
    for names in (list(wanted), list(wanted[:1])):
        torch.library.opcheck(op.backward_operator, (*flat, grads, kept, names, impl))


def assert_rows_do_not_meet(
    op: Callable[[Tensor], Tensor], x: Tensor, lengths: Sequence[int] = (0, 1, 2, 3, 17)
) -> None:
    """Batch and prefix invariance, bit for bit: `op` of some rows and first tokens of `x [B, T, ...]`, of `op(x)` a
    part. All tokens are one of the `lengths`.

    The same of the gradient, when nothing comes back from the other rows and tokens. Odd sizes on purpose: on the CPU
    the end of a tensor takes another path through torch than its middle.
    """
    whole = x.clone().requires_grad_()
    y = op(whole)
    for rows in (slice(0, 1), slice(1, 3)):
        for tokens in (*lengths, x.shape[1]):
            part = x[rows, :tokens].clone().requires_grad_()
            y_part = op(part)
            grad = torch.zeros_like(y)
            grad[rows, :tokens] = y_part.detach()
            (d_whole,) = torch.autograd.grad(y, whole, grad, retain_graph=True)
            (d_part,) = torch.autograd.grad(y_part, part, y_part.detach())
            assert_same_bits(f"rows {rows}, {tokens} tokens", y_part, y[rows, :tokens])
            assert_same_bits(f"gradient, rows {rows}, {tokens} tokens", d_part, d_whole[rows, :tokens])
    assert_same_bits("again", op(x), y)


def assert_laws_on_the_device(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Bits of rows alone and of every run; in a graph; compiled: of an `op` of `x [B, T, ...]` on a GPU."""
    assert_rows_do_not_meet(op, x.cuda())
    assert_repeats(lambda x: op(x.cuda()).cpu(), x)
    leaf = x.cuda().requires_grad_()
    assert_captures_both_ways(op, leaf)
    torch.testing.assert_close(torch.compile(op, fullgraph=True)(leaf), op(leaf))


def assert_captures_both_ways(op: Callable[[Tensor], Tensor], leaf: Tensor) -> None:
    """Forward and backward of a `leaf` have the same bits in a CUDA graph."""

    def step() -> tuple[Tensor, ...]:
        y = op(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_captures(step)


def assert_repeats(op: Op, *inputs: Tensor) -> None:
    """Outputs and gradients have the same bits every time."""
    first = results(op, inputs)
    for _ in range(3):
        for kind, again, before in zip(("output", "gradient"), results(op, inputs), first, strict=True):
            for index, (have, want) in enumerate(zip(again, before, strict=True)):
                assert_same_bits(f"{kind} {index} again", have, want)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, whatever waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_captures(step: Callable[[], tuple[Tensor, ...]]) -> None:
    """`step()` does not wait for the GPU, and replayed in a CUDA graph it gives the same bits."""
    want = step()
    with nothing_waits():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for have, wanted in zip(got, want, strict=True):
        assert_same_bits("graph", have, wanted)


def saved_bytes(op: Op, *inputs: Tensor) -> int:
    """What autograd keeps for the backward of `op(*inputs)`."""
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        op(*(value.detach().requires_grad_() for value in inputs))
    return sum(kept.values())
