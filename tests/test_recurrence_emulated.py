"""The recurrence's kernels for Hopper on a CPU, in the emulator of Gluon: results, the order of roles, barriers that everybody passes."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import test_recurrence_gpu
import torch
from budget import assert_within_budget
from cases import Case, make_inputs, run_op
from samples import sample, sample_of_rows
from test_recurrence import evaluate, same_bits
from test_recurrence_gpu import FUSED_CASES, GROUPED_CASES, HOPPER_CASES, fused_backward

import flashmix

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card
from kernels import MULTIPROCESSORS, recording
from recurrence_emulated import apart, cut_into, emulated

__all__ = ["apart", "fused_backward"]  # fixtures

CASES = [
    Case("grouped-token", "delta", "token", B=1, T=70, H=1, HV=2, K=128, V=128),
    Case("lone-token", "delta", "token", B=1, T=134, H=2, HV=2, K=128, V=128),
    Case("head-K96V80", "delta", "head", B=1, T=66, H=1, HV=1, K=96, V=80),
    Case("linear", "linear", "token", B=1, T=70, H=1, HV=1, K=128, V=128),
    Case("64-grouped-token", "delta", "token", B=1, T=134, H=1, HV=2, K=64, V=64),
    Case("64-lone-token", "delta", "token", B=1, T=262, H=1, HV=1, K=64, V=64),
    Case("64-linear", "linear", "token", B=1, T=70, H=1, HV=1, K=64, V=64),
    Case("128-64-grouped-token", "delta", "token", B=1, T=134, H=1, HV=2, K=128, V=64),
    Case("128-64-linear", "linear", "token", B=1, T=70, H=1, HV=2, K=128, V=64),
    Case("64-128-lone-token", "delta", "token", B=1, T=134, H=1, HV=1, K=64, V=128),
    Case("64-128-linear", "linear", "token", B=1, T=70, H=1, HV=2, K=64, V=128),
    Case("narrow-K48V40", "delta", "token", B=1, T=70, H=1, HV=2, K=48, V=40),
    Case("256-grouped-token", "delta", "token", B=1, T=134, H=1, HV=2, K=256, V=256),
    Case("256-token", "delta", "token", B=1, T=262, H=1, HV=1, K=256, V=256),
    Case("256-packed", "delta", "token", B=1, T=262, H=1, HV=2, K=256, V=256, lengths=(5, 0, 64, 65, 128)),
    Case("256-none-packed", "delta", "none", B=1, T=70, H=1, HV=1, K=256, V=256, lengths=(5, 65)),
    Case("256-linear-grouped-token", "linear", "token", B=1, T=134, H=1, HV=2, K=256, V=256),
    Case("256-linear-head", "linear", "head", B=2, T=66, H=2, HV=2, K=256, V=256),
    Case("256-linear-none-packed", "linear", "none", B=1, T=75, H=1, HV=2, K=256, V=256, lengths=(5, 0, 70)),
    Case("channel", "delta", "channel", B=1, T=70, H=1, HV=1, K=72, V=80),
    Case("channel-resets", "linear", "channel", B=1, T=70, H=1, HV=1, K=72, V=80, decay="resets"),
    # 2^-130 in a chunk, within one pass about the middle, and 2^-190, beyond it
    Case("channel-middle", "delta", "channel", B=1, T=70, H=1, HV=1, K=72, V=80, decay="-1.4"),
    Case("channel-middle-linear", "linear", "channel", B=1, T=70, H=1, HV=1, K=72, V=80, decay="-1.4"),
    Case("channel-beyond", "delta", "channel", B=1, T=70, H=1, HV=1, K=72, V=80, decay="-2.1"),
]


# Those of 256 channels take most of the time: of each rule the one with few chunks, and the packed one without a decay. Of other widths
# each pair once.
LATER = (
    *("256-token", "256-packed", "256-linear-grouped-token", "256-linear-none-packed", "lone-token", "64-lone-token"),
    *("128-64-linear", "64-128-lone-token", "64-linear", "channel-middle-linear"),
)


@pytest.mark.parametrize(
    "case",
    sample([*CASES, *HOPPER_CASES], [case for case in CASES if case.name not in LATER]),
    ids=lambda case: case.name,
)
def test_emulated_kernels_are_within_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    wide = "wide_" if case.K > 128 else ""
    output = "channel_output_kernel" if case.gate == "channel" else f"{wide}output_backward_kernel"
    state = "linear" if wide and case.rule == "linear" else "state"
    assert {f"{wide}{state}_forward_kernel", f"{wide}{state}_backward_kernel", output} <= set(launched), launched


FUSED = [
    Case("fused-token", "delta", "token", B=1, T=134, H=2, HV=2, K=128, V=128),
    Case("fused-none-packed", "delta", "none", B=1, T=139, H=1, HV=1, K=128, V=128, lengths=(5, 0, 64, 70)),
    Case("fused-head-K96V80", "delta", "head", B=1, T=66, H=1, HV=1, K=96, V=80),
    Case("fused-weak", "delta", "token", B=1, T=134, H=1, HV=1, K=128, V=128, decay="-0.02", states=False),
    Case("fused-linear", "linear", "token", B=1, T=134, H=1, HV=1, K=128, V=96),
    Case("fused-grouped", "delta", "token", B=1, T=134, H=1, HV=3, K=128, V=128),
    Case("fused-grouped-linear-packed", "linear", "none", B=1, T=75, H=2, HV=4, K=128, V=128, lengths=(5, 0, 70)),
]


@pytest.mark.parametrize(
    "case",
    sample(
        [*FUSED, *(c for c in [*FUSED_CASES, *GROUPED_CASES] if c.T < 8192)],
        [case for case in FUSED if case.name not in ("fused-token", "fused-grouped-linear-packed")],
    ),
    ids=lambda case: case.name,
)
def test_emulated_fused_backward_is_within_budget(
    case: Case, fused_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    fused_backward(True)
    with hopper_card() as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert launched[-2:] == ["state_backward_kernel", "walk_backward_kernel"], launched
    assert launched.count("state_forward_kernel") == 1 and "output_backward_kernel" not in launched, launched


@pytest.mark.parametrize(
    "rule, segments", sample_of_rows([("delta", 1), ("delta", 2), ("linear", 1), ("linear", 2)], [("delta", 2)])
)
def test_emulated_fused_backward_has_the_bits_of_the_kernels_that_it_joins(
    rule: str, segments: int, fused_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its roles comes first; so the size of a batch may choose between them."""
    cut_into(segments, monkeypatch)
    T = 140 + segments  # sizes of calls are remembered by shape
    case = Case("fused", rule, "token", B=1, T=T, H=1, HV=1, K=128, V=128, decay="-0.02")
    fused_backward(False)
    wanted, launched = emulated(case)
    assert {"output_backward_kernel"} <= set(launched) and "walk_backward_kernel" not in launched
    fused_backward(True)
    for seed in range(2):
        with hopper_card(seed=seed) as launched:
            found = evaluate(run_op, case, make_inputs(case, torch.bfloat16), "gluon")
        assert "walk_backward_kernel" in launched and "output_backward_kernel" not in launched
        for name, t in wanted.items():
            same_bits(found[name], t, name)


