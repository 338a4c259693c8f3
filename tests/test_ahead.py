"""Compiling ahead, without a GPU: a forward asks for all that it and its backward launch, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmix
from flashmix import Packing
from flashmix.gpu import ahead

pytest.importorskip("triton")
from kernels import recording

from flashmix.gpu import launch

pytestmark = pytest.mark.skipif(not launch.DIRECT, reason="this Triton has another launcher")


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def heads(D: int = 64) -> list[Tensor]:
    return [leaf(1, 200, 2, D) for _ in range(3)]


def decay(*shape: int) -> Tensor:
    return (-0.1 * torch.rand(shape)).requires_grad_()


def gate(*more: int) -> Tensor:
    return decay(1, 200, 2, *more)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = flashmix.softmax_attention(q, k, v, causal=True)
    return found[0] if isinstance(found, tuple) else found


CALLS: dict[str, Callable[[], Any]] = {
    "rms_norm": lambda: flashmix.rms_norm(leaf(16, 128), leaf(128)),
    "swiglu": lambda: flashmix.swiglu(leaf(16, 128), leaf(16, 128)),
    "short_conv": lambda: flashmix.short_conv(leaf(1, 200, 128), leaf(128, 4))[0],
    "delta rule": lambda: flashmix.delta_rule(*heads(), -gate(), gate())[0],
    "delta rule, float16": lambda: flashmix.delta_rule(*(t.half() for t in heads()), -gate(), gate())[0],
    "KDA": lambda: flashmix.delta_rule(*heads(128), -gate(), gate(128))[0],
    "linear attention": lambda: flashmix.linear_attention(*heads(), gate())[0],
    "scan": lambda: flashmix.scan(leaf(1, 200, 128), decay(1, 200, 128))[0],
    "rwkv4": lambda: flashmix.rwkv4(leaf(1, 64, 64), leaf(1, 64, 64), decay(64), leaf(64))[0],
    "attention": lambda: attended(*heads()),
}


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there were a GPU; what is compiled ahead is recorded when it is asked for, on this thread."""

    class Pool:
        def __init__(self, *options: Any) -> None: ...
        def submit(self, compiled: Callable[..., Any], *args: Any) -> None:
            compiled(*args)

        def shutdown(self, wait: bool) -> None: ...

    monkeypatch.setattr(launch, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name, value in {"current_device": 0, "is_current_stream_capturing": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield
    assert ahead.running.again is None


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_compiles_what_it_and_its_backward_launch(name: str, request: pytest.FixtureRequest) -> None:
    with recording((9, 0)) as forward:
        y = CALLS[name]()
        alone = {one.key for one in forward}
        torch.autograd.backward([y], [torch.ones_like(y)])
    request.getfixturevalue("compiled_at_once")
    with recording((9, 0)) as found:
        CALLS[name]()
    assert alone < {one.key for one in found} == {one.key for one in forward}


def test_without_a_gradient_no_backward_is_compiled(compiled_at_once: None) -> None:
    with recording((9, 0)) as found, torch.no_grad():
        CALLS["delta rule"]()
    assert found and not [one.name for one in found if "backward" in one.name]


def test_a_call_whose_backward_cannot_be_foreseen_runs(compiled_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while it is only to be found out what to compile fails where it is needed."""
    from flashmix.ops.norm import triton_gpu

    def refuse(*args: Any) -> None:
        raise ValueError("no backward today")

    monkeypatch.setattr(triton_gpu, "backward", refuse)
    with recording((9, 0)) as found:
        y = CALLS["rms_norm"]()
        assert found
        with pytest.raises(ValueError, match="no backward today"):
            torch.autograd.backward([y], [torch.ones_like(y)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_losses_are_left_out(overwrite: bool, compiled_at_once: None) -> None:
    """Their backward may write into logits, and their products are large."""
    logits = leaf(16, 1000).detach().clone().requires_grad_()
    with recording((9, 0)) as found:
        flashmix.cross_entropy(logits * 1.0, torch.zeros(16, dtype=torch.int64), overwrite_logits=overwrite)
    assert found and not [one.name for one in found if "backward" in one.name]


def test_tables_of_a_batch_are_written_by_launches(compiled_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While launches are gathered none is made, and no table that one of them should have written may be kept: attention's backward has
    blocks of another size than its forward.
    """
    packing = Packing.from_lengths([120, 0, 80])
    launched: list[Tensor] = []
    run = launch.Kernel.__call__

    def seen(self: launch.Kernel, grid: int, *structs: Any) -> Any:
        if ahead.gathering.wanted is None:
            launched.extend(t for t in structs if isinstance(t, Tensor))
        return run(self, grid, *structs)

    monkeypatch.setattr(launch.Kernel, "__call__", seen)
    with recording((9, 0)) as found:
        flashmix.softmax_attention(*heads(), causal=True, cu_seqlens=packing)
    assert found
    kept = [t for table in packing._tables.values() for t in (table if isinstance(table, tuple) else (table,))]
    written = {t.data_ptr() for t in launched} | {packing.cu_seqlens.data_ptr()}
    assert {t.data_ptr() for t in kept if isinstance(t, Tensor)} <= written
