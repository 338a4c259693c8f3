"""Attention's kernels for Hopper on a CPU, in the emulator of Gluon: results, and equal bits in whatever order its roles run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from unittest import mock

import pytest
import torch
from attention_cases import CASES, Call, Case, make_call
from budget import assert_within_budget
from samples import sample
from torch import Tensor

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card

from flashmix import Packing
from flashmix.ops.attention import call as limits
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention.gluon_hopper import backward_host
from flashmix.ops.attention.gluon_hopper import spec as specs
from flashmix.ops.attention.gluon_hopper.backward_host import heads_in_turns
from flashmix.ops.attention.gluon_hopper.plan import Plans
from flashmix.ops.attention.gluon_hopper.spec import hopper_spec

BF16 = torch.bfloat16
SMALL = {"batch": 1, "tokens": 150, "heads": 1, "heads_q": 1}
# Head dims that choose the tiles and the passes of the backward, then what each feature adds.
FAST = (
    Case("causal, persistent", **SMALL | {"tokens": 400}, dim=128, window=(63, 0)),
    Case("grouped heads, packed", **SMALL | {"heads_q": 2}, dim=128, softcap=3.0, sink=True, lengths=(70, 0, 5, 75)),
    Case("three heads in turns", **SMALL | {"tokens": 270, "heads": 3, "heads_q": 3}, dim=128),
    Case(
        "causal, dims 64, groups of queries by themselves", **SMALL | {"tokens": 410, "heads_q": 2}, dim=64, sink=True
    ),
    Case("dims 192", **SMALL | {"tokens": 390}, dim=192),
    Case("dims 64 and 50, not causal", **SMALL | {"tokens": 300}, dim=64, dim_v=50, causal=False),
    Case("dims 64 and 128, not causal", **SMALL, dim=64, dim_v=128, causal=False),
    Case("dims 256", **SMALL | {"tokens": 90}, dim=256),
    Case("grouped heads, dims 80 and 72", **SMALL | {"heads_q": 2}, dim=80, dim_v=72),
    Case("dims 192 and 128, not causal", **SMALL, dim=192, dim_v=128, causal=False),
    Case("packed everything but slopes", **SMALL | {"heads_q": 2}, dim=96, softcap=3.0, sink=True, lengths=(70, 0, 5)),
    Case("grouped heads, dims 60 and 100", **SMALL | {"heads_q": 2, "tokens": 90}, dim=60, dim_v=100, window=(30, 0)),
    Case("dims 256, gates and slopes", **SMALL | {"tokens": 90}, dim=256, decay=True, alibi=True),
    Case(
        "gates over several tiles, window", **SMALL | {"tokens": 700}, dim=128, decay=True, gate=0.01, window=(300, 0)
    ),
    Case("gates, more keys, first row's at a tile's end", **SMALL | {"tokens": 257}, tokens_k=512, dim=96, decay=True),
    Case("gates, keys of less than a tile", **SMALL, tokens_k=60, dim=66, decay=True),
    Case("slopes, dims 64", **SMALL | {"tokens": 410}, dim=64, alibi=True),
)
# The cases of all implementations, with head dims that these kernels take.
ALL = [
    replace(case, dim=max(case.dim, 66), dim_v=max(case.dim_v or case.dim, 66))
    for case in CASES
    if 0 not in (case.batch, case.tokens, case.tokens_k)
    and not case.dropout_p
    and not case.ranges
    and case.alibi != "rows"
]


# With the kernel that makes dK: heads of both ways, in several sequences of a batch, and programs that stay.
ONCE, STAY, KEYS = "hopper_backward_kernel", "hopper_backward_stay_kernel", "hopper_backward_keys_kernel"
OF_8 = {"batch": 1, "tokens": 300, "heads": 8, "heads_q": 8}
BACKWARD = {
    Case("two ways, dims 128", **OF_8 | {"batch": 2, "heads": 9, "heads_q": 9}, dim=128): ONCE,
    Case("two ways, grouped heads, dims 128", **OF_8 | {"heads": 2, "heads_q": 16}, dim=128, softcap=3.0): ONCE,
    Case("two ways, grouped heads, dims 192 and 100", **OF_8 | {"heads": 2}, dim=192, dim_v=100, softcap=3.0): KEYS,
    Case("two ways, packed, dims 130 and 192", **OF_8, dim=130, dim_v=192, lengths=(230, 0, 5, 65)): KEYS,
    Case("window, dims 100 and 150", **SMALL | {"tokens": 400, "heads_q": 2}, dim=100, dim_v=150, window=(90, 0)): KEYS,
    Case("two ways, packed, dims 128", **OF_8 | {"tokens": 340}, dim=128, lengths=(270, 0, 5, 65)): ONCE,
    Case("two ways, stay, dims 64", **OF_8 | {"tokens": 400}, dim=64, sink=True): STAY,
    Case("two ways, stay, softcap, dims 64", **OF_8 | {"tokens": 400}, dim=64, softcap=3.0): STAY,
    Case(
        "softcap, dims 60, not causal", **SMALL | {"tokens": 390, "heads_q": 2}, dim=60, causal=False, softcap=3.0
    ): ONCE,
    Case("two ways, stay, dims 96 and 72", **OF_8 | {"batch": 2}, dim=96, dim_v=72): STAY,
    Case("two ways, stay, packed, dims 96", **OF_8 | {"tokens": 340}, dim=96, lengths=(270, 0, 5, 65)): STAY,
    Case("two ways, stay, packed, grouped, dims 64", **OF_8 | {"heads": 1}, dim=64, lengths=(200, 31, 0)): STAY,
    Case("stay, window, dims 128", **SMALL | {"tokens": 400, "heads": 2, "heads_q": 2}, dim=128, window=(90, 0)): STAY,
    Case("stay, window, grouped, dims 96", **SMALL | {"tokens": 400, "heads_q": 2}, dim=96, window=(63, 0)): STAY,
    Case(
        "stay, keys that no query sees, dims 80", **SMALL | {"tokens_k": 700, "heads_q": 2}, dim=80, window=(20, 9)
    ): STAY,
}


@contextmanager
def two_ways_from(heads: int) -> Iterator[None]:
    """Calls of so many heads and more have some that go from their first keys; the plans are their own."""
    with (
        mock.patch.object(specs, "HEADS_OF_BOTH_WAYS", heads),
        mock.patch.object(backward_host, "PLANS", Plans(backward_host.BackwardPlan)),
    ):
        yield


@pytest.fixture
def few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few channels are not left to Triton."""
    monkeypatch.setattr(limits, "LEAST_CHANNELS_CAUSAL", 0)