def test_emulated_value_heads_that_share_a_key_head_take_turns(
    fused_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dq and dk are the sums of those of each value head alone, added one after the other in their dtype, in segments; whichever
    role comes first.
    """
    cut_into(2, monkeypatch)
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.KEEP_VALUES", False)  # a head alone keeps no nu
    case = Case("turns", "delta", "token", B=1, T=143, H=1, HV=3, K=128, V=128, decay="-0.02")
    fused_backward(True)
    x = make_inputs(case, torch.bfloat16)
    alone = []
    for head in range(3):
        own = {name: t if name in ("q", "k") else t[:, :, head : head + 1] for name, t in x.items()}
        own["initial_state"] = x["initial_state"][:, head : head + 1]
        with hopper_card() as launched:
            alone.append(alone_gradients(own, head))
        assert "walk_backward_kernel" in launched
    for seed in range(2):
        with hopper_card(seed=seed) as launched:
            found = alone_gradients(x)
        assert "walk_backward_kernel" in launched
        for name in ("q", "k"):
            first, second, third = (one[name] for one in alone)
            same_bits(found[name], (first + second) + third, name)
        for name in ("v", "beta", "log_decay"):
            same_bits(found[name], torch.cat([one[name] for one in alone], 2), name)


def alone_gradients(x: dict[str, torch.Tensor], head: int | None = None) -> dict[str, torch.Tensor]:
    """Of a fixed weighting of the output, of all value heads or of one."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, _ = flashmix.delta_rule(**leaves, impl="gluon")
    do = torch.randn(*o.shape[:2], 3, o.shape[3], generator=torch.Generator().manual_seed(1)).to(o.dtype)
    do = do if head is None else do[:, :, head : head + 1]
    return dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), do), strict=True))


