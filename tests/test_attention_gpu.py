"""The faults that users of other libraries met with attention on a GPU, a test each; numbers as in tests/test_faults.py.

What holds for every implementation takes `impl`; `-k gluon` selects what the kernels of Hopper are asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import EVERYTHING, KERNEL_STEPS, Case, make_call
from budget import assert_within_budget
from model_cases import left_padded, make_model, some_tokens
from torch import Tensor

from flashmix import Packing, explain
from flashmix.models.generate import generate
from flashmix.ops.attention import definition, softmax_attention
from flashmix.ops.attention.call import LEAST_CHANNELS_CAUSAL, LEAST_CHANNELS_HOPPER
from flashmix.ops.attention_cache import KVCache, attention_with_cache

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
Results = dict[str, Tensor]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
GLUON = pytest.param("gluon", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"))
HEAD_DIMS = ((16, 16), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


def make(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def qkv(
    batch: int, tokens: int, heads_q: int, heads: int, dim: int, dim_v: int | None = None, **kind: Any
) -> list[Tensor]:
    sizes = ((heads_q, dim), (heads, dim), (heads, dim_v or dim))
    return [make(batch, tokens, *size, seed=seed, **kind) for seed, size in enumerate(sizes)]


def skip_narrow(impl: object, *dims: int, simple: bool = False) -> None:
    """`simple`: packed or not causal, and no gate, slopes or softcap."""
    if impl == "gluon" and max(dims) < (LEAST_CHANNELS_HOPPER if simple else LEAST_CHANNELS_CAUSAL):
        pytest.skip("fewer channels than its tiles take")


def run(q: Tensor, k: Tensor, v: Tensor, flow: Tensor | None = None, **options: Any) -> Results:
    """o, lse and the gradients of q, k, v."""
    simple = "cu_seqlens" in options or not options.get("causal", True)
    changed = options.keys() & {"softcap", "alibi_slopes", "log_decay"}
    skip_narrow(options.get("impl"), q.shape[3], v.shape[3], simple=simple and not changed)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = softmax_attention(*leaves, **{"causal": True, "impl": "triton", "return_lse": True} | options)
    assert lse is not None
    gradients = torch.autograd.grad(o, leaves, make(*o.shape, dtype=o.dtype, seed=9) if flow is None else flow)
    return dict(zip(("o", "lse", "d_q", "d_k", "d_v"), (o.detach(), lse, *gradients), strict=True))


def assert_same_bits(found: Results, wanted: Results) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: Results, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Within the rounding of the dtype of the definition in float64 (the budget is tested in test_attention_kernels.py)."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, _ = definition.softmax_attention(*leaves, **{"causal": True, "scale": q.shape[3] ** -0.5} | options)
    gradients = torch.autograd.grad(o, leaves, make(*o.shape, dtype=q.dtype, seed=9).double())
    for name, wanted in zip(("o", "d_q", "d_k", "d_v"), (o, *gradients), strict=True):
        error = (found[name].double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error <= 2 * torch.finfo(q.dtype).eps, f"{name}: {error:.1e}"


@pytest.fixture(params=["triton", GLUON])
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("batch, heads", [(65538, 1), (2, 40000), (1, 200000)])
def test_fault_01_more_than_65535_batches_and_heads(batch: int, heads: int, impl: str) -> None:
    q, k, v = qkv(batch, 5, heads, heads, 96)
    flow = make(*q.shape, seed=9)
    found = run(q, k, v, flow, impl=impl)
    last = (slice(batch - 1, batch), slice(None), slice(heads - 1, heads))
    alone = run(q[last], k[last], v[last], flow[last], impl=impl)
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.equal(found[name][last], alone[name]), name


@pytest.mark.usefixtures("much_memory")
def test_fault_02_tensors_past_2_to_the_31_elements(impl: str) -> None:
    """A million tokens with a window: the last ones are right, and so are their gradients."""
    tokens, seen = 1_100_000, 64
    q, k, v = (x.expand(1, -1, -1, -1) for x in qkv(1, tokens, 16, 16, 128))
    assert q.numel() > 2**31
    flow = torch.zeros_like(q)
    flow[:, -100:] = make(1, 100, 16, 128, seed=9)
    found = run(q, k, v, flow, window=(seen - 1, 0), impl=impl)
    leaves = [x[:, -(100 + seen) :].detach().double().requires_grad_() for x in (q, k, v)]
    o, _ = definition.softmax_attention(*leaves, scale=128**-0.5, causal=True, window=(seen - 1, 0))
    gradients = torch.autograd.grad(o[:, -100:], leaves, flow[:, -100:].double())
    for name, wanted in zip(("o", "d_q", "d_k", "d_v"), (o, *gradients), strict=True):
        got, wanted = found[name][:, -100:].double(), wanted[:, -100:]
        assert (got - wanted).norm() <= 2 * torch.finfo(BF16).eps * wanted.norm(), name
    assert not found["d_q"][:, :-200].any()


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, (70, 3)])
def test_fault_04_empty_and_very_short_sequences(
    window: tuple[int, int] | None, dim: int, dim_v: int, impl: str
) -> None:
    lengths = (0, 1, 2, 63, 0, 64, 65, 200, 1, 0, 300)
    packing = Packing.from_lengths(lengths, device="cuda")
    q, k, v = qkv(1, sum(lengths), 10, 2, dim, dim_v)
    flow = make(1, sum(lengths), 10, dim_v, seed=9)
    options = {"window": window, "causal": window is None, "impl": impl}
    packed = run(q, k, v, flow, cu_seqlens=packing, **options)
    for first, last in pairwise(packing.cu_seqlens.tolist()):
        if impl == "gluon" and first == last:  # it refuses empty inputs
            continue
        of = (slice(None), slice(first, last))
        alone = run(q[of], k[of], v[of], flow[of], **options)
        assert torch.equal(packed["lse"][:, first:last], alone["lse"][0])
        for name in ("o", "d_q", "d_k", "d_v"):
            assert torch.equal(packed[name][of], alone[name]), f"{name} of {last - first} tokens"


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("window", [None, (200, 0)])
def test_fault_09_a_sequence_depends_on_the_rest_of_the_batch(
    window: tuple[int, int] | None, dim: int, impl: str
) -> None:
    q, k, v = qkv(5, 333, 10, 2, dim)
    flow = make(*q.shape, seed=9)
    together = run(q, k, v, flow, window=window, impl=impl)
    for n in range(5):
        one = slice(n, n + 1)
        alone = run(q[one], k[one], v[one], flow[one], window=window, impl=impl)
        assert_same_bits({name: x[one] for name, x in together.items()}, alone)
    poisoned = [torch.cat([x[:1], x[1:] * torch.inf]) for x in (q, k, v)]
    assert torch.equal(run(*poisoned, flow, window=window, impl=impl)["d_k"][:1], together["d_k"][:1])


@pytest.mark.parametrize("dim", [72, 96, 128])
def test_fault_09_sums_of_dq_on_hopper_have_one_order(dim: int) -> None:
    """Whatever else is in the batch, packed or not. Keys lie far from 0, so that the sums nearly cancel and their order shows."""
    if not HOPPER:
        pytest.skip("needs a Hopper GPU")
    q, k, v = qkv(3, 1000, 16, 4, dim)
    k, flow, options = k + 30, make(3, 1000, 16, dim, seed=9), {"impl": "gluon"}
    together = run(q, k, v, flow, **options)
    for n in range(3):
        one = slice(n, n + 1)
        alone = run(q[one], k[one], v[one], flow[one], **options)
        assert_same_bits({name: x[one] for name, x in together.items()}, alone)
    packing = Packing.from_lengths([1000, 0, 1000, 1000], device="cuda")
    packed = run(*(x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, flow)), cu_seqlens=packing, **options)
    for name in ("d_q", "d_k", "d_v"):
        assert torch.equal(packed[name].view_as(together[name]), together[name]), name


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
def test_fault_09_a_packed_neighbour_that_is_not_finite(dim: int, dim_v: int, impl: str) -> None:
    q, k, v = qkv(1, 300, 4, 2, dim, dim_v)
    packing = Packing.from_lengths([130, 170], device="cuda")
    flow = make(1, 300, 4, dim_v, seed=9)
    clean = run(q, k, v, flow, cu_seqlens=packing, impl=impl)
    spoilt = [torch.cat([x[:, :130], x[:, 130:] * torch.nan], 1) for x in (q, k, v, flow)]
    found = run(*spoilt, cu_seqlens=packing, impl=impl)
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.equal(found[name][:, :130], clean[name][:, :130]), name


def test_fault_10_no_gradient_silently() -> None:
    q = make(1, 5, 2, 300).requires_grad_()
    with pytest.raises(ValueError, match="the head dim of q must be between 1 and 256, got 300"):
        softmax_attention(q, q, q)
    assert softmax_attention(q.detach(), q.detach(), q.detach(), impl="triton")[0].shape == q.shape
    q = make(1, 5, 2, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="attention_with_cache has no gradient"):
        attention_with_cache(q, KVCache.contiguous(1, 8, 2, 16, device="cuda", dtype=BF16), q, q)
    (gradient,) = torch.autograd.grad(softmax_attention(q, q, q)[0].sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"no second derivative|does not require grad"):
        torch.autograd.grad(gradient.sum(), q)


def test_fault_11_new_lengths_compile_nothing(impl: str) -> None:
    from kernels import wait_for_compilers

    from flashmix.ops.attention.triton_gpu import backward_keys, backward_queries
    from flashmix.ops.attention.triton_gpu.forward import attention_forward_kernel

    kernels = [
        attention_forward_kernel,
        backward_keys.attention_backward_keys_kernel,
        backward_queries.attention_backward_queries_kernel,
    ]
    if impl == "gluon":
        from flashmix.ops.attention.gluon_hopper.backward import hopper_backward_kernel
        from flashmix.ops.attention.gluon_hopper.backward_sums import query_gradient_kernel
        from flashmix.ops.attention.gluon_hopper.forward import hopper_forward_kernel

        kernels = [hopper_forward_kernel, hopper_backward_kernel, query_gradient_kernel]

    def compiled() -> int:
        wait_for_compilers()
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    run(*qkv(1, 64, 2, 2, 128), cu_seqlens=Packing.from_lengths([60, 4], device="cuda"), impl=impl)
    before = compiled()
    for lengths in ([1], [3, 0, 700], [1, 1, 1, 1, 16], [129]):
        run(*qkv(1, sum(lengths), 2, 2, 128), cu_seqlens=Packing.from_lengths(lengths, device="cuda"), impl=impl)
    assert before and compiled() == before


def test_fault_12_host_time_of_a_call(impl: str) -> None:
    """At most a millisecond of the host for a forward (measured: about a fifth of that); the machine may be busy."""
    q, k, v = qkv(1, 64, 2, 2, 128)
    best = 1.0
    with torch.no_grad():
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(10):
                softmax_attention(q, k, v, causal=True, impl=impl)
            best = min(best, (time.perf_counter() - start) / 10)
    assert best * 1000 < 1, f"{best * 1e6:.0f} us"


@pytest.fixture
def synchronising_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_fault_13_nothing_waits_for_the_device(synchronising_again: None, impl: str) -> None:
    cu = torch.tensor([0, 40, 100], device="cuda", dtype=torch.int32)
    q, k, v = qkv(1, 100, 4, 2, 128)
    slopes, sink, decay = make(4).abs(), make(4), -make(1, 100, 4).abs()
    dropout = {"dropout_p": 0.1} if impl == "triton" else {}
    cache = KVCache.contiguous(2, 64, 2, 128, device="cuda", dtype=BF16)
    torch.cuda.set_sync_debug_mode("error")
    run(q, k, v, cu_seqlens=cu, alibi_slopes=slopes, sink=sink, log_decay=decay, impl=impl, **dropout)
    run(q, k, v, impl=impl)
    attention_with_cache(
        q[:, :8].view(2, 4, 4, 128), cache, k[:, :8].view(2, 4, 2, 128), v[:, :8].view(2, 4, 2, 128), impl="triton"
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_fault_17_compiled_and_captured(dim: int, impl: str) -> None:
    skip_narrow(impl, dim)
    q, k, v = (x.requires_grad_() for x in qkv(2, 100, 4, 2, dim))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, causal=True, window=(30, 0), impl=impl)[0].float().square().sum()

    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)

    inputs = [x.detach().clone() for x in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    run(*inputs, impl=impl)
    torch.cuda.synchronize()
    flow = make(*q.shape, seed=9)
    with torch.cuda.graph(graph):
        captured = run(*inputs, flow, impl=impl)
    for x, y in zip(inputs, qkv(2, 100, 4, 2, dim), strict=True):
        x.copy_(-y)
    for _ in range(2):  # counters begin at 0 each time
        graph.replay()
    assert_same_bits(captured, run(*inputs, flow, impl=impl))


def test_fault_18_tables_of_other_cards_are_right() -> None:
    """The tiles of cards with less shared memory and without Hopper's copies, run on this one."""
    from flashmix.gpu import device as gpu

    for target in (gpu.Target((8, 0), 163 * 1024, 108), gpu.Target((8, 6), 99 * 1024, 84)):
        with mock.patch.object(gpu, "target", lambda device, target=target: target):
            for dim, dim_v in ((64, 64), (80, 24), (128, 128), (192, 128), (256, 256)):
                tensors = qkv(1, 200, 2, 1, dim, dim_v)
                assert_close(run(*tensors, window=(90, 0)), *tensors, window=(90, 0))


