"""The laws of the recurrence on a GPU: the same bits whatever surrounds a token, however it lies, and by every way of calling.

Faults are numbered as in tests/test_faults.py; sizes and packs are in test_recurrence_gpu_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import test_recurrence as laws
import torch
from budget import assert_within_budget, relative_errors
from cases import CASES, Case, make_inputs, run_op
from recurrence_gpu import BF16, DEVICE, KINDS, Results, assert_same, impl_of, results, small
from test_recurrence import STAGES, named, references, same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashmix
from flashmix.gpu import device as card
from flashmix.layers import GatedDeltaNet
from flashmix.models import Decoder, preset
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE

gpu = pytest.mark.gpu
LONG = Case("segments", "delta", "token", B=1, T=8192, H=1, HV=1, K=64, V=64, states=False)
HOPPER_LONG = replace(LONG, name="hopper-segments", K=128, V=128)
HOPPER_LONG_CHANNEL = replace(HOPPER_LONG, name="hopper-channel-segments", gate="channel")
HOPPER_MORE = (
    HOPPER_LONG,
    HOPPER_LONG_CHANNEL,
    Case("hopper-packed", "delta", "token", B=1, T=200, K=128, V=128, lengths=(70, 0, 130)),
    Case("hopper-fused-packed", "delta", "token", B=1, T=200, HV=2, K=128, V=128, lengths=(70, 0, 130)),
    Case("hopper-fused-grouped-packed", "delta", "token", B=1, T=200, K=128, V=128, lengths=(70, 0, 130)),
)
# Decays that leave something of the state that a chunk starts from: e^{G_C} is 1e-12 else, and hides the sum <S, dS'> in dlog_decay.
WEAK = [
    Case("hopper-fused-weak", "delta", "token", T=200, HV=2, K=128, V=128, decay="-0.02"),
    Case("hopper-fused-grouped-weak", "delta", "token", T=200, K=128, V=128, decay="-0.02"),
    Case("hopper-fused-linear-weak", "linear", "token", T=200, K=128, V=128, decay="-0.02"),
    Case("hopper-256-weak", "delta", "token", T=200, K=256, V=256, decay="-0.02"),
    Case("hopper-256-linear-weak", "linear", "token", T=200, K=256, V=256, decay="-0.02"),
]
BITS = (
    laws.test_packed_is_one_by_one,
    laws.test_batch_invariance,
    laws.test_prefix_invariance_of_outputs_and_gradients,
    laws.test_non_contiguous_inputs,
)
SUMS = (laws.test_split_with_carried_state_is_the_whole, laws.test_steps_are_the_whole)


@pytest.fixture(autouse=True)
def fused_where_named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of that name have the backward of the output in the walk of the states, which is for calls that fill a card."""
    if "fused" in request.node.name:
        monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.FILLED", 0)
        monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.BACKWARD", {})


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], None]:
    """The laws of test_recurrence.py, with the kernels and in another dtype."""

    def change(dtype: torch.dtype) -> None:
        monkeypatch.setattr(laws, "make_inputs", lambda case, _: small(case, dtype))
        monkeypatch.setattr(laws, "run_op", lambda case, x: run_op(case, x, impl_of(case)))

    return change


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("law", BITS, ids=lambda law: law.__name__.removeprefix("test_"))
@named(KINDS)
def test_faults_08_09_and_27_bit_for_bit(law: Any, case: Case, dtype: torch.dtype, on_the_gpu: Any) -> None:
    on_the_gpu(dtype)
    law(case)


@gpu
@named([case for case in CASES if case.keys == "nearly_parallel" and case.beta == 2])
def test_bits_where_correlated_keys_begin(case: Case, on_the_gpu: Any) -> None:
    on_the_gpu(torch.float32)
    laws.test_laws_hold_where_correlated_keys_begin(case)


@gpu
@pytest.mark.parametrize("law", SUMS, ids=lambda law: law.__name__.removeprefix("test_"))
@named(KINDS)
def test_parts_are_the_whole(law: Any, case: Case, on_the_gpu: Any) -> None:
    on_the_gpu(torch.float32)
    law(case)