def test_the_fused_backward_is_for_calls_that_fill_a_card(fused_backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(multiprocessors: int, H: int = 2, **changed: Any) -> list[str]:
        case = Case(
            "fused", **({"rule": "delta", "gate": "none", "B": 1, "T": 5, "H": H, "HV": H, "K": 72, "V": 72} | changed)
        )
        monkeypatch.setitem(MULTIPROCESSORS, (9, 0), multiprocessors)
        with recording((9, 0)) as found:
            evaluate(run_op, case, make_inputs(case, torch.bfloat16), "gluon")
        return [launch.name for launch in found]

    fused_backward(True)
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.FILLED", 0.7)
    for walked in (launched(2), launched(4, HV=4), launched(1, rule="linear"), launched(2, HV=16)):
        assert "walk_backward_kernel" in walked and "output_backward_kernel" not in walked
    for other in (launched(3), launched(3, HV=4), launched(1, HV=18), launched(1, K=64)):
        assert "walk_backward_kernel" not in other and "output_backward_kernel" in other


def test_emulated_mlstm_errs_as_it_does_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of 512 channels, two value heads of 256; beside it the kernel of `scaled_rows`. Triton's kernels are emulated too."""
    mechanism = importlib.import_module("flashmix.mechanisms.mlstm")
    scan = mechanism.scan_beside  # the emulator does not have its kernels
    monkeypatch.setattr(mechanism, "scan_beside", lambda *x, **options: scan(*x, **(options | {"impl": "portable"})))
    torch.manual_seed(0)
    x = {name: torch.randn(1, 70, 1, D) for name, D in (("q", 256), ("k", 256), ("v", 512))}
    x = {name: t.bfloat16() for name, t in x.items()} | {"log_write": torch.randn(1, 70, 1)}
    x["log_forget"] = torch.nn.functional.logsigmoid(torch.randn(1, 70, 1) + 3)
    do = torch.randn(1, 70, 1, 512)

    def run(inputs: dict[str, torch.Tensor], impl: str) -> dict[str, torch.Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        o, _ = flashmix.mlstm(**leaves, impl=impl)
        return {"o": o.detach()} | dict(
            zip(leaves, torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype)), strict=True)
        )

    exact = run({name: t.double() for name, t in x.items()}, "portable")
    # On a CPU it would widen 16-bit operands.
    monkeypatch.setattr("flashmix.mechanisms.common.product_dtype", lambda x, impl: x.dtype)
    with monkeypatch.context() as patch, hopper_card() as launched:
        patch.setattr(mechanism, "scaled", lambda x, factor, impl: (x * factor.unsqueeze(-1)).to(x.dtype))
        baseline = run(x, "triton")
    assert "wide_linear_forward_kernel" not in launched and "scaled_rows_forward_kernel" not in launched, launched
    with hopper_card() as launched:
        found = run(x, "auto")
    assert launched.count("scaled_rows_backward_kernel") == 2, launched
    assert {"wide_linear_backward_kernel", "wide_output_backward_kernel"} <= set(launched), launched
    for name, t in found.items():
        assert_within_budget(name, t, exact[name], baseline[name], torch.bfloat16)


