"""What the row-wise ops share: their implementations, the dtype they compute in, and kernels as differentiable operators.

An op goes by `choose`'s answer: "portable" is plain PyTorch in the op's own module, "triton" an `Operator`, whose kernels
are in the module beside it (`norm/op.py`, `norm/triton_gpu/`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.choose import Implementation
from flashmix.op.operator import only_data

Tensors = Sequence[Tensor | None]
Options = tuple[Any, ...]  # ints, floats, bools and strings


def portable(module: str) -> Implementation[Any]:
    """The plain PyTorch implementation of the row-wise op in `module`; it runs anything that passed the op's checks."""
    return Implementation("portable", module, lambda problem: None)


def triton(module: str, supports: Callable[[Tensors], str | None] = lambda tensors: None) -> Implementation[Tensors]:
    """The Triton implementation in `module`. The problem is the op's floating tensors; `supports` may refuse more."""
    return Implementation("triton", module, lambda tensors: _refused(tensors) or supports(tensors))


def _refused(tensors: Tensors) -> str | None:
    for tensor in tensors:
        if tensor is not None:
            reason = gpu.refuses(tensor.device, tensor.dtype)
            if reason is not None:
                return reason
    return None


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def differentiable_gradients(
    formula: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor | None], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of `formula(*inputs)` that can be differentiated again; None where an input needs none.

    The hand-written backwards work in place and keep no graph. When a backward runs under `create_graph=True`, the op's
    plain formula is differentiated instead. `grads` has one entry for each result of the formula, or None for it.
    """
    # Views: fresh nodes, so that the gradients stop at the op's inputs when one input is computed from another.
    fresh = [value if value is None else value.view_as(value) for value in inputs]
    results = formula(*fresh)
    asked = [
        (result, grad)
        for result, grad in zip((results,) if isinstance(results, Tensor) else results, grads, strict=True)
        if grad is not None
    ]
    wanted = {index: value for index, value in enumerate(fresh) if value is not None and value.requires_grad}
    found = torch.autograd.grad(
        [result for result, _ in asked],
        list(wanted.values()),
        [grad for _, grad in asked],
        create_graph=True,
        allow_unused=True,
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for index, gradient in zip(wanted, found, strict=True):
        gradients[index] = gradient
    return tuple(gradients)


class Kernels(Protocol):
    """What the Triton module has for an operator; `inputs` and `options` are in the order of the operator's schema.

    Only `allocate` is asked while a compiler traces, of tensors without data: it looks at shapes and dtypes alone.
    """

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Empty tensors for the results, and (with `save`) for what the backward needs beside the inputs."""

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        """Fills the results and what is kept (an empty list: nothing is)."""

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        """Fills the gradients, contiguous and like their inputs (None: not wanted), from those of the results."""


