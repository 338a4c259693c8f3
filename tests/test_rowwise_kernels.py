"""The kernels of the row-wise ops, compiled for every kind of GPU without one.

An op's calls are in `CALLS`: each is made forward and backward, its launches are recorded and compiled. FAST is what the
default run compiles (for a Hopper card and for the card with the least shared memory); all calls for all targets with
FLASHMIX_ALL_KERNELS=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import TARGETS, compile_launch, recording  # noqa: E402

from flashmix._arch import SHARED_MEMORY_KIB  # noqa: E402

BF16 = torch.bfloat16
Call = Callable[[], Tensor | Sequence[Tensor | None]]


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


# The calls of each op by a name; those in FAST first. Contents are never looked at.
CALLS: dict[str, Call] = {}
FAST: set[str] = set()
# Bytes of stack that a kernel of a call may take, where it takes any.
STACK: dict[str, int] = {}

EVERYTHING = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"


def launches_of(call: Call, capability: tuple[int, int]) -> list:
    """What `call` launches, forward and backward."""
    with recording(capability) as launches:
        got = call()
        results = [got] if isinstance(got, Tensor) else [t for t in got if t is not None]
        asked = [t for t in results if t.requires_grad]
        if asked:
            torch.autograd.backward(asked, [torch.empty_like(t) for t in asked])
    return launches


@pytest.mark.parametrize("name", CALLS if EVERYTHING else FAST & set(CALLS))
def test_kernels_compile(name: str) -> None:
    for capability in TARGETS if EVERYTHING else ((9, 0), (8, 6)) if name in FAST else ():
        launches = launches_of(CALLS[name], capability)
        assert launches, f"{name} launches nothing"
        for launch in launches:
            made = compile_launch(launch)
            assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024, (launch.name, made.shared)
            assert made.stack <= STACK.get(name, 0), (launch.name, capability, made.stack)
