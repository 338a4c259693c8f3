"""The kernels of MesaNet for Hopper: in the emulator of Gluon, compiled without a GPU, and on a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from samples import sample

pytest.importorskip("triton")

from budget import assert_within_budget
from compilers.gluon_emulator import hopper_card
from kernels import compile_launch, recording
from rowwise_cases import assert_captures_both_ways, assert_repeats, assert_rows_do_not_meet, assert_same_bits, random
from torch import Tensor
from torch.nn.functional import normalize

from flashmix import Packing, explain, mesa_net
from flashmix.gpu.arch import SHARED_MEMORY_KIB

NAMES = ("o", "R", "S", "dq", "dk", "dv", "dbeta", "dg", "dridge", "dR", "dS")
# 16-bit roundings between what comes back and a gradient: of the adjoint solution, and of the operands of both maps
ROUNDINGS = 2


@dataclass(frozen=True)
class Case:
    """Sizes `B, T, H, HV, K, V`, packed sequences, whether a state is given, how much keys have in common, the size of the decay."""

    sizes: tuple[int, int, int, int, int, int]
    lengths: tuple[int, ...] = ()
    state: bool = True
    correlated: float = 0.0
    decay: float = 0.1
    steps: int = 30


FEW = [
    Case((1, 70, 2, 2, 16, 24)),
    Case((1, 80, 1, 2, 40, 72), lengths=(30, 0, 1, 49), steps=45),
    Case((2, 1, 1, 1, 33, 16), state=False),
    Case((2, 0, 1, 1, 40, 16)),
]
SHORT = [
    Case((1, 140, 2, 2, 64, 64), lengths=(66, 3, 0, 71), correlated=0.8, decay=0.01),
    Case((1, 70, 1, 2, 100, 200), correlated=0.9, steps=40),
]
LONG = [
    Case((2, 300, 2, 4, 128, 128)),
    Case((1, 700, 2, 2, 64, 64), lengths=(100, 3, 0, 597), correlated=0.8, decay=0.01),
    Case((1, 500, 1, 2, 100, 200), correlated=0.9, steps=40),
    Case((1, 200, 1, 1, 128, 256), decay=0.0),
]


def inputs(case: Case) -> dict[str, Tensor]:
    B, T, H, HV, K, V = case.sizes
    N, own = len(case.lengths) or B, (1 - case.correlated**2) ** 0.5
    k = case.correlated * normalize(random(1, 1, H, K, seed=9), dim=-1) + own * normalize(random(B, T, H, K), dim=-1)
    x = {"q": normalize(random(B, T, H, K, seed=1), dim=-1), "k": k, "v": random(B, T, HV, V, seed=2)}
    x |= {"beta": torch.sigmoid(random(B, T, HV, seed=3)), "g": -case.decay * random(B, T, HV, seed=4).abs()}
    x["ridge"] = 0.25 + random(HV, K, seed=5).abs()
    if case.state:
        R = random(N, HV, K, K, seed=6)
        x |= {"R": R @ R.mT / K, "S": random(N, HV, K, V, seed=7)}
    return x


def results(
    case: Case,
    x: dict[str, Tensor],
    dtype: torch.dtype,
    impl: str,
    device: str = "cpu",
    half: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs, states and gradients of inputs that are rounded to `half` first."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(name: str, t: Tensor) -> Tensor:
        t = t.to(half) if half is not None and name in "qkv" else t
        return t.to(device, dtype if name in "qkv" else wide).requires_grad_()

    leaves = {name: rounded(name, t) for name, t in x.items()}
    packing = Packing.from_lengths(case.lengths, device) if case.lengths else None
    options: dict[str, Any] = {"steps": case.steps, "scale": 0.7, "cu_seqlens": packing, "impl": impl}
    state = (leaves["R"], leaves["S"]) if case.state else None
    operands = [leaves[name] for name in ("q", "k", "v", "beta", "g", "ridge")]
    o, last = mesa_net(*operands, initial_state=state, return_state=True, **options)
    assert last is not None
    outputs = (o, *last)
    flows = [random(*t.shape, seed=10 + i).to(half or t.dtype).to(device, t.dtype) for i, t in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), flows)
    return {name: t.detach().cpu() for name, t in zip(NAMES, (*outputs, *grads), strict=False)}


def assert_solves(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    x = inputs(case)
    want, plain = (results(case, x, of, "portable", half=dtype) for of in (torch.float64, dtype))
    for name, have in results(case, x, dtype, impl, device).items():
        steps = ROUNDINGS if name[0] == "d" else 1
        assert_within_budget(f"{case}: {name}", have, want[name], plain[name], dtype, steps=steps)


@pytest.mark.parametrize("case", sample([*FEW[1:], *SHORT, *LONG[1:3]], [*FEW[2:], *SHORT]), ids=str)
def test_the_kernels_for_hopper(case: Case) -> None:
    with hopper_card() as launched:
        assert_solves(case, torch.bfloat16, "gluon")
    assert set(launched) >= ({"mesa_states_kernel", "mesa_solve_hopper_kernel"} if case.sizes[1] else set())


def test_boundaries_that_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, and touch nothing outside of their tensors: the emulator's memory refuses."""
    monkeypatch.setattr(Packing, "check", lambda self: None)
    x = {
        name: t.bfloat16() if name in "qkv" else t
        for name, t in inputs(Case((1, 40, 1, 1, 40, 16), (10, 20, 10))).items()
    }
    for bounds in ([0, 30, 10, 40], [35, 5, 40, 12], [0, 90, -20, 40]):
        packing = Packing.from_lengths([10, 20, 10])
        packing.cu_seqlens.copy_(torch.tensor(bounds))
        operands = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "beta", "g", "ridge")]
        with hopper_card():
            o, _ = mesa_net(*operands, steps=2, cu_seqlens=packing, impl="gluon")
            torch.autograd.grad(o, operands, torch.ones_like(o))


