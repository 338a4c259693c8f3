"""Kernels that Triton compiles without LLVM's passes, for Hopper and without a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import recording

import flashmix
from flashmix.gpu.passes import left_out, without_llvm_passes
from flashmix.gpu.ptxas import needed, sound_ptxas

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")


@triton.jit
def sums_kernel(x, out, count):
    """The sum of rows, each scaled by what is the same for all of them: work for LLVM."""
    total = tl.zeros([64], tl.float32)
    for i in range(count):
        total += tl.load(x + i * 64 + tl.arange(0, 64)) * (count * 3 + 7).to(tl.float32)
    tl.store(out + tl.arange(0, 64), total)


def compiled(without: bool, sound: bool = False) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(sums_kernel, signature={"x": "*fp32", "out": "*fp32", "count": "i32"}, constexprs={})
    with sound_ptxas() if sound else nullcontext(), without_llvm_passes() if without else nullcontext():
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("empty_cache")
def test_code_without_passes_is_another_and_has_its_own_name() -> None:
    with_passes, without = compiled(False), compiled(True)
    assert with_passes.hash != without.hash
    assert with_passes.asm["llir"] != without.asm["llir"]
    assert compiled(False).asm["llir"] == with_passes.asm["llir"] and compiled(False).hash == with_passes.hash
    names = {compiled(without, sound).hash for without in (True, False) for sound in (True, False)}
    assert len(names) == (2 if needed() is None else 4)


@pytest.mark.usefixtures("empty_cache")
def test_what_looks_at_the_thread_is_put_in_place_once() -> None:
    from triton.backends.nvidia import compiler

    for without, sound in ((True, False), (True, True), (False, True), (True, True)):
        compiled(without, sound)
    placed = compiler.get_ptxas_version, compiler.get_ptxas
    for without, sound in ((True, True), (True, False), (False, True)):
        compiled(without, sound)
    assert placed == (compiler.get_ptxas_version, compiler.get_ptxas)


def test_a_triton_with_other_names_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    monkeypatch.delattr(compiler, "get_ptxas_version")
    with without_llvm_passes():
        assert not left_out()


def test_other_threads_keep_the_passes() -> None:
    seen = []
    with without_llvm_passes():
        assert left_out()
        thread = threading.Thread(target=lambda: seen.append(left_out()))
        thread.start()
        thread.join()
        with pytest.raises(KeyError), without_llvm_passes():
            raise KeyError
        assert left_out()
    assert seen == [False] and not left_out()


@pytest.mark.parametrize(
    "channels, options, without",
    [
        (64, {}, {"hopper_forward_kernel"}),
        (64, {"softcap": 3.0}, set()),
        (128, {}, set()),
        (256, {}, {"hopper_backward_wide_kernel", "hopper_backward_queries_kernel"}),
        (256, {"log_decay": torch.zeros(1, 1024, 2)}, set()),
    ],
)
def test_which_kernels_of_attention_leave_them_out(channels: int, options: dict[str, Any], without: set[str]) -> None:
    leaves = [torch.zeros(1, 1024, 2, channels, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with recording((9, 0)) as launches:
        o, _ = flashmix.softmax_attention(*leaves, causal=True, impl="gluon", **options)
        torch.autograd.grad(o, leaves, o)
    assert {launch.name for launch in launches if not launch.llvm_passes} == without
