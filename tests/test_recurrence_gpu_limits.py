"""The faults that users of other libraries met with the recurrence on a GPU: sizes, packs, contents of boundaries, and calls.

Numbers as in tests/test_faults.py; laws and compilers are in test_recurrence_gpu_laws.py, decoding in test_step_gpu.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, pairwise
from pkgutil import iter_modules
from typing import Any
from unittest import mock

import pytest
import torch
from budget import assert_within_budget, relative_errors
from cases import Case, gradients, make_inputs, run_op
from recurrence_gpu import BF16, DEVICE, KINDS, STATES, assert_same, cut, impl_of, large, results, rows, small
from test_recurrence import STAGES, named, references, same_bits
from test_recurrence_gpu import assert_kernels_within_budget
from torch import Tensor

from flashmix import Packing, delta_rule
from flashmix.gpu import device as card
from flashmix.layers import GatedDeltaNet

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


@gpu
@pytest.mark.parametrize("gate, D", [("token", 16), ("channel", 16), ("token", 128)])
@pytest.mark.parametrize("B, T, H", [(10923, 32, 6), (50000, 5, 4)])
def test_fault_01_more_batches_times_heads_than_a_grid_axis_holds(B: int, T: int, H: int, gate: str, D: int) -> None:
    case = Case("hopper" if D == 128 else "", "delta", gate, B=B, T=T, H=H, HV=H, K=D, V=D)
    x = large(case)
    whole = results(case, x)
    assert all(bool(torch.isfinite(t).all()) for t in whole.values())
    for part in (slice(0, 3), slice(B // 2, B // 2 + 3), slice(B - 3, B)):
        assert_same(rows(whole, part), results(case, rows(x, part)))


@gpu
def test_fault_01_through_a_layer() -> None:
    """Batch x heads = 65,538. The recurrence has the same bits in small batches; the matrix products around it need not."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(128, 6, head_dim=16).to(DEVICE, BF16)
    x = torch.randn(10923, 32, 128, device=DEVICE, dtype=BF16).requires_grad_()
    seen: list[Any] = []
    recurrence = layer.recurrence

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append((args, recurrence(*args, **options)))
        return seen[-1][1]

    layer.recurrence = recorded  # type: ignore[method-assign]
    y = layer(x)
    found = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    assert torch.isfinite(y).all() and all(bool(torch.isfinite(t).all()) for t in found)
    (whole, (o, _)), part = seen[0], slice(-3, None)
    args = [t[part] if isinstance(t, Tensor) else t for t in whole]
    _, q, k, v, *_ = args
    beta, decay = layer.beta_and_decay(whole[0])
    assert decay is not None
    same_bits(delta_rule(q, k, v, beta[part], decay[part], impl="triton")[0], o[part], "o")
    last = x[part].detach().requires_grad_()
    few = layer(last)
    (grad,) = torch.autograd.grad(few, last, torch.ones_like(few))
    for name, got, wanted in (("y", y[part], few), ("dx", found[0][part], grad)):
        assert relative_errors(got.detach(), wanted.detach())[0] <= 2 * STAGES * torch.finfo(BF16).eps, name


def assert_last_tokens(case: Case, x: dict[str, Tensor], count: int) -> None:
    """The last tokens and their gradients, against the definition from the state before them."""
    _, state = run_op(case, cut(x, slice(None, -count)), impl_of(case))
    tail = cut(x, slice(-count, None)) | {"initial_state": state}
    exact, plain = references(case, {name: t.contiguous() for name, t in tail.items()})
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, state = run_op(case, leaves, impl_of(case))
    found = {"o": o[:, -count:], "state": state}
    grads = gradients((found["o"], state), leaves, BF16)
    found |= {f"d{name}": g[:, -count:] for name, g in grads.items()}
    for name, got in found.items():
        steps = 2 * STAGES if name.startswith("d") else STAGES
        assert_within_budget(name, got.detach(), exact[name], plain[name].to(got.dtype), BF16, steps)


