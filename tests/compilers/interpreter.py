"""Triton's interpreter, mended where it refuses what the compiler takes, and without what it makes anew for each tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def mend_splat() -> None:
    """Triton 3.9's interpreter makes a tile of a comparison of two scalars in the dtype of what was compared, which no mask may have."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    theirs = InterpreterBuilder.create_splat

    def create_splat(self: Any, wanted: Any, x: Any) -> Any:
        if x.data.dtype == np.bool_ and x.dtype is not tl.int1:
            return TensorHandle(np.full(wanted.shape, x.data[0]), tl.int1)
        return theirs(self, wanted, x)

    InterpreterBuilder.create_splat = create_splat


def patch_language_once() -> None:
    """It patches the language again for each call of a device function, 2 ms and more: here once for a module."""
    from triton.runtime import interpreter

    theirs, patched = interpreter._patch_lang, set()

    def patch(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            theirs(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def make_types_once() -> None:
    """The type of a tile, what a tensor has of its type, and NumPy's dtype of it, which are immutable, once for each type.

    Nor does it find out for each operation how two tiles of one shape are broadcast, and of what type a tuple is that nobody asks. Only
    in Triton 3.6, whose insides these are.
    """
    import triton

    if not triton.__version__.startswith("3.6."):
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    block, tensor, dtype_of = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    broadcast, values = TritonSemantic.broadcast_impl_value, core.tuple.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            types[key] = vars(self) | {"of_tensors": {}}
        vars(self).update(types[key])

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).setdefault("of_tensors", {})
        if not known:
            tensor(self, handle, type)
            known.update(vars(self))
        vars(self).update(known, handle=handle, type=type)

    def numpys(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if element.name not in dtypes:
            dtypes[element.name] = dtype_of(type)
        return dtypes[element.name]

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        known = vars(lhs.type).get("shape")
        same = known is not None and known is vars(rhs.type).get("shape")
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def of_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            values(self, args, type)

    def type_of_tuple(self: Any) -> Any:
        if "type" not in vars(self):
            vars(self)["type"] = core._type_for_tuple_values(self.values)
        return vars(self)["type"]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = of_block, of_tensor, numpys
    core.tuple.__init__, TritonSemantic.broadcast_impl_value = of_tuple, of_one_shape
    core.tuple.type = property(type_of_tuple, lambda self, type: vars(self).update(type=type))
