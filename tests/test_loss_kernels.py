"""The kernels of the losses: interpreted, compiled for every GPU, and on one against the definitions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import definitions
import pytest
import rowwise_cases
import test_losses
import torch
from rowwise_cases import assert_captures, assert_compiles, assert_same_bits, assert_sound_operator, random
from test_cross_entropy import EVERY_OPTION, OPTIONS, TARGET, head, reduced
from torch import Tensor

from flashmix.ops.losses import op as losses
from flashmix.ops.losses.call import CrossEntropyCall, GRPOCall, KLDivergenceCall, LinearCrossEntropyCall
from flashmix.ops.losses.op import cross_entropy, linear_cross_entropy, linear_grpo, linear_kl_divergence
from flashmix.ops.losses.triton_gpu import head as triton_head

pytest.importorskip("triton")

from kernels import TARGETS, compile_launch, recording

from flashmix.gpu.arch import SHARED_MEMORY_KIB

GPU = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Kernels round the logits, and the probabilities or what a policy makes of them, where the formula has one rounding.
assert_matches = partial(rowwise_cases.assert_matches, steps=2)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=GPU)]


def moved(op: Callable[..., Tensor], device: str) -> Callable[..., Any]:
    """`op` by its kernels on `device`, of tensors anywhere (float64: the portable op, for references)."""

    def call(first: Tensor, *tensors: Any, **options: Any) -> Tensor:
        if first.dtype == torch.float64:
            return op(first, *tensors, **options)
        rest = [t.to(device) if isinstance(t, Tensor) else t for t in tensors]
        named = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
        return op(first.to(device), *rest, **{**named, "impl": "triton"}).cpu()

    return call


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropies(options: dict, device: str) -> None:
    given, linear = moved(cross_entropy, device), moved(linear_cross_entropy, device)
    for dtype in DTYPES if device == "cuda" else DTYPES[:2]:
        hidden, weight, bias = (random(*s, dtype=dtype, seed=i) for i, s in enumerate([(2, 5, 8), (11, 8), (11,)]))
        if device == "cuda":
            forms = list(itertools.product(("mean", "sum", "none"), ((False, None), (True, 3))))
        else:  # the interpreter is slow: every reduction, both ways of overwriting and chunks
            forms = [("mean", (False, 3)), ("none", (True, None)), ("sum", (True, 3))][: 3 if dtype == DTYPES[0] else 1]
        for reduction, (overwrite, chunk) in forms:
            assert_matches(
                lambda z: given(z * 1, TARGET, reduction=reduction, overwrite_logits=overwrite, **options),  # noqa: B023
                lambda z: reduced(definitions.cross_entropy(z, TARGET, **options), TARGET, reduction),  # noqa: B023
                random(2, 5, 11, dtype=dtype) * 3,
            )
            assert_matches(
                lambda h, w, b: linear(h, w, TARGET, bias=b, reduction=reduction, chunk=chunk, **options),  # noqa: B023
                lambda h, w, b: reduced(
                    definitions.cross_entropy(h @ w.T + b, TARGET, **options),
                    TARGET,
                    reduction,  # noqa: B023
                ),
                hidden,
                weight,
                bias,
            )


@GPU
@pytest.mark.parametrize("vocabulary", [1, 2, 100, 2048, 2049, 50257, 128256])
def test_vocabularies(vocabulary: int) -> None:
    target = torch.randint(vocabulary, (7,), generator=torch.Generator().manual_seed(0))
    target[2] = -100
    for dtype in DTYPES:
        assert_matches(
            lambda z: moved(cross_entropy, "cuda")(z, target, reduction="none", label_smoothing=0.1),
            lambda z: definitions.cross_entropy(z, target, 0.1),
            random(7, vocabulary, dtype=dtype) * 3,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_divergences(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the portable losses, by the kernels."""
    monkeypatch.setattr(test_losses, "assert_matches", assert_matches)
    if device == "cpu":  # the interpreter is slow: three chunks of 30 rows
        monkeypatch.setattr(test_losses, "TIMES", 3)
        monkeypatch.setattr(test_losses, "CHUNK", 12)
    monkeypatch.setattr(test_losses, "linear_kl_divergence", moved(linear_kl_divergence, device))
    for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
        for temperature, reduction, reverse in (
            (1.0, "mean", False),
            (2.0, "none", True),
            (1.0, "none", True),
            (2.0, "mean", False),
        )[: 4 if device == "cuda" else 2]:
            test_losses.test_kl_divergence_is_its_definition(temperature, reduction, reverse, dtype)
    test_losses.test_tokens_ruled_out_by_teacher_and_student_count_for_nothing()


