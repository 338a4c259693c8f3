"""Names of compiled code and the turns of Triton's front ends, without a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.compiler import code_generator

from flashmix.gpu.compiling import functions_of, in_turn, length

NAMES = """
import sys
from flashmix.gpu.compiling import name
from flashmix.ops.recurrence.triton_gpu.output import output_backward_kernel
from flashmix.ops.recurrence.triton_gpu.scores import scores_forward_kernel
from flashmix.ops.recurrence.triton_gpu.state import state_backward_kernel, state_forward_kernel
kernels = [scores_forward_kernel, state_forward_kernel, state_backward_kernel, output_backward_kernel]
for kernel in kernels[:: int(sys.argv[1])]:
    name(kernel)
print([kernel.cache_key for kernel in kernels])
"""


SIZE = tl.constexpr(8)


@triton.jit
def inner(x: Any) -> Any:
    return x + SIZE


@triton.jit
def middle(x: Any) -> Any:
    return tl.sum(inner(x), 0)


@triton.jit
def outer(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out, middle(tl.load(x + at)) + inner(1))


def test_what_a_kernel_calls_comes_before_it() -> None:
    """Once each, with the language's own functions; so a kernel is longer than what it calls."""
    found = [function.fn.__name__ for function in functions_of(outer)]
    assert found.count("inner") == 1 and found.index("inner") < found.index("middle") < found.index("outer")
    assert "sum" in found and found[-1] == "outer"
    assert length(outer) > length(middle) > length(inner) > 0


def test_names_do_not_follow_from_what_was_compiled_before() -> None:
    """Else another process, which calls other ops first, compiles again what lies in the cache."""
    found = [
        subprocess.run([sys.executable, "-c", NAMES, step], capture_output=True, text=True, check=True).stdout
        for step in ("1", "-1")
    ]
    assert found[0] == found[1] and len(set(found[0].split(", "))) == 4


def test_front_ends_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread is first; one that has nothing to do, as its code lies in the cache, holds up nobody."""
    ran: list[int] = []
    monkeypatch.setattr(code_generator, "ast_to_ttir", ran.append)
    turns = [threading.Event() for _ in range(5)]
    turns[0].set()
    later = threading.Event()

    def compiled(number: int) -> None:
        with in_turn(turns[number], turns[number + 1]):
            if number == 0:
                assert later.wait(20)
            if number == 3:
                later.set()
            if number != 1:
                code_generator.ast_to_ttir(number)

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(compiled, number) for number in (3, 2, 1, 0)]:
            job.result(20)
    assert sorted(ran) == [0, 2, 3] and ran.index(2) < ran.index(3)
    code_generator.ast_to_ttir(4)  # of a thread that has no turn
    assert ran[-1] == 4


def test_a_front_end_that_fails_passes_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise ValueError("no front end")

    monkeypatch.setattr(code_generator, "ast_to_ttir", fails)
    begin, end = threading.Event(), threading.Event()
    begin.set()
    with pytest.raises(ValueError, match="no front end"), in_turn(begin, end):
        code_generator.ast_to_ttir()
    assert end.is_set() and gc.isenabled()