ODD_HEAD_DIMS = (
    (1, 1),
    (7, 7),
    (3, 200),
    (40, 40),
    (66, 65),
    (72, 72),
    (80, 80),
    (96, 96),
    (100, 7),
    (128, 64),
    (192, 128),
    (192, 256),
    (256, 192),
    (256, 256),
)


@pytest.mark.parametrize("dim, dim_v", ODD_HEAD_DIMS)
def test_fault_22_head_dims_are_refused(dim: int, dim_v: int, impl: str) -> None:
    tensors = qkv(1, 300, 4, 2, dim, dim_v)
    if HOPPER and max(dim, dim_v) >= LEAST_CHANNELS_CAUSAL:
        assert explain(softmax_attention, *tensors, causal=True).choice == "gluon"
    assert_close(run(*tensors, impl=impl), *tensors)


def test_fault_22_wide_heads_are_refused() -> None:
    wide = qkv(1, 100, 2, 1, 512, 300)
    with torch.no_grad():
        o, _ = softmax_attention(*wide, causal=True, impl="triton")
    wanted, _ = definition.softmax_attention(*(x.double() for x in wide), causal=True, scale=512**-0.5)
    assert (o.double() - wanted).norm() <= 2 * torch.finfo(BF16).eps * wanted.norm()