@pytest.mark.parametrize("device", DEVICES)
def test_policies(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_losses, "assert_matches", assert_matches)
    monkeypatch.setattr(test_losses, "linear_grpo", moved(linear_grpo, device))
    for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
        for reduction in ("sequence", "mean", "sum", "none") if device == "cuda" else ("sequence",):
            test_losses.test_grpo_is_its_definition(0.5, reduction, dtype)
    test_losses.test_grpo_of_the_sampling_policy_is_the_policy_gradient()
    test_losses.test_grpo_masked_tokens_may_hold_anything()


@pytest.mark.parametrize("impl, device", [("portable", "cpu"), pytest.param("triton", "cuda", marks=GPU)])
def test_overwritten_logits(impl: str, device: str) -> None:
    """The gradient lies where the logits were; whoever needs them afterwards is told."""
    leaf, target = random(10, 11).to(device).requires_grad_(), TARGET.flatten().to(device)
    logits = leaf * 1
    (want,) = torch.autograd.grad(cross_entropy(logits, target, impl=impl), logits, retain_graph=True)
    loss = cross_entropy(logits, target, overwrite_logits=True, impl=impl)
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert got.data_ptr() == logits.data_ptr()
    assert_same_bits("gradient", got, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)
    assert_compiles(lambda z: cross_entropy(z, TARGET, overwrite_logits=True), random(2, 5, 11))


def test_chunks_and_accumulators() -> None:
    bf16, half, wide = torch.bfloat16, torch.float16, torch.float32
    assert triton_head.rows_at_once(None, 128256, bf16, 16384) == 2048
    assert triton_head.rows_at_once(None, 128256, wide, 16384) == 1024
    assert triton_head.rows_at_once(None, 2**30, bf16, 10) == 1
    assert triton_head.rows_at_once(None, 100, bf16, 10) == 10 and triton_head.rows_at_once(3, 100, bf16, 10) == 3
    assert triton_head.accumulator_dtype(bf16, 16384, 2048) == bf16
    assert triton_head.accumulator_dtype(bf16, 16384, 512) == wide
    assert triton_head.accumulator_dtype(half, 16384, 16384) == wide


