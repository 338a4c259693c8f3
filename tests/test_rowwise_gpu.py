"""The row-wise kernels against their definitions: every case on a GPU, some in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import definitions
import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import (
    assert_matches,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    nothing_waits,
    random,
)
from samples import sample, sample_of_rows
from test_rotary import counted, halves_to_pairs, pairs_to_halves
from torch import Tensor

from flashmix import Packing
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength
from flashmix.ops.gated_product.op import ACTIVATIONS, gated, swiglu
from flashmix.ops.norm.op import group_norm, l2_norm, layer_norm, rms_norm
from flashmix.ops.own_write import with_own_write
from flashmix.ops.rotary.op import rotary, rotary_qk, rotary_table
from flashmix.ops.scaled_rows.op import scaled_rows
from flashmix.ops.token_shift.op import token_shift

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Op = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op, its definition, and the shapes of its inputs; `factor` scales the first."""

    name: str
    op: Op
    definition: Op
    shapes: tuple[tuple[int, ...], ...]
    tiny: bool = False  # runs in the interpreter too
    factor: float = 1.0

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        first, *rest = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(self.shapes))
        return [first * self.factor, *rest]


def on_gpu(op: Op) -> Op:
    """`op` of CPU tensors, computed on the GPU by the Triton kernels."""

    def call(*inputs: Tensor) -> Any:
        got = op(*(value.cuda() for value in inputs))
        return got.cpu() if isinstance(got, Tensor) else tuple(t if t is None else t.cpu() for t in got)

    return call


def norm_cases() -> list[Case]:
    cases = []
    shapes = [(2, 5, 24), (1, 1, 7), (2, 0, 8), (160,), (3, 1), (2, 3, 4, 64), (70, 100), (5, 1000), (33, 4096)]
    shapes += [(1, 2100), (3, 8192), (2, 8193), (2, 65536), (2, 70001), (2100, 128)]
    for shape in shapes:
        tiny, width = len(shape) == 1 or shape[1:] in ((5, 24), (0, 8), (2100,)), shape[-1]
        plain = [
            ("rms_norm", rms_norm, definitions.rms_norm, (shape,)),
            ("rms_norm weight", rms_norm, definitions.rms_norm, (shape, (width,))),
            ("rms_norm gate", lambda x, w, g: rms_norm(x, w, gate=g), definitions.rms_norm, (shape, (width,), shape)),
            (
                "rms_norm sigmoid gate",
                lambda x, g: rms_norm(x, gate=g, gate_activation="sigmoid"),
                lambda x, g: definitions.rms_norm(x) * torch.sigmoid(g),
                (shape, shape),
            ),
            (
                "rms_norm residual",
                lambda x, w, r: rms_norm(x, w, residual=r, return_residual=True),
                lambda x, w, r: (definitions.rms_norm(x + r, w), x + r),
                (shape, (width,), shape),
            ),
            ("l2_norm", l2_norm, definitions.l2_norm, (shape,)),
            ("layer_norm", layer_norm, definitions.layer_norm, (shape, (width,), (width,))),
            (
                "layer_norm residual",
                lambda x, w, b, r: layer_norm(x, w, b, residual=r, return_residual=True),
                lambda x, w, b, r: (definitions.layer_norm(x + r, w, b), x + r),
                (shape, (width,), (width,), shape),
            ),
            (
                "layer_norm gate",
                lambda x, w, b, g: layer_norm(x + 1, w, b, gate=g),
                lambda x, w, b, g: definitions.layer_norm(x + 1, w, b) * definitions.silu(g),
                (shape, (width,), (width,), shape),
            ),
        ]
        if width == 1:  # the norm of one number is its sign, whose gradient is rounding alone
            sign = ("rms_norm", lambda x: rms_norm(x.detach()) + x, lambda x: definitions.rms_norm(x.detach()) + x)
            plain = [(*sign, (shape,))]
        cases += [Case(f"{name} {shape}", op, d, shapes, tiny) for name, op, d, shapes in plain]
    for groups in (1, 2, 6):
        for center in (True, False):
            cases.append(
                Case(
                    f"group_norm {groups} {center}",
                    lambda x, w, b, g, r, n=groups, c=center: group_norm(
                        x + 1, n, w, b, center=c, gate=g, residual=r, return_residual=True
                    ),
                    lambda x, w, b, g, r, n=groups, c=center: (
                        definitions.group_norm(x + 1 + r, n, w, b, c) * definitions.silu(g),
                        x + 1 + r,
                    ),
                    ((2, 9, 24), (24,), (24,), (2, 9, 24), (2, 9, 24)),
                    tiny=groups == 2,
                )
            )
    return cases


