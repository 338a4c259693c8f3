"""The law that mbarriers keep their memory: it must see the ways in which they lose it."""

from __future__ import annotations

import pytest
from compilers.barrier_memory import short_barriers

pytest.importorskip("triton")

from flashmix.gpu.hopper import allocate_barriers, gl, gluon, plain, retire, signal, thread_barrier, wait_full

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def barrier_kernel(out, USED: gl.constexpr, RETIRED: gl.constexpr):
    """Turns a row in shared memory around after a barrier, which is used, retired, both or neither."""
    barriers = allocate_barriers(1, 1)
    if USED:
        signal(barriers, 0)
        wait_full(barriers, 0)
    row = gl.allocate_shared_memory(gl.float32, [128], plain())
    i = gl.arange(0, 128, LANES)
    row.store(gl.load(out + i))
    thread_barrier()
    gl.store(out + 127 - i, row.load(LANES))
    if RETIRED:
        retire(barriers)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("retired", [False, True])
def test_barriers_that_lose_their_memory(used: bool, retired: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {"out": "*fp32", "USED": "constexpr", "RETIRED": "constexpr"}
    source = GluonASTSource(barrier_kernel, signature, {(1,): used, (2,): retired})
    made = compile(source, target=GPUTarget("cuda", 90, 32))
    short = short_barriers(made.asm["ttgir"], (9, 0))
    assert bool(short) != retired, short
