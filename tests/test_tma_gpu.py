"""Tensors that TMA moves, as the launcher hands them to kernels."""

import threading
from contextlib import nullcontext

import pytest
import torch

from flashmix.gpu.launch import Kernel
from flashmix.gpu.tma import KEPT, Tiles

pytestmark = [pytest.mark.gpu]

ROWS, COLUMNS = 16, 32


def kernels():
    """A kernel of Triton and one of Gluon; both copy tiles of x into y."""
    import triton
    import triton.language as tl

    from flashmix.gpu.hopper import copy_to_global, copy_to_shared, fence_async_shared, gl, gluon, mbarrier, stores_done

    @triton.jit
    def copy(x, y, S):
        row = tl.program_id(0) * x.block_shape[0]
        y.store([row, 0], x.load([row, 0]))

    @gluon.jit
    def gluon_copy(x, y, S):
        row = gl.program_id(0) * x.block_type.shape[0]
        tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrived, count=1)
        fence_async_shared()
        mbarrier.expect(arrived, x.block_type.nbytes)
        copy_to_shared(x, [row, 0], arrived, tile)
        mbarrier.wait(arrived, 0)
        copy_to_global(y, [row, 0], tile)
        stores_done(0)

    return copy, gluon_copy


@pytest.mark.parametrize("language", [0, 1], ids=["triton", "gluon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_are_the_tensors_of_the_launch(language, dtype):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA is of Hopper and later")
    kernel = Kernel(kernels()[language], None)
    for rows, columns in (
        (64, 32),
        (61, 32),
        (1, 24),
        (61, 48),
    ):  # whole tiles; rows and columns past the end; a stride
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        y = torch.full_like(x, 7)
        size, steps = (rows, min(columns, COLUMNS)), (columns, 1)
        kernel(-(-rows // ROWS), *[Tiles(t, size, steps, (ROWS, COLUMNS)) for t in (x, y)])
        assert torch.equal(y[:, :COLUMNS], x[:, :COLUMNS])
        assert bool((y[:, COLUMNS:] == 7).all())


def test_more_tensors_than_maps_are_kept():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA is of Hopper and later")
    kernel = Kernel(kernels()[0], None)
    x = torch.randn(KEPT + 9, ROWS, COLUMNS, device="cuda")
    y = torch.zeros_like(x)
    for a, b in zip(x, y, strict=True):
        kernel(1, *[Tiles(t, (ROWS, COLUMNS), (COLUMNS, 1), (ROWS, COLUMNS)) for t in (a, b)])
    assert torch.equal(x, y)


@pytest.mark.parametrize("captured", [False, True])
def test_a_thread_without_a_context_launches(captured):
    """As autograd's thread in the first backward of a process."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA is of Hopper and later")
    kernel = Kernel(kernels()[0], None)
    x = torch.randn(2, ROWS, COLUMNS, device="cuda")
    y = torch.zeros_like(x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def launch(i):
        with torch.cuda.stream(stream):
            kernel(1, *[Tiles(t[i], (ROWS, COLUMNS), (COLUMNS, 1), (ROWS, COLUMNS)) for t in (x, y)])

    torch.cuda.synchronize()
    launch(0)  # compiles
    thread = threading.Thread(target=launch, args=(1,))
    with torch.cuda.graph(graph, stream=stream) if captured else nullcontext():
        thread.start()
        thread.join()
    if captured:
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, y)


def test_tiles_begin_at_multiples_of_16_bytes():
    x = torch.zeros(65, device="cuda")[1:].view(2, 32)
    with pytest.raises(ValueError, match="16 bytes"):
        Tiles(x, (2, 32), (32, 1), (ROWS, COLUMNS))