@gpu
@pytest.mark.parametrize(
    "T, K, V, gate",
    [
        (105_000, 16, 256, "token"),
        (105_000, 256, 16, "channel"),
        (27_000, 256, 256, "token"),
        (210_000, 128, 128, "token"),
    ],
    ids=["values", "keys and decays", "states of chunks", "all of those"],
)
@pytest.mark.usefixtures("much_memory")
def test_fault_02_more_elements_than_32_bits_count(T: int, K: int, V: int, gate: str) -> None:
    case = Case("hopper" if K == V == 128 else "", "delta", gate, B=1, T=T, H=80, HV=80, K=K, V=V, states=False)
    assert max(T * 80 * max(K, V), T // 64 * 80 * K * V) > 2**31
    assert_last_tokens(case, large(case, decay=0.1), 100)


@gpu
@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.usefixtures("much_memory")
def test_fault_02_a_million_tokens(gate: str) -> None:
    """Cut into segments where it has few heads: against the definition at its end, and against its halves."""
    case = Case("", "delta", gate, B=1, T=1_000_000, H=2, HV=2, K=64, V=64, states=False)
    x = large(case, decay=0.01)
    assert_last_tokens(case, x, 100)
    whole = results(case, x)
    leaves, half = {name: t.detach().requires_grad_() for name, t in x.items()}, case.T // 2
    first, state = run_op(case, cut(leaves, slice(None, half)), impl_of(case))
    second, last = run_op(case, cut(leaves, slice(half, None)) | {"initial_state": state}, impl_of(case))
    flows = [x["v"].flip(-1), torch.full_like(last, 0.5)]
    o = torch.cat([first, second], 1)
    grads = torch.autograd.grad([o, last], list(leaves.values()), flows)
    halves = {"o": o.detach(), "state": last.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
    for name, wanted in halves.items():  # each within its stages of the definition
        steps = 2 * STAGES * (2 if name.startswith("d") else 1)
        assert relative_errors(whole[name], wanted)[0] <= steps * torch.finfo(BF16).eps, name


EVERYTHING = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
ENTRIES = [
    Case(f"{rule}-{gate}-K{K}V{V}", rule, gate, B=1, T=200, H=1, HV=2, K=K, V=V)
    for K, V in ((32, 32), (64, 64), (128, 128), (256, 256), (64, 128), (128, 64))
    for rule in ("linear", "delta", "untied", "dplr", "read_before")
    for gate in ("none", "token", "channel")
]
SOME = [c for c in ENTRIES if c.K == c.V >= 64 and (c.rule, c.gate) in (("delta", "token"), ("delta", "channel"))]
SOME += [c for c in ENTRIES if c.name in ("dplr-channel-K64V64", "linear-token-K128V128", "untied-channel-K128V128")]


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@named(ENTRIES if EVERYTHING else SOME)
def test_fault_03_a_kernel_is_miscompiled(case: Case, dtype: torch.dtype) -> None:
    """Every entry of the table against the definition; some unless FLASHMIX_ALL_KERNELS=1."""
    assert_kernels_within_budget(case, dtype)


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@named(KINDS)
def test_fault_04_empty_and_very_short_sequences(case: Case, dtype: torch.dtype) -> None:
    lengths = (0, 1, 2, 63, 0, 64, 65, 0)
    packed = replace(case, B=1, T=sum(lengths), lengths=lengths)
    x = small(packed, dtype)
    together = results(packed, x)
    shared = {name: t for name, t in x.items() if t.dim() == 1}
    for n, (first, last) in enumerate(pairwise([0, *accumulate(lengths)])):
        tokens, sequence = slice(first, last), slice(n, n + 1)
        alone = results(replace(packed, lengths=None), cut(x, tokens, sequence) | shared)
        assert_same(cut(together, tokens, sequence), {n: t for n, t in alone.items() if t.dim() > 1}, last - first)
        if last == first:
            same_bits(together["state"][n], x["initial_state"][n], "state of no token")
            assert bool((together["dinitial_state"][n] == 0.5).all())


@gpu
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_fault_04_a_hundred_thousand_sequences_of_one_to_three_tokens(gate: str) -> None:
    lengths = torch.randint(1, 4, (100_000,), generator=torch.Generator().manual_seed(0))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    case = Case("", "delta", gate, B=1, T=int(ends[-1]), H=2, HV=2, K=16, V=16, lengths=tuple(lengths.tolist()))
    x = large(case)
    together = results(case, x, ends.to(DEVICE))
    for length in (1, 2, 3):
        chosen = (lengths == length).nonzero()[:, 0]
        chosen = torch.cat([chosen[:20], chosen[-20:]])
        tokens = ends[chosen][:, None] + torch.arange(length)  # [40, length]
        dense = {n: t[chosen.to(DEVICE)] if n in STATES else t[0, tokens.to(DEVICE)] for n, t in x.items()}
        alone = results(replace(case, B=40, T=length, lengths=None), dense)
        picked = {n: t[chosen.to(DEVICE)] if n in STATES else t[0, tokens.to(DEVICE)] for n, t in together.items()}
        assert_same(picked, alone, length)


@gpu
@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize(
    "K, V", [(1, 7), (7, 1), (8, 24), (80, 96), (96, 80), (100, 200), (200, 100), (256, 1), (1, 256)]
)
def test_fault_05_dims_that_are_no_power_of_two(K: int, V: int, gate: str) -> None:
    """Over twelve heads where one has few channels: the error of a handful of numbers is luck."""
    heads = 12 if min(K, V) < 16 else 2
    assert_kernels_within_budget(Case("", "delta", gate, B=1, T=70, H=heads, HV=heads, K=K, V=V), BF16)


@gpu
@pytest.mark.parametrize("lengths", [None, (1, 0, 2, 3)], ids=["dense", "packed"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_fault_06_a_convolution_wider_than_the_sequence(tokens: int, lengths: tuple[int, ...] | None) -> None:
    if lengths is not None and tokens != sum(lengths):
        pytest.skip("packed, there are six tokens")
    found = {}
    for name, device, dtype in (
        ("exact", "cpu", torch.float64),
        ("plain", "cpu", torch.float32),
        ("got", DEVICE, BF16),
    ):
        torch.manual_seed(0)
        layer = GatedDeltaNet(32, 2).to(BF16).to(device, dtype)
        x = torch.randn(1, tokens, 32).to(BF16).to(device, dtype).requires_grad_()
        cu = None if lengths is None else torch.tensor([0, *accumulate(lengths)], device=device)
        y = layer(x, cu_seqlens=cu)
        grads = torch.autograd.grad(y, [x, layer.qkv.weight, layer.convolution.weight], torch.ones_like(y))
        found[name] = [t.detach().cpu() for t in (y, *grads)]
    for exact, plain, got in zip(found["exact"], found["plain"], found["got"], strict=True):
        # Roundings of the layer: projection, convolution, norm of a head, the recurrence, norm, gate, output; and back.
        limit = 2 * (6 + STAGES) * torch.finfo(BF16).eps
        assert relative_errors(got, exact)[0] <= 2 * relative_errors(plain, exact)[0] + limit


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@named([replace(case, name=f"{case.name}{d}", decay=d) for case in KINDS for d in ("zero", "-20", "-1e4", "-inf")])
def test_fault_07_strong_decay(case: Case, dtype: torch.dtype) -> None:
    """Finite everywhere; in float32 gradients keep the budget too (test_recurrence_gpu.py), here e^-20 is none."""
    x = make_inputs(case, dtype)
    exact, plain = references(case, x)
    found = results(case, small(case, dtype))
    assert all(bool(torch.isfinite(t).all()) for t in found.values())
    for name in ("o", "state"):
        got = found[name].cpu()
        assert_within_budget(name, got, exact[name], plain[name].to(got.dtype), dtype, STAGES)


@gpu
@named(KINDS)
def test_fault_09_a_neighbour_that_is_not_finite(case: Case) -> None:
    packed = replace(case, B=1, T=200, lengths=(70, 130))
    x = small(packed)
    shared = {name: t for name, t in x.items() if t.dim() == 1}
    spoilt = {
        n: torch.cat([t[:1], t[1:] * torch.nan]) if n in STATES else torch.cat([t[:, :70], t[:, 70:] * torch.nan], 1)
        for n, t in x.items()
        if t.dim() > 1
    }
    part = (slice(0, 70), slice(0, 1))
    assert_same(cut(results(packed, spoilt | shared), *part), cut(results(packed, x), *part))


@gpu
@pytest.mark.parametrize("tokens", [1, 6])
@named(KINDS)
def test_fault_10_no_gradient_silently(case: Case, tokens: int) -> None:
    x = small(replace(case, T=tokens))
    for name in x:
        one = x | {name: x[name].clone().requires_grad_()}
        o, state = run_op(case, one, impl_of(case))
        (grad,) = torch.autograd.grad(o.float().square().sum() + state.square().sum(), one[name])
        assert bool(torch.isfinite(grad).all()) and bool(grad.any()), name


def compiled_kernels() -> int:
    """How many codes the kernels of the recurrence came to in this process."""
    from kernels import wait_for_compilers
    from triton.runtime.jit import JITFunction

    from flashmix.ops.recurrence import triton_gpu

    packages = [triton_gpu]
    if card.hopper_refuses(torch.device(DEVICE), BF16, (BF16,)) is None:
        packages.append(import_module("flashmix.ops.recurrence.gluon_hopper"))
    modules = [import_module(f"{p.__name__}.{module.name}") for p in packages for module in iter_modules(p.__path__)]
    modules.append(import_module("flashmix.ops.recurrence.step.triton_gpu"))
    found = {id(k): k for module in modules for k in vars(module).values() if isinstance(k, JITFunction)}
    assert len(found) >= 10
    wait_for_compilers()
    return sum(len(caches[0]) for kernel in found.values() for caches in kernel.device_caches.values())


@gpu
@named(KINDS)
def test_fault_11_new_lengths_compile_nothing(case: Case) -> None:
    def packed(*lengths: int) -> None:
        one = replace(case, B=1, T=sum(lengths), lengths=lengths)
        results(one, small(one))

    packed(60, 4)
    for tokens in (1, case.T):  # one token takes the step
        one = replace(case, T=tokens)
        results(one, small(one))
    before = compiled_kernels()
    for lengths in ((1,), (3, 0, 700), (1, 1, 1, 1, 16), (128,), (129, 1), (0,)):
        packed(*lengths)
        other = replace(case, B=len(lengths), T=lengths[0])
        results(other, small(other))
    assert compiled_kernels() == before


@gpu
@pytest.mark.parametrize("backward, limit", [(False, 1e-3), (True, 3e-3)], ids=["forward", "and backward"])
def test_fault_12_host_time_of_a_call(backward: bool, limit: float) -> None:
    """The best of many: the machine may be busy."""
    case = Case("", "delta", "token", B=1, T=64, H=2, HV=2, K=64, V=64)
    x, best = small(case), 1.0
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            results(case, x) if backward else run_op(case, x, impl_of(case))
        best = min(best, (time.perf_counter() - start) / 10)
    assert best < limit, f"{best * 1e6:.0f} us"


@gpu
@named(KINDS)
def test_fault_13_nothing_waits_for_the_device(case: Case) -> None:
    lengths = (40, 0, 100)
    packed = replace(case, B=1, T=140, lengths=lengths)
    x, y, long = small(case), small(packed), replace(case, B=1, T=16384, H=1, HV=1, states=False)
    z = small(long)
    cu = torch.tensor([0, *accumulate(lengths)], device=DEVICE)
    calls = [
        lambda: results(case, x),
        lambda: results(long, z),
        lambda: results(packed, y, cu),
        lambda: results(packed, y, cu.int()),
        lambda: results(packed, y, Packing(cu, 140)),
    ]
    for warm in (True, False):
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        for call in calls:
            call()


@gpu
def test_fault_13_a_layer_waits_for_nothing() -> None:
    layer = GatedDeltaNet(64, 2).to(DEVICE, BF16)
    x = torch.randn(1, 140, 64, device=DEVICE, dtype=BF16).requires_grad_()
    cu = torch.tensor([0, 40, 40, 140], device=DEVICE)
    for warm in (True, False):
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        for packing in (None, cu, Packing(cu, 140)):
            y = layer(x, cu_seqlens=packing)
            torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))


@gpu
@named(
    [
        Case(f"{g}-{D}", "delta", g, B=1, T=200, H=1, HV=2, K=D, V=D)
        for g, D in (("token", 128), ("channel", 128), ("token", 256))
    ]
)
def test_fault_18_tables_of_smaller_cards_are_right(case: Case) -> None:
    with mock.patch.object(card, "target", lambda device: card.Target((8, 6), 99 * 1024, 84)):
        assert_kernels_within_budget(case, BF16)


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@named(KINDS)
def test_fault_23_past_the_last_packed_token(case: Case, dtype: torch.dtype) -> None:
    """Fresh memory is NaN in these tests."""
    packed = replace(case, B=1, T=300, lengths=(100, 80))
    for boundaries in ([0, 100, 180], [0, 0, 0]):
        found = results(packed, small(packed, dtype), torch.tensor(boundaries, device=DEVICE))
        for name, t in found.items():
            assert bool(torch.isfinite(t).all()), name
            assert t.dim() == 1 or name in STATES or not t[:, boundaries[-1] :].any(), name