@pytest.mark.parametrize("rule", sample(("delta", "linear"), ("delta",)))
def test_emulated_later_decays_change_no_bit_of_a_chunk(rule: str) -> None:
    """Nor of gradients. A decay per channel: where keys are scaled about the middle of a chunk's decay, and where rows are out of range."""
    x = make_inputs(Case("", rule, "channel", B=1, T=64, H=3, HV=3, K=128, V=72, states=False), torch.bfloat16)
    x["log_decay"][:, :, :, ::3] *= 2.0
    assert -80 < x["log_decay"][:, :40].sum(1).amin() / math.log(2) < -65  # m is 0 there
    found = []
    for later in (0.0, 1.0, 4.0, 30.0):
        decay = x["log_decay"].clone()
        decay[:, 40:] *= later
        leaves = {name: t.detach().requires_grad_() for name, t in (x | {"log_decay": decay}).items()}
        with hopper_card() as launched:
            o = run_op(Case("", rule, "channel"), leaves, "gluon")[0]
            grads = torch.autograd.grad(o[:, :40].float().sum(), list(leaves.values()))
        assert {"channel_scores_kernel", "channel_output_kernel"} <= set(launched)
        found.append({"o": o.detach(), **dict(zip(leaves, grads, strict=True))})
    for later in found[1:]:
        for name, t in later.items():
            same_bits(t[:, :40], found[0][name][:, :40], name)
        assert not torch.equal(later["o"], found[0]["o"])


def test_emulated_float64_decays_have_the_bits_of_float32() -> None:
    """A decay per channel: its gradient came from other kernels, and so did those of q and k."""
    x = make_inputs(Case("channel", "delta", "channel", B=1, T=66, H=1, HV=1, K=72, V=72), torch.bfloat16)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = {n: (t.to(dtype) if n == "log_decay" else t).requires_grad_() for n, t in x.items()}
        with hopper_card() as launched:
            o, _ = flashmix.delta_rule(**leaves, impl="gluon")
            grads = torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
        assert "channel_output_kernel" in launched
        found.append(dict(zip(leaves, grads, strict=True)))
    narrow, wide = found
    assert wide["log_decay"].dtype == torch.float64
    assert all(torch.equal(wide[name], t.to(wide[name].dtype)) for name, t in narrow.items())