@gpu
@named([LONG, HOPPER_LONG])
def test_fault_08_later_gates_in_segments(case: Case) -> None:
    """A change in the last segment leaves what is before it, and the gradients of outputs before it."""
    x = small(case)
    later = {name: torch.cat([t[:, :8000], t[:, 8000:].flip(1) * 0.5], 1) for name, t in x.items()}
    found = []
    for one in (x, later):
        leaves = {name: t.detach().requires_grad_() for name, t in one.items()}
        o = run_op(case, leaves, impl_of(case))[0][:, :8000]
        grads = torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
        found.append([o.detach(), *(g[:, :8000] for g in grads)])
    for name, a, b in zip(("o", *x), *found, strict=True):
        same_bits(a, b, name)


def before_strong_decays(case: Case, x: Results, tokens: int) -> list[tuple[str, Tensor, Tensor]]:
    """Outputs of the first tokens and the gradients of their sum: as they are, and with decays of e^-20 after them."""
    g = x["log_decay"].clone()
    g[:, tokens:] = -20.0
    found = []
    for one in (x, x | {"log_decay": g}):
        leaves = {name: t.detach().requires_grad_() for name, t in one.items()}
        o = run_op(case, leaves, impl_of(case))[0][:, :tokens]
        grads = torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
        found.append(
            [o.detach(), *(t if n == "initial_state" else t[:, :tokens] for n, t in zip(x, grads, strict=True))]
        )
    return list(zip(("o", *x), *found, strict=True))


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@named([case for case in KINDS if case.gate in ("channel", "value")])
def test_fault_08_later_gates_that_need_other_passes(case: Case, dtype: torch.dtype) -> None:
    for name, one, other in before_strong_decays(case, small(case, dtype), 30):
        same_bits(one, other, name)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@named([case for case in KINDS if case.name in ("delta-channel", "linear-value")])
def test_fault_08_later_gates_that_need_other_passes_interpreted(
    case: Case, dtype: torch.dtype, room_for_factors: Callable[[int], None]
) -> None:
    case = replace(case, B=1, H=1, HV=1)
    x = make_inputs(case, dtype)
    if dtype == torch.float16:
        room_for_factors(5)
        x["log_decay"] *= 0.02  # one pass serves, but for the rows of strong decays
    for name, one, other in before_strong_decays(case, x, 30):
        same_bits(one, other, name)


@gpu
@named(
    [
        replace(LONG, name="token", B=3),
        replace(LONG, name="channel", gate="channel", B=3),
        replace(LONG, name="value", rule="linear", gate="value", B=3),
        replace(HOPPER_LONG, B=3),
    ]
)
def test_fault_09_the_batch_does_not_choose_the_segments(case: Case) -> None:
    x = small(case)
    whole = results(case, x)
    alone = results(replace(case, B=1), {name: t[1:2] for name, t in x.items()})
    assert_same({name: t[1:2] for name, t in whole.items()}, alone)


@gpu
@named([case for case in KINDS if case.name in ("delta-token", "delta-channel")])
def test_fault_26_a_thousand_repeats_give_the_same_bits(case: Case) -> None:
    assert_repeats(case, small(replace(case, T=200)), 1000)


@gpu
@named([*KINDS, LONG, *HOPPER_MORE, *WEAK, replace(KINDS[2], name="packed", B=1, T=200, lengths=(70, 0, 130))])
def test_fault_26_a_hundred_repeats_give_the_same_bits(case: Case) -> None:
    assert_repeats(case, small(case), 100)


def assert_repeats(case: Case, x: Results, repeats: int) -> None:
    """What differs is counted on the device and read once."""
    cu = None if case.lengths is None else torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0)
    first = results(case, x, cu)
    differ = torch.zeros(len(first), dtype=torch.int64, device=DEVICE)
    for _ in range(repeats):
        found = results(case, x, cu)
        differ += torch.stack([(found[name] != t).sum() for name, t in first.items()])
    assert not differ.any(), dict(zip(first, differ.tolist(), strict=True))


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "every second channel": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "turned round": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape),
    "of a larger tensor, an odd channel on": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    "one number on": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@gpu
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
@named(KINDS)
def test_fault_27_inputs_that_are_not_contiguous(case: Case, change: Callable[[Tensor], Tensor]) -> None:
    odd = {name: change(t) for name, t in small(case).items()}
    plain = {name: t.clone(memory_format=torch.contiguous_format) for name, t in odd.items()}
    assert_same(results(case, odd), results(case, plain))


