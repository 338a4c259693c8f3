"""The chunked cross entropy of a head against its definition; what it keeps and how much memory it takes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from typing import Any

import definitions
import pytest
import torch
from rowwise_cases import (
    DTYPES,
    assert_compiles,
    assert_matches,
    assert_same_bits,
    assert_sound_operator,
    random,
    saved_bytes,
)
from torch import Tensor

from flashmix.ops.losses import op as losses
from flashmix.ops.losses.call import CrossEntropyCall, LinearCrossEntropyCall
from flashmix.ops.losses.op import cross_entropy, linear_cross_entropy
from flashmix.ops.losses.portable import head as portable_head

TARGET = torch.tensor([[3, 0, -100, 10, 7], [1, 1, 9, -100, 2]])
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 2.0},
    {"label_smoothing": 0.3, "z_loss": 0.1, "softcap": 5.0},
]


EVERY_OPTION: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}


def head(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int = 4) -> dict[str, Any]:
    """The fields of a call of a head."""
    needs = ("hidden", "weight") if bias is None else ("hidden", "weight", "bias")
    return {"hidden": hidden, "weight": weight, "bias": bias, "chunk": chunk, "needs": needs}


def reduced(losses: Tensor, target: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != -100).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_linear_cross_entropy_is_its_definition(
    chunk: int | None, reduction: str, options: dict, dtype: torch.dtype
) -> None:
    hidden, weight, bias = (random(*s, dtype=dtype, seed=i) for i, s in enumerate([(2, 5, 8), (11, 8), (11,)]))

    def op(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, TARGET, bias=b, reduction=reduction, chunk=chunk, **options)

    def definition(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reduced(definitions.cross_entropy(h @ w.T + b, TARGET, **options), TARGET, reduction)

    assert_matches(op, definition, hidden, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_its_definition(reduction: str, options: dict, dtype: torch.dtype) -> None:
    assert_matches(
        lambda z: cross_entropy(z, TARGET, reduction=reduction, **options),
        lambda z: reduced(definitions.cross_entropy(z, TARGET, **options), TARGET, reduction),
        random(2, 5, 11, dtype=dtype) * 3,
    )


def test_cross_entropy_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's loss is its own whatever the chunk, the logits stay as they are, gradients are right and compile."""
    logits = random(2, 5, 11)
    before = logits.clone()
    op = partial(cross_entropy, target=TARGET, label_smoothing=0.1, z_loss=0.1, softcap=3.0, reduction="none")
    whole = op(logits)
    monkeypatch.setattr(portable_head, "LOGITS_AT_ONCE", 33)
    assert_same_bits("chunks", op(logits), whole)
    assert_same_bits("logits", logits, before)
    assert_same_bits("one", op(logits[1:, 2:3], target=TARGET[1:, 2:3]), whole[1:, 2:3])
    assert torch.autograd.gradcheck(op, (logits.double().requires_grad_(),))
    assert_compiles(op, logits)
    rows = logits.flatten(0, 1).requires_grad_()
    call = CrossEntropyCall(logits=rows, target=TARGET.flatten(), overwrite_logits=False, **EVERY_OPTION)
    assert_sound_operator(losses.CROSS_ENTROPY, call, "logits")


@pytest.mark.parametrize("wrong", [torch.zeros(2, 5, 0), torch.tensor(1.0)])
def test_cross_entropy_refuses_no_logits(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"logits must have shape \[\.\.\., V\] with V >= 1"):
        cross_entropy(wrong, TARGET)


def test_cross_entropy_refuses() -> None:
    with pytest.raises(TypeError, match="logits must have a floating dtype, got int64"):
        cross_entropy(torch.ones(2, 5, 11).long(), TARGET)
    with pytest.raises(ValueError, match=r"target must have shape \[2, 5\], got \[5\]"):
        cross_entropy(torch.ones(2, 5, 11), TARGET[0])
    with pytest.raises(ValueError, match=r"must be below the vocabulary 10 .*, got 10"):
        cross_entropy(torch.ones(2, 5, 10), TARGET)
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'triton', 'portable', got 'cuda'"):
        cross_entropy(torch.ones(2, 5, 11), TARGET, impl="cuda")


