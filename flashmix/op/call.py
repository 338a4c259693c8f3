"""The contract of every op: a frozen `Call` holds its tensors and options by name, and an `Op` runs it.

From the fields of the call follow the operator's schema, its version for tensors without data, what autograd saves, and the gradients
by name, so no file keeps an order of operands. docs/architecture.md carries one op through all of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashmix.gpu import device as gpu
from flashmix.op import autograd
from flashmix.op.choose import Implementation, choose
from flashmix.op.packing import Packing, check_whole
from flashmix.op.run import launched

LIBRARY = torch.library.Library("flashmix", "FRAGMENT")  # the operators exist as long as it does
SCHEMA: dict[Any, str] = {Tensor: "Tensor", float: "float", int: "SymInt", str: "str"}
SCHEMA |= {kind | None: f"{name}?" for kind, name in SCHEMA.items()} | {bool: "bool", torch.dtype: "ScalarType"}
SCHEMA |= {tuple[int, ...]: "int[]", tuple[float, ...]: "float[]", tuple[str, ...]: "str[]"}
Written = Annotated[Tensor, "written"]  # a tensor field of a call that the op overwrites
PLAIN: dict[Any, Any] = {Written: Tensor, Written | None: Tensor | None}
Outputs = tuple[Tensor, ...]
Gradients = dict[str, Tensor]


class Call:
    """One call of an op: a frozen dataclass whose fields are tensors, packings and options; its facts are properties.

    The first field is a tensor that is always given; device and dtype of the call are its own.
    """

    names: ClassVar[tuple[str, ...]]  # fields that hold tensors
    packings: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]
    written: ClassVar[tuple[str, ...]]  # of the tensors, those that the op overwrites
    of_kind: ClassVar[Any] = None  # a `CallKind`, which all calls like this one share; None: not known

    @property
    def device(self) -> torch.device:
        return getattr(self, self.names[0]).device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self, self.names[0]).dtype

    def tensors(self) -> list[Tensor]:
        """The given tensors, in the order of the fields."""
        return [t for t in [getattr(self, name) for name in self.names] if t is not None]

    def results(self) -> Outputs:
        """Empty outputs: shapes and dtypes follow from the call alone, whichever implementation runs it."""
        raise NotImplementedError

    def for_backward(self, outputs: Outputs) -> Call:
        """The call as its backward receives it: without the tensors that it does not need (None instead)."""
        return self

    @classmethod
    def make(cls, values: dict[str, Any]) -> Any:
        """A call of these fields, which keeps the dict; faster than the constructor, and nothing is checked."""
        if torch.compiler.is_compiling():  # which traces the constructor, but no `__dict__`
            return cls(**values)
        call = object.__new__(cls)
        object.__setattr__(call, "__dict__", values)
        return call

    def but(self, **changes: Any) -> Any:
        """The call with other values of some fields, as `dataclasses.replace` makes it, at less cost to the host."""
        if torch.compiler.is_compiling():  # which traces no `__dict__` on Python 3.11.2, nor from 3.13 on
            call: Any = self
            return dataclasses.replace(call, **changes)
        values = {**self.__dict__, **changes}
        values.pop("of_kind", None)
        return self.make(values)


def refused(tensors: Iterable[Tensor | None]) -> str | None:
    """The reason why Triton kernels cannot run on the floating tensors among these, None if they can."""
    for t in tensors:
        if t is not None and t.is_floating_point():
            reason = gpu.refuses(t.device, t.dtype)
            if reason is not None:
                return reason
    return None


def triton_refuses(call: Call) -> str | None:
    """The reason why Triton kernels cannot run the call's tensors, None if they can: the `supports` of most ops."""
    return refused(call.tensors())


def triton_refuses_first(call: Call) -> str | None:
    """The same of the call's first tensor alone: its checks say which dtypes the others may have."""
    return gpu.refuses(call.device, call.dtype)