@pytest.mark.parametrize("dim", [64, 128])
def test_fault_23_past_the_last_packed_token(dim: int, impl: str) -> None:
    q, k, v = qkv(1, 700, 4, 2, dim)
    cu = torch.tensor([0, 100, 180], device="cuda")
    found = run(q, k, v, cu_seqlens=cu, impl=impl)
    assert (found["lse"][:, 180:] == -torch.inf).all()
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.isfinite(found[name]).all() and not found[name][:, 180:].any(), name


def test_many_packed_sequences(impl: str) -> None:
    """Of any lengths: more slots of the table than blocks."""
    lengths = [1 + 37 * n % 500 for n in range(300)]
    q, k, v = qkv(1, sum(lengths), 8, 8, 128)
    first, second = (run(q, k, v, cu_seqlens=Packing.from_lengths(lengths, device="cuda"), impl=impl) for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    "boundaries",
    [[0, 500, 100, 700], [-5, 300, 2**40, 700], [2**62, -(2**62), 1, 0], [700, 0, 700, 0], [0, 0, 0, 0]],
    ids=str,
)
def test_corrupt_boundaries_stay_inside(boundaries: list[int], impl: str) -> None:
    """Run under compute-sanitizer too, which sees what a test cannot."""
    q, k, v = qkv(1, 700, 4, 2, 128)
    copies = [x.clone() for x in (q, k, v)]
    run(q, k, v, cu_seqlens=torch.tensor(boundaries, device="cuda"), impl=impl)
    cache = KVCache.contiguous(3, 64, 2, 128, device="cuda", dtype=BF16)
    attention_with_cache(q, cache, k, v, cu_seqlens=torch.tensor(boundaries, device="cuda"), impl="triton")
    torch.cuda.synchronize()
    for x, copy in zip((q, k, v), copies, strict=True):
        assert torch.equal(x, copy)


