"""Softmax attention against its definition: values and gradients of every case in every dtype."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attention_cases import CASES, DTYPES, KERNEL_STEPS, PORTABLE_CASES, Case, make_call
from budget import assert_within_budget, relative_errors
from samples import every, sample_of_rows
from torch import Tensor

from flashmix.ops.attention import softmax_attention

pytestmark = pytest.mark.usefixtures("one_thread", "deterministic_only")
Results = dict[str, Tensor]
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


def check(
    case: Case, dtype: torch.dtype, found: Results, reference: Results, baseline: Results, steps: int = 1
) -> None:
    """Shapes, dtypes and the budget of everything in `found`, which rounds between `steps` stages more than the formula."""
    assert found.keys() == reference.keys()
    # The reference errs as much as a float64 baseline would: what float32 errs, times the ratio of the rounding steps.
    # That ratio holds for a call as a whole rather than for a gradient of eight numbers.
    step, step_32 = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
    visible = {name: tensor.isfinite() for name, tensor in reference.items()}
    worst_32 = max(max(relative_errors(baseline[n][seen], reference[n][seen])) for n, seen in visible.items())
    budget_64 = (1 + 2) * worst_32 * step / step_32 + steps * step
    for name, wanted in reference.items():
        got, naive = found[name], baseline[name]
        assert got.shape == wanted.shape
        assert got.dtype == (lse_dtype(dtype) if name == "lse" else dtype)
        if name == "lse":
            seen = wanted != -torch.inf
            assert torch.equal(got == -torch.inf, ~seen), "lse is -inf exactly where a row sees nothing"
            got, wanted, naive = got[seen], wanted[seen], naive[seen]
        if dtype == torch.float64:
            assert max(relative_errors(got, wanted)) <= budget_64, f"{case}, {name}"
        else:
            assert_within_budget(f"{case}, {name}", got, wanted, naive, dtype, steps)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


EACH = list(product(CASES + PORTABLE_CASES, DTYPES))
SAMPLE = [row for place, row in enumerate(EACH) if place % 3 == 0]  # of four dtypes each in turn


@pytest.mark.parametrize("case, dtype", sample_of_rows(EACH, SAMPLE), ids=lambda x: DTYPE_NAMES.get(x, str(x)))
def test_portable_is_within_budget(case: Case, dtype: torch.dtype) -> None:
    call = make_call(case, dtype)
    baseline = call.definition(torch.float32 if dtype == torch.float64 else dtype)
    steps = KERNEL_STEPS.get(dtype, 1)
    if case.tokens == 1 and dtype == torch.float32:
        steps += 1  # the backward's scores are another product than the forward's, and round once more
    if any(end - start == 1 for start, end in zip(case.key_starts or (), case.key_lengths or (), strict=False)):
        steps *= 4  # of one key: its gradients are 0 in the formula, and what is left of two products of 8 terms here
    check(case, dtype, call.op("portable"), call.definition(torch.float64), baseline, steps)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("case", every(2, [case for case in CASES if case.plain and case.batch]), ids=str)
def test_torch_attention_is_within_budget(case: Case, dtype: torch.dtype) -> None:
    """Twice the error of portable or of the definition, whichever is larger."""
    call = make_call(case, dtype)
    reference = call.definition(torch.float64, return_lse=False)
    baselines = [call.op("portable", return_lse=False), call.definition(dtype, return_lse=False)]
    larger = {
        name: max((b[name] for b in baselines), key=lambda x, wanted=wanted: relative_errors(x, wanted))
        for name, wanted in reference.items()
    }
    steps = 1
    if case.tokens == 1 and dtype == torch.float32:
        steps += 2  # torch has another way for one query, which rounds more on some processors (an EPYC)
    check(case, dtype, call.op("sdpa", return_lse=False), reference, larger, steps)


@pytest.mark.parametrize("case", [case for case in CASES if not case.plain], ids=str)
def test_torch_attention_refuses_what_it_does_otherwise(case: Case) -> None:
    with pytest.raises(ValueError, match="impl='sdpa' cannot run this"):
        make_call(case, torch.float32).op("sdpa", return_lse=False)


EVERYTHING = {"window": (3, 0), "softcap": 2.0, "sink": True, "alibi": True, "decay": True, "dropout_p": 0.4}
GRADCHECK = [
    Case("causal", batch=1, tokens=5, tokens_k=7, heads_q=2, heads=1, dim=3, dim_v=2),
    Case("everything", batch=1, tokens=4, tokens_k=6, heads_q=2, heads=1, dim=2, **EVERYTHING),
    Case("not causal", batch=1, tokens=4, tokens_k=5, dim=2, causal=False, alibi=True, sink=True),
    Case("packed", lengths=(3, 0, 2), lengths_k=(4, 1, 2), dim=2, decay=True, sink=True),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_gradcheck(case: Case) -> None:
    call = make_call(case, torch.float64)
    tensors = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}
    boundaries = {} if call.packing is None else {"cu_seqlens": call.packing[0], "cu_seqlens_k": call.packing[1]}

    def op(*values: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        named = dict(zip(tensors, values, strict=True))
        options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "dropout_p": case.dropout_p}
        return softmax_attention(**named, **options, **boundaries, return_lse=True, impl="portable")

    assert torch.autograd.gradcheck(op, tuple(tensors.values()))
