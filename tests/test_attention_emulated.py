"""Attention's kernels for Hopper on a CPU, in the emulator of Gluon: results, and equal bits in whatever order its roles run."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_cases import CASES, Call, Case, make_call
from budget import assert_within_budget
from torch import Tensor

pytest.importorskip("triton")

from compilers.gluon_emulator import hopper_card

from flashmix import Packing
from flashmix.ops.attention import call as limits
from flashmix.ops.attention import softmax_attention

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
    Case("dims 192", **SMALL, dim=192),
    Case("dims 64 and 50, not causal", **SMALL | {"tokens": 300}, dim=64, dim_v=50, causal=False),
    Case("dims 64 and 128", **SMALL, dim=64, dim_v=128),
    Case("grouped heads, dims 80 and 72", **SMALL | {"heads_q": 2}, dim=80, dim_v=72),
    Case("dims 192 and 128, not causal", **SMALL, dim=192, dim_v=128, causal=False),
    Case("packed everything but slopes", **SMALL | {"heads_q": 2}, dim=96, softcap=3.0, sink=True, lengths=(70, 0, 5)),
    Case("grouped heads, dims 60 and 100", **SMALL | {"heads_q": 2, "tokens": 90}, dim=60, dim_v=100, window=(30, 0)),
    Case("dims 256, gates and slopes", **SMALL | {"tokens": 90}, dim=256, decay=True, alibi=True),
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


def emulated(call: Call, seed: int) -> dict[str, Tensor]:
    with hopper_card(2, seed) as launched, mock.patch.object(limits, "LEAST_TOKENS_CAUSAL", 0):
        found = call.op("gluon")
    assert "hopper_forward_kernel" in launched
    return found


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.whole) for case in ALL)], ids=str)
def test_emulated_kernels_are_within_budget(case: Case) -> None:
    call = make_call(case, BF16)
    found, exact, plain = emulated(call, 0), call.definition(torch.float64), call.definition(BF16)
    for name, wanted in exact.items():
        empty = torch.isinf(wanted)  # lse of rows that see nothing
        assert torch.equal(torch.isinf(found[name]), empty), name
        got, wanted, base = (x.masked_fill(empty, 0) for x in (found[name], wanted, plain[name]))
        assert_within_budget(name, got, wanted, base, BF16)


@pytest.mark.parametrize("case", FAST[:2], ids=str)
def test_bits_do_not_depend_on_which_role_runs_first(case: Case) -> None:
    call = make_call(case, BF16)
    wanted = emulated(call, 0)
    for seed in (1000, 2000):
        for name, found in emulated(call, seed).items():
            assert torch.equal(found, wanted[name]), (name, seed)


def test_dq_does_not_depend_on_other_heads() -> None:
    """Its sums over four blocks of keys have one order, whatever group of heads takes turns with it, and packed or not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, flow = (torch.randn(1, 400, 3, 128, generator=generator).to(BF16) for _ in range(4))

    def d_q(heads: slice, packing: Packing | None = None) -> Tensor:
        leaves = [x[:, :, heads].clone().requires_grad_() for x in (q, k, v)]
        with hopper_card(2, 0), mock.patch.object(limits, "LEAST_TOKENS_CAUSAL", 0):
            o, _ = softmax_attention(*leaves, causal=True, impl="gluon", cu_seqlens=packing)
            return torch.autograd.grad(o, leaves, flow[:, :, heads])[0]

    together = d_q(slice(0, 3))
    for head in range(3):
        assert torch.equal(d_q(slice(head, head + 1)), together[:, :, head : head + 1]), head
    assert torch.equal(d_q(slice(0, 3), Packing.from_lengths([400])), together)