@GPU
def test_peak_memory_and_a_frozen_head() -> None:
    """4096 tokens of 50,257 logits are 393 MiB in bfloat16; a chunk of 512 of them 49."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    hidden, weight = (random(*s).cuda().bfloat16().requires_grad_() for s in ((4096, 512), (50257, 512)))
    target = torch.randint(50257, (4096,), device="cuda")
    linear_cross_entropy(hidden, weight, target, chunk=512).backward()  # the matrix products' own workspace
    for frozen, most in ((False, 49 + 2 * 49 + 2 * 4 + 8), (True, 49 + 2 * 4 + 8)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = linear_cross_entropy(hidden, weight.detach() if frozen else weight, target, chunk=512)
        torch.autograd.grad(loss, [hidden] if frozen else [hidden, weight])
        assert torch.cuda.max_memory_allocated() - before <= most * 2**20


@GPU
def test_operators_are_sound_and_compile() -> None:
    hidden, weight, bias = (random(*s, seed=i) for i, s in enumerate([(2, 5, 8), (11, 8), (11,)]))
    flat = [t.cuda().requires_grad_() for t in (hidden.flatten(0, 1), weight, bias)]
    target = TARGET.flatten().cuda()
    names, fields = ("hidden", "weight", "bias"), head(*flat)
    given = CrossEntropyCall(logits=flat[0], target=target.clamp(max=7), overwrite_logits=False, **EVERY_OPTION)
    assert_sound_operator(losses.CROSS_ENTROPY, given, "logits", impl="triton")
    for summed in (False, True):
        linear = LinearCrossEntropyCall(**fields, target=target, summed=summed, **EVERY_OPTION)
        assert_sound_operator(losses.LINEAR_CROSS_ENTROPY, linear, *names, impl="triton")
    teacher = {f"teacher_{name}": t.detach() for name, t in zip(names, flat, strict=True)}
    for reduction in ("none", "mean"):
        divergence = KLDivergenceCall(
            **fields, **teacher, mask=None, temperature=1.0, reverse=reduction == "mean", reduction=reduction
        )
        assert_sound_operator(losses.KL_DIVERGENCE, divergence, *names, impl="triton")
    ones = torch.ones(2, 5, device="cuda")
    policy = GRPOCall(
        **fields,
        target=TARGET.cuda().clamp(min=0),
        advantages=ones,
        old_log_probs=ones,
        reference_log_probs=ones,
        mask=None,
        clip=(0.2, 0.2),
        kl_weight=0.1,
        temperature=1.0,
        reduction="sequence",
    )
    assert_sound_operator(losses.GRPO, policy, *names, impl="triton")
    for reduction in ("mean", "none"):
        call = partial(moved(linear_cross_entropy, "cuda"), reduction=reduction, chunk=4)
        assert_compiles(lambda h, w, b: call(h, w, TARGET, bias=b), hidden, weight, bias)  # noqa: B023
        assert_compiles(lambda z: moved(cross_entropy, "cuda")(z, TARGET, reduction=reduction), random(2, 5, 11))  # noqa: B023


@GPU
def test_graphs_and_no_synchronisation() -> None:
    hidden, weight = (random(*s).cuda().requires_grad_() for s in ((10, 16), (300, 16)))
    target = TARGET.flatten().cuda()

    def step() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, target, chunk=4)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    assert_captures(step)


@GPU
def test_rows_are_their_own_strided_and_nan() -> None:
    z, target = random(10, 100).cuda(), TARGET.flatten().cuda()
    call = partial(cross_entropy, reduction="none", label_smoothing=0.1)
    whole = call(z, target)
    for odd in (random(100, 10).cuda().T, z.repeat(1, 2)[:, 50:150], z[:1].expand(10, 100)):
        assert_same_bits("strided", call(odd, target), call(odd.contiguous(), target))
    assert_same_bits("alone", call(z[3:4], target[3:4]), whole[3:4])
    z[3, 5] = torch.nan
    z[4, 6] = torch.inf
    leaf = z.requires_grad_()
    got = call(leaf, target)
    (grad,) = torch.autograd.grad(got.sum(), leaf)
    fine = [i for i in range(10) if i not in (3, 4)]
    assert_same_bits("others", got[fine], whole[fine])
    assert torch.isfinite(grad[fine]).all() and got[3].isnan() and not torch.isfinite(got[4])


@GPU
def test_more_than_2_31_logits() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    z = torch.randn(16900, 128256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(128256, (16900,), device="cuda")
    few = z.detach()[-4:].clone().requires_grad_()
    want = torch.autograd.grad(cross_entropy(few, target[-4:], reduction="sum"), few)[0]
    loss = cross_entropy(z, target, reduction="none", overwrite_logits=True)
    assert_same_bits("losses", loss[-4:], cross_entropy(few, target[-4:], reduction="none"))
    (got,) = torch.autograd.grad(loss.sum(), z)
    assert_same_bits("gradient", got[-4:], want)
    rows = torch.randn(200_000, 33, device="cuda")
    short = torch.randint(33, (200_000,), device="cuda")
    torch.testing.assert_close(cross_entropy(rows, short), torch.nn.functional.cross_entropy(rows, short))


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def head_call(vocabulary: int, dtype: torch.dtype, **options: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        target, bias = torch.zeros(4, dtype=torch.int64), leaf(vocabulary, dtype=dtype) if options else None
        return linear_cross_entropy(
            leaf(4, 8, dtype=dtype), leaf(vocabulary, 8, dtype=dtype), target, bias=bias, **options
        )

    return call


def kl_call(vocabulary: int, dtype: torch.dtype, reverse: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        hidden, weight = leaf(4, 8, dtype=dtype), leaf(vocabulary, 8, dtype=dtype)
        return linear_kl_divergence(hidden, weight, hidden.detach(), weight.detach(), reverse=reverse)

    return call


SLOWEST = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}
FAST = {
    "head": head_call(128256, torch.bfloat16),
    "head, all options": head_call(50257, torch.float32, **SLOWEST),
    "kl": kl_call(128256, torch.bfloat16, False),
    "reverse kl": kl_call(32000, torch.float32, True),
}
EVERYTHING = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
CALLS = FAST | {
    f"{vocabulary} {dtype} {i}": make
    for vocabulary in (1, 11, 1000, 3000, 65536)
    for dtype in DTYPES
    for i, make in enumerate(
        [
            head_call(vocabulary, dtype),
            head_call(vocabulary, dtype, **SLOWEST),
            kl_call(vocabulary, dtype, False),
            kl_call(vocabulary, dtype, True),
        ]
    )
}


@pytest.mark.parametrize("name", CALLS if EVERYTHING else FAST)
def test_kernels_compile(name: str) -> None:
    for capability in TARGETS if EVERYTHING else ((8, 6),) if name == "kl" else ((9, 0),):
        with recording(capability) as found:
            CALLS[name]().backward()
        assert len(found) == 2
        for launch in found:
            made = compile_launch(launch)
            assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024, (launch.name, made.shared)
            assert made.stack == 0, (launch.name, capability, made.stack)


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_target_of_one_sequence(device: str) -> None:
    """`flatten` leaves it expanded, and the kernels read it number after number."""
    hidden, weight, advantages = (random(*shape, seed=2).to(device) for shape in ((1, 9, 16), (12, 16), (1,)))
    target = torch.tensor([[5]], device=device).expand(1, 9)
    old = random(1, 9, seed=3).to(device) - 3
    expanded, whole = (
        linear_grpo(hidden, weight, t, advantages, old_log_probs=old, impl="triton")
        for t in (target, target.contiguous())
    )
    assert torch.equal(expanded, whole)