def test_corrupt_cache_stays_inside() -> None:
    q, k, v = qkv(3, 2, 4, 2, 64)
    for lengths, pages in (([5, 2**50, -7], [[0], [1], [2]]), ([1, 2, 3], [[-1], [99], [2]])):
        cache = KVCache.contiguous(3, 64, 2, 64, device="cuda", dtype=BF16)
        cache.lengths.copy_(torch.tensor(lengths))
        cache.page_table = torch.tensor(pages, device="cuda")
        attention_with_cache(q, cache, k, v, impl="triton")
    torch.cuda.synchronize()


@pytest.mark.parametrize("Tq, Tk", [(6, 6), (3, 7), (7, 3), (1, 5), (200, 300)])
def test_fault_24_windows_off_by_one_or_aligned_elsewhere(Tq: int, Tk: int) -> None:
    q, k, v = (torch.zeros(1, t, 1, 16, device="cuda") for t in (Tq, Tk, Tk))
    v = torch.eye(Tk, device="cuda").view(1, Tk, 1, Tk) if Tk <= 256 else v
    p, j = torch.arange(Tq, device="cuda")[:, None] + Tk - Tq, torch.arange(Tk, device="cuda")
    for causal in (False, True):
        for left in (None, 0, 1, 2, 100):
            for right in (None, 0, 1, 70):
                after = 0 if causal else right
                seen = torch.ones(Tq, Tk, dtype=torch.bool, device="cuda")
                seen &= True if left is None else j >= p - left
                seen &= True if after is None else j <= p + after
                o, lse = softmax_attention(q, k, v, causal=causal, window=(left, right), return_lse=True, impl="triton")
                assert lse is not None
                torch.testing.assert_close(lse[0, 0], seen.float().sum(1).log())
                if Tk <= 256:
                    torch.testing.assert_close(o[0, :, 0], seen / seen.sum(1, keepdim=True).clamp(min=1))