@gpu
@named([*KINDS, LONG])
def test_fault_27_what_flows_back_is_not_contiguous(case: Case) -> None:
    leaves = {name: t.requires_grad_() for name, t in small(case).items()}
    o, state = run_op(case, leaves, impl_of(case))
    turned = (o.detach().mT.contiguous().mT, state.detach().mT.contiguous().mT)
    for do, dstate in ((o.new_ones(()).expand_as(o), state.new_ones(()).expand_as(state)), turned):
        odd, plain = (
            torch.autograd.grad([o, state], list(leaves.values()), flows, retain_graph=True)
            for flows in ([do, dstate], [do.contiguous(), dstate.contiguous()])
        )
        for name, a, b in zip(leaves, odd, plain, strict=True):
            same_bits(a, b, name)


@gpu
@named([*KINDS, LONG, *HOPPER_MORE, replace(KINDS[3], name="packed", B=1, T=200, lengths=(70, 0, 130))])
def test_fault_17_a_graph_replays_what_calls_do(case: Case) -> None:
    """Forward and backward; packed, with other boundaries than those of the capture."""
    x = small(case)
    cu = None if case.lengths is None else torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0)
    results(case, x, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(case, x, cu)
    if cu is not None:
        cu.copy_(torch.tensor([0, 1, 131, 200]))
    x["v"].mul_(-1)
    graph.replay()
    assert_same(captured, results(case, x, cu))


@gpu
def test_fault_17_a_training_step_in_a_graph() -> None:
    torch.use_deterministic_algorithms(False)  # as people train; what is captured then is deterministic all the same
    tokens = torch.randint(64, (2, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def trainer() -> tuple[Decoder, Callable[[], Tensor]]:
        torch.manual_seed(0)
        model = Decoder(preset("gated_deltanet_tiny", vocab_size=64)).to(DEVICE, BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step

    (called, step), (model, to_capture) = trainer(), trainer()
    expected = [step().clone() for _ in range(7)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [to_capture().clone() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = to_capture()
    for _ in range(4):
        graph.replay()
        losses.append(loss.clone())
    same_bits(torch.stack(losses), torch.stack(expected), "losses")
    assert expected[-1] < expected[0]
    for (name, a), b in zip(model.named_parameters(), called.parameters(), strict=True):
        same_bits(a.detach(), b.detach(), name)


@gpu
@named(KINDS)
def test_fault_17_compiled_gives_the_same_bits(case: Case) -> None:
    torch._dynamo.reset()
    x = small(case)
    wanted = laws.evaluate(run_op, case, x, impl_of(case))
    compiled = torch.compile(lambda x: run_op(case, x, impl_of(case)), fullgraph=True, backend="aot_eager")
    assert_same(laws.evaluate(lambda case, x: compiled(x), case, x), wanted)


@gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_fault_17_a_layer_compiled_by_inductor(packed: bool) -> None:
    """Beside the layer as it is called: both round, in other places."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = GatedDeltaNet(64, 2).to(BF16)
    x = torch.randn(1, 100, 64).to(BF16)
    options = {"cu_seqlens": torch.tensor([0, 30, 30, 100])} if packed else {}

    def run(call: Any, x: Tensor, parameters: Any, options: dict[str, Any]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = call(x, **options)
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))]

    layer.double()
    exact = run(layer, x.double(), layer.parameters(), options)
    layer.to(DEVICE, BF16)
    x, options = x.to(DEVICE), {name: t.to(DEVICE) for name, t in options.items()}
    plain = run(layer, x, layer.parameters(), options)
    found = run(torch.compile(layer, fullgraph=True), x, layer.parameters(), options)
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    for name, got, reference, baseline in zip(names, found, exact, plain, strict=True):
        assert_within_budget(name, got, reference.to(DEVICE), baseline, BF16, 2 * STAGES)


@gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@named(KINDS)
def test_fault_17_opcheck(case: Case, packed: bool) -> None:
    lengths = (40, 0, 3, 30) if packed else None
    case = replace(case, B=1 if packed else 2, T=73 if packed else 40, lengths=lengths)
    x = {name: t.requires_grad_() for name, t in small(case).items()}
    packing = None if lengths is None else Packing.from_lengths(lengths, DEVICE)
    names = ("k", "a", "b", "beta", "log_decay", "initial_state")
    tensors = {name: x.get(name) for name in names} | (
        {"a": x["erase"], "b": x["write"], "k": None, "beta": None} if case.rule == "untied" else {}
    )
    call = RecurrenceCall(
        q=x["q"],
        v=x["v"],
        **tensors,
        packing=packing,
        scale=0.5,
        read_before=case.rule == "read_before",
        value_decay=case.gate == "value",
    )
    chosen = flashmix.explain(run_op, case, x).choice if impl_of(case) == "auto" else "triton"
    empty = torch.empty  # what is kept has places that no kernel writes or reads
    with mock.patch.object(torch, "empty", lambda *shape, **options: empty(*shape, **options).zero_()):
        torch.library.opcheck(RECURRENCE.operator, (*RECURRENCE.flat(call), True, chosen))


@gpu
@named(KINDS)
def test_autocast_lowers_the_operands_and_keeps_gates_and_states(case: Case) -> None:
    x = small(case, torch.float32)
    with torch.autocast(DEVICE, dtype=BF16):
        got = laws.evaluate(run_op, case, x, impl_of(case), dtype=BF16)
    kept = ("beta", "log_decay", "initial_state")
    expected = laws.evaluate(run_op, case, {n: t if n in kept else t.to(BF16) for n, t in x.items()}, impl_of(case))
    assert got["o"].dtype == BF16 and got["state"].dtype == torch.float32
    for name, t in expected.items():
        same_bits(got[name], t.to(got[name].dtype), name)


@gpu
@named([*KINDS, LONG])
def test_checkpointing_gives_the_same_gradients(case: Case) -> None:
    x = small(case)
    expected = laws.evaluate(run_op, case, x, impl_of(case))

    def again(case: Case, x: Results) -> Any:
        return checkpoint(lambda: run_op(case, x, impl_of(case)), use_reentrant=False)

    assert_same(laws.evaluate(again, case, x), expected)


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@gpu
@named([Case(f"delta-{gate}", "delta", gate, B=1, T=200, H=2, HV=2, K=64, V=64) for gate in ("token", "channel")])
def test_float32_honours_the_precision_of_matrix_products(case: Case, matmul_precision: None) -> None:
    x = make_inputs(case, torch.float32)
    exact, plain = references(case, x)
    errors: dict[str, list[float]] = {}
    for precision, step in (
        ("highest", 2.0**-23),
        ("high", 2.0**-21),
        ("medium", 2.0**-10),
    ):  # of float32, tf32x3, tf32
        torch.set_float32_matmul_precision(precision)
        found = laws.evaluate(run_op, case, {name: t.to(DEVICE) for name, t in x.items()}, "triton")
        errors[precision] = []
        for name, got in found.items():
            error = relative_errors(got.cpu(), exact[name])[0]
            steps = 2 * STAGES if name.startswith("d") else STAGES
            assert error <= 2 * relative_errors(plain[name], exact[name])[0] + steps * step, (precision, name, error)
            errors[precision].append(error)
    for low, high, highest in zip(errors["medium"], errors["high"], errors["highest"], strict=True):
        assert low > 8 * max(high, highest), "the products do not change with the setting"


@gpu
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float16, torch.float64], ids=str)
@named([case for case in KINDS if "log_decay" in make_inputs(case, BF16)])
def test_gates_of_any_dtype(case: Case, gate_dtype: torch.dtype) -> None:
    """The bits of the same numbers in float32; gradients come in the dtype of the gate."""
    x = small(case)
    gates = {name: x[name].to(BF16).to(gate_dtype) for name in ("beta", "log_decay") if name in x}
    found, wanted = (results(case, x | {n: t.to(d) for n, t in gates.items()}) for d in (gate_dtype, torch.float32))
    assert found["state"].dtype == torch.float32 and found["o"].dtype == BF16
    for name, t in wanted.items():
        if name.removeprefix("d") in gates:
            assert found[name].dtype == gate_dtype
            assert relative_errors(found[name], t)[1] <= max(
                torch.finfo(gate_dtype).eps, torch.finfo(torch.float32).eps
            )
        else:
            same_bits(found[name], t, name)


@gpu
def test_states_are_float32() -> None:
    x = small(KINDS[2])
    for dtype in (BF16, torch.float64):
        with pytest.raises(TypeError, match="initial_state must"):
            run_op(KINDS[2], x | {"initial_state": x["initial_state"].to(dtype)}, "triton")


@pytest.mark.parametrize(
    "dtype, device, reason",
    [
        (torch.float32, "cpu", "it needs tensors on a CUDA device, got cpu"),
        (torch.float64, "cpu", "its kernels take float32, bfloat16 and float16, got torch.float64"),
        pytest.param(
            torch.float64, "cuda", "its kernels take float32, bfloat16 and float16, got torch.float64", marks=gpu
        ),
    ],
    ids=str,
)
@named(KINDS)
def test_what_the_kernels_refuse_in_words(case: Case, dtype: torch.dtype, device: str, reason: str) -> None:
    x = {name: t.to(device) for name, t in make_inputs(case, dtype).items()}
    with pytest.raises(ValueError, match=rf"^impl='triton' cannot run this: {reason}"):
        run_op(case, x, "triton")
    assert flashmix.explain(run_op, case, x).choice in ("native", "portable")


GUARD = 1 << 16


def guarded(found: list[Tensor]) -> Callable[..., Any]:
    """A `torch.empty` whose memory has a guard on both sides; `found` are the buffers."""
    empty = torch.empty

    def allocate(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, **options: Any) -> Tensor:
        shape = shape or (options["size"],)
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = dtype.itemsize
        for size in sizes:
            count *= size
        buffer = empty(count + 2 * GUARD, dtype=torch.uint8, device=device).fill_(0xFF)
        buffer[:GUARD], buffer[GUARD + count :] = 0x5A, 0x5A
        found.append(buffer)
        return buffer[GUARD : GUARD + count].view(dtype).view(sizes)

    return allocate


@contextmanager
def parts_apart(allocate: Callable[..., Any]) -> Iterator[None]:
    """The kernels of Hopper cards divide an allocation: within, each part is one of its own."""
    if card.hopper_refuses(torch.device(DEVICE), BF16, (BF16,)) is not None:
        yield
        return
    made: dict[int, list[Tensor]] = {}

    def views(memory: Tensor | None, parts: Any) -> list[Tensor]:
        if memory is None:
            return []
        key = memory.data_ptr()
        if key not in made:
            made[key] = [allocate(part.shape, dtype=part.dtype, device=memory.device) for part in parts]
        return made[key]

    with mock.patch.object(import_module("flashmix.ops.recurrence.gluon_hopper"), "views", views):
        yield


CORRUPT = [[0, 500, 100, 700], [-5, 300, 2**40, 700], [2**62, -(2**62), 1, 0], [700, 0, 700, 0], [3, 3, 3, 3]]


@gpu
@pytest.mark.parametrize("boundaries", CORRUPT, ids=str)
@named(KINDS)
def test_corrupt_boundaries_stay_inside(case: Case, boundaries: list[int]) -> None:
    """Nothing is written around any tensor; compute-sanitizer sees the reads."""
    packed = replace(case, B=1, T=700, lengths=(0, 0, 700))
    x = small(packed)
    copies, buffers, cu = {n: t.clone() for n, t in x.items()}, [], torch.tensor(boundaries, device=DEVICE)
    allocate = guarded(buffers)
    likes = {
        "empty": allocate,
        "empty_like": lambda t, dtype=None: allocate(t.shape, dtype=dtype or t.dtype, device=t.device),
        "zeros": lambda *shape, **options: allocate(*shape, **options).zero_(),
    }
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    with mock.patch.multiple(torch, **likes), parts_apart(allocate):
        o, state = run_op(packed, leaves, impl_of(case), cu)
        torch.autograd.grad([o, state], list(leaves.values()), [o.detach(), state.detach()])
    assert len(buffers) > 2 + len(leaves)  # of results, and of what they are made in
    for buffer in buffers:
        assert bool((buffer[:GUARD] == 0x5A).all()) and bool((buffer[-GUARD:] == 0x5A).all())
    assert_same(x, copies)