@pytest.mark.parametrize(
    "rule, K, V",
    [
        ("delta", 128, 128),
        *(
            pytest.param(rule, K, V, marks=pytest.mark.whole)
            for rule, K, V in (
                *(("linear", 128, 128), ("delta", 64, 64), ("delta", 128, 64)),
                *(("delta", 64, 128), ("linear", 64, 128)),
            )
        ),
    ],
)
def test_emulated_states_that_are_kept_change_no_bit(
    rule: str, K: int, V: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FLASHMIX_KEEP_STATES=1`: the forward writes what the backward would have made again."""
    case = Case("kept", rule, "token", B=1, T=134, H=1, HV=2, K=K, V=V)
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.KEEP_VALUES", False)
    wanted, launched = emulated(case)
    assert launched.count("state_forward_kernel") == 2
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.KEEP_STATES", True)
    found, launched = emulated(case)
    assert launched.count("state_forward_kernel") == 1
    for name, t in wanted.items():
        same_bits(found[name], t, name)


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("segments", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_emulated_nu_that_is_kept(
    walk: bool, segments: int, fused_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With value heads that share a key head the forward keeps nu: its bits are the same, and gradients are but for rounding."""
    cut_into(segments, monkeypatch)
    case = Case("nu", "delta", "token", B=1, T=150 + segments, H=1, HV=2, K=128, V=128, decay="-0.02")
    fused_backward(walk)
    found, launched = emulated(case)
    assert launched.count("state_forward_kernel") == segments + (not walk)
    with hopper_card(), torch.no_grad():  # and nothing without a gradient
        o, _ = run_op(case, make_inputs(case, torch.bfloat16), "gluon")
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.KEEP_VALUES", False)
    fused_backward(walk)
    wanted, _ = emulated(case)
    same_bits(o, wanted["o"], "o")
    for name, t in wanted.items():
        if name in ("o", "state"):
            same_bits(found[name], t, name)
        else:
            error, size = (x.double().square().mean().sqrt() for x in (found[name].double() - t.double(), t))
            assert error <= torch.finfo(torch.bfloat16).eps * size, name
    assert any(not torch.equal(found[name], t) for name, t in wanted.items())


@pytest.mark.parametrize(
    "rule, K",
    [
        ("delta", 128),
        *(pytest.param(*case, marks=pytest.mark.whole) for case in (("linear", 128), ("delta", 64), ("linear", 64))),
        ("linear", 256),
    ],
)
def test_emulated_halves_of_the_values_change_no_bit(rule: str, K: int) -> None:
    """With few programs a state pass has one warpgroup and half of the values, beside the one that makes A_qb."""
    case = Case("halves", rule, "token", B=1, T=134, H=1, HV=1, K=K, V=max(128, K))
    wanted, found = emulated(case, 1)[0], emulated(case, 132)[0]
    for name, t in wanted.items():
        same_bits(found[name], t, name)


@pytest.mark.parametrize("gate", ["head", pytest.param("token", marks=pytest.mark.whole)])
def test_emulated_parts_of_a_batch_change_no_bit(gate: str) -> None:
    """With 256 channels the backward of linear attention is made in parts that cost no round of programs, in the same memory."""
    case = Case("parts", "linear", gate, B=4, T=40, H=1, HV=2, K=256, V=256)
    (wanted, once), (found, launched) = emulated(case, 132), emulated(case, 8)  # 16 programs: of one round, of two
    assert once.count("wide_output_backward_kernel") == 1 and launched.count("wide_output_backward_kernel") == 2
    for name, t in wanted.items():
        same_bits(found[name], t, name)


@pytest.mark.parametrize("states", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_emulated_stretches_of_a_sequence_change_no_bit(monkeypatch: pytest.MonkeyPatch, states: bool) -> None:
    """With 256 channels the backward of one long sequence is made in two stretches, the later first, in the same memory."""
    from flashmix.ops.recurrence.gluon_hopper import memory

    case = Case("stretches", "linear", "token", B=1, T=134, H=1, HV=1, K=256, V=256, states=states)
    wanted, once = emulated(case, 132)
    monkeypatch.setattr(memory, "STRETCHED", 3)  # chunks: two and one
    found, launched = emulated(case, 132)
    assert once.count("wide_output_backward_kernel") == 1 and launched.count("wide_output_backward_kernel") == 2
    for name, t in wanted.items():
        same_bits(found[name], t, name)


def test_parts_cost_no_round_of_programs() -> None:
    from flashmix.ops.recurrence.gluon_hopper.memory import parts_of_rounds

    assert parts_of_rounds(8, 32, 132) == 2  # of mLSTM: 256 programs, two rounds of 128
    assert parts_of_rounds(4, 32, 132) == parts_of_rounds(1, 512, 132) == parts_of_rounds(7, 32, 132) == 1
    assert parts_of_rounds(64, 32, 132) == 16


@pytest.mark.whole
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(
    "rule, K, V",
    [
        *(("delta", 128, 128), ("delta", 64, 64), ("linear", 64, 64), ("delta", 256, 256), ("delta", 128, 64)),
        ("linear", 256, 256),
        *(("linear", 128, 64), ("delta", 64, 128), ("linear", 64, 128), ("delta", 96, 40), ("delta", 40, 80)),
    ],
)
def test_emulated_segments_are_within_budget(
    rule: str, K: int, V: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence cut into segments, which Triton's kernels join, or with corrections and 65 to 128 channels `join.py`."""
    cut_into(2, monkeypatch)
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    case = Case("segments", rule, "token", B=1, T=140, H=1, HV=1, K=K, V=V)
    with hopper_card(multiprocessors) as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    triton = rule == "linear" or not 64 < min(K, V) <= max(K, V) <= 128
    joins = ["segments_forward_kernel", "segments_backward_kernel"] if triton else ["join_kernel"] * 2
    assert [name for name in launched if name.startswith(("segments_", "join_"))] == joins, launched


@pytest.mark.parametrize(
    "gate, K, V, states",
    sample_of_rows(
        [("token", 128, 128, True), ("token", 72, 104, False), ("token", 104, 72, True), ("channel", 72, 72, True)],
        [("token", 128, 128, True), ("token", 72, 104, False)],
    ),
)
def test_emulated_join_is_within_budget(
    gate: str, K: int, V: int, states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several segments, whose slow decay leaves the next ones much of the state; with states of a sequence and without."""
    cut_into(7, monkeypatch)  # more maps than their ring has stages
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    decay = "-0.02" if gate == "token" else "mild"
    case = Case("join", "delta", gate, B=1, T=442, H=1, HV=2, K=K, V=V, decay=decay, states=states)
    with hopper_card(132) as launched:
        test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert launched.count("join_kernel") == 2, launched