def emulated(
    call: Call, seed: int, kernel: str = "hopper_forward_kernel", beside: Sequence[str] = ()
) -> dict[str, Tensor]:
    with hopper_card(2, seed, beside) as launched, mock.patch.object(limits, "LEAST_TOKENS_CAUSAL", 0):
        found = call.op("gluon")
    assert kernel in launched
    return found


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.whole) for case in ALL)], ids=str)
def test_emulated_kernels_are_within_budget(case: Case) -> None:
    call = make_call(case, BF16)
    within_budget(call, emulated(call, 0))


# One way, each kernel, packed or not, and heads that share keys; the kernels' other widths run with `-m whole`.
FEW = [case for case in BACKWARD if case.name in ("two ways, packed, dims 128", "two ways, stay, dims 64")]
FEW += [case for case in BACKWARD if case.name.startswith(("window", "stay, window, grouped", "stay, keys"))]


@lru_cache  # both tests compare with it
def in_order(case: Case) -> dict[str, Tensor]:
    return emulated(make_call(case, BF16), 0, BACKWARD[case])


@pytest.mark.parametrize("case", sample(BACKWARD, FEW), ids=str)
def test_backward_kernels_are_within_budget(case: Case, few_channels: None) -> None:
    call = make_call(case, BF16)
    within_budget(call, in_order(case))


