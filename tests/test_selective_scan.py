"""The selective scan and its step: every case in every implementation against the definition, the laws, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import assert_compiles, assert_rows_do_not_meet, random
from samples import sample_of_rows
from selective_cases import CASES, STAGES, assert_scans, evaluate, inputs

from flashmix import selective_scan, selective_scan_step
from flashmix.ops.selective_scan.native.binding import missing
from flashmix.ops.selective_scan.step.definition import selective_scan_step as define_step

pytestmark = pytest.mark.usefixtures("one_thread")
IMPLS = [pytest.param("native", marks=pytest.mark.skipif(missing() is not None, reason=str(missing()))), "portable"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes, lengths", sample_of_rows(CASES, CASES[::2]), ids=str)
def test_every_case_is_its_definition(sizes: tuple[int, ...], lengths: tuple[int, ...], impl: str) -> None:
    for extras in (True, False):
        assert_scans(sizes, lengths, torch.float64 if impl == "portable" else torch.float32, impl, extras)
    if CASES.index((sizes, lengths)) % 4 == 3:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_scans(sizes, lengths, dtype, impl, True)


@pytest.mark.parametrize("impl", IMPLS)
def test_laws(impl: str) -> None:
    dt, A, B = random(3, 150, 16, seed=1).abs(), -random(16, 4, seed=2).abs(), random(3, 150, 4, seed=3)
    assert_rows_do_not_meet(lambda u: selective_scan(u, u.abs(), A, u[..., :4], u[..., 4:8], impl=impl)[0], dt)
    cu_seqlens = torch.tensor([0, 1, 1, 150])
    assert_compiles(
        lambda u, dt, B: selective_scan(u, dt, A, B, B, return_state=True, cu_seqlens=cu_seqlens, impl=impl),
        *(t[:1] for t in (dt, dt, B)),
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_split_sequence_goes_on_from_its_state(impl: str) -> None:
    """Single tokens too; forgetting all at once, and no decay."""
    x = inputs((2, 150, 16, 3, 1), torch.float32, 2, extras=False)
    x["A"][0], x["A"][1] = -torch.inf, 0.0
    whole, last = selective_scan(**x, return_state=True, impl=impl)
    state, parts = x.pop("initial_state"), []
    for part in torch.arange(150).split([64, 1, 0, 85]):
        own = {n: t if n == "A" else t[:, part] for n, t in x.items()}
        y, state = selective_scan(**own, initial_state=state, return_state=True, impl=impl)
        parts.append(y)
    assert torch.isfinite(whole).all()
    assert_within_budget("y", torch.cat(parts, 1), whole.double(), whole, steps=STAGES)
    assert_within_budget("h", state, last.double(), last, steps=STAGES)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_bits_do_not_depend_on_threads() -> None:
    x, found = inputs((2, 100, 192, 4, 1), torch.float32, 2), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(evaluate(lambda x: selective_scan(**x, softplus=True, return_state=True, impl="native"), x))
    for name in ("y", "h", "d_u", "d_dt", "d_A", "d_initial_state"):  # those of B and C are sums of the blocks
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("pooled", [False, True])
def test_the_step_is_its_definition(pooled: bool) -> None:
    x = inputs((3, 4, 8, 5, 2), torch.float32, 3)
    pool = random(6, 8, 5, seed=9) if pooled else x["initial_state"]
    del x["initial_state"]
    indices = torch.tensor([4, -1, 0]) if pooled else None
    want, after = define_step(
        **{n: t.double() for n, t in x.items()}, state=pool.double(), state_indices=indices, softplus=True
    )
    plain, _ = define_step(**x, state=pool, state_indices=indices, softplus=True)
    state = pool.clone()
    y = selective_scan_step(**x, state=state, state_indices=indices, softplus=True)
    assert_within_budget("y", y, want, plain, steps=STAGES)
    assert_within_budget("state", state, after, after.float(), steps=STAGES)
    assert not pooled or (not y[1].any() and torch.equal(state[[1, 2, 3, 5]], pool[[1, 2, 3, 5]]))


def test_steps_are_the_whole_sequence() -> None:
    x = inputs((2, 5, 16, 3, 1), torch.float32, 2)
    whole, last = selective_scan(**x, softplus=True, return_state=True)
    state = x.pop("initial_state").clone()
    shared = ("A", "D", "dt_bias")
    parts = [
        selective_scan_step(
            **{n: v if n in shared else v[:, t : t + 1] for n, v in x.items()}, state=state, softplus=True
        )
        for t in range(5)
    ]
    assert_within_budget("y", torch.cat(parts, 1), whole.double(), whole, steps=STAGES)
    assert_within_budget("h", state, last.double(), last, steps=STAGES)


def test_the_states_of_all_tokens_are_never_there() -> None:
    """The backward keeps one state every 64 tokens."""
    x = inputs((1, 1024, 16, 16, 1), torch.float32, 1)
    saved: list[int] = []
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        selective_scan(**leaves, softplus=True)
    assert max(saved) <= 1024 * 16


GOOD = inputs((1, 5, 16, 4, 1), torch.float32, 1, extras=False)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"u": GOOD["u"][0]}, ValueError, "u must have shape [B, T, D], got [5, 16]"),
    ({"dt": GOOD["dt"][:, :4]}, ValueError, "dt must have shape [1, 5, 16], got [1, 4, 16]"),
    ({"dt": -1 - GOOD["dt"].fmod(1)}, ValueError, "dt must be at least 0 (a step size), got -1."),
    ({"A": -GOOD["A"]}, ValueError, "A must be at most 0 (a rate of decay), got "),
    ({"B": GOOD["B"][..., :3]}, ValueError, "B must have shape [1, 5, 1, 4], got [1, 5, 1, 3]"),
    (
        {"B": GOOD["B"].repeat(1, 1, 3, 1), "C": GOOD["C"].repeat(1, 1, 3, 1)},
        ValueError,
        "the number of channels of u must be a positive multiple of the number of groups of B = 3, got 16",
    ),
    ({"C": GOOD["C"].double()}, TypeError, "C must have dtype float32 like u, got float64"),
    ({"D": GOOD["u"]}, ValueError, "D must have shape [16], got [1, 5, 16]"),
    ({"z": GOOD["u"][:, :4]}, ValueError, "z must have shape [1, 5, 16], got [1, 4, 16]"),
    ({"dt_bias": torch.ones(16)}, ValueError, "dt_bias must be given with softplus=True, got softplus=False"),
    ({"initial_state": torch.ones(2, 16, 4)}, ValueError, "initial_state must have shape [1, 16, 4], got [2, 16, 4]"),
    ({"u": GOOD["u"].long()}, TypeError, "u must have dtype float32 or bfloat16 or float16 or float64, got int64"),
]


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        selective_scan(**{**GOOD, **arguments})
    assert str(raised.value).startswith(text)
