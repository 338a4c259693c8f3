"""The steps on a GPU: every case, graphs, batches of any size, pools past 2^31 numbers, indices that are no slots."""

from __future__ import annotations

import pytest
import test_delta_net_step as layer
import test_step as plain
import torch
from budget import assert_within_budget, relative_errors
from model_cases import WIDTH, make_layer, numbers
from rowwise_cases import nothing_waits
from step_cases import CASES, StepCase, make_history, make_inputs, run_op
from torch import Tensor

import flashmix
from flashmix.ops.recurrence.step.op import STEPS

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: StepCase) -> None:
    plain.check(case, torch.float32, "triton", "cuda")
    if case in plain.HALF:
        for dtype in HALF:
            plain.check(case, dtype, "triton", "cuda")
        plain.check(case, torch.bfloat16, "triton", "cuda", torch.bfloat16)
        plain.check(case, torch.float32, "portable", "cuda")


@pytest.mark.parametrize("case", layer.CASES, ids=lambda case: case.name)
def test_every_case_of_a_layer(case: layer.Case) -> None:
    for dtype in (torch.float32, *HALF):
        layer.check(case, dtype, "triton", "cuda")


def on_gpu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in x.items()}


def both(B: int, slots: tuple[int, ...] | None = None, pool: int = 5) -> list:
    """A call of a step and one of a layer's step: functions that run it and give all it writes."""
    step = StepCase("", "delta", "channel", B=B, K=64, V=64, slots=slots, pool=pool, T=2, kept=2)
    whole = layer.Case("", "channel", "sigmoid", B=B, HV=4, K=64, V=64, slots=slots, pool=pool)
    x, y = on_gpu(make_inputs(step, torch.bfloat16)), on_gpu(layer.make_inputs(whole, torch.bfloat16))
    history = make_history(step, x)

    def run_step() -> list[Tensor]:
        return [run_op(step, x, "triton", history), x["state"], history]  # type: ignore[list-item]

    def run_layer() -> list[Tensor]:
        o = flashmix.delta_net_step(**y, **layer.options(whole), impl="triton")  # type: ignore[arg-type]
        return [o, y["state"], y["conv_state"]]

    return [run_step, run_layer]


@pytest.mark.parametrize("slots", [None, (3, -1, 0)], ids=str)
def test_a_graph_replays_what_calls_do(slots: tuple[int, ...] | None) -> None:
    for called, captured in zip(both(3, slots), both(3, slots), strict=True):
        expected = [[t.clone() for t in called()] for _ in range(4)]
        got = [t.clone() for t in captured()]  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = captured()
        for wanted in expected[1:]:
            for t, w in zip(got, expected[0], strict=True):
                assert torch.equal(t, w)
            graph.replay()
            for t, w in zip(outputs, wanted, strict=True):
                assert torch.equal(t, w)


def test_nothing_waits_for_the_device() -> None:
    runs = both(3, (3, -1, 0))
    for run in runs:
        run()
    with nothing_waits():
        for run in runs:
            run()


@pytest.mark.parametrize("batch", [1, 64, 256, 257, 1024, 4096])
def test_a_sequence_has_the_same_bits_in_any_batch(batch: int) -> None:
    case = StepCase("", "delta", "token", B=batch, H=2, HV=4, K=64, V=48)
    x = on_gpu(make_inputs(case, torch.bfloat16))
    n = batch // 2
    alone = {name: t[n : n + 1].clone() for name, t in x.items()}
    o = run_op(case, x)
    assert torch.equal(run_op(case, alone), o[n : n + 1]) and torch.equal(alone["state"], x["state"][n : n + 1])
    whole = layer.Case("", "token", B=batch, H=2, HV=2, K=64, V=48)
    y = on_gpu(layer.make_inputs(whole, torch.bfloat16))
    same = ("conv_weight", "A_log", "dt_bias", "norm_weight")
    alone = {name: t if name in same else t[n : n + 1].clone() for name, t in y.items()}
    o = flashmix.delta_net_step(**y, **layer.options(whole))  # type: ignore[arg-type]
    assert torch.equal(flashmix.delta_net_step(**alone, **layer.options(whole)), o[n : n + 1])  # type: ignore[arg-type]
    assert torch.equal(alone["state"], y["state"][n : n + 1])


@pytest.mark.parametrize("batch, heads", [(10923, 6), (50000, 4)])
def test_more_heads_than_a_grid_has_rows(batch: int, heads: int) -> None:
    case = StepCase("", "delta", "channel", B=batch, H=heads, HV=heads, K=16, V=16)
    x = on_gpu(make_inputs(case, torch.bfloat16))
    last = {name: t[-2:].clone() for name, t in x.items()}
    o = run_op(case, x)
    assert torch.equal(run_op(case, last), o[-2:]) and torch.equal(last["state"], x["state"][-2:])