def test_fault_25_lse_of_a_row_that_sees_nothing() -> None:
    q, k, v = (x.requires_grad_() for x in (make(1, 5, 2, 4), make(1, 2, 2, 4), make(1, 2, 2, 4)))
    o, lse = softmax_attention(q, k, v, causal=True, return_lse=True, impl="triton")
    assert lse is not None and (lse[:, :, :3] == -torch.inf).all() and torch.isfinite(lse[:, :, 3:]).all()
    assert not o[:, :3].any()
    gradients = torch.autograd.grad([o.sum(), lse], [q, k, v], [None, torch.ones_like(lse)])
    assert not gradients[0][:, :3].any() and all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_fault_26_a_thousand_repeats_give_the_same_bits(causal: bool, features: bool, impl: str) -> None:
    tokens = 300 if features else 1500
    tensors = [*qkv(2, tokens, 8, 2, 128), make(2, tokens, 8, 128, seed=9)]
    options: dict[str, Any] = {"causal": causal, "impl": impl}
    if features:
        if not causal:
            pytest.skip("gates are causal")
        options |= {"sink": make(8), "log_decay": -make(2, tokens, 8).abs()}
    first = run(*tensors, **options)
    for _ in range(1000):
        found = run(*tensors, **options)
        assert all(bool(torch.equal(found[name], first[name])) for name in first)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"causal": True, "window": (700, 0)}, {"packed": 1100}], ids=str
)
@pytest.mark.parametrize("dim", [72, 96, 128, 192, 256])
def test_scores_that_rise_out_of_the_range_of_the_first_tile(dim: int, options: dict[str, Any]) -> None:
    """The kernels on Hopper take the blocks again; half of the heads have scores that stay."""
    options = dict(options)
    q, k, v = (x.float() for x in qkv(2, 3300, 16, 16, dim))
    if packed := options.pop("packed", 0):
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        options |= {"causal": True, "cu_seqlens": Packing.from_lengths([packed] * 6, device="cuda")}
    direction = torch.nn.functional.normalize(q[0, 0, 0], dim=0)
    rise = 45.0 * (torch.arange(k.shape[1], device="cuda") // 500)[:, None, None] * direction
    k[:, :, ::2] += rise
    q, k, v = (x.to(BF16) for x in (q + 30 * direction, k, v))
    found = softmax_attention(q, k, v, **options, return_lse=True, impl="gluon")
    again = softmax_attention(q, k, v, **options, return_lse=True, impl="gluon")
    wanted = softmax_attention(q, k, v, **options, return_lse=True, impl="triton")
    for got, same, right in zip(found, again, wanted, strict=True):
        assert torch.equal(got, same)
        assert (got.float() - right.float()).norm() < torch.finfo(BF16).eps * right.float().norm()


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "every second channel": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "turned round": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "of a larger tensor, an odd channel on": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
}