def test_what_it_refuses() -> None:
    """Keys of more than 128 channels are solved for by the recurrence's kernels, a pass a step."""
    x = inputs(Case((1, 8, 1, 1, 144, 16), state=False))
    operands = [x[name].bfloat16() if name in "qkv" else x[name] for name in ("q", "k", "v", "beta", "g", "ridge")]
    with recording((9, 0)) as launches:
        assert explain(mesa_net, *operands).choice == "triton"
        mesa_net(*operands, steps=3)
    assert not any(launch.name.startswith("mesa") for launch in launches)
    with recording((9, 0)), pytest.raises(ValueError, match="keys of 33 to 128 channels"):
        mesa_net(*operands, impl="gluon")


@pytest.mark.parametrize("K", sample((128, 64, 48), (128,)))
def test_they_compile(K: int) -> None:
    """Within shared memory; what spills is 16 loads a step of the backward with 128 channels."""
    x = inputs(Case((1, 70, 1, 2, K, K)))
    leaves = {name: (t.bfloat16() if name in "qkv" else t).requires_grad_() for name, t in x.items()}
    operands = [leaves[name] for name in ("q", "k", "v", "beta", "g", "ridge")]
    with recording((9, 0)) as launches:
        o, _ = mesa_net(*operands, initial_state=(leaves["R"], leaves["S"]), steps=3)
        torch.autograd.grad(o, operands, torch.empty_like(o))
    own = [launch for launch in launches if launch.name.startswith("mesa_")]
    assert {launch.name for launch in own} == {"mesa_states_kernel", "mesa_solve_hopper_kernel"}
    for launch in own:
        made = compile_launch(launch)
        assert made.stack <= 160, (launch.name, K)
        assert made.shared <= SHARED_MEMORY_KIB[9, 0] * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW, *LONG], ids=str)
def test_on_the_device(case: Case) -> None:
    assert_solves(case, torch.bfloat16, "auto", "cuda")


@pytest.mark.gpu
def test_laws_on_the_device() -> None:
    """Bits of rows alone and of every run; in a graph; 100,000 sequences of one token."""
    beta, g, ridge = torch.rand(2, 150, 2).cuda(), -torch.rand(2, 150, 2).cuda(), 0.25 + torch.rand(2, 64).cuda()

    def op(x: Tensor) -> Tensor:
        x = normalize(x, dim=-1)
        B, T = x.shape[:2]
        return mesa_net(x, x, x, beta[:B, :T], g[:B, :T], ridge)[0]

    beta[1], g[1] = beta[0], g[0]
    x = random(2, 150, 2, 64).bfloat16()
    assert_rows_do_not_meet(op, x.cuda())
    assert_repeats(lambda x: op(x.cuda()).cpu(), x)
    assert_captures_both_ways(op, x.cuda().requires_grad_())
    tokens = normalize(random(1, 100_000, 2, 64).cuda(), dim=-1).bfloat16()
    one = torch.full((1, 100_000, 2), 0.5, device="cuda")
    y, _ = mesa_net(tokens, tokens, tokens, one, -one, ridge, cu_seqlens=Packing.from_lengths([1] * 100_000, "cuda"))
    rows, ones = tokens.transpose(0, 1), one.transpose(0, 1)
    assert_same_bits("alone", y, mesa_net(rows, rows, rows, ones, -ones, ridge)[0].transpose(0, 1))