def rotary_case(rotated: int, channels: int, interleaved: bool, inverse: bool) -> Case:
    table = rotary_table(32, rotated)
    sign = -1 if inverse else 1

    def one(x: Tensor) -> Tensor:
        cos, sin = (t.to(x.dtype) for t in table)
        x = pairs_to_halves(x, rotated) if interleaved else x
        y = definitions.rotary(x, cos, sign * sin, counted(2, 9, 4))
        return halves_to_pairs(y, rotated) if interleaved else y

    def op(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        cos, sin = (t.to(q.device) for t in table)
        options: dict[str, Any] = {"positions": 4, "interleaved": interleaved, "inverse": inverse}
        return *rotary_qk(q, k, cos, sin, **options), rotary(q, cos, sin, **options)

    name = f"rotary {rotated} of {channels}{' interleaved' * interleaved}{' inverse' * inverse}"
    shapes = ((2, 9, 3, channels), (2, 9, 1, channels))
    return Case(name, op, lambda q, k: (one(q), one(k), one(q)), shapes, tiny=rotated == 6)


def gated_case(activation: str, shape: tuple[int, ...]) -> Case:
    scalar = torch.sigmoid if activation == "sigmoid" else getattr(definitions, activation)
    return Case(
        f"gated {activation} {shape}",
        lambda g, u: gated(g, u, activation),
        lambda g, u: scalar(g) * u,
        (shape, shape),
        tiny=shape == (2, 5, 24),
        factor=3.0,
    )


def halves_case(width: int) -> Case:
    return Case(
        f"swiglu of halves {width}",
        lambda both: swiglu(*both.chunk(2, -1)),
        lambda both: definitions.swiglu(*both.chunk(2, -1)),
        ((3, 5, 2 * width),),
        tiny=width == 24,
    )


def gate_cases() -> list[Case]:
    cases = []
    for shape, of_bias in (
        ((2, 5, 24), (24,)),
        ((2, 5, 3, 7), (3, 7)),
        ((1, 1, 7), (7,)),
        ((2, 0, 4), (4,)),
        ((40, 40), (40,)),
        ((300, 32, 128), (32, 128)),
        ((5000, 16), (16,)),
    ):
        for gate in (softplus_decay, bounded_decay):
            cases.append(
                Case(
                    f"{gate.__name__} {shape}",
                    lambda x, A_log, dt_bias, gate=gate: gate(x, A_log, dt_bias - 2),
                    lambda x, A_log, dt_bias, gate=gate: getattr(definitions, gate.__name__)(x, A_log, dt_bias - 2),
                    (shape, of_bias[:1], of_bias),
                    tiny=shape[-1] == 7,
                    factor=3.0,
                )
            )
        cases.append(
            Case(
                f"write_strength {shape}",
                lambda x: write_strength(x, negative_eigenvalues=True),
                lambda x: definitions.write_strength(x, True),
                (shape,),
                tiny=shape[-1] == 7,
            )
        )
    return cases


def shift_case(tokens: int, channels: int) -> Case:
    return Case(
        f"token_shift {tokens} x {channels}",
        lambda x, s: token_shift(x, initial_state=s, return_state=True),
        definitions.token_shift,
        ((2, tokens, channels), (2, 1, channels)),
        tiny=channels == 7,
    )


def own_case(batch: int, tokens: int, groups: int, heads: int, keys: int, values: int, skip: bool) -> Case:
    outputs, kept = (batch, tokens, heads, values), (batch, tokens, groups, keys)
    shapes = (outputs, outputs, kept, kept, outputs[:3], (heads,))
    return Case(
        f"own_write {shapes}",
        lambda *x: with_own_write(*x, scale=0.5, impl="auto") if skip else with_own_write(*x[:5], None, 0.5, "auto"),
        lambda *x: definitions.with_own_write(*(x if skip else x[:5]), scale=0.5),
        shapes if skip else shapes[:5],
        tiny=tokens < 10,
    )


CASES = [
    *gate_cases(),
    *(
        own_case(*case)
        for case in (
            (2, 5, 1, 2, 6, 5, True),
            (2, 9, 3, 3, 130, 16, False),
            (1, 3, 2, 40, 7, 64, True),
            (1, 0, 1, 2, 3, 4, True),
            (2, 300, 1, 32, 128, 64, True),
            (1, 70, 2, 10, 256, 256, False),
        )
    ),
    *(shift_case(tokens, channels) for tokens in (0, 1, 9, 300) for channels in (7, 64, 5000)),
    *norm_cases(),
    *(
        rotary_case(rotated, channels, interleaved, inverse)
        for rotated, channels in ((16, 16), (6, 16), (2, 7), (96, 96), (128, 128), (256, 256), (64, 512))
        for interleaved in (False, True)
        for inverse in (False, True)
    ),
    *(
        gated_case(activation, shape)
        for activation in ACTIVATIONS
        for shape in ((2, 5, 24), (1, 1, 7), (3, 0, 8), (70, 1001))
    ),
    *(halves_case(width) for width in (1, 24, 1000, 11008)),
    *(
        Case(f"scaled_rows {shape}", scaled_rows, definitions.scaled_rows, (shape, shape[:-1]), tiny=shape[-1] == 24)
        for shape in ((2, 5, 24), (1, 1, 7), (3, 0, 8), (3, 2, 0), (70, 1001), (4, 33, 256), (9, 512), (3, 5000))
    ),
    Case(
        "scaled_rows of a transposed tensor",
        lambda x, factor: scaled_rows(x.transpose(1, 2), factor.mT),
        lambda x, factor: definitions.scaled_rows(x.transpose(1, 2), factor.mT),
        ((2, 3, 5, 24), (2, 3, 5)),
        tiny=True,
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_are_their_definition(case: Case, dtype: torch.dtype) -> None:
    assert_matches(on_gpu(case.op), case.definition, *case.inputs(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", sample(DTYPES[:2], DTYPES[:1]))
@pytest.mark.parametrize("case", [case for case in CASES if case.tiny], ids=lambda case: case.name)
def test_kernels_are_their_definition_interpreted(case: Case, dtype: torch.dtype) -> None:
    assert_matches(case.op, case.definition, *case.inputs(dtype))


def sums(width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Norms of a sum less those of the sum made before: outputs and gradients, `[made in the norm, before]` by norm and result."""
    a, b, d_y, d_h = (random(5, width, dtype=dtype, seed=s).to(device) for s in range(4))
    weight, bias = (random(width, dtype=dtype, seed=s).to(device) for s in (4, 5))
    found = []
    for op, *parameters in (
        (rms_norm, weight),
        (rms_norm,),
        (layer_norm, weight, bias),
        (partial(group_norm, groups=1), weight),
    ):
        for gate in ({}, {"gate": d_y * 2}):
            both = []
            for x, residual in ((a, b), (a + b, None)):
                leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
                rest = dict(zip(("weight", "bias"), leaves[1:], strict=False))
                y, h = op(leaves[0], residual=residual, return_residual=True, **rest, **gate)
                both.append(
                    [
                        y,
                        h,
                        op(leaves[0], residual=residual, **rest, **gate),
                        *torch.autograd.grad((y, h), leaves, (d_y, d_h)),
                    ]
                )
            found += zip(*both, strict=True)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 128, 512, 1000, 2048, 2100, 4096, 8192, 9000])
def test_a_sum_made_before_has_the_same_bits(width: int, dtype: torch.dtype) -> None:
    """Activation checkpoints keep the sum alone, and what is made again has no residual."""
    for made, before in sums(width, dtype, "cuda"):
        assert_same_bits(f"{width} channels", made, before)


@pytest.mark.interpreted
@pytest.mark.parametrize(  # it cuts bfloat16 off where a GPU rounds
    "width, dtype",
    sample_of_rows(list(product((7, 24), (torch.float32, torch.float16))), [(7, torch.float16), (24, torch.float32)]),
)
def test_a_sum_made_before_has_the_same_bits_interpreted(width: int, dtype: torch.dtype) -> None:
    for made, before in sums(width, dtype, "cpu"):
        assert_same_bits(f"{width} channels", made, before)


def some_ops(channels: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ops of `x [B, T, channels]` that share nothing between rows, by name."""
    weight = random(channels, seed=1).cuda()
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "l2_norm": l2_norm,
        "rms_norm": lambda x: rms_norm(x, weight, gate=x * 0.5),
        "layer_norm": lambda x: layer_norm(x, weight, weight),
        "swiglu": lambda x: swiglu(x, x * 0.5),
        "softplus_decay": lambda x: softplus_decay(x, weight, weight),
        "bounded_decay": lambda x: bounded_decay(x, weight, weight),
        "write_strength": write_strength,
    }
    if channels % 2 == 0:
        cos, sin = (t.cuda() for t in rotary_table(1024, channels))
        found["rotary"] = lambda x: rotary(x.unsqueeze(2), cos, sin).squeeze(2)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [7, 64, 128, 4096, 9000])
def test_rows_are_their_own(channels: int) -> None:
    x = random(3, 403, channels).cuda()
    for op in some_ops(channels).values():
        assert_rows_do_not_meet(op, x)
        assert_repeats(on_gpu(op), x.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("channels", [7, 128, 9000])
def test_what_is_not_finite_stays_in_its_row(channels: int, value: float) -> None:
    x = random(1, 67, channels).cuda()
    bad = x.clone()
    bad[0, 33, channels // 2] = value
    others = torch.arange(67, device="cuda") != 33
    for name, op in some_ops(channels).items():
        found = [
            (y, torch.autograd.grad(y.sum(), leaf)[0])
            for leaf in (x.requires_grad_(), bad.requires_grad_())
            for y in [op(leaf)]
        ]
        for have, want in zip(*found, strict=True):
            assert_same_bits(name, have[:, others], want[:, others])
            assert name in ("bounded_decay", "write_strength") or not torch.isfinite(found[1][0][:, 33]).all(), name


@pytest.mark.gpu
def test_strided_rows_are_read_where_they_lie() -> None:
    whole = random(3, 6, 5, 8, 64).cuda()
    views = [whole.permute(2, 0, 1, 3, 4), whole[..., 16:48], whole.transpose(1, -1), whole[:1].expand(3, 6, 5, 8, 64)]
    views += [whole[:, :, 1:4], whole[:, ::2, :, ::3]]
    for view in views:
        weight = random(view.shape[-1], seed=1).cuda()
        for op in (l2_norm, lambda x: rms_norm(x, weight, gate=x), lambda x: swiglu(x, x)):  # noqa: B023
            for a, b in zip(device_results(op, [view]), device_results(op, [view.contiguous()]), strict=True):
                assert_same_bits("strided", a[0], b[0])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if view.stride(-1) == 1:  # the result and a number a row, but no second tensor of that size
            l2_norm(view)
            assert torch.cuda.max_memory_allocated() - before < 1.5 * view.numel() * 4, "a copy was made"


@pytest.mark.gpu
def test_gradients_to_second_order() -> None:
    """The second derivative of the kernels' results is that of the plain formula."""
    cos, sin = (t.cuda() for t in rotary_table(16, 8))
    ops: dict[str, Op] = {
        "rms_norm": lambda x, r, impl: rms_norm(x, gate=r, impl=impl),
        "residual": lambda x, r, impl: rms_norm(x, residual=r, return_residual=True, impl=impl),
        "group_norm": lambda x, r, impl: group_norm(x, 2, gate=r, impl=impl),
        "swiglu": lambda x, r, impl: swiglu(x, r, impl=impl),
        "softplus_decay": lambda x, r, impl: softplus_decay(x, r[0, 0], r[0, 1], impl=impl),
        "bounded_decay": lambda x, r, impl: bounded_decay(x, r[0, 0], r[0, 1], impl=impl),
        "token_shift": lambda x, r, impl: token_shift(x * r, initial_state=r[:, :1], return_state=True, impl=impl),
        "rotary": lambda x, r, impl: rotary((x * r).unsqueeze(2), cos, sin, impl=impl),
    }

    def derivatives(op: Op, impl: str, dtype: torch.dtype) -> list[Tensor]:
        x, r = (random(2, 5, 8, seed=s).cuda().to(dtype).requires_grad_() for s in (1, 2))
        got = op(x, r, impl=impl)
        loss = sum(y.square().sum() for y in ([got] if isinstance(got, Tensor) else got))
        first = torch.autograd.grad(loss, (x, r), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, r))]

    for name, op in ops.items():
        exact = derivatives(op, "portable", torch.float64)
        plain, found = (derivatives(op, impl, torch.float32) for impl in ("portable", "triton"))
        for have, want, baseline in zip(found, exact, plain, strict=True):
            assert_within_budget(name, have, want, baseline, steps=3)  # the op and two derivatives


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles(backend: str) -> None:
    cos, sin = (t.cuda() for t in rotary_table(64, 8))
    packed = torch.tensor([0, 2, 5], device="cuda")
    ops: dict[str, Op] = {
        "rms_norm": lambda x, r: rms_norm(x, gate=r),
        "residual": lambda x, r: rms_norm(x, residual=r, return_residual=True),
        "layer_norm": lambda x, r: layer_norm(x, r[0, 0], r[0, 0]),
        "group_norm": lambda x, r: group_norm(x, 2, gate=r),
        "swiglu": lambda x, r: swiglu(x, r),
        "rotary": lambda x, r: rotary_qk(x.unsqueeze(2), r.unsqueeze(2), cos, sin, positions=3),
        "packed": lambda x, r: rotary((x * r)[:1].unsqueeze(2), cos, sin, cu_seqlens=packed),
        "token_shift": lambda x, r: token_shift(x, initial_state=r[:, :1], return_state=True),
        "shift of packed": lambda x, r: token_shift((x * r)[:1], return_state=True, cu_seqlens=packed),
        "softplus_decay": lambda x, r: softplus_decay(x, r[0, 0], r[0, 1]),
        "bounded_decay": lambda x, r: bounded_decay(x.unflatten(-1, (2, 4)), r[0, 0, :2], r[0, 1].view(2, 4)),
        "write_strength": lambda x, r: write_strength(x * r),
        "in place": lambda x, r: rotary((x * r).detach().unsqueeze(2), cos, sin, inplace=True) * x.unsqueeze(2),
    }
    inputs = [random(2, 5, 8, seed=s).cuda() for s in (1, 2)]
    for op in ops.values():
        torch._dynamo.reset()
        compiled = torch.compile(op, fullgraph=True, backend=backend)
        wide = [torch.cat([t, t], 1) for t in inputs]
        for arguments in [inputs] if op in (ops["packed"], ops["shift of packed"]) else [inputs, wide]:
            for have, want in zip(device_results(compiled, arguments), device_results(op, arguments), strict=True):
                for h, w in zip(have, want, strict=True):
                    torch.testing.assert_close(h, w)


def device_results(op: Op, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [value.detach().requires_grad_() for value in inputs]
    got = op(*leaves)
    outputs = [got] if isinstance(got, Tensor) else list(got)
    flows = [torch.ones_like(y) * 0.5 for y in outputs]
    return [y.detach() for y in outputs], list(torch.autograd.grad(outputs, leaves, flows, materialize_grads=True))


@pytest.mark.gpu
def test_cuda_graphs() -> None:
    """Captured once, replayed on other contents: what an eager call gives."""
    cos, sin = (t.cuda() for t in rotary_table(64, 64))
    x, gate, positions = random(2, 5, 4, 64).cuda(), random(2, 5, 4, 64, seed=1).cuda(), torch.zeros(2, 5).long().cuda()

    def step() -> list[Tensor]:
        a = rms_norm(x.requires_grad_(), gate=gate)
        b = rotary(swiglu(a, gate), cos, sin, positions=positions)
        return [b.detach(), torch.autograd.grad(b.sum(), x)[0]]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(random(2, 5, 4, 64, seed=seed))
            positions.fill_(seed)
        graph.replay()
        for have, want in zip(captured, step(), strict=True):
            assert_same_bits("replayed", have, want)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    cos, sin = (t.cuda() for t in rotary_table(64, 64))
    x, positions = random(2, 5, 4, 64).cuda().requires_grad_(), torch.zeros(2, 5).long().cuda()

    def step() -> None:
        y = rotary(rms_norm(swiglu(x, x), residual=x), cos, sin, positions=positions, axes=None)
        y.sum().backward()

    step()
    torch.cuda.synchronize()
    with nothing_waits():
        step()


@pytest.mark.gpu
def test_opcheck() -> None:
    from flashmix.ops.decay.op import GATE
    from flashmix.ops.gated_product.op import GATED
    from flashmix.ops.norm.op import NORM
    from flashmix.ops.rotary.op import ROTARY
    from flashmix.ops.token_shift.op import SHIFT

    cos, sin = (t.cuda() for t in rotary_table(64, 8))
    x, r = (random(2, 5, 8, seed=s).cuda().requires_grad_() for s in (1, 2))
    w = random(8).cuda().requires_grad_()
    q = x.detach().unsqueeze(2).requires_grad_()
    for op, arguments in (
        (NORM, (x, r, w, None, None, 1e-6, 1, False, True, "silu", x.dtype, True)),
        (NORM, (x, None, w, w, r, 1e-6, 2, True, True, "sigmoid", x.dtype, False)),
        (NORM, (x, None, w, None, None, 1e-6, 1, False, True, "silu", x.dtype, True)),
        (GATED, (x, r, "gelu")),
        (GATE, (x, w, w, "softplus_decay", 1.0)),
        (SHIFT, (x, None, None, 0, 5, False, True)),
        (ROTARY, (q, None, cos, sin, None, None, 0, 3, [], False, False)),
    ):
        torch.library.opcheck(op.operator, (*arguments, True, "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[3, 0, 1, 7, 0], [0, 0, 4], [300, 1, 65]])
def test_packed_is_one_by_one(lengths: list[int]) -> None:
    x, state = (
        random(1, sum(lengths), 6).cuda().requires_grad_(),
        random(len(lengths), 1, 6, seed=1).cuda().requires_grad_(),
    )
    cu_seqlens = Packing.from_lengths(lengths).cu_seqlens.cuda()
    cos, sin = (t.cuda() for t in rotary_table(400, 6))
    parts = [
        token_shift(part, initial_state=s, return_state=True)
        for part, s in zip(x.split(lengths, dim=1), state.split(1), strict=True)
    ]
    alone = torch.cat([y for y, _ in parts], dim=1), torch.cat([s for _, s in parts])
    packed = token_shift(x, initial_state=state, return_state=True, cu_seqlens=cu_seqlens)
    flows = [random(*y.shape, seed=2).cuda() for y in alone]
    wanted = torch.autograd.grad(alone, (x, state), flows)
    found = torch.autograd.grad(packed, (x, state), flows)
    for have, want in zip((*packed, *found), (*alone, *wanted), strict=True):
        assert_same_bits("token_shift", have, want)
    heads = x.detach().unsqueeze(2)
    turned = torch.cat([rotary(part, cos, sin, positions=5) for part in heads.split(lengths, dim=1)], 1)
    assert_same_bits("rotary", rotary(heads, cos, sin, positions=5, cu_seqlens=cu_seqlens), turned)
    for wrong in ([0, 5, 3], [-7, 2, 9**9], [9, 9, 9]):  # nothing outside the tensors
        token_shift(x, return_state=True, cu_seqlens=torch.tensor(wrong).cuda())
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_positions_past_the_table_are_bounded() -> None:
    cos, sin = (t.cuda() for t in rotary_table(4, 4))
    x = random(1, 2, 1, 4).cuda()
    bounded = rotary(x, cos, sin, positions=torch.tensor([[0, 3]]).cuda())
    for positions in ([[-3, 99]], [[-(2**62), 2**62]]):
        assert_same_bits("bounded", rotary(x, cos, sin, positions=torch.tensor(positions).cuda()), bounded)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4096, 2**31 + 8])
@pytest.mark.usefixtures("much_memory")
def test_more_elements_than_32_bits_count(width: int) -> None:
    """The last row (or the last elements of the only one) of what is larger than 2^31 elements."""
    rows = max(1, (2**31 + 4096) // width)
    x = torch.full((rows, width), 0.5, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        x[-1, -8:] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])[-min(8, width) :]
        for op in (l2_norm, rms_norm, lambda t: swiglu(t, t), write_strength):
            got = op(x)
            tail = op(x[-1:])
            assert_same_bits("tail", got[-1, -8:], tail[-1, -8:])
            assert torch.isfinite(got[-1, -8:]).all() and got[-1, -8:].float().abs().min() > 0
            del got
        if width == 4096:
            cos, sin = (t.cuda() for t in rotary_table(rows, 128))
            heads = x.view(1, rows, 32, 128)
            assert_same_bits(
                "rotary", rotary(heads, cos, sin)[:, -1:], rotary(heads[:, -1:], cos, sin, positions=rows - 1)
            )


@pytest.mark.gpu
def test_more_batches_times_heads_than_a_grid_axis_holds() -> None:
    cos, sin = (t.cuda() for t in rotary_table(1, 8))
    x = random(200_000, 1, 2, 8).cuda()
    for op in (
        l2_norm,
        lambda t: token_shift(t.flatten(2), return_state=True)[1],
        write_strength,
        lambda t: swiglu(t, t),
        lambda t: rotary(t, cos, sin),
        lambda t: group_norm(t.flatten(2), 2),
    ):
        got = op(x)
        for part in (slice(0, 3), slice(65_534, 65_540), slice(-2, None)):
            assert_same_bits("part", got[part], op(x[part]))
