"""Autograd of an op: eager calls, the operator that compilers see, second derivatives and torch.func.

`op` is an `Op` of flashmix.op.call throughout, `call` one of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead


def bump_versions(*overwritten: Tensor | None) -> None:
    """Tells autograd that these were overwritten: a backward that saved them before raises."""
    for t in overwritten:
        if t is not None:
            torch.autograd.graph.increment_version(t)


def bump_versions_of(library: torch.library.Library, name: str, operator: Any) -> None:
    """Gives the operator `name`, which writes into its arguments, the kernel that tells autograd so."""
    places = [i for i, a in enumerate(operator._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    def run(keyset: Any, *args: Any) -> Any:
        bump_versions(*(args[i] for i in places))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, run, "ADInplaceOrView", with_keyset=True)


def register(op: Any, library: torch.library.Library) -> None:
    """Gives the operator of `op` its backward."""
    nothing = len(op.call.packings) * 2 + len(op.call.options) + 2  # packings as two arguments, options, save, impl

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, (_, impl) = op.from_flat(inputs)
        save(op, ctx, call, tuple(output[0]), tuple(output[1]), impl)
        ctx.empty = [
            [] if value == [] else None for value in inputs[-nothing:]
        ]  # an empty list counts as one of tensors

    def backward(ctx: Any, grads: Any, _: Any) -> tuple[Any, ...]:
        names = op.call.names
        return *gradients(op, ctx, grads, names, ctx.needs_input_grad[: len(names)], True), *ctx.empty

    torch.library.register_autograd(f"flashmix::{op.name}", backward, setup_context=setup_context, lib=library)


def own(results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Tensor]:
    """The results of an operator, whose memory may be neither an argument's nor another result's: those are copied."""
    taken = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}
    owned = []
    for t in results:
        place = t.untyped_storage()._cdata
        owned.append(t.clone() if place in taken else t)
        taken.add(place)
    return owned


def refuse_second_derivative(op: Any) -> None:
    """Gives the operator of the backward a backward that raises; not at import, where each registration makes two dataclasses."""
    if op.refuses_second:
        return
    op.refuses_second = True

    def no_second_derivative(ctx: Any, *grads: Any) -> None:
        if op.formula is not None:
            raise NotImplementedError(f"{op.name}: a compiled backward has no derivative")
        raise NotImplementedError(f"{op.name} has no second derivative")

    torch.library.register_autograd(f"flashmix::{op.name}_backward", no_second_derivative, lib=op.library)


def save(op: Any, ctx: Any, call: Any, outputs: Sequence[Tensor], kept: Sequence[Tensor], impl: str) -> None:
    """Saves the tensors of the call that its backward needs, the outputs it reads, and what the implementation kept."""
    ctx.set_materialize_grads(False)
    ctx.shared = _dtypes(op, call) if op.shares else None
    kept = all_kept(op, outputs, kept)
    values = {**call.for_backward(outputs).__dict__}
    values.pop("of_kind", None)  # hooks of saved tensors may change these
    given, tensors = [], []
    for name in call.names:
        t = values[name]
        if t is not None:
            given.append(name)
            tensors.append(t)
            values[name] = None
    ctx.save_for_backward(*tensors, *kept)
    ctx.given, ctx.values, ctx.impl = given, values, impl
    ctx.packings = [(t, t.version) for name in op.call.packings if (t := values[name]) is not None]


def all_kept(op: Any, outputs: Sequence[Tensor], kept: Sequence[Tensor]) -> Sequence[Tensor]:
    """What an implementation kept, behind the outputs that the backward reads."""
    if not op.keeps_outputs:
        return kept
    return (*[outputs[i] for i in op.keeps_outputs if i < len(outputs)], *kept)


def both_ways(op: Any, call: Any, save: bool, module: Any) -> None:
    """Runs an implementation and, if that `save`s, its backward as autograd would where outputs of other sizes, states, are not used."""
    outputs, kept = module.forward(call, save)
    if not save or op.adjoint is not None:
        return
    first = outputs[0]
    used = [y.dim() == first.dim() and y.shape[:2] == first.shape[:2] for y in outputs]
    grads = [torch.empty_like(y) if use else None for y, use in zip(outputs, used, strict=True)]
    needed = [name for name in call.names if (t := getattr(call, name)) is not None and t.requires_grad]
    wanted = _wanted(op, needed, _dtypes(op, call) if op.shares else None)
    if wanted:
        module.backward(call.for_backward(outputs), all_kept(op, outputs, kept), grads, frozenset(wanted))


def _wanted(op: Any, needed: list[str], shared: dict[str, torch.dtype] | None) -> list[str]:
    """The gradients that an implementation is asked for where those of the fields `needed` are."""
    wanted = needed if shared is None else list(dict.fromkeys([op.shares.get(name, name) for name in needed]))
    return [name for name in wanted if name not in op.passes] if op.passes else wanted


def _dtypes(op: Any, call: Any) -> dict[str, torch.dtype] | None:
    """Dtypes of the fields that share a gradient; None where none of those is given that take it from another."""
    for name in op.shares:
        if getattr(call, name) is not None:
            return {name: t.dtype for name in op.sharing if (t := getattr(call, name)) is not None}
    return None


def gradients(
    op: Any, ctx: Any, grads: Sequence[Any], names: Sequence[str], needs: Sequence[bool], dispatched: bool | None
) -> list[Tensor | None]:
    """The gradient of each tensor field of `names`, None where none is wanted; `dispatched`: None under torch.func."""
    needed = list(compress(names, needs))
    if not needed or not [grad for grad in grads if grad is not None]:
        return [None] * len(names)
    for packing, version in ctx.packings:
        if packing.version != version:
            raise RuntimeError(f"{op.name}: cu_seqlens was overwritten between the forward and the backward")
    saved, given, shared = ctx.saved_tensors, ctx.given, ctx.shared  # once: checkpoints make them again
    call = op.call.make({**ctx.values, **dict(zip(given, saved, strict=False))})
    kept, recorded = saved[len(given) :], torch.is_grad_enabled()
    wanted = _wanted(op, needed, shared)
    if not wanted:
        found = {}
    elif op.adjoint is not None:
        found = op.adjoint(call, grads, wanted, ctx.impl)
    elif recorded and op.formula is not None:
        found = of_formula(op.formula, call, grads, wanted)
    elif dispatched is None:
        fields = [getattr(call, name) for name in op.fields]
        made = TransformedBackward.apply(op, ctx.impl, tuple(wanted), len(kept), *fields, *kept, *grads)
        found = dict(zip(wanted, made, strict=True))
    elif dispatched or recorded:
        if recorded:
            refuse_second_derivative(op)
        made = op.backward_operator(*op.flat(call), list(grads), list(kept), wanted, ctx.impl)
        found = dict(zip(wanted, made, strict=True))
    else:
        found = op.backward(call, kept, grads, wanted, ctx.impl)
    if shared is not None:
        found = _shared(op, shared, found, needed)
    if op.passes:
        found = {**found, **{name: grads[index] for name, index in op.passes.items()}}
    return [found.get(name) if need else None for name, need in zip(names, needs, strict=False)]


def _shared(op: Any, dtypes: dict[str, torch.dtype], found: dict[str, Any], needed: Sequence[str]) -> dict[str, Any]:
    """The gradients with those of fields that share one, each in the dtype of its field."""
    found = {name: found.get(op.shares.get(name, name)) for name in needed}
    return {n: g.to(dtypes[n]) if g is not None and n in dtypes else g for n, g in found.items()}


def of_formula(formula: Any, call: Any, grads: Sequence[Tensor | None], wanted: Sequence[str]) -> dict[str, Any]:
    """Gradients of the op's plain formula, which can be differentiated again where autograd records."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: fresh nodes, so that the gradients stop at the call's tensors when one of them is computed from another.
        fresh = {name: t.view_as(t) for name in call.names if (t := getattr(call, name)) is not None}
        outputs = formula(call.but(**fresh))
    asked = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
    sources = {name: fresh[name] for name in wanted if fresh[name].requires_grad}
    found = torch.autograd.grad(
        [y for y, _ in asked], list(sources.values()), [g for _, g in asked], create_graph=again, allow_unused=True
    )
    return dict(zip(sources, found, strict=True))


