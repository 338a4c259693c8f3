"""A program for `tests/test_launch.py`: what the driver is given by flashmix's launcher and series, and by Triton's own launcher.

Runs in a process of its own, before a `libcuda.so.1` that records launches (`recording_driver.c`, its path is the argument). Raises where
the bytes differ; prints the number of launches.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = ctypes.CDLL(
    sys.argv[1], ctypes.RTLD_GLOBAL
)  # first of all: what is linked with libcuda.so.1 later gets this one
LIBRARY.fake_taken.restype = ctypes.c_size_t
os.environ["TRITON_LIBCUDA_PATH"] = str(Path(sys.argv[1]).parent)

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from flashmix.gpu.hopper import copy_to_global, gl, gluon, stores_done  # noqa: E402
from flashmix.gpu.launch import Kernel, Launched, noting  # noqa: E402
from flashmix.gpu.series import Locations, Movable  # noqa: E402
from flashmix.gpu.tma import Tiles  # noqa: E402

STREAM = 77
SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}


class Inner(NamedTuple):
    absent: Any
    stride: Any
    number: Any


class Struct(NamedTuple):
    x: Any
    inner: Inner
    out: Any
    one: Any


class Spec(NamedTuple):
    BLOCK: int


@triton.jit(do_not_specialize=["n"])
def plain_kernel(s, scale, n, long, S: tl.constexpr):
    i = tl.arange(0, S.BLOCK)
    x = tl.load(s.x + i * s.inner.stride + long, i < n)
    if s.inner.absent is not None:
        x += tl.load(s.inner.absent + i)
    tl.store(s.out + i * s.one, x.to(tl.float32) * scale + s.inner.number)


@triton.jit
def tiles_kernel(a, s, b, n, S: tl.constexpr):
    b.store([n, 0], a.load([n, 0]) + tl.load(s.x))


@gluon.jit
def gluon_kernel(a, b, n, S: gl.constexpr):
    tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    tile.store(gl.full([16, 64], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    copy_to_global(a, [n, 0], tile)
    copy_to_global(b, [n, 0], tile)
    stores_done(0)


def without_a_gpu() -> None:
    """Makes Triton's driver for CUDA the one that it takes, for a Hopper card, and torch's streams those of nobody."""
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: STREAM
    triton.runtime.driver.set_active(driver)
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    torch.cuda.current_device = lambda: 0


def taken() -> bytes:
    """The last launch since `expect`."""
    memory = (ctypes.c_ubyte * (1 << 16))()
    return bytes(memory[: LIBRARY.fake_taken(memory)])


def expect(ptx: str) -> int:
    """Tells the driver the parameters of a kernel in PTX; returns how many there are."""
    head = ptx[ptx.index(".entry") :]
    found = re.findall(
        r"\.param (?:\.align \d+ )?\.[bufs](\d+)[^\[\n]*?(?:\[(\d+)\])?,?\n", head[: head.index(")")] + "\n"
    )
    assert found, head
    sizes = [SIZE[bits] * int(times or 1) for bits, times in found]
    LIBRARY.fake_sizes(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    return len(sizes)


def tensors(shift: int) -> list[Tensor]:
    """Two tensors of 16-bit numbers and one of float32, at other addresses at each call."""
    return [
        torch.zeros(128, 64, dtype=torch.bfloat16)[shift:],
        torch.zeros(64, 64, dtype=torch.bfloat16),
        torch.zeros(512),
    ]


def calls(given: list[Tensor]) -> list[tuple[Any, int, tuple[Any, ...]]]:
    """Kernels with a grid and arguments: members None, 64 bits, 1 and 16, not aligned; tiles in Triton and in Gluon."""
    x, y, out = given
    tiles = [Tiles(t, (32, 64), (64, 1), (16, 64)) for t in (x, y)]
    half = x.flatten()[1:]
    return [
        (plain_kernel, 3, (Struct(x, Inner(None, 16, 2.5), out, 1), 0.5, 5, 2**33)),
        (plain_kernel, 3, (Struct(half, Inner(y, 3, 7), out, 2), 2.0, 1, 48)),
        (tiles_kernel, 2, (tiles[0], Struct(y, Inner(None, 1, 1), out, 1), tiles[1], 3)),
        (gluon_kernel, 1, (*tiles, 16)),
    ]


def by_triton(kernel: Any, grid: int, structs: tuple[Any, ...], spec: Spec) -> bytes:
    described = [x.described(kernel.is_gluon()) if isinstance(x, Tiles) else x for x in structs]
    made = kernel[(grid,)](*described, spec, enable_fp_fusion=True)
    expect(made.asm["ptx"])
    kernel[(grid,)](*described, spec, enable_fp_fusion=True)
    return taken()


def assert_loads_again(kernel: Any, grid: int, structs: tuple[Any, ...]) -> None:
    """Code whose load failed, for want of memory, is loaded by the next call."""
    utils, ours = triton.runtime.driver.active.utils, Kernel(kernel, Spec(128))
    load = utils.load_binary

    def refused(*args: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    utils.load_binary = refused
    for _ in range(2):
        try:
            ours(grid, *structs)
        except RuntimeError as error:
            assert "out of memory" in str(error)
        else:
            raise AssertionError("the load was not asked for")
    utils.load_binary = load
    made = ours(grid, *structs)
    assert made is not None and made.direct is not None and made.direct[1][0] == made.made.function is not None


def assert_leaves_passes_out(kernel: Any, grid: int, structs: tuple[Any, ...]) -> None:
    """A kernel that wants none of LLVM's passes is compiled without, and kept under another name."""
    found = []
    for llvm_passes in (True, False):
        kernel.device_caches.clear()  # the same kernel and spec are never wanted both ways
        made = Kernel(kernel, Spec(256), llvm_passes=llvm_passes)(grid, *structs)
        assert made is not None
        found.append(made.made)
    assert found[0].hash != found[1].hash and found[0].asm["llir"] != found[1].asm["llir"], kernel.fn.__name__


def main() -> None:
    without_a_gpu()
    assert_loads_again(*calls(tensors(0))[0])
    for call in calls(tensors(0))[0], calls(tensors(0))[3]:
        assert_leaves_passes_out(*call)
    spec, seen = Spec(64), 0
    first, second = tensors(0), tensors(16)
    moved = calls(second)
    for (kernel, grid, structs), (_, _, others) in zip(calls(first), moved, strict=True):
        wanted, elsewhere = by_triton(kernel, grid, structs, spec), by_triton(kernel, grid, others, spec)
        assert wanted and elsewhere and wanted != elsewhere
        ours = Kernel(kernel, spec)
        noting.launches = []
        made = ours(grid, *structs)
        assert made is not None and made.direct is not None
        noted = noting.launches
        noting.launches = None
        expect(made.made.asm["ptx"])
        ours(grid, *structs)
        assert taken() == wanted, f"{kernel.fn.__name__}: the launcher"
        (again,) = (x for x in noted if isinstance(x, Launched))
        launch, size, arguments = Movable(again, Locations(first)).to([t.data_ptr() for t in second])
        expect(made.made.asm["ptx"])
        launch(size, 1, 1, STREAM, *arguments)
        assert taken() == elsewhere, f"{kernel.fn.__name__}: the series"
        seen += 1
    print(seen)


if __name__ == "__main__":
    main()