@pytest.mark.parametrize("case", sample(BACKWARD, [case for case in FEW if case.lengths or case.window]), ids=str)
def test_programs_may_run_in_any_order(case: Case, few_channels: None) -> None:
    """None waits for ever, one after another in the order of their numbers or all beside each other, and bits are the same."""
    call, kernel = make_call(case, BF16), BACKWARD[case]
    for name, found in emulated(call, 1000, kernel, (kernel,)).items():
        assert torch.equal(found, in_order(case)[name]), name


def within_budget(call: Call, found: dict[str, Tensor], dtype: torch.dtype = BF16) -> None:
    exact, plain = call.definition(torch.float64), call.definition(dtype)
    for name, wanted in exact.items():
        empty = torch.isinf(wanted)  # lse of rows that see nothing
        assert torch.equal(torch.isinf(found[name]), empty), name
        got, wanted, base = (x.masked_fill(empty, 0) for x in (found[name], wanted, plain[name]))
        assert_within_budget(name, got, wanted, base, dtype)


# Scores that rise from one tile to the next by more than P has room for when they are counted from the first that is read, of gates and
# slopes the last: blocks come again.
RISING = (
    Case("rising, three groups of 64 queries, sink", **SMALL | {"tokens": 450, "heads_q": 2}, dim=64, sink=True),
    Case("rising, not causal", **SMALL | {"tokens": 300, "heads": 3, "heads_q": 3}, dim=128, causal=False),
    Case("rising, packed", **SMALL, dim=96, lengths=(290, 0, 5, 150)),
    Case("rising, window", **SMALL | {"tokens": 650}, dim=128, window=(450, 0)),
    Case("rising, dims 192", **SMALL | {"tokens": 450}, dim=192),
    Case("falling, gates, window", **SMALL | {"tokens": 650}, dim=128, decay=True, gate=0.0001, window=(450, 0)),
    Case("falling, slopes, sink", **SMALL | {"tokens": 450, "heads_q": 2}, dim=80, alibi=True, sink=True),
)
OF_HALF = {case for case in RISING if case.dim == 64 or case.decay}