def test_a_pool_of_more_than_two_to_the_31_numbers() -> None:
    pool, K = 4200, 128
    case = StepCase("", "delta", "token", B=2, H=4, HV=32, K=K, V=K)
    x = on_gpu(make_inputs(case, torch.bfloat16))
    whole = torch.zeros(pool, 32, K, K, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pool - 1, pool // 2 + 7], device="cuda")
    whole[slots] = x["state"].bfloat16()
    x["state"] = x["state"].bfloat16()
    o = run_op(case, x | {"state": whole, "state_indices": slots})
    assert torch.equal(run_op(case, x), o) and torch.equal(whole[slots], x["state"])
    assert torch.equal(whole.any(-1).any(-1).any(-1).nonzero()[:, 0], slots.sort().values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_that_are_no_slots_are_idle(dtype: torch.dtype) -> None:
    case = StepCase("", "delta", "token", B=6, slots=(0, 1, 2, 3, 4, -1))
    x = on_gpu(make_inputs(case, torch.float32))
    limits = torch.iinfo(dtype)
    x["state_indices"] = torch.tensor([2, 5, -2, limits.max, limits.min, 10**9], dtype=dtype, device="cuda")
    before = x["state"].clone()
    o = run_op(case, x)
    assert o[0].any() and not o[1:].any()
    assert torch.equal(x["state"][[0, 1, 3, 4]], before[[0, 1, 3, 4]]) and not torch.equal(x["state"][2], before[2])


def test_calls_after_the_first_take_the_short_way_and_give_the_same() -> None:
    STEPS.known.clear()
    expected = [[t.clone() for t in run()] for run in both(2)]
    assert len(STEPS.known) == 1
    for run, wanted in zip(both(2), expected, strict=True):
        for t, w in zip(run(), wanted, strict=True):
            assert torch.equal(t, w)
    x = on_gpu(make_inputs(StepCase("", "delta", "channel", K=64, V=64, T=2), torch.bfloat16))
    odd = torch.empty(x["state"].numel() + 1, device="cuda")[1:].view_as(x["state"]).copy_(x["state"])
    case = StepCase("", "delta", "channel", K=64, V=64, T=2)
    for _ in range(2):  # four bytes off: not what was compiled
        torch.testing.assert_close(run_op(case, x | {"state": odd}), run_op(case, x))
        torch.testing.assert_close(odd, x["state"])
    with pytest.raises(ValueError, match="state must be on"):
        run_op(case, x | {"state": x["state"].cpu()})


def test_compiled_by_inductor() -> None:
    case = StepCase("", "delta", "token", K=64, V=64)
    x = on_gpu(make_inputs(case, torch.bfloat16))
    other = {n: t.clone() for n, t in x.items()}
    compiled = torch.compile(lambda x: run_op(case, x).float().square(), fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), run_op(case, other).float().square())
            assert torch.equal(x["state"], other["state"])


def test_another_stream_and_repeats_give_the_same_bits() -> None:
    case = StepCase("", "delta", "token", B=3, K=128, V=128)
    inputs = on_gpu(make_inputs(case, torch.bfloat16))
    results = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                x = {n: t.clone() for n, t in inputs.items()}
                results.append((run_op(case, x), x["state"]))
        torch.cuda.synchronize()
    for o, state in results:
        assert torch.equal(o, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.parametrize(
    "name", ["retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "kda_bounded", "rwkv7"]
)
def test_layers_decode_what_they_read_at_once(name: str) -> None:
    """Token by token on the GPU, in float32, against all at once on the CPU in float64; beside it, the CPU in float32."""
    x = numbers(2, 9, WIDTH)
    with torch.no_grad():
        exact = make_layer(name)(x)
        plain = make_layer(name, torch.float32)(x.float())
        layer = make_layer(name, torch.float32).cuda()
        cache = layer.new_cache()
        got = torch.cat([layer(part, cache=cache) for part in x.float().cuda().split(1, dim=1)], 1)
    steps = torch.finfo(torch.float32).eps * x.shape[1]  # a rounding a token: they are summed in another order
    assert relative_errors(got.cpu(), exact)[0] <= 2 * relative_errors(plain, exact)[0] + 4 * steps


@pytest.mark.parametrize("gate", plain.GATES)
@pytest.mark.parametrize("rule", ["linear", "delta", "untied", "dplr"])
def test_step_to_a_new_state(rule: str, gate: str) -> None:
    from flashmix.ops.recurrence.step.triton_gpu import step

    for states in (True, False):
        x = plain.operands(rule, gate, states, torch.float32)
        exact = plain.portable_step(plain.operands(rule, gate, states, torch.float64), torch.float64)
        baseline = plain.portable_step(x, torch.float32)
        on_card = x.but(**{n: t.cuda() for n, t in vars(x).items() if isinstance(t, Tensor)})
        for name, got, e, b in zip(("o", "state"), step(on_card), exact, baseline, strict=True):
            assert_within_budget(name, got.cpu(), e, b, steps=plain.STAGES)