def run_eager(op: Any, call: Any, impl: str, names: list[str], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a call that autograd records, without the dispatcher in between; `tensors` are its given fields `names`."""
    # As `Eager.apply`, which would also look for arguments with defaults and for transforms: there are none of either.
    return _apply_eager(op, impl, call, names, *[unwrap_if_dead(t) for t in tensors])


class Eager(torch.autograd.Function):
    """An op called at once. The given tensors of the call are arguments of their own, for autograd sees no others."""

    @staticmethod
    def forward(ctx: Any, op: Any, impl: str, call: Any, names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = op.forward(call, True, impl)
        # Autograd refuses to write in place into views that were made here; detached tensors are none, and still counted as one memory.
        outputs = tuple([t.detach() if t._is_view() else t for t in outputs])
        save(op, ctx, call, outputs, kept, impl)
        ctx.op, ctx.names = op, names
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dispatched = torch.compiler.is_compiling()
        for g in grads:
            if g is not None and type(g) is not Tensor:
                dispatched = True
        return None, None, None, None, *gradients(ctx.op, ctx, grads, ctx.names, ctx.needs_input_grad[4:], dispatched)


_apply_eager = super(torch.autograd.Function, Eager).apply


def once_differentiable(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors for operators of torch that have no second derivative, which raises by the name of our op."""
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return tensors
    return OnceDifferentiable.apply(name, *tensors)


class Identity(torch.autograd.Function):
    """The identity of tensors behind a name, under transforms too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(t if t is None else t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, *_ = inputs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        return tuple(t if t is None else t.view_as(t) for t in tangents[1:])


class OnceDifferentiable(Identity):
    """The identity, whose derivative is `NotDifferentiable`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *NotDifferentiable.apply(ctx.name, *grads)


class NotDifferentiable(Identity):
    """The identity, which has no derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{ctx.name} has no second derivative")


def transformed(op: Any, call: Any, impl: str, asked: str) -> tuple[Tensor, ...]:
    """The outputs under torch.func and forward-mode derivatives: by the plain formula, else by implementations one row at a time."""
    if op.formula is not None:
        return op.formula(call)
    if op.writes:
        raise NotImplementedError(
            f"{asked} writes into its arguments: torch.func and forward-mode derivatives cannot pass it"
        )
    if not torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{asked} has no forward-mode derivative")
    count = Count(asked)
    return Transformed.apply(op, impl, count, *[getattr(call, name) for name in op.fields])[: count.outputs]


class Count:
    """How many of the outputs of `Transformed` are the op's (an object, for torch.func copies lists), and the public op's name."""

    def __init__(self, asked: str) -> None:
        self.outputs, self.asked = 0, asked


class Transformed(torch.autograd.Function):
    """An op under torch.func: what is kept is an output too, for `setup_context` sees only inputs and outputs."""

    @staticmethod
    def forward(op: Any, impl: str, count: Count, *fields: Any) -> tuple[Tensor, ...]:
        outputs, kept = op.forward(op.call.make(dict(zip(op.fields, fields, strict=True))), True, impl)
        count.outputs = len(outputs)
        return *outputs, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        op, impl, count, *fields = inputs
        outputs, kept = output[: count.outputs], output[count.outputs :]
        ctx.mark_non_differentiable(*kept)
        call = op.call.make(dict(zip(op.fields, fields, strict=True)))
        save(op, ctx, call, outputs, kept, impl)
        ctx.op, ctx.count, ctx.asked = op, count.outputs, count.asked

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"{ctx.asked} has no forward-mode derivative")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op = ctx.op
        names = op.call.names
        found = gradients(op, ctx, grads[: ctx.count], names, ctx.needs_input_grad[3 : 3 + len(names)], None)
        return None, None, None, *found, *[None] * (len(op.fields) - len(found))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return row_by_row(Transformed, info, in_dims, args)


class TransformedBackward(torch.autograd.Function):
    """The backward of an op under torch.func; its arguments are the fields of the call, what is kept, and the gradients."""

    @staticmethod
    def forward(op: Any, impl: str, wanted: tuple[str, ...], kept: int, *tensors: Any) -> tuple[Tensor, ...]:
        fields, rest = tensors[: len(op.fields)], tensors[len(op.fields) :]
        call = op.call.make(dict(zip(op.fields, fields, strict=True)))
        found = op.backward(call, rest[:kept], rest[kept:], wanted, impl)
        return tuple(found[name] for name in wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        op, *_ = inputs
        ctx.name = op.name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{ctx.name} has no second derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return row_by_row(TransformedBackward, info, in_dims, args)


def row_by_row(function: Any, info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
    """The rule of vmap for ops that have no formula: one call for each row of the mapped dimension."""

    def row(i: int) -> list[Any]:
        return [t.select(d, i) if isinstance(d, int) else t for t, d in zip(args, in_dims, strict=True)]

    def zeros(t: Tensor, d: int) -> Tensor:
        return t.new_zeros([n for axis, n in enumerate(t.shape) if axis != d % t.dim()])

    rows = [function.apply(*row(i)) for i in range(info.batch_size)]
    if not rows:  # one that says what the results of none look like
        none = [zeros(t, d) if isinstance(d, int) else t for t, d in zip(args, in_dims, strict=True)]
        rows = [function.apply(*none)]
    return tuple(torch.stack(part)[: info.batch_size] for part in zip(*rows, strict=True)), (0,) * len(rows[0])