def test_a_row_does_not_depend_on_how_many_are_beside_it() -> None:
    """A single product of a few rows has other bits than one of many."""
    hidden, weight = random(130, 256).requires_grad_(), random(512, 256, seed=1)
    target = torch.arange(130)
    whole = linear_cross_entropy(hidden, weight, target, reduction="none")
    (gradient,) = torch.autograd.grad(whole.sum(), hidden)
    for rows in (slice(0, 1), slice(127, 130), slice(30, 99)):
        few = linear_cross_entropy(hidden[rows], weight, target[rows], reduction="none")
        assert_same_bits("loss", few, whole[rows])
        assert_same_bits("gradient", torch.autograd.grad(few.sum(), hidden)[0][rows], gradient[rows])


def test_it_agrees_with_torch() -> None:
    hidden, weight = random(10, 8, dtype=torch.float64), random(11, 8, seed=1, dtype=torch.float64)
    for smoothing, reduction in itertools.product((0.0, 0.1), ("mean", "sum", "none")):
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, TARGET.flatten(), label_smoothing=smoothing, reduction=reduction),
            torch.nn.functional.cross_entropy(
                hidden @ weight.T, TARGET.flatten(), label_smoothing=smoothing, reduction=reduction
            ),
        )


def test_the_result_is_float32_for_narrow_inputs() -> None:
    hidden, weight = random(2, 5, 8, dtype=torch.bfloat16), random(11, 8, dtype=torch.bfloat16)
    assert linear_cross_entropy(hidden, weight, TARGET).dtype == torch.float32


def test_nothing_to_learn_is_zero() -> None:
    hidden, weight = random(3, 8).requires_grad_(), random(11, 8).requires_grad_()
    for target, h in ((torch.full((3,), -100), hidden), (torch.zeros(0, dtype=torch.int64), hidden[:0])):
        loss = linear_cross_entropy(h, weight, target)
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert loss.item() == 0 and not any(grad.any() for grad in grads)


def test_sums_over_micro_batches_are_the_mean_over_the_batch() -> None:
    """Micro batches with 4, 1 and 3 targets: sums over the whole count make the whole's mean, means of means do not."""
    hidden, weight = random(10, 8, dtype=torch.float64), random(11, 8, dtype=torch.float64, seed=1).requires_grad_()
    target = TARGET.flatten()
    count = (target != -100).sum()
    (whole,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), weight)
    parts = [slice(0, 5), slice(5, 6), slice(6, 10)]
    sums = [linear_cross_entropy(hidden[p], weight, target[p], reduction="sum") / count for p in parts]
    torch.testing.assert_close(sum(torch.autograd.grad(loss, weight)[0] for loss in sums), whole)
    means = [linear_cross_entropy(hidden[p], weight, target[p]) / 3 for p in parts]
    assert not torch.allclose(sum(torch.autograd.grad(loss, weight)[0] for loss in means), whole)


def test_gradcheck() -> None:
    hidden, weight, bias = (
        random(*s, dtype=torch.float64, seed=i).requires_grad_() for i, s in enumerate([(2, 5, 4), (11, 4), (11,)])
    )
    for options in OPTIONS:
        assert torch.autograd.gradcheck(
            lambda h, w, b: linear_cross_entropy(h, w, TARGET, bias=b, chunk=3, reduction="none", **options),  # noqa: B023
            (hidden, weight, bias),
        )


def test_second_order_is_a_clear_error() -> None:
    hidden, weight = random(3, 8).requires_grad_(), random(11, 8).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, TARGET[0, :3])
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy has no second derivative"):
        grad.sum().backward()


def test_a_frozen_head_skips_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    products = 0
    addmm = Tensor.addmm_

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal products
        products += 1
        return addmm(*args, **kwargs)

    monkeypatch.setattr(Tensor, "addmm_", counted)
    hidden, weight = random(2, 5, 8).requires_grad_(), random(11, 8)
    linear_cross_entropy(hidden, weight, TARGET).backward()
    assert products == 0 and hidden.grad is not None
    linear_cross_entropy(hidden, weight.requires_grad_(), TARGET).backward()
    assert products == 1 and weight.grad is not None