def native_refuses(
    call: Call, wide: torch.dtype, given: torch.dtype | None = None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> str | None:
    """The reason why code in C that computes in `dtypes` cannot run a call that computes in `wide`, `given` this dtype; None if it can."""
    if call.device.type != "cpu":
        return f"it needs tensors on a CPU, got {call.device.type}"
    if wide not in dtypes:
        return f"it computes in float32, got {str(given or wide).removeprefix('torch.')}"
    return None


def always(call: Call) -> None:
    """The `supports` of plain PyTorch."""
    return None


def implementations(
    op: str,
    refuses: Callable[[Any], str | None] = triton_refuses,
    module: str = "",
    formula: Callable[[Any], Outputs | None] | None = None,
) -> tuple[Implementation[Any], ...]:
    """The two that most ops have, Triton's kernels before plain PyTorch: in `flashmix/ops/<op>`, or a `module` of their folders.

    `formula`: of plain PyTorch, which torch differentiates.
    """
    place, module = f"flashmix.ops.{op}", module and f".{module}"
    return (
        Implementation("triton", f"{place}.triton_gpu{module}", refuses),
        Implementation("portable", f"{place}.portable{module}", always, formula),
    )


class Op:
    """An op as an operator of autograd, torch.compile and torch.func.

    The module of an implementation has
        forward(call, save) -> (outputs, kept):  `kept` are further tensors for the backward, () unless `save`
        keeps(call) -> tuple of empty tensors like `kept` (absent: nothing is kept)
        backward(call, kept, grads, wanted) -> {name: gradient} of at least the fields `wanted`; `grads` has an entry for each
            output, None where it has no gradient; `kept` begins with the outputs that `keeps_outputs` names.
    An implementation with a `formula` of its own needs none of these.

    Args:
        name: of the operator `flashmix::name`.
        call: the dataclass of its calls.
        implementations: who can run it, best first.
        outputs: how many outputs an op that writes into its arguments has; None for one that writes nowhere.
        formula: `formula(call) -> outputs` in plain PyTorch that autograd can differentiate: second and forward-mode derivatives,
            torch.func, and "portable" under torch.compile, which then fuses it. None: the op has no second derivative.
        adjoint: `adjoint(call, grads, wanted, impl) -> {name: gradient}` by calls of ops, in place of `backward` and of the formula's
            derivative, for ops that are linear.
        shares: `{name: source}`: the gradient of field `name` is that of `source` in its own dtype.
        passes: `{name: index}`: the gradient of field `name` is that of output `index`, to which it is added; `backward` is not asked.
        keeps_outputs: indices of outputs that the backward reads.
        sharded: module with `run(call, impl, asked) -> outputs` for a call whose packing is a `Shard`; without one that raises.
        once: implementations run once a call and no more: they exchange with other ranks, multiply large matrices or overwrite.
    """

    def __init__(
        self,
        name: str,
        call: type[Call],
        implementations: Sequence[Implementation[Any]],
        *,
        outputs: int | None = None,
        formula: Callable[[Any], Outputs] | None = None,
        adjoint: Callable[[Any, Sequence[Tensor | None], Sequence[str], str], Gradients] | None = None,
        shares: Mapping[str, str] | None = None,
        passes: Mapping[str, int] | None = None,
        keeps_outputs: Sequence[int] = (),
        sharded: str | None = None,
        once: bool = False,
    ) -> None:
        self.sharded, self.once = sharded, once
        self.name, self.call, self.implementations = name, call, tuple(implementations)
        self.formula, self.adjoint = formula, adjoint
        self.shares, self.keeps_outputs = dict(shares or {}), tuple(keeps_outputs)
        self.sharing, self.passes = (*self.shares, *self.shares.values()), dict(passes or {})
        self._modules = {implementation.name: implementation for implementation in implementations}
        self._loaded: dict[str, Any] = {}
        self.library, self.refuses_second = LIBRARY, False
        inputs = self._describe()
        returns = "(Tensor[] outputs, Tensor[] kept)"
        if outputs is not None:
            returns = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
        self.writes = outputs is not None
        self.operator = self._define(
            name, f"({inputs}, bool save, str impl) -> {returns}", self._dispatched, self._fake
        )
        if self.writes:
            autograd.bump_versions_of(LIBRARY, name, self.operator)
            return
        backward = f"({inputs}, Tensor?[] grads, Tensor[] kept, str[] wanted, str impl) -> Tensor[]"
        run, fake = self._backward_dispatched, self._backward_fake
        self.backward_operator = self._define(f"{name}_backward", backward, run, fake)
        autograd.register(self, LIBRARY)

    def _describe(self) -> str:
        """Sorts the fields of the call into tensors, packings and options; returns the operator's inputs in torch's schema language."""
        call, marked = self.call, typing.get_type_hints(self.call, include_extras=True)
        hints = {name: PLAIN.get(hint, hint) for name, hint in marked.items()}
        fields = dataclasses.fields(call)  # type: ignore[arg-type]
        call.written = tuple(f.name for f in fields if marked[f.name] in (Written, Written | None))
        call.names = tuple(f.name for f in fields if hints[f.name] in (Tensor, Tensor | None))
        call.packings = tuple(f.name for f in fields if hints[f.name] in (Packing, Packing | None))
        call.options = tuple(f.name for f in fields if f.name not in call.names + call.packings)
        self.fields = call.names + call.packings + call.options
        parts: list[str] = []
        for name in call.names:
            kind = SCHEMA[hints[name]]
            parts.append(
                f"{kind.replace('Tensor', f'Tensor(a{len(parts)}!)') if name in call.written else kind} {name}"
            )
        for name in call.packings:
            parts += [f"Tensor? {name}", f"SymInt {name}_tokens"]
        parts += [f"{SCHEMA[hints[name]]} {name}" for name in call.options]
        return ", ".join(parts)

    @staticmethod
    def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """`flashmix::name`, without importing torch's compiler as `torch.library.custom_op` does at its first call (3 s)."""
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashmix::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.flashmix, name).default

    def __call__(self, call: Any, impl: str = "auto", asked: str | None = None) -> Outputs:
        """The outputs of a checked call; `asked` is the public function that `explain` and errors name."""
        for name in self.call.packings:
            packing = getattr(call, name)
            if packing is not None and packing.sharded:
                return over_ranks(self, packing, call, impl, asked or self.name)
        implementation = choose(asked or self.name, self.implementations, call, impl)
        if implementation.formula is not None:
            outputs = implementation.formula(call)
            if outputs is not None:
                return outputs
        chosen = implementation.name
        if torch.compiler.is_compiling():
            if chosen == "portable" and self.formula is not None:
                return self.formula(call)
            return self._outputs(self.operator(*self.flat(call), self._saves(call), chosen))
        names, tensors, data, gradient = given(call)
        if torch._C._are_functorch_transforms_active() or (forward_ad._current_level >= 0 and has_tangent(tensors)):
            return autograd.transformed(self, call, chosen, asked or self.name)
        save = gradient and not self.writes and torch.is_grad_enabled()
        if not data:
            return self._outputs(self.operator(*self.flat(call), save, chosen))
        if save:
            return autograd.run_eager(self, call, chosen, names, tensors)
        outputs = self.forward(call, False, chosen)[0]
        if self.writes:
            autograd.bump_versions(*(getattr(call, name) for name in call.written))
        return outputs

    def _saves(self, call: Call) -> bool:
        """Whether autograd will ask for a gradient."""
        return not self.writes and torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors())

    def forward(self, call: Call, save: bool, impl: str) -> tuple[Outputs, Outputs]:
        """Outputs and what is kept, of an implementation; autograd sees nothing of it."""
        if call.of_kind is not None:
            found: tuple[Outputs, Outputs] = call.of_kind.module.forward(call, save)
            return found
        module = self._loaded.get(impl) or self.module(impl)
        first = getattr(call, call.names[0])
        again = None if self.writes or self.once else lambda: autograd.both_ways(self, call, save, module)
        return launched(partial(module.forward, call, save), again, first)

    def module(self, impl: str) -> Any:
        """The module of an implementation, imported when it is first used."""
        if impl not in self._loaded:
            self._loaded[impl] = self._modules[impl].load()
        return self._loaded[impl]

    def backward(
        self, call: Call, kept: Outputs, grads: Sequence[Tensor | None], wanted: Sequence[str], impl: str
    ) -> Gradients:
        """The gradients of the fields `wanted`, by an implementation."""
        module = self._loaded.get(impl) or self.module(impl)
        first = kept[0] if kept else next(g for g in grads if g is not None)
        run = partial(module.backward, call, kept, grads, frozenset(wanted))
        return launched(run, None if self.once else run, first)

    # ---- the operator, as torch.compile and tensor subclasses see it -----------------------------------------------------

    def flat(self, call: Call) -> list[Any]:
        """The call as the operator's arguments."""
        values: list[Any] = [getattr(call, name) for name in call.names]
        for name in call.packings:
            packing = getattr(call, name)
            values += [None, 0] if packing is None else [packing.cu_seqlens, packing.total]
        return values + [getattr(call, name) for name in call.options]

    def from_flat(self, flat: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The call behind the operator's arguments, and the arguments that follow it."""
        rest: Iterator[Any] = iter(flat)
        values = {name: next(rest) for name in self.call.names}
        for name in self.call.packings:
            cu_seqlens, tokens = next(rest), next(rest)
            values[name] = None if cu_seqlens is None else Packing.unchecked(cu_seqlens, tokens)
        for name in self.call.options:
            value = next(rest)
            values[name] = tuple(value) if isinstance(value, (list, tuple)) else value
        return self.call.make(values), list(rest)

    def _outputs(self, returned: Any) -> Outputs:
        if not self.writes:
            return tuple(returned[0])
        return returned if isinstance(returned, tuple) else () if returned is None else (returned,)

    def _returned(self, outputs: Outputs, kept: Outputs) -> Any:
        if not self.writes:
            return list(outputs), list(kept)
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    def _dispatched(self, *flat: Any) -> Any:
        call, (save, impl) = self.from_flat(flat)
        outputs, kept = self.forward(call, save, impl)
        owned = autograd.own((*outputs, *kept), flat)
        return self._returned(tuple(owned[: len(outputs)]), tuple(owned[len(outputs) :]))

    def _fake(self, *flat: Any) -> Any:
        call, (save, impl) = self.from_flat(flat)
        keeps = getattr(self.module(impl), "keeps", None) if save else None
        return self._returned(call.results(), keeps(call) if keeps else ())

    def _backward_dispatched(self, *flat: Any) -> list[Tensor]:
        call, (grads, kept, wanted, impl) = self.from_flat(flat)
        found = self.backward(call, tuple(kept), grads, wanted, impl)
        return autograd.own([found[name] for name in wanted], [*flat, *kept, *grads])

    def _backward_fake(self, *flat: Any) -> list[Tensor]:
        call, (_, _, wanted, _) = self.from_flat(flat)
        like = [getattr(call, name) for name in wanted]
        return [torch.empty(size=t.shape, dtype=t.dtype, device=t.device) for t in like]


def over_ranks(op: Op, packing: Packing, call: Call, impl: str, asked: str) -> Outputs:
    """The outputs of a call over a shard, which exchanges with the other ranks and calls the op on what it has.

    torch.compile ends a graph here; its compiler is not imported for that.
    """
    if "torch._dynamo" not in sys.modules:
        return exchanged(op, packing, call, impl, asked)
    if not UNTRACED:
        UNTRACED.append(torch.compiler.disable(exchanged))
    return UNTRACED[0](op, packing, call, impl, asked)


def exchanged(op: Op, packing: Packing, call: Call, impl: str, asked: str) -> Outputs:
    if op.sharded is None:
        check_whole(packing, asked)
    module = importlib.import_module(str(op.sharded))
    choose(
        asked, op.implementations, call, impl, lambda: module.exchange(call)
    )  # raises, or explains, before any collective
    return module.run(call, impl, asked)


UNTRACED: list[Callable[..., Outputs]] = []  # `exchanged`, as the compiler leaves it alone
over_ranks._torchdynamo_disable = True  # type: ignore[attr-defined]


def given(call: Call) -> tuple[list[str], list[Tensor], bool, bool]:
    """Names and tensors of the given operands; whether none is without data, of a subclass (fake, functional, …) or a view whose numbers
    are read with the other sign (`z.conj().imag`), which must go through the dispatcher; whether one requires a gradient.
    """
    names, tensors, data, gradient = [], [], True, False
    for name in call.names:
        t = getattr(call, name)
        if t is not None:
            names.append(name)
            tensors.append(t)
            if (type(t) is not Tensor and type(t) is not Parameter) or t.is_meta or t.is_neg():
                data = False
            if t.requires_grad:
                gradient = True
    return names, tensors, data, gradient


def has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether a forward-mode derivative is wanted of any tensor."""
    level = forward_ad._current_level
    return level >= 0 and any(forward_ad.unpack_dual(t, level=level).tangent is not None for t in tensors)
