"""The kernels of the sLSTM with recurrent weights: in Triton's interpreter against the definition, and compiled for a GPU without one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import compile_launch, recording
from slstm_cases import LENGTHS, SIZES, compare, inputs, ours

from flashmix import Packing, slstm
from flashmix.ops.slstm import triton_gpu

ALL = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"  # otherwise for a Hopper card


def given(heads: int, channels: int, sequences: int, *shape: int) -> list[Tensor]:
    return [t.float() for t in inputs(heads, channels, sequences, *shape)]


@pytest.fixture
def few_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the matrices of 20 channels 8 rows lie in registers, the others are read 4 at a time; backwards 32 and 16."""
    monkeypatch.setattr(triton_gpu, "RESIDENT", 1024)
    monkeypatch.setattr(triton_gpu, "STREAMED", 512)


@pytest.mark.interpreted
def test_the_kernels_are_the_definition() -> None:
    tensors = given(2, 5, 2, 2, 3)
    compare(ours(tensors, "triton"), tensors)


@pytest.mark.interpreted
def test_weights_that_registers_do_not_hold(few_registers: None) -> None:
    lengths = [3, 0, 1]
    tensors, packing = given(1, 20, len(lengths), 1, sum(lengths)), Packing.from_lengths(lengths)
    compare(ours(tensors, "triton", packing), tensors, packing.cu_seqlens.tolist())


@pytest.mark.interpreted
def test_logits_of_any_size() -> None:
    tensors = given(1, 6, 1, 1, 5)
    tensors[:4] = [40 * t for t in tensors[:4]]
    compare(ours(tensors, "triton"), tensors)
    tensors[0][:, 2], tensors[7][:] = -torch.inf, -torch.inf  # writes nothing; a state that counts nothing
    write, forget, candidate, output, recurrent, c, n, m, y = tensors
    start = c, n, m, y
    gates = write, forget, candidate, output
    given_state: dict[str, Any] = {"initial_state": start, "return_state": True, "impl": "triton"}
    out, state = slstm(*gates, recurrent, **given_state)
    assert state is not None and torch.isfinite(out).all() and torch.isfinite(state[2]).all()
    _, unchanged = slstm(write[:, :0], forget[:, :0], candidate[:, :0], output[:, :0], recurrent, **given_state)
    assert unchanged is not None and all(torch.equal(*pair) for pair in zip(unchanged, start, strict=True))


@pytest.mark.interpreted
def test_weights_of_16_bits_are_read_as_they_are() -> None:
    tensors = given(1, 6, 1, 1, 3)
    narrow = tensors[4].bfloat16()
    wide = ours([*tensors[:4], narrow.float(), *tensors[5:]], "triton")
    for place, (have, want) in enumerate(zip(ours([*tensors[:4], narrow, *tensors[5:]], "triton"), wide, strict=True)):
        assert torch.equal(have, want.to(have.dtype)), place


def test_heads_that_are_too_wide_are_refused() -> None:
    x = torch.zeros(1, 1, 1, 520)
    with pytest.raises(ValueError, match="heads of at most 512 channels, got 520"):
        slstm(x, x, x, x, torch.zeros(4, 1, 520, 520), impl="triton")


def compiles(channels: int, capability: tuple[int, int], dtype: torch.dtype, packed: bool = False) -> None:
    """Both kernels compile without spills."""
    tensors = given(1, channels, 2 if packed else 1, 1, 2)
    tensors[4] = tensors[4].to(dtype)
    with recording(capability) as launches:
        ours(tensors, "triton", Packing.from_lengths([1, 1]) if packed else None)
    assert {launch.name for launch in launches} == {"cell_kernel", "cell_backward_kernel"}
    for launch in launches:
        compiled = compile_launch(launch)
        assert compiled.stack == 0, (launch.name, compiled.stack)


def test_the_kernels_compile(few_registers: None) -> None:
    compiles(20, (9, 0), torch.float32, packed=True)


@pytest.mark.whole
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)] if ALL else [(9, 0)], ids=str)
@pytest.mark.parametrize("channels", [5, 32, 64, 128, 192, 256, 512] if ALL else [128, 256])
def test_every_width_compiles_without_spills(channels: int, capability: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compiles(channels, capability, dtype)
        compiles(channels, capability, dtype, packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, channels", [*SIZES, (2, 64), (1, 128), (1, 200), (1, 256), (1, 512)])
def test_on_the_device(heads: int, channels: int) -> None:
    tensors = given(heads, channels, 2, 2, 20)
    compare(ours(tensors, "triton", device="cuda"), tensors)


@pytest.mark.gpu
def test_packed_on_the_device() -> None:
    tensors = given(2, 150, len(LENGTHS), 1, sum(LENGTHS))
    packing = Packing.from_lengths(LENGTHS)
    found = ours(tensors, "triton", Packing.from_lengths(LENGTHS, "cuda"), "cuda")
    compare(found, tensors, packing.cu_seqlens.tolist())
