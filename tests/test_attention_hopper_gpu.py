"""The laws of attention for the kernels of Hopper: the faults of tests/test_attention_gpu.py at the head dims that they take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_attention_gpu import BF16, STRIDES, Results, assert_close, assert_same_bits, make, qkv
from test_attention_gpu import run as run_any
from torch import Tensor

from flashmix import Packing, explain
from flashmix.ops.attention import definition, softmax_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
HEAD_DIMS = ((128, 128), (96, 96), (192, 128), (256, 256))


def run(q: Tensor, k: Tensor, v: Tensor, flow: Tensor | None = None, **options: object) -> Results:
    return run_any(q, k, v, flow, impl="gluon", **options)


@pytest.mark.parametrize("batch, heads", [(65538, 1), (1, 70000)])
def test_more_than_65535_batches_and_heads(batch: int, heads: int) -> None:
    q, k, v = qkv(batch, 5, heads, heads, 128)
    flow = make(*q.shape, seed=9)
    found = run(q, k, v, flow)
    last = (slice(batch - 1, batch), slice(None), slice(heads - 1, heads))
    alone = run(q[last], k[last], v[last], flow[last])
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.equal(found[name][last], alone[name]), name


def test_tensors_past_2_to_the_31_elements() -> None:
    tokens, seen = 1_100_000, 64
    q, k, v = qkv(1, tokens, 16, 16, 128)
    flow = torch.zeros_like(q)
    flow[:, -100:] = make(1, 100, 16, 128, seed=9)
    found = run(q, k, v, flow, window=(seen - 1, 0))
    leaves = [x[:, -(100 + seen) :].detach().double().requires_grad_() for x in (q, k, v)]
    o, _ = definition.softmax_attention(*leaves, scale=128**-0.5, causal=True, window=(seen - 1, 0))
    gradients = torch.autograd.grad(o[:, -100:], leaves, flow[:, -100:].double())
    for name, wanted in zip(("o", "d_q", "d_k", "d_v"), (o, *gradients), strict=True):
        got, wanted = found[name][:, -100:].double(), wanted[:, -100:]
        assert (got - wanted).norm() <= 2 * torch.finfo(BF16).eps * wanted.norm(), name


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, (70, 3)])
def test_packed_is_one_by_one(dim: int, dim_v: int, window: tuple[int, int] | None) -> None:
    lengths = (0, 1, 2, 63, 0, 64, 65, 200, 1, 0, 300)
    packing = Packing.from_lengths(lengths, device="cuda")
    q, k, v = qkv(1, sum(lengths), 2, 2, dim, dim_v)
    flow = make(1, sum(lengths), 2, dim_v, seed=9)
    options = {"window": window, "causal": window is None}
    packed = run(q, k, v, flow, cu_seqlens=packing, **options)
    for first, last in pairwise(packing.cu_seqlens.tolist()):
        if first == last:
            continue
        of = (slice(None), slice(first, last))
        alone = run(q[of], k[of], v[of], flow[of], **options)
        assert torch.equal(packed["lse"][:, first:last], alone["lse"][0])
        for name in ("o", "d_q", "d_k", "d_v"):
            assert torch.equal(packed[name][of], alone[name]), f"{name} of {last - first} tokens"


def test_many_packed_sequences() -> None:
    """Of any lengths: more slots of the table than blocks."""
    lengths = [1 + 37 * n % 500 for n in range(300)]
    packing = Packing.from_lengths(lengths, device="cuda")
    q, k, v = qkv(1, sum(lengths), 8, 8, 128)
    assert_same_bits(
        run(q, k, v, cu_seqlens=packing), run(q, k, v, cu_seqlens=Packing.from_lengths(lengths, device="cuda"))
    )


def test_a_sequence_does_not_depend_on_the_batch() -> None:
    q, k, v = qkv(5, 333, 2, 2, 128)
    flow = make(*q.shape, seed=9)
    together = run(q, k, v, flow, window=(200, 0))
    for n in range(5):
        one = slice(n, n + 1)
        alone = run(q[one], k[one], v[one], flow[one], window=(200, 0))
        assert_same_bits({name: x[one] for name, x in together.items()}, alone)


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS)
def test_a_packed_neighbour_that_is_not_finite(dim: int, dim_v: int) -> None:
    q, k, v = qkv(1, 300, 2, 2, dim, dim_v)
    packing = Packing.from_lengths([130, 170], device="cuda")
    flow = make(1, 300, 2, dim_v, seed=9)
    clean = run(q, k, v, flow, cu_seqlens=packing)
    spoilt = [torch.cat([x[:, :130], x[:, 130:] * torch.nan], 1) for x in (q, k, v, flow)]
    found = run(*spoilt, cu_seqlens=packing)
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.equal(found[name][:, :130], clean[name][:, :130]), name


def test_past_the_last_packed_token() -> None:
    q, k, v = qkv(1, 700, 2, 2, 128)
    found = run(q, k, v, cu_seqlens=torch.tensor([0, 100, 180], device="cuda"))
    assert (found["lse"][:, 180:] == -torch.inf).all()
    for name in ("o", "d_q", "d_k", "d_v"):
        assert torch.isfinite(found[name]).all() and not found[name][:, 180:].any(), name


@pytest.mark.parametrize("boundaries", [[0, 500, 100, 700], [-5, 300, 2**40, 700], [700, 0, 700, 0]], ids=str)
def test_corrupt_boundaries_stay_inside_and_end(boundaries: list[int]) -> None:
    tensors = qkv(1, 700, 2, 2, 128)
    copies = [x.clone() for x in tensors]
    run(*tensors, cu_seqlens=torch.tensor(boundaries, device="cuda"))
    torch.cuda.synchronize()
    for x, copy in zip(tensors, copies, strict=True):
        assert torch.equal(x, copy)


def test_nothing_waits_and_graphs_replay() -> None:
    inputs = qkv(2, 300, 2, 2, 128)
    flow = make(*inputs[0].shape, seed=9)
    run(*inputs, flow)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = run(*inputs, flow)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(inputs, qkv(2, 300, 2, 2, 128), strict=True):
        x.copy_(-y)
    for _ in range(2):  # counters begin at 0 each time
        graph.replay()
    assert_same_bits(captured, run(*inputs, flow))


def test_compiled_by_torch() -> None:
    leaves = [x.requires_grad_() for x in qkv(2, 100, 2, 2, 128)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, causal=True, window=(30, 0))[0].float().square().sum()

    assert explain(softmax_attention, *leaves, causal=True).choice == "gluon"
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [True, False])
def test_a_thousand_repeats_give_the_same_bits(causal: bool) -> None:
    tensors = [*qkv(2, 1500, 8, 8, 128), make(2, 1500, 8, 128, seed=9)]
    first = run(*tensors, causal=causal)
    for _ in range(1000):
        found = run(*tensors, causal=causal)
        assert all(bool(torch.equal(found[name], first[name])) for name in first)


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
def test_inputs_that_are_not_contiguous(change) -> None:  # type: ignore[no-untyped-def]
    tensors = [change(x) for x in (*qkv(3, 150, 2, 2, 72), make(3, 150, 2, 72, seed=9))]
    assert_same_bits(run(*tensors), run(*(x.contiguous() for x in tensors)))


@pytest.mark.parametrize("dim, dim_v", [(3, 200), (66, 65), (72, 72), (100, 7), (128, 64), (256, 192), (192, 256)])
def test_odd_head_dims(dim: int, dim_v: int) -> None:
    tensors = qkv(1, 300, 4, 2, dim, dim_v)
    assert_close(run(*tensors), *tensors)
