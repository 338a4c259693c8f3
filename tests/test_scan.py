"""The scan and its step: every case in every implementation against the definition, the laws, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import assert_compiles, assert_rows_do_not_meet, assert_same_bits, random
from samples import every
from scan_cases import CASES, COUPLED, Case, assert_scans, results

from flashmix import Packing, scan, scan_step
from flashmix.ops.scan import scan_max
from flashmix.ops.scan.definition import scan as define
from flashmix.ops.scan.definition import scan_max as define_max
from flashmix.ops.scan.native.binding import missing
from flashmix.ops.scan.step.definition import scan_step as define_step

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
needs_library = pytest.mark.skipif(missing() is not None, reason=str(missing()))
IMPLS = [pytest.param("native", marks=needs_library), "portable"]
each_impl = pytest.mark.parametrize("impl", IMPLS)
LONG = Case((2, 300, 3, 5))


@each_impl
@pytest.mark.parametrize("case", every(2, [*CASES, *COUPLED]), ids=str)
def test_every_case_is_its_definition(case: Case, impl: str) -> None:
    """In 16 bits only the conversions are others than in float32: every fifth case."""
    few = [*CASES, *COUPLED].index(case) % 5 == 0
    for dtype in DTYPES if few else DTYPES[:2]:
        if impl == "portable" or dtype != torch.float64:
            assert_scans(case, dtype, impl)


@pytest.mark.parametrize("complex_decay", [False, True])
@pytest.mark.parametrize("case", every(2, CASES[::3]), ids=str)
def test_complex_numbers(case: Case, complex_decay: bool) -> None:
    for dtype in (torch.complex64, torch.complex128):
        assert_scans(case, dtype, "portable", complex_decay=complex_decay)
    if missing() is None:
        assert_scans(case, torch.complex64, "native", complex_decay=complex_decay)


@needs_library
def test_angles_of_any_size() -> None:
    """The C reduces angles up to 8192 by itself; factors of thousands of tokens with one decay keep the digits of the loop."""
    x, g = random(1, 5, 40), torch.complex(-random(1, 5, 40).abs(), 10 ** (4 * random(1, 5, 40, seed=1)))
    constant = torch.complex(-0.01 * random(40).abs(), random(40, seed=1))
    for tokens, decay in ((5, g), (3000, constant)):
        z = torch.complex(random(1, tokens, 40), random(1, tokens, 40, seed=2)) if tokens > 5 else x + 0j
        h = torch.view_as_real(scan(z, decay, impl="native")[0])
        want, plain = (
            torch.view_as_real(define(z.to(dtype), decay.to(dtype))[0]) for dtype in (torch.complex128, torch.complex64)
        )
        assert_within_budget("h", h, want, plain)


@pytest.mark.parametrize("coupling", ["complement", "root", "logit"])
@each_impl
def test_small_decays_keep_what_is_written(impl: str, coupling: str) -> None:
    """`1 - e^g` has the digits of a `g` far below the rounding of 1, and the derivative of a root of 0 is bounded."""
    x = random(1, 5, 40)
    for size in (1e-9, 1e-5, 0.0):
        g = -size * random(1, 5, 40, seed=1).abs() - (coupling == "logit") * (20 if size else 200)
        found = []
        for dtype, run in ((torch.float64, None), (torch.float32, None), (torch.float32, impl)):
            leaves = [t.to(dtype).requires_grad_() for t in (x, g)]
            h = define(*leaves, coupling=coupling)[0] if run is None else scan(*leaves, coupling=coupling, impl=run)[0]
            found.append([h.detach(), *torch.autograd.grad(h.sum(), leaves)])
        for name, exact, plain, have in zip(("h", "dx", "dg"), *found, strict=True):
            assert_within_budget(f"{name} at {size}", have, exact, plain)


@each_impl
def test_laws(impl: str) -> None:
    g = -random(3, 403, 7, seed=1).abs()
    assert_rows_do_not_meet(lambda x: scan(x, -x.abs(), impl=impl)[0], random(3, 403, 7))
    for coupling in ("complement", "root", "logit"):
        assert_rows_do_not_meet(
            lambda x, own=coupling: scan(x, -x.abs(), coupling=own, impl=impl)[0], random(3, 203, 7)
        )
    cu_seqlens = torch.tensor([0, 1, 1, 90])
    inputs = random(1, 90, 3), g[:1, :90, :3], random(3, 3)
    assert_compiles(
        lambda x, g, s: scan(x, g, initial_state=s, return_state=True, cu_seqlens=cu_seqlens, impl=impl), *inputs
    )


@pytest.mark.parametrize("coupling", ["complement", "root", "logit"])
def test_gradients_of_couplings(coupling: str) -> None:
    for case in (Case((2, 5, 2, 2), "head"), Case((1, 7, 3), lengths=(0, 5, 2), read_before=True)):
        x, g, s = (t.requires_grad_() for t in case.inputs(torch.float64))
        options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, *case.lengths]).cumsum(0) if case.lengths else None}
        options |= {"read_before": case.read_before, "coupling": coupling, "return_state": True}
        assert torch.autograd.gradcheck(lambda x, g, s, o=options: scan(x, g - 0.1, initial_state=s, **o), (x, g, s))


def test_gradients_of_gradcheck() -> None:
    for case in (Case((2, 5, 2, 2), "head"), Case((1, 7, 3), lengths=(0, 5, 2), read_before=True)):
        x, g, s = (t.requires_grad_() for t in case.inputs(torch.complex128, complex_decay=True))
        ends = torch.tensor([0, *case.lengths]).cumsum(0) if case.lengths else None

        def op(x, g, s, ends=ends, case=case):  # type: ignore[no-untyped-def]
            options: dict[str, Any] = {"cu_seqlens": ends, "read_before": case.read_before}
            return scan(x, g - 1, initial_state=s, return_state=True, **options)

        assert torch.autograd.gradcheck(op, (x, g, s))


@each_impl
@pytest.mark.parametrize("read_before", [False, True])
def test_packed_has_the_bits_of_one_by_one(impl: str, read_before: bool) -> None:
    lengths = (3, 0, 130, 1, 64, 0)
    case = Case((1, sum(lengths), 2, 6), "head", lengths, read_before=read_before)
    x, g, s = case.inputs(torch.float32)
    packed = results("scan", case, (x, g, s), impl)
    flow = {"dx": [], "dg": [], "h": [], "state": []}
    first = 0
    for n, length in enumerate(lengths):
        h, state = scan(
            x[:, first : first + length],
            g[:, first : first + length],
            initial_state=s[n : n + 1],
            return_state=True,
            read_before=read_before,
            impl=impl,
        )
        flow["h"].append(h)
        flow["state"].append(state)
        first += length
    assert_same_bits("h", packed["h"], torch.cat(flow["h"], 1))
    assert_same_bits("state", packed["state"], torch.cat(flow["state"]))
    for cu_seqlens in (Packing.from_lengths(lengths), torch.tensor([0, *lengths]).cumsum(0).int()):
        again, _ = scan(x, g, initial_state=s, cu_seqlens=cu_seqlens, read_before=read_before, impl=impl)
        assert_same_bits("h", again, packed["h"])


@each_impl
@pytest.mark.parametrize("cuts", [[100, 200], [1] * 300, [0, 300], [64, 0, 236]])
def test_split_and_carried_is_whole(cuts: list[int], impl: str) -> None:
    x, g, state = LONG.inputs(torch.float64 if impl == "portable" else torch.float32)
    whole, last = scan(x, g, initial_state=state, return_state=True, impl=impl)
    parts = []
    for part, decay in zip(x.split(cuts, 1), g.split(cuts, 1), strict=True):
        h, state = scan(part, decay, initial_state=state, return_state=True, impl=impl)
        parts.append(h)
    assert_within_budget("h", torch.cat(parts, 1), whole, whole, steps=4)
    assert_within_budget("state", state, last, last, steps=4)


@each_impl
def test_what_is_not_a_number_stays_in_its_sequence(impl: str) -> None:
    lengths = (70, 1, 64, 5)
    x, g = random(1, 140, 20), -random(1, 140, 20, seed=1).abs()
    clean, _ = scan(x, g, cu_seqlens=Packing.from_lengths(lengths), impl=impl)
    x[0, 75], g[0, 60] = torch.nan, torch.nan
    h, _ = scan(x, g, cu_seqlens=Packing.from_lengths(lengths), impl=impl)
    spoilt = torch.zeros(140, dtype=torch.bool)
    spoilt[60:70] = spoilt[75:135] = True
    assert torch.isnan(h[0, spoilt]).all()
    assert_same_bits("other tokens", h[0, ~spoilt], clean[0, ~spoilt])


@needs_library
def test_bits_do_not_depend_on_threads() -> None:
    case, found = Case((2, 400, 5, 13), "head"), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(results("scan", case, case.inputs(torch.float32), "native"))
    for name, want in found[0].items():
        assert all(torch.equal(other[name], want) for other in found[1:]), name


@needs_library
@pytest.mark.parametrize("decay", ["token", "head", "constant"])
def test_channels_of_several_blocks(decay: str) -> None:
    assert_scans(Case((1, 5, 3, 2100), decay), torch.float32, "native")
    assert_scans(Case((1, 5, 100, 50), decay), torch.float32, "native")


@needs_library
@pytest.mark.parametrize("level", range(3))
def test_every_set_of_instructions(level: int) -> None:
    from flashmix.ops.recurrence.native.binding import library

    try:
        if library().flashmix_instructions(level) != level:
            pytest.skip("this machine does not have them")
        for case in (*CASES[:8], *COUPLED[::3]):
            assert_scans(case, torch.float32, "native")
    finally:
        library().flashmix_instructions(2)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("decay", ["token", "head", "constant", "constant head"])
def test_steps_in_a_pool(decay: str, read_before: bool) -> None:
    slots = torch.tensor([4, -1, 0])
    x, g, _ = Case((3, 2, 2, 5), decay).inputs(torch.float64)
    pool = random(6, 2, 5, dtype=torch.float64, seed=7)
    want, after = define_step(x, g, pool, slots, read_before)
    h = scan_step(x, g, pool, state_indices=slots, read_before=read_before)
    assert_within_budget("h", h, want, want)
    assert_within_budget("pool", pool, after, after)
    assert not h[1].any()
    batch = random(3, 2, 5, dtype=torch.float64, seed=8)
    want, after = define_step(x, g, batch, None, read_before)
    assert_within_budget("h of a batch", scan_step(x, g, batch, read_before=read_before), want, want)
    assert_within_budget("state of a batch", batch, after, after)


@pytest.mark.parametrize("coupling", ["complement", "root", "logit"])
@pytest.mark.parametrize("decay", ["token", "constant head"])
def test_steps_of_couplings(decay: str, coupling: str) -> None:
    x, g, state = Case((3, 4, 2, 5), decay, coupling=coupling).inputs(torch.float64)
    want, after = define_step(x, g, state, coupling=coupling)
    whole, last = scan(x, g, initial_state=state, return_state=True, coupling=coupling, impl="portable")
    h = scan_step(x, g, state, coupling=coupling)
    for have, one, exact in ((h, whole, want), (state, last, after)):
        assert_within_budget("step", have, exact, exact)
        assert_same_bits("scan", have, one)


def test_a_step_keeps_its_state_in_16_bits() -> None:
    x, g, state = Case((3, 1, 8)).inputs(torch.bfloat16)
    pool = state.bfloat16()
    h = scan_step(x, g, pool)
    want, after = define_step(x.double(), g.double(), state.bfloat16().double())
    assert h.dtype == pool.dtype == torch.bfloat16
    assert_within_budget("h", h, want, want)
    assert_within_budget("state", pool, after, after)


def test_a_complex_step() -> None:
    x, g, state = Case((2, 3, 4)).inputs(torch.complex128, complex_decay=True)
    want, after = define_step(x, g, state)
    h = scan_step(x, g, state)
    assert_within_budget("h", torch.view_as_real(h), torch.view_as_real(want), torch.view_as_real(want))
    assert_within_budget("state", torch.view_as_real(state), torch.view_as_real(after), torch.view_as_real(after))


@pytest.mark.parametrize("lengths", [(), (5, 0, 130, 1)], ids=str)
@pytest.mark.parametrize("decay", ["none", "token", "head", "constant"])
@each_impl
def test_the_running_maximum(impl: str, decay: str, lengths: tuple[int, ...]) -> None:
    """Beside the definition in float64: a maximum rounds nothing, and sums with decays no more than its loop does."""
    x = random(1, 136, 3, 7)
    sizes = {"none": (3, 7), "token": (1, 136, 3, 7), "head": (1, 136, 3), "constant": (3, 7)}[decay]
    g = -random(*sizes, seed=1).abs() * (decay != "none")
    state = random(len(lengths) or 1, 3, 7, seed=2)
    full = (g.unsqueeze(-1) if decay == "head" else g).expand(1, 136, 3, 7)
    for late in (False, True):
        parts = lengths or (136,)
        plain, want = (
            [
                define_max(part, own, s, late)
                for part, own, s in zip(*(t.to(dtype).split(size, dim) for t, size, dim in cut), strict=True)
            ]
            for cut in [((x, parts, 1), (full, parts, 1), (state, 1, 0))]
            for dtype in (torch.float32, torch.float64)
        )
        options: dict[str, Any] = {"initial_state": state, "return_state": True, "read_before": late, "impl": impl}
        options["cu_seqlens"] = Packing.from_lengths(lengths) if lengths else None
        m, last = scan_max(x, None if decay == "none" else g, **options)
        steps = 4 if impl == "portable" else 1
        exact, loop = (torch.cat([one for one, _ in found], 1) for found in (want, plain))
        assert_within_budget("m", m, exact, loop, steps=steps)
        assert_within_budget("last", last, *(torch.cat([s for _, s in found]) for found in (want, plain)), steps=steps)
        assert decay != "none" or torch.equal(m, loop)


@needs_library
@pytest.mark.parametrize("decay", ["token", "head", "constant"])
def test_the_running_maximum_of_a_long_sequence(decay: str) -> None:
    """Rounds once, however many decays lie between; a loop in float32 errs by 500 times as much here with one decay for all tokens."""
    x = random(1, 3000, 2, 8)
    g = -1e-3 * random(*{"token": (1, 3000, 2, 8), "head": (1, 3000, 2), "constant": (2, 8)}[decay], seed=1).abs()
    want, last = scan_max(x.double(), g.double(), return_state=True, impl="portable")
    m, state = scan_max(x, g, return_state=True, impl="native")
    assert last is not None and state is not None
    assert_within_budget("m", m, want, want)
    assert_within_budget("last", state, last, last)


def test_the_running_maximum_of_nothing() -> None:
    m, last = scan_max(torch.full((1, 3, 2), -torch.inf), return_state=True)
    assert bool((m == -torch.inf).all()) and bool((last == -torch.inf).all())
    for impl in ("auto", "portable"):
        x = torch.tensor([0.0, torch.nan, 1.0]).view(1, 3, 1)
        assert torch.isnan(scan_max(x, impl=impl)[0]).flatten().tolist() == [False, True, True]


X = torch.ones(2, 5, 8)
G = -torch.ones(2, 5, 8)
HEADS = "[2, 5, 4, 2] or [4, 2] or [2, 5, 4] or [4]"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": X[0]}, ValueError, "x must have shape [B, T, D], got [5, 8]"),
    ({"log_decay": G[:, :, :1]}, ValueError, "log_decay must have shape [2, 5, 8] or [8], got [2, 5, 1]"),
    ({"x": X.view(2, 5, 4, 2)}, ValueError, f"log_decay must have shape {HEADS}, got [2, 5, 8]"),
    ({"log_decay": -G}, ValueError, "log_decay must be at most 0 (a factor e^g of the state), got 1"),
    ({"log_decay": G.to(torch.complex64)}, TypeError, "log_decay must have a floating dtype, got complex64"),
    ({"x": X.to(torch.complex64), "initial_state": torch.ones(2, 8)}, TypeError,
     "initial_state must have dtype complex64, got float32"),
    ({"x": X.to(torch.complex64), "log_decay": torch.complex(-G, G)}, ValueError,
     "log_decay must be at most 0 (a factor e^g of the state), got 1"),
    ({"coupling": "sum"}, ValueError, "coupling must be one of 'complement', 'root', 'logit' or None, got 'sum'"),
    ({"x": X.to(torch.complex64), "coupling": "root"}, TypeError, "x must have a floating dtype, got complex64"),
    ({"log_decay": -G, "coupling": "root"}, ValueError,
     "log_decay must be at most 0 (a factor e^g of the state), got 1"),
    ({"x": X.to(torch.complex128), "impl": "native"}, ValueError,
     "impl='native' cannot run this: it computes in float32, got complex128"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_scan_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        scan(**{"x": X, "log_decay": G, **arguments})
    assert str(raised.value) == text


STEP_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": X[:, :0], "log_decay": G[:, :0]}, ValueError, "the number of tokens must be between 1 and 16, got 0"),
    ({"state": torch.zeros(3, 8)}, ValueError, "state must have shape [2, 8], got [3, 8]"),
    ({"state": torch.zeros(8).expand(2, 8)}, ValueError,
     "state must have memory of its own for each number, got strides [0, 1]"),
    ({"state": torch.zeros(0, 8), "state_indices": torch.tensor([-1, -1])}, ValueError,
     "state must have at least one slot, got 0"),
    ({"state_indices": torch.tensor([1, 1])}, ValueError, "state_indices must name each slot at most once, got 1 twice"),
    ({"log_decay": -G}, ValueError, "log_decay must be at most 0 (a factor e^g of the state), got 1"),
    ({"x": X.clone().requires_grad_()}, RuntimeError,
     "scan_step has no gradient, it writes its state in place: call it under torch.no_grad()"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, error, text", STEP_REFUSED)
def test_scan_step_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        scan_step(**{"x": X, "log_decay": G, "state": torch.zeros(2, 8), **arguments})
    assert str(raised.value) == text
