"""Looking at kernels without a GPU: which ones a call launches, and what each compiles to for any target.

Nothing is written down twice: the launches are recorded from the public ops themselves, which run on CPU tensors with the
launch replaced; their results are uninitialised and must not be looked at.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from compilers.barrier_memory import short_barriers
from compilers.ptxas_descriptors import lost_descriptors

from flashmix.gpu import device as gpu
from flashmix.gpu.arch import SHARED_MEMORY_KIB
from flashmix.gpu.launch import RELEASE
from flashmix.gpu.passes import left_out, without_llvm_passes
from flashmix.gpu.ptxas import sound_ptxas

# LLVM (Triton 3.6) made of `tid << 31`, one of two shifts packed into one number, a product in 64 bits, which drops nothing: addresses
# of nowhere. A thread's number is under 2^10.
WIDEST = 2**22
COUNTED = (3, 6)  # the Triton whose spills the tests know
TARGETS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
MULTIPROCESSORS = {(8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148}


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel, as a launch asks for it."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    capability: tuple[int, int]
    key: str  # equal for launches that compile to the same code
    grid: tuple[int, ...]
    llvm_passes: bool = True

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@dataclass(frozen=True)
class Compiled:
    """What a kernel came to: shared memory and stack (spills and arrays) in bytes, registers a thread, its PTX.

    What tests allow as stack was counted with one release of Triton; with others it is not held against a kernel, and 0 here.
    """

    shared: int
    stack: int
    registers: int
    ptx: str
    said: str  # by ptxas; nothing where the code was compiled before

    @property
    def advice(self) -> set[str]:
        """Numbers of what ptxas says of `wgmma`: C7510 to C7517 tell that products are awaited where they need not be."""
        return set(re.findall(r"C75\d\d", self.said or said_again(self.ptx)))


def said_again(ptx: str) -> str:
    """What ptxas says of code for Hopper."""
    from triton.backends.nvidia import compiler

    with sound_ptxas():
        tool = compiler.get_ptxas(90).path
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@contextmanager
def forgotten_kinds() -> Iterator[None]:
    """Within it the recurrence on Hopper knows no kinds of calls from before, when a card may have been another one."""
    with ExitStack() as stack:
        for name in ("FORWARD", "SAVING", "BACKWARD"):
            stack.enter_context(mock.patch.dict(f"flashmix.ops.recurrence.gluon_hopper.{name}", clear=True))
        yield


@contextmanager
def recording(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Within it, Triton implementations accept CPU tensors and launch nothing; what they would launch is in the list."""
    from triton.runtime.jit import JITFunction

    found: dict[str, Launch] = {}
    launches: list[Launch] = []
    shared = SHARED_MEMORY_KIB[capability] * 1024
    target = gpu.Target(capability, shared, MULTIPROCESSORS[capability])

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound, specialization, _ = _binder(self, capability)(*args, **kwargs)
        key = f"{self.fn.__module__}.{self.fn.__name__}{specialization}{sorted(kwargs.items(), key=str)}{capability}"
        grid = tuple(grid(bound) if callable(grid) else grid)
        assert all(size > 0 for size in grid) and all(size <= 65535 for size in grid[1:]), (self.fn.__name__, grid)
        if key not in found:
            found[key] = Launch(self, args, tuple(kwargs.items()), capability, key, grid, not left_out())
            launches.append(found[key])

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(gpu, "target", lambda device: target),
        mock.patch.object(gpu, "refuses", lambda device, dtype: None),
        mock.patch.object(
            gpu, "hopper_refuses", lambda device, dtype, dtypes: None if capability == (9, 0) else "not Hopper"
        ),
        forgotten_kinds(),
    ):
        yield launches


def wait_for_compilers() -> None:
    """What earlier calls had compiled ahead is there, so that codes can be counted."""
    for thread in threading.enumerate():
        if thread.name.startswith("flashmix-compile"):
            thread.join()


def _binder(kernel: Any, capability: tuple[int, int]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def compile_launch(launch: Launch) -> Compiled:
    """What a recorded launch comes to on the target it was recorded for; needs no GPU. No product may have lost a descriptor."""
    from triton import knobs

    said = io.StringIO()
    with sound_ptxas(), knobs.nvidia.scope(), redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        made = code_of(launch)
    chosen = "_do_compile" in vars(launch.kernel)  # with_sound_ptxas puts it there
    assert chosen or "wgmma" not in made.asm["ptx"], f"{launch.name} has products, but not with_sound_ptxas"
    wide = [int(n) for n in re.findall(r"mul\.wide\.u32[^;]*, (\d+);", made.asm["ptx"])]
    assert max(wide, default=0) < WIDEST, f"{launch.key}: LLVM multiplied where a shift drops bits"
    lost = lost_descriptors(made.asm["ptx"], made.asm["cubin"])
    assert not lost, f"{launch.key}: {lost} read what they should not"
    if launch.kernel.is_gluon():
        short = short_barriers(made.asm["ttgir"], launch.capability)
        assert not short, f"{launch.key}: the memory of barriers {short} is used for something else"
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(
        made.metadata.shared, stack if RELEASE == COUNTED else 0, registers, made.asm["ptx"], said.getvalue()
    )


def code_of(launch: Launch) -> Any:
    """Triton's own result, by the ptxas that it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource

    gpu = GPUTarget("cuda", launch.capability[0] * 10 + launch.capability[1], 32)
    backend = make_backend(gpu)
    kwargs = dict(launch.kwargs)
    bound, specialization, options = _binder(launch.kernel, launch.capability)(*launch.args, **kwargs)
    options, signature, constexprs, attrs = launch.kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    with nullcontext() if launch.llvm_passes else without_llvm_passes():
        return triton.compile(source(launch.kernel, signature, constexprs, attrs), target=gpu, options=options.__dict__)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack of the kernel in `cubin`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found is not None, text.stdout
    return int(found[1]), int(found[2])