@pytest.mark.parametrize(
    "case, dtype",
    [*((case, BF16) for case in RISING), *((case, torch.float16) for case in RISING if case in OF_HALF)],
    ids=str,
)
def test_scores_that_leave_the_range_of_the_first_tile(case: Case, dtype: torch.dtype) -> None:
    call = make_call(case, dtype)
    q, k = (call.tensors[name][0] for name in ("q", "k"))
    direction = torch.nn.functional.normalize(q[0, 0].float(), dim=0)
    places = torch.arange(k.shape[0])
    places = places.flip(0) if case.decay or case.alibi else places
    q += (30 * direction).to(dtype)
    k += ((45.0 if dtype == BF16 else 15.0) * (places // 130)[:, None, None] * direction).to(dtype)
    scores = (q[280, 0].double() @ k[:281, 0].double().T) * case.dim**-0.5 / math.log(2)
    first = scores[-25:] if case.decay or case.alibi else scores[:128]
    assert scores.max() - first.max() > (128 if dtype == BF16 else 24)
    within_budget(call, emulated(call, 0), dtype)


IN_ANY_ORDER = (*FAST[:2], next(case for case in FAST if case.name == "dims 192"))


@pytest.mark.parametrize("case", sample(IN_ANY_ORDER, IN_ANY_ORDER[1:]), ids=str)
def test_bits_do_not_depend_on_which_role_runs_first(case: Case) -> None:
    call = make_call(case, BF16)
    wanted = emulated(call, 0)
    for seed in (1000, 2000):
        for name, found in emulated(call, seed).items():
            assert torch.equal(found, wanted[name]), (name, seed)


@pytest.mark.parametrize(
    "dim, tokens, batch, heads, wanted",
    [
        *(
            (128, 4096, 4, 16, (4, 8)),
            (128, 8192, 2, 16, (2, 4)),
            (128, 16384, 1, 16, (1, 2)),
            (64, 4096, 4, 32, (8, 16)),
        ),
        *(
            (64, 4096, 16, 32, (8, 16)),
            (128, 2048, 8, 16, (8, 16)),
            (128, 65536, 1, 9, (1, 1)),
            (128, 300, 1, 8, (7, 1)),
        ),
    ],
)
def test_heads_that_take_turns(dim: int, tokens: int, batch: int, heads: int, wanted: tuple[int, int]) -> None:
    """Of those from the last keys 16 MiB; of those from the first 32, or two programs for each multiprocessor."""
    x = torch.empty(batch, tokens, heads, dim, dtype=BF16, device="meta")
    names = ("sink", "alibi_slopes", "log_decay", "seed", "packing", "packing_k", "left", "softcap")
    options = {"scale": 1.0, "right": 0, "dropout_p": 0.0, "return_lse": False} | dict.fromkeys(names)
    call = limits.AttentionCall(x, x, x, **options)
    with hopper_card(132):
        S, _ = hopper_spec(call, "backward")
        assert heads_in_turns(call, S, -(-tokens // 128), 5) == wanted
        assert heads_in_turns(call, S._replace(TWO_WAYS=False), -(-tokens // 128), 5) == (5, None)


def drawn(*shape: int) -> list[Tensor]:
    """q, k, v and what flows back. Keys lie far from 0, which scores do not see: sums of dQ nearly cancel, so that their order shows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, flow = (torch.randn(*shape, generator=generator) for _ in range(4))
    return [x.to(BF16) for x in (q, k + 30, v, flow)]


def d_q(inputs: Sequence[Tensor], packing: Packing | None = None) -> Tensor:
    *given, flow = inputs
    leaves = [x.clone().requires_grad_() for x in given]
    with hopper_card(2, 0), mock.patch.object(limits, "LEAST_TOKENS_CAUSAL", 0):
        o, _ = softmax_attention(*leaves, causal=True, impl="gluon", cu_seqlens=packing)
        return torch.autograd.grad(o, leaves, flow)[0]


def test_dq_does_not_depend_on_other_heads() -> None:
    """Its sums over four blocks of keys have one order, whatever group of heads takes turns with it, and packed or not."""
    inputs = drawn(1, 400, 3, 128)
    together = d_q(inputs)
    for head in range(3):
        alone = slice(head, head + 1)
        assert torch.equal(d_q([x[:, :, alone] for x in inputs]), together[:, :, alone]), head
    assert torch.equal(d_q(inputs, Packing.from_lengths([400])), together)


@pytest.mark.whole  # its cards run 52 heads; by default heads alone and packed, above, and any order of programs
@pytest.mark.parametrize("dim", (64, 96, 128))
def test_dq_depends_on_neither_batch_nor_packing(dim: int, few_channels: None) -> None:
    """Nor on heads past the eighth; of eight heads only the last one's sums, over three blocks of keys, begin with the first keys."""
    inputs = drawn(2, 380, 9, dim)
    together = d_q(inputs)
    assert torch.equal(d_q([x[1:] for x in inputs]), together[1:])
    eight = [x[:1, :, :8] for x in inputs]
    assert torch.equal(d_q(eight), together[:1, :, :8])
    row = [x.reshape(1, 760, 9, dim)[:, 350:] for x in inputs]
    packed = d_q(row, Packing.from_lengths([30, 0, 380]))
    assert torch.equal(packed[:, :30], d_q([x[:, :30] for x in row]))
    assert torch.equal(packed[:, 30:], together[1:])
    with two_ways_from(99):
        before = d_q(eight)
    assert torch.equal(together[:1, :, :7], before[:, :, :7])
    assert not torch.equal(together[:1, :, 7], before[:, :, 7])
