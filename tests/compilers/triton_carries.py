"""A fault of Triton's frontend (3.6): a loop that gives a variable the value of another one does not carry it, if both begin as the
same value. After `before = end`, in `for ...: ...; before = end; end = load(...)`, `before` stays what it was, on a GPU only.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import kernels


def not_carried(launch: kernels.Launch) -> set[str]:
    """Variables that a loop of the kernel should carry and Triton's frontend does not."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir

    found: set[str] = set()
    find_carries = CodeGenerator._find_carries

    def find(self: Any, node: Any, liveins: dict[str, Any], **ignored: Any) -> Any:
        after: dict[str, Any] = {}

        def visit(body: Any) -> None:
            CodeGenerator.visit_compound_statement(self, body)
            after.update(self.local_defs)

        with mock.patch.object(self, "visit_compound_statement", visit):
            carried = find_carries(self, node, liveins, **ignored)
        values = {name: flatten_values_to_ir([value]) for name, value in liveins.items() if hasattr(value, "type")}
        for name in after.keys() & values.keys() - set(carried[0]):
            if any(set(values[name]) & set(values[other]) for other in carried[0]):
                found.add(name)
        return carried

    target = GPUTarget("cuda", launch.capability[0] * 10 + launch.capability[1], 32)
    backend = make_backend(target)
    kwargs = dict(launch.kwargs)
    bound, specialization, options = kernels._binder(launch.kernel, launch.capability)(*launch.args, **kwargs)
    options, signature, constexprs, attrs = launch.kernel._pack_args(backend, kwargs, bound, specialization, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, signature, constexprs, attrs)
    with mock.patch.object(CodeGenerator, "_find_carries", find):
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    return found
