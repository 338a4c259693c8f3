"""The laws of the scan and the selective scan on a GPU: bits, graphs, compilation, sizes past every limit of a launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import (
    assert_captures,
    assert_compiles,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    random,
    results,
)
from torch import Tensor

from flashmix import Packing, scan, selective_scan
from flashmix.ops.selective_scan.definition import selective_scan as selective_definition

pytestmark = pytest.mark.gpu
Ops = dict[str, Callable[[Tensor], Tensor]]
RATES, WEIGHTS = -random(40, 16, seed=1).abs(), random(40, 16, seed=2)


def ops() -> Ops:
    """Ops of one tensor `[B, T, 40]`, for selective scans with everything that they have."""
    A, D = RATES.cuda(), WEIGHTS[:, 0].cuda()

    def selected(u: Tensor) -> Tensor:
        B, C = u[..., :16], u[..., 16:32]
        return selective_scan(u, u, A, B, C, D=D, z=u, dt_bias=D, softplus=True, impl="triton")[0]

    return {
        "scan": lambda x: scan(x, -x.abs(), impl="triton")[0],
        "read_before": lambda x: scan(x, -x.abs(), read_before=True, impl="triton")[0],
        "selective_scan": selected,
    }


each_op = pytest.mark.parametrize("name", ["scan", "read_before", "selective_scan"])


@each_op
def test_bits(name: str) -> None:
    """Nothing depends on other rows, on later tokens, on how often it was run, or on what the memory held."""
    op, x = ops()[name], random(3, 150, 40)
    assert_rows_do_not_meet(op, x.cuda())
    assert_rows_do_not_meet(op, x.bfloat16().cuda())

    def on_device(x: Tensor) -> Tensor:
        return op(x.cuda()).cpu()

    assert_repeats(on_device, x)
    want = results(on_device, [x])
    spoilt = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(4)]
    del spoilt
    for have, expected in zip(results(on_device, [x]), want, strict=True):
        for h, w in zip(have, expected, strict=True):
            assert_same_bits("in other memory", h, w)


@each_op
def test_graphs_and_compilation(name: str) -> None:
    op, x = ops()[name], random(2, 70, 40)
    assert_compiles(lambda x: op(x.cuda()).cpu(), x)
    leaf = x.cuda().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = op(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_captures(step)


@each_op
def test_many_short_sequences(name: str) -> None:
    """200,000 sequences of one token: each is what it is alone."""
    x = random(1, 200_000, 40).cuda()
    packing = Packing.from_lengths([1] * 200_000, "cuda")
    if name == "selective_scan":
        A, B = RATES.cuda(), x[..., :16]
        y, _ = selective_scan(x, x.abs(), A, B, B, cu_seqlens=packing)
        alone, _ = selective_scan(x.transpose(0, 1), x.abs().transpose(0, 1), A, *(B.transpose(0, 1),) * 2)
    else:
        options = {"read_before": name == "read_before"}
        y, _ = scan(x, -x.abs(), cu_seqlens=packing, **options)
        alone, _ = scan(x.transpose(0, 1), -x.abs().transpose(0, 1), **options)
    assert_same_bits("alone", y, alone.transpose(0, 1))


@pytest.mark.parametrize("tokens, channels", [(1_000_000, 8), (1 << 20, 2056)])
def test_long_rows(tokens: int, channels: int) -> None:
    """A million tokens, and more than 2^31 numbers: where a state is forgotten, the rest is as if it began there."""
    x = torch.randn(1, tokens, channels, device="cuda", dtype=torch.bfloat16)
    g = torch.full((1, tokens, channels), -0.01, device="cuda", dtype=torch.bfloat16)
    g[:, -1000:] *= 2
    g[:, -1000] = -torch.inf
    h, state = scan(x, g, return_state=True, impl="triton")
    want, last = (t for t in scan(x[:, -1000:].double(), g[:, -1000:].double(), return_state=True))
    plain, _ = scan(x[:, -1000:], g[:, -1000:], impl="portable")
    assert last is not None and state is not None
    assert_within_budget("h", h[:, -1000:], want, plain, steps=3)
    # the hardware's exponential errs by 2^-22, with equal decays always by the same
    _, off = scan(x[:, -1000:].double(), g[:, -1000:].double() + 2**-22, return_state=True)
    assert off is not None
    assert_within_budget("state", state, last, off.float(), steps=3)
    if channels > 8:
        return
    A, B = RATES[:channels].cuda(), x[..., :1].expand(1, tokens, 16)
    y, _ = selective_scan(x, x.abs(), A, B, B, impl="triton")
    assert torch.isfinite(y).all()
    first, own = x[:, :1000], B[:, :1000]
    part, _ = selective_scan(first, first.abs(), A, own, own, impl="triton")
    # segments follow from the sizes: of 1024 tokens here, of 384 alone; the states before the later ones are joined, not carried
    assert_same_bits("first segment", part[:, :384], y[:, :384])
    given = [t.double() for t in (first, first.abs(), A, own, own)]
    want, _ = selective_definition(*given)
    plain, _ = selective_scan(first, first.abs(), A, own, own, impl="portable")
    for name, have in (("first tokens", y[:, :1000]), ("alone", part)):
        assert_within_budget(name, have, want, plain, steps=3)
