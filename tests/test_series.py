"""Launches made again at other addresses, without a GPU: the compiler and the driver's launch function are replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from flashmix.gpu import launch, series, tma
from flashmix.gpu.launch import Kernel
from flashmix.gpu.series import LaunchSeries
from flashmix.gpu.tma import Tiles

pytestmark = pytest.mark.skipif(not launch.DIRECT, reason="this Triton has another launcher")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    more: Any


@triton.jit(do_not_specialize=["n"])
def kernel(pair: Any, tiles: Any, out: Any, n: Any, S: Any) -> None:
    pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Grid and arguments of each launch."""
    seen: list[Any] = []
    facts = {"swizzle": 3, "elem_size": 2, "elem_type": 7, "block_size": (16,)}
    run = SimpleNamespace(
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=False,
        arg_annotations=[],
        kernel_signature=b"",
        launch=lambda grid, y, z, stream, *given: seen.append((grid, given[9:] if launch.FLAT else given[-1])),
    )
    made = SimpleNamespace(
        run=run,
        module=1,  # loaded
        function=1,
        packed_metadata=(),
        src=SimpleNamespace(signature={1: "tensordesc"}),
        metadata=SimpleNamespace(tensordesc_meta=[facts]),
    )
    compiler = SimpleNamespace(run=lambda *args, **options: made, params=kernel.params, is_gluon=lambda: False)
    for of_code in ("hash_triton", "length", "name"):  # there is none
        monkeypatch.setattr(launch, of_code, lambda *kernel: 0)
    monkeypatch.setattr(launch, "without_descriptors", lambda function: function)
    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=lambda *map: map)))
    monkeypatch.setattr(tma.triton.runtime, "driver", driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(f"{__name__}.kernel", compiler)
    yield seen


def launch_all(made: Kernel, x: Tensor, out: Tensor, memory: Tensor, absent: Tensor | None) -> None:
    """Two launches: of a struct within a struct, a part of an allocation, and tiles."""
    made(3, Pair(x, Pair(absent, 7)), Tiles(x, (4, 16), (16, 1), (2, 16)), out, 5)
    made(4, Pair(memory[16:32], Pair(None, 2.5)), Tiles(memory, (1, 16), (16, 1), (1, 16)), memory[8:], 6)


def tensors(absent: bool = False) -> list[Any]:
    x, out, memory, more = (torch.zeros(64) for _ in range(4))
    return [x, out, memory, None if absent else more]


def test_other_addresses_get_the_launches_that_they_would_have_made(launched: list[Any]) -> None:
    made, ready, calls = Kernel(kernel, None), LaunchSeries(), 0
    for absent in (False, False, True, True, False):
        given = tensors(absent)
        launch_all(made, *given)
        wanted = launched[:]
        for _ in range(2):  # moved there, and made once more at the same addresses
            launched.clear()

            def make(given: list[Any] = given) -> None:
                nonlocal calls
                calls += 1
                launch_all(made, *given)

            ready(CPU, given, make)
            assert launched == wanted
        launched.clear()
    assert calls == 3  # what is to be compiled; once with the last tensor, once without it


def test_what_the_first_call_needs_is_compiled_side_by_side(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of arguments, which wait for one another to be compiled; then nothing is compiled again."""
    both, compiled = threading.Barrier(2, timeout=20), []
    compile_it = kernel.run

    def run(*args: Any, **options: Any) -> Any:
        assert not launched
        both.wait()
        compiled.append(threading.current_thread())
        return compile_it(*args, **options)

    monkeypatch.setattr(kernel, "run", run)
    made, ready = Kernel(kernel, None), LaunchSeries()
    for _ in range(2):
        given = tensors()
        ready(CPU, given, partial(launch_all, made, *given))
    assert len(launched) == 4 and len(compiled) == 2 and threading.main_thread() not in compiled


def test_a_tensor_that_is_two_arguments_says_nothing_about_the_next_call(launched: list[Any]) -> None:
    made, ready = Kernel(kernel, None), LaunchSeries()
    x, _, memory, more = tensors()
    ready(CPU, (x, x, memory, more), lambda: launch_all(made, x, x, memory, more))
    given = tensors()
    launched.clear()
    ready(CPU, given, lambda: launch_all(made, *given))
    assert launched[0][1][0][0] == given[0].data_ptr() and launched[0][1][-3] == given[1].data_ptr()


def test_tensors_that_begin_on_no_16_bytes_are_noted_once_for_each_remainder(launched: list[Any]) -> None:
    """As caches of others do, `[B, C, W]` without its oldest column; code for aligned tensors is not theirs."""
    made, ready, calls = Kernel(kernel, None), LaunchSeries(), 0
    for begin in (1, 1, 2, 1, 0, 2):
        given = [*tensors()[:3], torch.zeros(68)[begin:]]

        def make(given: list[Any] = given) -> None:
            nonlocal calls
            calls += 1
            launch_all(made, *given)

        ready(CPU, given, make)
        assert launched[-2][1][0][1][0] == given[3].data_ptr()
    assert calls == 1 + 3


def test_a_thread_has_a_context_before_a_tensor_map_is_made(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backward of a process runs on a thread that has none, where the driver makes no tensor map."""
    ready: list[int] = []
    found: list[bool] = []
    monkeypatch.setattr(
        tma, "_thread", tma.ThreadContext()
    )  # nothing is known of the threads of other tests, nor they of these
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ready.append(threading.get_ident()))

    def fill(*facts: Any) -> tuple[Any, ...]:
        found.append(threading.get_ident() in ready)
        return facts

    monkeypatch.setattr(tma.triton.runtime.driver.active.utils, "fill_tma_descriptor", fill)
    made, given = Kernel(kernel, None), [tensors() for _ in range(3)]
    launch_all(made, *given[0])
    thread = threading.Thread(target=lambda: [launch_all(made, *x) for x in given[1:]])
    thread.start()
    thread.join()
    assert len(found) >= 3 and all(found)
    assert len(ready) == len(set(ready))  # asked once a thread


def test_memory_of_nobody_is_not_kept(launched: list[Any]) -> None:
    """A tensor that the call does not name may be gone at the next one."""
    made, ready, calls = Kernel(kernel, None), LaunchSeries(), []
    x, out, memory, more = tensors()

    def make() -> None:
        calls.append(1)
        launch_all(made, x, out, memory, more)

    for _ in range(3):
        ready(CPU, (x, out, memory), make)
    assert len(calls) == 1 + 3


def test_launches_under_a_profiler_and_within_a_series_are_made_one_by_one(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inner, outer, calls = Kernel(kernel, None), LaunchSeries(), LaunchSeries(), []
    given = tensors()

    def make() -> None:
        calls.append(1)
        launch_all(made, *given)

    inner(CPU, given, make)
    launched.clear()
    outer(CPU, given, lambda: inner(CPU, given, make))
    assert len(calls) == 4 and len(launched) == 2  # each asks first what is to be compiled, and launches nothing then
    launched.clear()
    outer(CPU, given, make)
    assert len(calls) == 4 and len(launched) == 2
    monkeypatch.setattr(series, "hooked", lambda: True)
    outer(CPU, given, make)
    assert len(calls) == 5


def test_no_more_is_kept_than_most(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MOST", 3)
    made, ready = Kernel(kernel, None), LaunchSeries()
    alive = [tensors() for _ in range(8)]
    for given in alive:
        ready(CPU, given, partial(launch_all, made, *given))
    assert len(launched) == 16 and len(ready._known) <= 3


def test_code_whose_load_failed_is_loaded_by_the_next_call(launched: list[Any]) -> None:
    """Triton's `run` does not try again."""
    made, loads = kernel.run(), []
    made._init_handles = lambda: loads.append(made)
    launch.Code(made, False)
    assert not loads
    made.module = None
    launch.Code(made, False)
    assert loads == [made]