def test_compiles_and_is_a_sound_operator() -> None:
    hidden, weight, bias = (random(*s, seed=i) for i, s in enumerate([(2, 5, 8), (11, 8), (11,)]))
    inputs = hidden, weight, bias
    assert_compiles(lambda h, w, b: linear_cross_entropy(h, w, TARGET, bias=b, softcap=3.0, chunk=4), *inputs)
    flat = hidden.flatten(0, 1).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    for summed in (False, True):
        call = LinearCrossEntropyCall(**head(*flat), target=TARGET.flatten(), summed=summed, **EVERY_OPTION)
        assert_sound_operator(losses.LINEAR_CROSS_ENTROPY, call, "hidden", "weight", "bias")


def test_autocast() -> None:
    hidden, weight = random(2, 5, 8, dtype=torch.bfloat16), random(11, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, TARGET)
    assert_same_bits("autocast", loss, linear_cross_entropy(hidden, weight.bfloat16(), TARGET))


def test_same_bits_again_and_through_a_checkpoint() -> None:
    hidden, weight = random(2, 5, 8).requires_grad_(), random(11, 8).requires_grad_()

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    first = gradients(linear_cross_entropy(hidden, weight, TARGET))
    again = gradients(linear_cross_entropy(hidden, weight, TARGET))
    kept = gradients(
        torch.utils.checkpoint.checkpoint(linear_cross_entropy, hidden, weight, TARGET, use_reentrant=False)
    )
    for a, b, c in zip(first, again, kept, strict=True):
        assert_same_bits("again", b, a)
        assert_same_bits("checkpoint", c, a)


def test_the_backward_keeps_inputs_and_a_number_a_token() -> None:
    logits, hidden, weight = random(10, 512), random(10, 64), random(512, 64)
    token = 10 * 8 + 10 * 4  # the target and the log-sum-exp
    assert saved_bytes(lambda z: cross_entropy(z, TARGET.flatten(), reduction="sum"), logits) == 10 * 512 * 4 + token
    linear = saved_bytes(lambda h, w: linear_cross_entropy(h, w, TARGET.flatten(), reduction="sum"), hidden, weight)
    assert linear == (10 + 512) * 64 * 4 + token


PEAK = """
import resource, sys, torch
from flashmix.ops.losses.op import linear_cross_entropy
tokens, channels, vocabulary = map(int, sys.argv[1:])
hidden = torch.randn(tokens, channels, requires_grad=True)
weight = torch.randn(vocabulary, channels, requires_grad=True)
target = torch.randint(vocabulary, (tokens,))
small = torch.randn(64, 64, requires_grad=True)
linear_cross_entropy(small, small, target[:64] % 64).backward()  # what the first call of anything loads
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(hidden, weight, target).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_logits_of_all_tokens_are_never_held() -> None:
    """2048 tokens of 50257 logits are 393 MiB; the gradient of the weight is 12 of the 100 allowed."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "2048", "64", "50257"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100 * 1024


REFUSED = [
    ({"weight": torch.ones(11, 7)}, ValueError, r"weight must have shape \[11, 8\], got \[11, 7\]"),
    ({"weight": torch.ones(8)}, ValueError, r"weight must have shape \[V, D\], got \[8\]"),
    ({"weight": torch.ones(0, 8)}, ValueError, r"weight must have shape \[V, D\] with V >= 1, got \[0, 8\]"),
    ({"weight": torch.ones(11, 8).double()}, TypeError, "weight must have dtype float32 like hidden, got float64"),
    ({"hidden": torch.ones(2, 5, 8).long()}, TypeError, "hidden must have a floating dtype, got int64"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden must have shape \[\.\.\., D\], got \[\]"),
    ({"target": TARGET[0]}, ValueError, r"target must have shape \[2, 5\], got \[5\]"),
    ({"target": TARGET.int()}, TypeError, "target must have dtype int64, got int32"),
    ({"target": TARGET.clamp(0) + 1}, ValueError, "must be below the vocabulary 11 .* ignore_index = -100, got 11"),
    ({"ignore_index": -1}, ValueError, "ignore_index = -1, got -100"),
    ({"bias": torch.ones(8)}, ValueError, r"bias must have shape \[11\], got \[8\]"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0.0 and 1.0, got 1.5"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    ({"chunk": 0}, ValueError, "chunk must be positive, got 0"),
    ({"weight": torch.ones(11, 8, device="meta")}, ValueError, "weight must be on cpu like hidden, got meta"),
    ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
]


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_linear_cross_entropy_refuses(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        linear_cross_entropy(
            **{"hidden": torch.ones(2, 5, 8), "weight": torch.ones(11, 8), "target": TARGET, **arguments}
        )