class Operator:
    """Kernels as one differentiable operator `flashmix::<name>`, for eager calls, autograd and compilers.

    Eager calls launch at once; compilers (and tensors that are more than data) see `flashmix::<name>` and
    `flashmix::<name>_backward`. A backward that is to be differentiated again takes the plain formula.

    Args:
        name: of the operator.
        kernels: the class that is its `Kernels`, "flashmix.ops.norm.triton_gpu.rows.Norm"; imported when first used.
        tensors: the inputs in the schema language of torch, "Tensor x, Tensor? weight".
        options: the options likewise, "float eps, bool center".
        formula: `formula(*inputs, *options)`, which autograd can differentiate: a tensor, or one for each result.
        adjoint: `adjoint(grads, inputs, options)` gives the gradients by calls that are differentiable themselves, and
            stands for `Kernels.backward` and the formula (ops that are linear).
        forgets: with an adjoint, the names of the inputs that it does not need; it gets None for them.
    """

    def __init__(
        self,
        name: str,
        kernels: str,
        tensors: str,
        options: str = "",
        *,
        formula: Callable[..., Tensor | Sequence[Tensor]] | None = None,
        adjoint: Callable[[Tensors, Tensors, Options], Tensors] | None = None,
        forgets: Sequence[str] = (),
    ) -> None:
        self.name, self._kernels, self._formula, self._adjoint = name, kernels, formula, adjoint
        names = [entry.split()[1] for entry in tensors.split(",")]
        self._saves, self._count = [entry not in forgets for entry in names], len(names)
        rest = f", {options}" if options else ""
        self.operator = self._define(
            name, f"({tensors}, bool save{rest}) -> (Tensor[] results, Tensor[] kept)", self._run_flat, self._fake
        )
        self.operator_backward = self._define(
            f"{name}_backward",
            f"(Tensor?[] grads, Tensor?[] inputs, Tensor[] kept, bool[] needs{rest}) -> Tensor[]",
            self._run_backward_flat,
            self._fake_backward,
        )
        torch.library.register_autograd(
            f"flashmix::{name}", self._backward_traced, setup_context=self._setup_context_traced
        )
        torch.library.register_autograd(f"flashmix::{name}_backward", self._backward_of_backward)
        self._function: Any = type(f"flashmix_{name}", (_Eager,), {})

    @staticmethod
    def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        torch.library.custom_op(f"flashmix::{name}", run, mutates_args=(), schema=schema).register_fake(fake)
        return getattr(torch.ops.flashmix, name).default

    @property
    def kernels(self) -> Kernels:
        module, name = self._kernels.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)

    def __call__(self, *inputs: Tensor | None, options: Options = ()) -> list[Tensor]:
        """The results of checked inputs."""
        save = wants_gradient(*inputs)
        if torch.compiler.is_compiling() or not only_data(inputs):
            return self.operator(*inputs, save, *options)[0]
        if save:
            return list(self._function.apply(self, options, *inputs))
        return self._run(inputs, options, False)[0]

    def _run(self, inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        results, kept = self.kernels.allocate(inputs, options, save)
        with gpu.on(results[0].device):
            self.kernels.forward(results, kept, inputs, options)
        return results, kept

    def _run_flat(self, *flat: Any) -> tuple[list[Tensor], list[Tensor]]:
        return self._run(flat[: self._count], flat[self._count + 1 :], flat[self._count])

    def _fake(self, *flat: Any) -> tuple[list[Tensor], list[Tensor]]:
        return self.kernels.allocate(flat[: self._count], flat[self._count + 1 :], flat[self._count])

    def _run_backward(
        self, grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], needs: Sequence[bool], options: Options
    ) -> list[Tensor | None]:
        gradients = _like(inputs, needs)
        with gpu.on(next(t for t in gradients if t is not None).device):
            self.kernels.backward(gradients, grads, inputs, kept, options)
        return gradients

    def _run_backward_flat(self, grads: Any, inputs: Any, kept: Any, needs: Any, *options: Any) -> list[Tensor]:
        return [t for t in self._run_backward(grads, inputs, kept, needs, options) if t is not None]

    def _fake_backward(self, grads: Any, inputs: Any, kept: Any, needs: Any, *options: Any) -> list[Tensor]:
        return [t for t in _like(inputs, needs) if t is not None]

    def _setup_context(
        self, ctx: Any, inputs: Tensors, results: Sequence[Tensor], kept: Sequence[Tensor], options: Options
    ) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t if saved else None for t, saved in zip(inputs, self._saves, strict=True)), *kept)
        ctx.options = options

    def _setup_context_traced(self, ctx: Any, inputs: Any, output: Any) -> None:
        results, kept = output
        self._setup_context(ctx, inputs[: self._count], results, kept, inputs[self._count + 1 :])

    def _backward_traced(self, ctx: Any, grads: Any, _: Any) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[: self._count]
        # torch takes an empty list among the options for one of tensors.
        nothing: Any = (None if option != [] else [] for option in ctx.options)
        return *self._backward(ctx, grads, needs, traced=True), None, *nothing

    def _backward(self, ctx: Any, grads: Tensors, needs: Sequence[bool], traced: bool) -> Tensors:
        """The gradients of all inputs; None where none is wanted."""
        inputs, kept = ctx.saved_tensors[: self._count], ctx.saved_tensors[self._count :]
        if all(grad is None for grad in grads):
            return (None,) * self._count
        if self._adjoint is not None:
            found = self._adjoint(grads, inputs, ctx.options)
            return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
        if torch.is_grad_enabled():
            return self._differentiable(grads, inputs, ctx.options)
        if not traced:
            return self._run_backward(grads, inputs, kept, needs, ctx.options)
        made = iter(self.operator_backward(grads, inputs, kept, needs, *ctx.options))
        return tuple(next(made) if needed else None for needed in needs)

    def _differentiable(self, grads: Tensors, inputs: Tensors, options: Options) -> Tensors:
        formula = self._formula
        if formula is None:
            raise NotImplementedError(f"{self.name} has no second derivative")
        return differentiable_gradients(lambda *tensors: formula(*tensors, *options), inputs, *grads)

    def _backward_of_backward(self, ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{self.name}: a compiled backward has no derivative")


class _Eager(torch.autograd.Function):
    """An operator called at once: the launches without the dispatcher between."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, options: Options, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        results, kept = operator._run(inputs, options, True)
        operator._setup_context(ctx, inputs, results, kept, options)
        ctx.operator = operator
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        traced = torch.compiler.is_compiling() or not only_data(grads)
        return None, None, *ctx.operator._backward(ctx, grads, ctx.needs_input_grad[2:], traced)


def _like(inputs: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
    """Empty gradients, contiguous, of the inputs that need one."""
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if needed and t is not None else None
        for t, needed in zip(inputs, needs, strict=True)
    ]