@pytest.mark.parametrize("dim", [40, 72])
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
def test_fault_27_inputs_that_are_not_contiguous(change: Callable[[Tensor], Tensor], dim: int, impl: str) -> None:
    tensors = [change(x) for x in (*qkv(3, 150, 4, 2, dim), make(3, 150, 4, dim, seed=9))]
    assert_same_bits(run(*tensors, impl=impl), run(*(x.contiguous() for x in tensors), impl=impl))


def test_fault_28_gradients_through_lse_and_features() -> None:
    """On the GPU as on the CPU, where they are checked numerically."""
    q, k, v = qkv(1, 90, 4, 2, 16, dtype=torch.float32)
    features = {"sink": make(4, dtype=torch.float32), "alibi_slopes": make(4, dtype=torch.float32).abs() / 10}
    features["log_decay"] = -make(1, 90, 4, dtype=torch.float32).abs()
    weights = make(1, 4, 90, dtype=torch.float32)
    found = {}
    for impl in ("triton", "portable"):
        leaves = {"q": q, "k": k, "v": v} | features
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        o, lse = softmax_attention(**leaves, causal=True, softcap=3.0, return_lse=True, impl=impl)
        assert lse is not None
        found[impl] = torch.autograd.grad(o.square().sum() + (lse * weights).sum(), list(leaves.values()))
    for got, wanted in zip(found["triton"], found["portable"], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("batch", [1, 16, 256, 257, 4096])
def test_fault_29_decoding_a_large_batch(batch: int) -> None:
    """And a sequence gets the same bits whatever the batch."""
    cache = KVCache.contiguous(batch, 700, 2, 64, device="cuda", dtype=BF16)
    for held in (cache.keys, cache.values):
        held.normal_()
    cache.lengths.copy_(torch.arange(batch) % 699)
    q, k, v = qkv(batch, 1, 8, 2, 64)
    alone = []
    for n in {0, batch // 2, batch - 1}:
        one = slice(n, n + 1)
        part = KVCache(
            cache.keys[one].clone(),
            cache.values[one].clone(),
            torch.zeros_like(cache.page_table[one]),
            cache.lengths[one].clone(),
        )
        alone.append((one, attention_with_cache(q[one], part, k[one], v[one], impl="triton")[0], part))
    o, _ = attention_with_cache(q, cache, k, v, impl="triton")
    for one, wanted, part in alone:
        assert torch.equal(o[one], wanted)
        assert torch.equal(cache.keys[one], part.keys) and torch.equal(cache.lengths[one], part.lengths)


@pytest.mark.parametrize("page_size", [0, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_cache_is_the_whole_sequence(page_size: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(3, 700, 8, 2, 64, dtype=dtype)
    options: dict[str, Any] = {"window": (400, 0), "sink": make(8), "softcap": 20.0}
    wanted, wanted_lse = softmax_attention(*(x.double() for x in (q, k, v)), causal=True, return_lse=True, **options)
    assert wanted_lse is not None
    cache = KVCache.contiguous(3, 700, 2, 64, device="cuda", dtype=dtype)
    if page_size:
        table = torch.randperm(3 * (704 // page_size + 1), device="cuda").view(3, -1)
        cache = KVCache.paged(table.numel(), page_size, table.int(), 2, 64, device="cuda", dtype=dtype)
    start = 0
    for count in (1, 300, 1, 4, 16, 17, 361):
        new = slice(start, start + count)
        o, lse = attention_with_cache(q[:, new], cache, k[:, new], v[:, new], return_lse=True, impl="triton", **options)
        assert lse is not None
        error = (o.double() - wanted[:, new]).norm() / wanted[:, new].norm()
        assert error <= 4 * torch.finfo(dtype).eps, f"{count} tokens from {start}: {error:.1e}"
        torch.testing.assert_close(lse, wanted_lse[:, :, new].float(), rtol=0, atol=2 * torch.finfo(dtype).eps * 8)
        start += count
    assert cache.lengths.tolist() == [700] * 3


LONG = {
    "plain": Case("plain", batch=1, heads_q=4),
    "everything": Case("everything", **EVERYTHING, batch=1, window=(1000, 0)),
    "large logits": Case("large logits", batch=1, scale=30.0),
    "one visible key": Case("one visible key", batch=1, window=(0, 0)),
    "rows that see nothing": Case("rows that see nothing", batch=1, tokens_k=40),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [64, 1000, 4096])
@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
def test_long_and_adversarial_inputs_are_within_budget(
    case: Case, tokens: int, dim: int, dtype: torch.dtype, impl: str
) -> None:
    if impl == "gluon" and dtype == torch.float32:
        pytest.skip("its kernels take half precision")
    skip_narrow(impl, dim)
    made = make_call(replace(case, tokens=tokens, dim=dim), dtype).on("cuda")
    found, reference, baseline = made.op(impl), made.definition(torch.float64), made.definition(dtype)
    for name, wanted in reference.items():
        seen = wanted != -torch.inf
        assert torch.equal(found[name] == -torch.inf, ~seen)
        steps = KERNEL_STEPS.get(dtype, 1)
        assert_within_budget(name, found[name][seen], wanted[seen], baseline[name][seen], dtype, steps)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda random, at: random * 0,
    "weak": lambda random, at: random * -1e-3,
    "usual": lambda random, at: -random,
    "walls": lambda random, at: torch.where(at % 150 == 70, -1000.0, random * -1e-2),
    "wall at the end of a tile": lambda random, at: torch.where(at % 128 == 127, -50.0, random * -1e-3),
    "growing": lambda random, at: random * 1e-2,
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
def test_gates_over_many_tiles(
    gates: Callable[[Tensor, Tensor], Tensor], dim: int, dtype: torch.dtype, impl: str
) -> None:
    """Gates in float32 beside q, k and v in half precision, whose rounding would hide what is wrong about gates."""
    skip_narrow(impl, dim)
    tokens = 900
    random = torch.rand(1, tokens, 2, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    log_decay = gates(random, torch.arange(tokens, device="cuda")[None, :, None])
    inputs = dict(zip(("q", "k", "v"), qkv(1, tokens, 2, 1, dim, dtype=dtype), strict=True)) | {"log_decay": log_decay}
    flow, found = make(1, tokens, 2, dim, dtype=dtype, seed=9), []
    for kind in (None, torch.float64):
        leaves = {name: x.detach().to(kind or x.dtype).requires_grad_() for name, x in inputs.items()}
        if kind is None:
            o, lse = softmax_attention(**leaves, causal=True, return_lse=True, impl=impl)
        else:
            o, lse = definition.softmax_attention(**leaves, causal=True, scale=dim**-0.5)
        assert lse is not None
        gradients = torch.autograd.grad(o, list(leaves.values()), flow.to(o.dtype))
        found.append(dict(zip(("o", "lse", *leaves), (o.detach(), lse.detach(), *gradients), strict=True)))
    for name, wanted in found[1].items():
        error = (found[0][name].double() - wanted).norm() / wanted.norm()
        assert error <= 2 * torch.finfo(dtype).eps, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", ["transformer", "hybrid", "qwen3_next_like"])
def test_a_model_generates_what_it_does_on_the_cpu(name: str) -> None:
    """Prompts of unequal length, then a token at a time from the caches, float32 on both."""
    model = make_model(name, torch.float32)
    tokens, mask = left_padded([some_tokens(1, length, seed=length) for length in (1, 70, 4)])
    wanted = generate(model, tokens, 40, attention_mask=mask)
    found = generate(model.cuda(), tokens.cuda(), 40, attention_mask=mask.cuda())
    assert torch.equal(found.cpu(), wanted)


def test_explain_names_triton() -> None:
    q = make(1, 8, 2, 16)
    assert explain(softmax_attention, q, q, q, causal=True).choice == "triton"
    cache = KVCache.contiguous(1, 8, 2, 16, device="cuda", dtype=BF16)
    assert explain(attention_with_cache, q, cache, q, q).choice == "triton"
