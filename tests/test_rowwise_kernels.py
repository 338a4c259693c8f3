"""The kernels of the row-wise ops, compiled for every kind of GPU without one.

An op's calls are in `CALLS`: each is made forward and backward, its launches are recorded and compiled. FAST is what the
default run compiles (for a Hopper card and for the card with the least shared memory); all calls for all targets with
FLASHMIX_ALL_KERNELS=1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import MULTIPROCESSORS, TARGETS, code_of, compile_launch, recording
from samples import thinned

from flashmix.gpu.arch import SHARED_MEMORY_KIB
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength
from flashmix.ops.gated_product.linear import SwiGLULinear
from flashmix.ops.gated_product.op import ACTIVATIONS, gated, swiglu
from flashmix.ops.norm.op import group_norm, l2_norm, layer_norm, rms_norm
from flashmix.ops.own_write import with_own_write
from flashmix.ops.rotary.op import rotary, rotary_qk
from flashmix.ops.scaled_rows.op import scaled_rows
from flashmix.ops.short_conv.op import short_conv
from flashmix.ops.token_shift.op import token_shift

BF16 = torch.bfloat16
Call = Callable[[], Tensor | Sequence[Tensor | None]]


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def norms(width: int, dtype: torch.dtype = BF16, rows: int = 70) -> dict[str, Call]:
    def all_of(op: Callable[..., Sequence[Tensor]], *rest: int, bias: bool = True) -> Call:
        def call() -> Sequence[Tensor]:
            x, gate, residual = (leaf(rows, width, dtype=dtype) for _ in range(3))
            parameters = [leaf(width) for _ in range(1 + bias)]
            return op(x, *rest, *parameters, gate=gate, residual=residual, return_residual=True)

        return call

    return {
        f"rms_norm {width} {dtype}": lambda: rms_norm(leaf(rows, width, dtype=dtype), leaf(width)),
        f"l2_norm {width} {dtype}": lambda: l2_norm(leaf(rows, width, dtype=dtype)),
        f"gated rms_norm {width} {dtype}": all_of(rms_norm, bias=False),
        f"gated layer_norm {width} {dtype}": all_of(layer_norm),
        f"group_norm {width} {dtype}": all_of(group_norm, 2 if width % 2 == 0 else 1),
        f"strided rms_norm {width} {dtype}": lambda: rms_norm(leaf(5, width, rows, dtype=dtype).mT, leaf(width)),
    }


def rotations(heads: int, dim: int, rotated: int, dtype: torch.dtype = BF16) -> dict[str, Call]:
    shape = f"{heads} x {dim}, {rotated} turned, {dtype}"

    def table() -> tuple[Tensor, Tensor]:
        return torch.empty(64, rotated // 2), torch.empty(64, rotated // 2)

    def q() -> Tensor:
        return leaf(2, 9, heads, dim, dtype=dtype)

    def in_place() -> tuple[Tensor, Tensor]:
        return rotary_qk(q().detach(), q().detach()[:, :, :1], *table(), inplace=True, impl="triton")

    def by_axes() -> Tensor:
        positions, axes = torch.zeros(2, 9, 3, dtype=torch.int64), [i % 3 for i in range(rotated // 2)]
        return rotary(q(), *table(), positions=positions, axes=axes)

    return {
        f"rotary {shape}": lambda: rotary(q(), *table()),
        f"rotary_qk {shape}": lambda: rotary_qk(q(), q()[:, :, :1], *table(), positions=3),
        f"interleaved rotary_qk {shape}": lambda: rotary_qk(q(), q()[:, :, :1], *table(), interleaved=True),
        f"positions, rotary {shape}": lambda: rotary(q(), *table(), positions=torch.zeros(2, 9, dtype=torch.int32)),
        f"axes, rotary {shape}": by_axes,
        f"in place, rotary_qk {shape}": in_place,
    }


def products(dtype: torch.dtype) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for activation in ACTIVATIONS:
        calls[f"gated {activation} {dtype}"] = lambda a=activation: gated(
            leaf(7, 100, dtype=dtype), leaf(7, 100, dtype=dtype), a
        )
    for width in (1, 100, 11008):
        calls[f"halves, swiglu {width} {dtype}"] = lambda w=width: swiglu(*leaf(7, 2 * w, dtype=dtype).chunk(2, -1))
        calls[f"swiglu with a matrix {width} {dtype}"] = lambda w=width: SwiGLULinear.apply(
            leaf(7, 2 * w, dtype=dtype), leaf(8, w, dtype=dtype)
        )
    return calls


def shifts(width: int, dtype: torch.dtype = BF16) -> dict[str, Call]:
    def call(count: int, cu_seqlens: Tensor | None) -> Sequence[Tensor | None]:
        x, state = (
            leaf(1 if cu_seqlens is not None else count, 9, width, dtype=dtype),
            leaf(count, 1, width, dtype=dtype),
        )
        return token_shift(x, initial_state=state, return_state=True, cu_seqlens=cu_seqlens)

    return {
        f"token_shift {width} {dtype}": lambda: call(2, None),
        f"packed token_shift {width} {dtype}": lambda: call(3, torch.tensor([0, 2, 2, 9])),
        f"plain token_shift {width} {dtype}": lambda: token_shift(leaf(2, 9, width, dtype=dtype)),
    }


def gates(dtype: torch.dtype) -> dict[str, Call]:
    def heads(op: Callable[..., Tensor], *shape: int) -> Call:
        return lambda: op(leaf(2, 9, *shape, dtype=dtype), leaf(shape[0]), leaf(*shape, dtype=dtype))

    return {
        f"softplus_decay 16 {dtype}": heads(softplus_decay, 16),
        f"softplus_decay 32 x 128 {dtype}": heads(softplus_decay, 32, 128),
        f"softplus_decay 3 x 5 {dtype}": heads(softplus_decay, 3, 5),
        f"bounded_decay 7 {dtype}": heads(bounded_decay, 7),
        f"bounded_decay 32 x 128 {dtype}": heads(bounded_decay, 32, 128),
        f"write_strength {dtype}": lambda: write_strength(leaf(2, 9, 16, dtype=dtype)),
    }


def factors(width: int, dtype: torch.dtype = BF16) -> dict[str, Call]:
    def call(transposed: bool) -> Tensor:
        x, factor = leaf(2, 9, 3, width, dtype=dtype), leaf(2, 9, 3, dtype=torch.float32)
        return scaled_rows(x.transpose(1, 2), factor.mT) if transposed else scaled_rows(x, factor)

    return {
        f"scaled_rows {width} {dtype}": lambda: call(False),
        f"transposed scaled_rows {width} {dtype}": lambda: call(True),
    }


def own_writes(groups: int, heads: int, keys: int, values: int, dtype: torch.dtype = BF16) -> dict[str, Call]:
    def call() -> Tensor:
        y, x = (leaf(2, 9, heads, values, dtype=dtype) for _ in range(2))
        B, C = (leaf(2, 9, groups, keys, dtype=dtype) for _ in range(2))
        return with_own_write(y, x, B, C, leaf(2, 9, heads, dtype=torch.float32), leaf(heads), 0.5, "auto")

    return {f"own_write {groups} x {keys}, {heads} x {values} {dtype}": call}


# The calls of each op by a name; those in FAST are compiled in every run. Contents are never looked at.
CALLS: dict[str, Call] = {}
for _width in (1, 7, 64, 100, 128, 256, 512, 1000, 2048, 4096, 8192, 65536):
    CALLS |= norms(_width) | (norms(_width, torch.float32) if _width in (64, 4096, 8192) else {})
for _shape in ((32, 128, 128), (4, 64, 64), (5, 96, 32), (3, 7, 2), (16, 256, 256), (1, 512, 64)):
    CALLS |= rotations(*_shape) | (rotations(*_shape, torch.float32) if _shape[1] in (7, 128) else {})
for _width in (1, 100, 2048, 5000):
    CALLS |= shifts(_width) | shifts(_width, torch.float32)
for _width in (1, 100, 256, 512, 5000):
    CALLS |= factors(_width) | factors(_width, torch.float32)
for _shape in ((1, 32, 128, 64), (4, 4, 16, 16), (2, 6, 100, 7), (1, 8, 256, 256)):
    CALLS |= own_writes(*_shape) | own_writes(*_shape, torch.float32)
CALLS |= products(BF16) | products(torch.float32) | gates(BF16) | gates(torch.float32)
FAST = {
    "interleaved rotary_qk 32 x 128, 128 turned, torch.bfloat16",
    "axes, rotary 5 x 96, 32 turned, torch.bfloat16",
    "gated gelu_tanh torch.bfloat16",
    "packed token_shift 2048 torch.bfloat16",
    "softplus_decay 32 x 128 torch.bfloat16",
    "bounded_decay 7 torch.float32",
    "halves, swiglu 11008 torch.bfloat16",
    "rms_norm 4096 torch.bfloat16",
    "gated rms_norm 128 torch.bfloat16",
    "gated layer_norm 8192 torch.float32",
    "group_norm 65536 torch.bfloat16",
    "scaled_rows 512 torch.bfloat16",
    "own_write 1 x 128, 32 x 64 torch.bfloat16",
}
# Bytes of stack that a kernel of a call may take, where it takes any.
STACK = {
    "l2_norm 8192 torch.bfloat16": 8,
    "gated layer_norm 1000 torch.bfloat16": 16,
    "group_norm 1000 torch.bfloat16": 8,
    "gated layer_norm 65536 torch.bfloat16": 8,
    "group_norm 65536 torch.bfloat16": 8,
}

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


@pytest.mark.parametrize(
    ("name", "capability"),
    thinned(1, CALLS, TARGETS)
    if EVERYTHING
    else thinned(3, [name for name in CALLS if name in FAST], ((9, 0), (8, 6))),
    ids=str,
)
def test_kernels_compile(name: str, capability: tuple[int, int]) -> None:
    launches = launches_of(CALLS[name], capability)
    assert launches, f"{name} launches nothing"
    for launch in launches:
        made = compile_launch(launch)
        assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024, (launch.name, made.shared)
        assert made.stack <= STACK.get(name, 0), (launch.name, capability, made.stack)


@pytest.mark.parametrize("groups", [1, 8])
def test_a_norm_of_one_channel_has_no_gradient(groups: int) -> None:
    """Its `dn - mean(dn)` is 0; as one multiply-add it would be the rounding of `dy weight`, times a scale of up to `1 / sqrt(eps)`."""
    weight = torch.empty(groups)
    for capability in ((9, 0), (8, 0)):
        launches = launches_of(lambda: group_norm(leaf(70, groups), groups, weight, center=True), capability)
        backward = next(launch for launch in launches if "backward" in launch.name)
        assert "fma.rn.f32" not in compile_launch(backward).ptx


@pytest.mark.parametrize(("norm", "width"), thinned(3, ["rms_norm", "layer_norm"], [512, 1000, 4096, 8192]))
def test_a_sum_in_the_same_pass_is_added_up_alike(norm: str, width: int) -> None:
    """A row's reductions lie over threads and warps as those of a sum that was made before: the bits of both are the same."""
    op, parameters = {"rms_norm": (rms_norm, 1), "layer_norm": (layer_norm, 2)}[norm]
    found = []
    for residual in (None, leaf(70, width)):
        launches = launches_of(
            lambda r=residual: op(leaf(70, width), *(leaf(width) for _ in range(parameters)), residual=r), (9, 0)
        )
        forward = next(launch for launch in launches if "forward" in launch.name)
        assert compile_launch(forward).stack == 0
        text = code_of(forward).asm["ttgir"]
        layouts = dict(re.findall(r"(#\w+) = (#ttg\.blocked<.*?>)\n", text))
        reduced = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(\w+), (#\w+)>\)', text, re.DOTALL)
        found.append([(shape, layouts[name]) for shape, name in reduced])
    assert found[0] and found[0] == found[1]


def resident(registers: int, warps: int) -> int:
    """Programs of so many registers a thread that a multiprocessor holds: each of its quarters has 16,384 of them."""
    return 16384 // (-(-registers // 8) * 8 * 32) * 4 // warps


SUMMING: dict[str, Call] = {
    "rms_norm of 128": lambda: rms_norm(leaf(20_000, 128), leaf(128)),
    "gated rms_norm of 128": lambda: rms_norm(leaf(20_000, 128), leaf(128), gate=leaf(20_000, 128)),
    "layer_norm of 512": lambda: layer_norm(leaf(4_000, 512), leaf(512), leaf(512)),
    "layer_norm of 2048": lambda: layer_norm(leaf(2_000, 2048), leaf(2048), leaf(2048)),
    "rms_norm of 4096": lambda: rms_norm(leaf(800, 4096), leaf(4096)),
    "layer_norm of 4096": lambda: layer_norm(leaf(800, 4096), leaf(4096), leaf(4096)),
    "rms_norm of 8192": lambda: rms_norm(leaf(400, 8192), leaf(8192)),
    "float32 rms_norm of 4096": lambda: rms_norm(leaf(800, 4096, dtype=torch.float32), leaf(4096)),
    "softplus_decay": lambda: softplus_decay(leaf(4, 512, 32, 128), leaf(32), leaf(32, 128)),
    "short_conv": lambda: short_conv(leaf(4, 2048, 4096), leaf(4096, 4))[0],
}


@pytest.mark.parametrize("name", SUMMING)
def test_programs_that_sum_run_at_once(name: str) -> None:
    """One more than registers hold would run when all others are done, and the backward take twice as long."""
    launches = [launch for launch in launches_of(SUMMING[name], (9, 0)) if "backward_kernel" in launch.name]
    launch = next(launch for launch in launches if "weight" not in launch.name)
    fit = resident(compile_launch(launch).registers, dict(launch.kwargs)["num_warps"])
    assert launch.grid[0] <= fit * MULTIPROCESSORS[9, 0], (launch.grid[0] / MULTIPROCESSORS[9, 0], fit)
