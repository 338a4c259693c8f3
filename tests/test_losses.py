"""Distillation and policy losses over chunked logits against their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import definitions
import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import DTYPES, assert_compiles, assert_matches, assert_same_bits, assert_sound_operator, random
from samples import thinned
from torch import Tensor

from flashmix.ops.losses import op as losses
from flashmix.ops.losses.call import KLDivergenceCall
from flashmix.ops.losses.op import linear_grpo, linear_kl_divergence

MASK = torch.tensor([[True, True, False, True, True], [True, False, False, True, True]])
CHUNK = 3  # rows of a head at once
TIMES = 10  # five rows each, of a sequence
DRAWS = 12  # calls
TARGET = torch.tensor([[3, 0, -100, 10, 7], [1, -5, 99, 4, 2]])  # anything where the mask is False


def reduced(values: Tensor, mask: Tensor, reduction: str) -> Tensor:
    values = torch.where(mask, values, torch.zeros_like(values))
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if reduction == "mean":
        return values.sum() / mask.sum()
    return (values.sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("temperature, reduction", [(1.0, "mean"), (1.0, "sum"), (2.0, "none")])
def test_kl_divergence_is_its_definition(temperature: float, reduction: str, reverse: bool, dtype: torch.dtype) -> None:
    tokens = 5 * TIMES
    shapes, mask = ((2, tokens, 8), (11, 8), (11,)), MASK.repeat(1, TIMES)
    teacher = [random(*s, dtype=dtype, seed=9 - i) for i, s in enumerate([(2, tokens, 6), (11, 6), (11,)])]

    def op(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        th, tw, tb = (value.to(h.dtype) for value in teacher)
        options = {"temperature": temperature, "reverse": reverse, "reduction": reduction, "chunk": CHUNK}
        return linear_kl_divergence(h, w, th, tw, bias=b, teacher_bias=tb, mask=mask, **options)

    def definition(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        th, tw, tb = (value.to(h.dtype) for value in teacher)
        values = definitions.kl_divergence(h @ w.T + b, th @ tw.T + tb, temperature, reverse)
        return reduced(values, mask, reduction)

    inputs = [random(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    steps = 2 if dtype == torch.float32 else 1  # a product with each of two heads
    assert_matches(op, definition, *inputs, steps=steps)


def kl_call(student: Sequence[Tensor], teacher: Sequence[Tensor], **options: Any) -> KLDivergenceCall:
    """A call of heads without biases, two rows at a time."""
    fields = dict(zip(("hidden", "weight", "teacher_hidden", "teacher_weight"), (*student, *teacher), strict=True))
    given = {"bias": None, "teacher_bias": None, "mask": None, "chunk": 2, "needs": ("hidden", "weight")}
    return KLDivergenceCall(**fields, **{**given, **options})


def test_kl_divergence_laws() -> None:
    hidden, weight, teacher, head = (
        random(*s, dtype=torch.float64, seed=i) for i, s in enumerate([(5, 4), (11, 4), (5, 6), (11, 6)])
    )
    for reverse in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda h, w: linear_kl_divergence(h, w, teacher, head, chunk=2, temperature=1.5, reverse=reverse),  # noqa: B023
            leaves,
        )
        assert_compiles(
            lambda h, w: linear_kl_divergence(h, w, teacher, head, reverse=reverse),  # noqa: B023
            hidden,
            weight,
        )
        call = kl_call(leaves, (teacher, head), temperature=2.0, reverse=reverse, reduction="none")
        for reduction, mask in (("none", None), ("mean", torch.arange(5) != 2)):
            changed = call.but(reduction=reduction, mask=mask)
            assert_sound_operator(losses.KL_DIVERGENCE, changed, "hidden", "weight")
    assert linear_kl_divergence(hidden, weight, hidden, weight).abs() < torch.finfo(torch.float64).eps * 11
    loss = linear_kl_divergence(hidden.requires_grad_(), weight, teacher, head)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_kl_divergence has no second derivative"):
        grad.sum().backward()


def test_tokens_ruled_out_by_teacher_and_student_count_for_nothing() -> None:
    """A vocabulary padded with logits of minus infinity gives the numbers of the shorter one."""
    hidden, weight, teacher, head = (random(*s, seed=i) for i, s in enumerate([(5, 4), (11, 4), (5, 6), (11, 6)]))
    out = torch.zeros(11)
    out[8:] = -torch.inf
    for reverse in (False, True):
        h = hidden.clone().requires_grad_()
        long = linear_kl_divergence(h, weight, teacher, head, bias=out, teacher_bias=out, reverse=reverse)
        short = linear_kl_divergence(h, weight[:8], teacher, head[:8], reverse=reverse)
        torch.testing.assert_close(long, short)
        torch.testing.assert_close(torch.autograd.grad(long, h), torch.autograd.grad(short, h))


def log_probs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    z = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return z.gather(-1, TARGET.where(MASK, 0).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("temperature", "reduction", "dtype"), thinned(3, [1.0, 0.5], ["sequence", "mean", "sum", "none"], DTYPES), ids=str
)
def test_grpo_is_its_definition(temperature: float, reduction: str, dtype: torch.dtype) -> None:
    # A mean over eight tokens of both signs rounds by luck: many calls are one result.
    hidden, weight = random(DRAWS, 2, 5, 8, dtype=dtype) / 2, random(DRAWS, 11, 8, dtype=dtype, seed=1) / 2
    old, reference = (
        torch.stack([log_probs(h, w, temperature) for h, w in zip(hidden.double(), weight.double(), strict=True)])
        + random(DRAWS, 2, 5, dtype=torch.float64, seed=s) * 0.4
        for s in (2, 3)
    )
    given = {"mask": MASK, "clip": (0.2, 0.28), "kl_weight": 0.1, "temperature": temperature, "reduction": reduction}
    for advantages in (torch.tensor([1.0, -2.0]), random(2, 5, seed=4)):

        def op(h: Tensor, w: Tensor) -> Tensor:
            found = [
                linear_grpo(*x, TARGET, advantages, old_log_probs=a, reference_log_probs=b, chunk=3, **given)  # noqa: B023
                for *x, a, b in zip(h, w, old, reference, strict=True)
            ]
            return torch.stack(found)

        def definition(h: Tensor, w: Tensor) -> Tensor:
            a = advantages.reshape(2, -1).to(h.dtype)  # noqa: B023
            found = []
            for *x, before, other in zip(h, w, old.to(h.dtype), reference.to(h.dtype), strict=True):
                values = definitions.grpo(log_probs(*x, temperature), before, other, a, 0.2, 0.28, 0.1)
                found.append(reduced(values, MASK, reduction))
            return torch.stack(found)

        assert_matches(op, definition, hidden, weight)


def test_grpo_of_the_sampling_policy_is_the_policy_gradient() -> None:
    """Without old log-probabilities the ratio is 1, and the gradient that of advantage times log-probability."""
    hidden, weight = random(2, 5, 8).requires_grad_(), random(11, 8, seed=1)
    advantages = torch.tensor([1.0, -2.0])
    loss = linear_grpo(hidden, weight, TARGET, advantages, mask=MASK, reduction="sum")
    assert loss.item() == pytest.approx(-(MASK.sum(1) * advantages).sum().item())
    plain = -reduced(log_probs(hidden, weight, 1.0) * advantages[:, None], MASK, "sum")
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(plain, hidden))


def test_grpo_masked_tokens_may_hold_anything() -> None:
    hidden, weight, advantages = random(2, 5, 8).requires_grad_(), random(11, 8, seed=1), torch.tensor([1.0, -2.0])
    old = torch.zeros(2, 5) - 2.0
    found = []
    for filler in (0.0, -torch.inf, torch.nan):
        filled = {name: old.where(MASK, filler) for name in ("old_log_probs", "reference_log_probs")}
        loss = linear_grpo(hidden, weight, TARGET, advantages, **filled, kl_weight=0.1, mask=MASK)
        found.append((loss.detach(), *torch.autograd.grad(loss, hidden)))
    for other in found[1:]:
        for have, want in zip(other, found[0], strict=True):
            assert_same_bits("filler", have, want)


def test_grpo_compiles_and_checks_its_gradient() -> None:
    hidden, weight, advantages = random(2, 5, 4, dtype=torch.float64), random(11, 4, dtype=torch.float64), random(2)

    def op(h: Tensor, w: Tensor) -> Tensor:
        old = torch.full((2, 5), -2.0, dtype=torch.float64)
        return linear_grpo(
            h, w, TARGET, advantages.double(), mask=MASK, old_log_probs=old, reference_log_probs=old, kl_weight=0.1
        )

    assert_compiles(op, hidden, weight)
    assert torch.autograd.gradcheck(op, (hidden.requires_grad_(), weight.requires_grad_()))


KL = {
    "hidden": torch.ones(2, 5, 8),
    "weight": torch.ones(11, 8),
    "teacher_hidden": torch.ones(2, 5, 6),
    "teacher_weight": torch.ones(11, 6),
}
GRPO = {"hidden": KL["hidden"], "weight": KL["weight"], "target": TARGET.where(MASK, 0), "advantages": torch.ones(2)}
REFUSED = [
    (
        linear_kl_divergence,
        {"weight": torch.ones(11, 7)},
        ValueError,
        r"weight must have shape \[11, 8\], got \[11, 7\]",
    ),
    (
        linear_kl_divergence,
        {"teacher_weight": torch.ones(9, 6)},
        ValueError,
        r"teacher_weight must have shape \[11, 6\]",
    ),
    (
        linear_kl_divergence,
        {"teacher_hidden": torch.ones(2, 4, 6)},
        ValueError,
        r"teacher_hidden must have shape \[2, 5, 6\]",
    ),
    (
        linear_kl_divergence,
        {"teacher_weight": torch.ones(11, 6, requires_grad=True)},
        ValueError,
        "not require a gradient",
    ),
    (linear_kl_divergence, {"mask": torch.ones(2, 5)}, TypeError, "mask must have dtype bool, got float32"),
    (linear_kl_divergence, {"mask": MASK[0]}, ValueError, r"mask must have shape \[2, 5\], got \[5\]"),
    (linear_kl_divergence, {"temperature": 0.0}, ValueError, r"temperature must be positive, got 0\.0"),
    (linear_kl_divergence, {"reduction": "batchmean"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'"),
    (
        linear_kl_divergence,
        {"impl": "cuda"},
        ValueError,
        "impl must be one of 'auto', 'triton', 'portable', got 'cuda'",
    ),
    (linear_grpo, {"hidden": torch.ones(5, 8)}, ValueError, r"hidden must have shape \[B, T, D\], got \[5, 8\]"),
    (linear_grpo, {"advantages": torch.ones(3)}, ValueError, r"advantages must have shape \[2\], got \[3\]"),
    (linear_grpo, {"advantages": torch.ones(2, 4)}, ValueError, r"advantages must have shape \[2, 5\], got \[2, 4\]"),
    (linear_grpo, {"old_log_probs": torch.ones(2)}, ValueError, r"old_log_probs must have shape \[2, 5\], got \[2\]"),
    (
        linear_grpo,
        {"kl_weight": 0.1},
        ValueError,
        "reference_log_probs must be given when kl_weight is not 0, got None",
    ),
    (linear_grpo, {"clip": (-0.1, 0.2)}, ValueError, r"clip must be between 0\.0 and inf, got -0\.1"),
    (linear_grpo, {"target": TARGET}, ValueError, "target must be below the vocabulary 11"),
    (
        linear_grpo,
        {"reduction": "seq"},
        ValueError,
        "reduction must be one of 'sequence', 'mean', 'sum', 'none', got 'seq'",
    ),
    (linear_grpo, {"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
]


@pytest.mark.parametrize("op, arguments, error, text", REFUSED)
def test_losses_refuse(op, arguments: dict, error: type[Exception], text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=text):
        op(**{**(KL if op is linear_kl_divergence else GRPO), **arguments})


def test_grpo_rounds_no_bias_by_its_temperature() -> None:
    """A float16 bias beside float32 logits is exact; over a temperature it would be rounded again."""
    hidden, weight, bias = random(2, 5, 8), random(11, 8, seed=1), random(11, seed=2).half()
    advantages = torch.tensor([1.0, -2.0])

    def op(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_grpo(h, w, TARGET, advantages, bias=b.half(), mask=MASK, temperature=0.7, reduction="none")

    def definition(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = torch.log_softmax((h @ w.T + b) / 0.7, dim=-1)
        chosen = z.gather(-1, TARGET.where(MASK, 0).unsqueeze(-1)).squeeze(-1)
        return -advantages.to(h.dtype)[:, None] * torch.exp(chosen - chosen.detach()) * MASK

    got, want = op(hidden, weight, bias.float()), definition(hidden.double(), weight.double(), bias.double())
    assert_within_budget("loss", got, want, definition(hidden, weight, bias.float()))
    h, h64 = hidden.requires_grad_(), hidden.detach().double().requires_grad_()
    (d_h,) = torch.autograd.grad(op(h, weight, bias.float()).sum(), h)
    (want,) = torch.autograd.grad(definition(h64, weight.double(), bias.double()).sum(), h64)
    (base,) = torch.autograd.grad(definition(h, weight, bias.float()).sum(), h)
    assert_within_budget("gradient", d_h, want, base)


def test_grpo_refuses_targets_elsewhere_beside_a_mask() -> None:
    with pytest.raises(ValueError, match="target must be on cpu like hidden, got meta"):
        linear_grpo(random(2, 5, 8), random(11, 8), TARGET.to("meta"), torch.ones(2), mask=MASK)
