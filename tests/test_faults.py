"""The faults that users of other libraries met, one test each, as far as they can happen without a GPU.

Numbers and names follow the list of faults in the issue trackers of flash-linear-attention, flash-attention, vLLM and
transformers. Each test fails where the fault is.

On a GPU those of the row-wise kernels are at the end, those of attention in test_attention_gpu.py, those of the recurrence in
test_recurrence_gpu_limits.py (sizes, packs, calls) and test_recurrence_gpu_laws.py (the same bits by every way). To come with
the adapters: 16 (another version of transformers).
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import LAYERS, WIDTH, assert_same, left_padded, make_layer, make_model, numbers, some_tokens
from rowwise_cases import nothing_waits
from samples import sample
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import flashmix
from flashmix import doctor, layers, models, modules
from flashmix.capabilities import public_ops, tiny_call
from flashmix.layer import padding
from flashmix.mechanisms.registry import functions
from flashmix.ops import recurrence
from flashmix.ops.attention import definition as attention_definition
from flashmix.ops.losses.portable.head import HeadGradients
from flashmix.ops.recurrence import definition as recurrence_definition

OPS = public_ops()
MECHANISMS = [name for name in OPS if name in functions()]
RECURRENCES = ("linear_attention", "delta_rule", "dplr")
LOSSES = ("cross_entropy", "linear_cross_entropy", "linear_kl_divergence", "linear_grpo")
WITHOUT_GRADIENT = ("attention_with_cache", "linear_attention_step", "delta_rule_step", "dplr_step", "delta_net_step")
WITHOUT_GRADIENT += ("scan_max", "scan_step", "selective_scan_step")
STATEFUL = [op for op in OPS if "initial_state" in inspect.signature(OPS[op]).parameters]
HOST_LENGTHS = {
    "momentum_deltanet",
    "titans_linear",
    "ttt_linear",
}  # their rows are as long as the longest sequence: no one graph for all
PACKED = [op for op in OPS if "cu_seqlens" in inspect.signature(OPS[op]).parameters and op != "attention_with_cache"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random tensors are the same in any order of the tests."""
    torch.manual_seed(0)


def outputs(op: str, call: dict[str, Any], run: Callable[..., Any] | None = None) -> list[Tensor]:
    """All tensors that the op, or a compiled one (`run`), returns."""
    got = (run or OPS[op])(**call)
    if op == "short_conv_qkv":  # one output, then the state
        got = (torch.cat(got[:3], -1), got[3])
    parts = [got] if isinstance(got, Tensor) else [t for t in got if t is not None]
    return [t for part in parts for t in ([part] if isinstance(part, Tensor) else part)]  # several states are a tuple


def as_state(states: list[Tensor]) -> Any:
    """What an op takes as `initial_state`."""
    return states[0] if len(states) == 1 else tuple(states)


def floating(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in call.items() if isinstance(t, Tensor) and t.is_floating_point()}


def with_gradients(op: str, call: dict[str, Any], tokens: int | None = None) -> dict[str, Tensor]:
    """Outputs and gradients of the floating arguments by name, if it has any; what flows back stops after `tokens`."""
    if op in WITHOUT_GRADIENT:
        return {f"output {i}": t for i, t in enumerate(outputs(op, call))}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in floating(call).items() if "teacher" not in name}
    found = outputs(op, call | leaves)
    flow = torch.ones_like(found[0])
    if tokens is not None:
        flow[:, tokens:] = 0
    flows = [flow, *(torch.ones_like(t) for t in found[1:])]
    pairs = [(t, back) for t, back in zip(found, flows, strict=True) if t.requires_grad]  # a running maximum has none
    grads = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [back for _, back in pairs])
    return {f"output {i}": t.detach() for i, t in enumerate(found)} | dict(zip(leaves, grads, strict=True))


def per_token(op: str, call: dict[str, Any]) -> set[str]:
    """The arguments with one entry a token."""
    other = tiny_call(op, tokens=3)
    return {
        name for name, t in call.items() if isinstance(t, Tensor) and name in other and t.shape != other[name].shape
    }


def all_finite(found: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in found.values())


def some_decay(*shape: int) -> Tensor:
    return -torch.rand(shape)


@pytest.mark.parametrize("op", [*STATEFUL, "softmax_attention"])
def test_fault_04_empty_and_very_short_sequences(op: str) -> None:
    lengths = (0, 1, 2, 63, 0, 64, 65, 0)
    call = tiny_call(op, torch.float64, tokens=sum(lengths)) | ({"causal": True} if op == "softmax_attention" else {})
    tokens = per_token(op, call)
    if op in STATEFUL:
        shapes = [t.shape[1:] for t in outputs(op, tiny_call(op) | {"return_state": True})[1:]]
        states = [torch.rand(len(lengths), *shape, dtype=torch.float64) for shape in shapes]
        call |= {"return_state": True, "initial_state": as_state(states)}
    packed = with_gradients(op, call | {"cu_seqlens": torch.tensor([0, *accumulate(lengths)])})
    assert all_finite(packed)
    for n, (first, last) in enumerate(pairwise([0, *accumulate(lengths)])):
        alone = {name: t[:, first:last] if name in tokens else t for name, t in call.items()}
        if op in STATEFUL:
            alone["initial_state"] = as_state([t[n : n + 1] for t in states])
        o, *state = outputs(op, alone)
        torch.testing.assert_close(packed["output 0"][:, first:last], o)
        for place, after in enumerate(state):
            whole = packed[f"output {place + 1}"]
            torch.testing.assert_close(whole[n : n + 1], after)
            assert last > first or torch.equal(whole[n], states[place][n])


@pytest.mark.parametrize("K, V", [(1, 7), (7, 1), (8, 24), (24, 8), (80, 96), (96, 80), (100, 200), (200, 100)])
def test_fault_05_dims_that_are_no_power_of_two(K: int, V: int) -> None:
    q, k, a, b = (torch.randn(1, 5, 2, K, dtype=torch.float64) / K**0.5 for _ in range(4))
    v, beta = torch.randn(1, 5, 2, V, dtype=torch.float64), torch.rand(1, 5, 2, dtype=torch.float64)
    for op, extra in (("linear_attention", ()), ("delta_rule", (beta,)), ("dplr", (a, b))):
        wanted = getattr(recurrence_definition, op)(q, k, v, *extra)
        names = list(inspect.signature(OPS[op]).parameters)
        found = with_gradients(op, dict(zip(names, (q, k, v, *extra), strict=False)) | {"return_state": True})
        assert all_finite(found)
        torch.testing.assert_close(found["output 0"], wanted[0])
        torch.testing.assert_close(found["output 1"], wanted[1])


@pytest.mark.parametrize("tokens, ends", [(1, None), (2, None), (7, [0, 1, 3, 3, 7]), (3, [0, 1, 2, 3])])
def test_fault_06_gradients_of_a_convolution_wider_than_the_sequence(tokens: int, ends: list[int] | None) -> None:
    count = 1 if ends is None else len(ends) - 1
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, tokens, 3), (3, 4), (3,), (count, 3, 3))
    ]
    cu_seqlens = None if ends is None else torch.tensor(ends)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        return flashmix.short_conv(x, weight, bias, initial_state=state, return_state=True, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(convolve, inputs)


@pytest.mark.parametrize("decay", [0.0, -20.0, -1e4, -torch.inf])
@pytest.mark.parametrize("op", [*RECURRENCES, "softmax_attention"])
def test_fault_07_strong_decay(op: str, decay: float) -> None:
    shapes = {"token": (1, 70, 2), "channel": (1, 70, 2, 8)}
    for shape in [shapes["token"]] if op == "softmax_attention" else shapes.values():
        call = tiny_call(op, tokens=70) | {"log_decay": torch.full(shape, decay)}
        call |= {"causal": True} if op == "softmax_attention" else {"return_state": True}
        found = with_gradients(op, call)
        assert all_finite(found)
        if decay == -torch.inf and op == "linear_attention":  # nothing but the token itself
            q, k, v = (call[name] for name in ("q", "k", "v"))
            own = (q * k).sum(-1, keepdim=True) * 8**-0.5 * v
            torch.testing.assert_close(found["output 0"], own)
            torch.testing.assert_close(found["output 1"], k[:, -1, :, :, None] * v[:, -1, :, None, :])
        some = tiny_call(op, tokens=70) | {"log_decay": some_decay(*shape).masked_fill(torch.rand(shape) < 0.2, decay)}
        assert all_finite(with_gradients(op, call | some))


@pytest.mark.parametrize("op", [*STATEFUL, "softmax_attention"])
def test_fault_08_earlier_outputs_depend_on_later_gates(op: str) -> None:
    """Bit for bit, outputs and gradients; the change falls into the middle of a chunk."""
    before, after = 40, 70
    call = tiny_call(op, tokens=after)
    if op in RECURRENCES:
        call["log_decay"] = some_decay(1, after, 2, 8)
    call |= {"causal": True, "log_decay": some_decay(1, after, 2)} if op == "softmax_attention" else {}
    tokens = per_token(op, call) | ({"log_decay"} & set(call))
    later = dict(call)
    for name in tokens:
        factor = 1e4 if name in ("log_decay", "log_forget", "dt") else 0.5
        later[name] = torch.cat([call[name][:, :before], factor * call[name][:, before:].flip(1)], 1)
    first, second = (with_gradients(op, one, tokens=before) for one in (call, later))
    for name in first.keys() & {"output 0", *tokens}:
        assert torch.equal(first[name][:, :before], second[name][:, :before]), name


@pytest.mark.parametrize("op", [op for op in OPS if op not in WITHOUT_GRADIENT])
def test_fault_09_a_sequence_depends_on_the_rest_of_the_batch(op: str) -> None:
    call = tiny_call(op, tokens=37) | ({"reduction": "none"} if op in LOSSES else {})
    if op in ("rotary", "rotary_qk"):
        call |= dict(zip(("cos", "sin"), flashmix.rotary_table(64, 8), strict=True))
    rows = {name for name, t in call.items() if isinstance(t, Tensor) and t.shape[0] == 1}
    batch = {name: torch.cat([t.flip(-1), t, t.flip(-1)]) if name in rows else t for name, t in call.items()}
    alone, together = with_gradients(op, call), with_gradients(op, batch)
    for name, t in alone.items():
        if name in rows or name.startswith("output"):
            assert torch.equal(together[name][1:2], t), name


@pytest.mark.parametrize("op", OPS)
def test_fault_10_no_gradient_silently(op: str) -> None:
    """One token or some, with a state or without: the output has a gradient, or the op raises."""
    for tokens in (1, 6):
        call = tiny_call(op, tokens=tokens)
        if op in STATEFUL:
            call["initial_state"] = as_state(outputs(op, call | {"return_state": True})[1:])
        for name in [name for name in floating(call) if "teacher" not in name]:
            one = call | {name: call[name].clone().requires_grad_()}
            if op in WITHOUT_GRADIENT:
                with pytest.raises(RuntimeError, match="has no gradient"):
                    outputs(op, one)
            else:
                (grad,) = torch.autograd.grad(sum(t.square().sum() for t in outputs(op, one)), one[name])
                assert grad.shape == one[name].shape


@pytest.mark.parametrize("name", LAYERS)
def test_fault_10_no_gradient_in_eval_mode(name: str) -> None:
    layer, x = make_layer(name), numbers(1, 8, WIDTH).requires_grad_()
    trained = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()], allow_unused=True)
    evaluated = torch.autograd.grad(layer.eval()(x).sum(), [x, *layer.parameters()], allow_unused=True)
    assert trained[0].count_nonzero()
    for a, b in zip(trained, evaluated, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


# Others of their kinds with `-m whole`: what a mechanism adds to its op is row by row.
COMPILED_PACKED = (*("delta_rule", "gla", "mamba2", "rotary", "scan", "short_conv", "softmax_attention"),)


@pytest.mark.parametrize("op", sample([op for op in PACKED if op not in HOST_LENGTHS], COMPILED_PACKED))
def test_fault_11_13_and_23_packing_recompiles_reads_boundaries_or_leaves_tokens_uninitialised(op: str) -> None:
    """One graph without a break (a break is what reading a boundary gives), the same for any boundaries, those that end too soon too."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(OPS[op], fullgraph=True, backend=counter)
    for ends in ([0, 2, 6], [0, 0, 6], [0, 5, 6]):
        call = tiny_call(op) | {"cu_seqlens": torch.tensor(ends)}
        got, want = compiled(**call), OPS[op](**call)
        torch.testing.assert_close(*(t if isinstance(t, Tensor) else t[0] for t in (got, want)))
    boundaries_that_end_too_soon(op, compiled)
    assert counter.frame_count == 1
    for ends in ([0, 2, 4, 6], [0, 1, 2, 3, 6], [0, 1, 2, 3, 4, 6], [0, 0, 0, 0, 0, 0, 6]):
        compiled(**tiny_call(op) | {"cu_seqlens": torch.tensor(ends)})
    assert counter.frame_count <= 2, "once more, for any number of sequences"


def boundaries_that_end_too_soon(op: str, compiled: Callable[..., Any]) -> None:
    """Fault 23. On the CPU they are an error; compiled, where they are not read, an error or zeros."""
    call = tiny_call(op) | {"cu_seqlens": torch.tensor([0, 3, 5])}
    with pytest.raises(ValueError, match=r"cu_seqlens must end at the token count 6, got 5"):
        outputs(op, call)
    try:
        got = outputs(op, call, compiled)[0]
    except (ValueError, RuntimeError) as error:
        assert "cu_seqlens must end at the token count" in str(error)
    else:
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got[:, :5], outputs(op, trimmed(op, call))[0])
        assert op in ("rotary", "rotary_qk", "short_conv", "short_conv_qkv", "token_shift") or not got[:, 5:].any()


def test_fault_14_a_mask_replaces_boundaries_or_padding_is_removed_in_every_layer(monkeypatch: Any) -> None:
    mask, ends = torch.ones(1, 6, dtype=torch.bool), torch.tensor([0, 2, 6])
    model = make_model("hybrid")
    for call, x in ((make_layer("gla"), numbers(1, 6, WIDTH)), (model, some_tokens(1, 6))):
        with pytest.raises(ValueError, match="attention_mask and cu_seqlens must not both be given"):
            call(x, attention_mask=mask, cu_seqlens=ends)
    assert ends.tolist() == [0, 2, 6]
    made: list[Tensor] = []
    unpatched = padding.Padding.__init__
    monkeypatch.setattr(padding.Padding, "__init__", lambda self, mask: (made.append(mask), unpatched(self, mask))[1])
    model(some_tokens(2, 6), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]))
    assert len(made) == 1 and len(model.blocks) > 1


@pytest.mark.parametrize("name", ["hybrid", "rwkv7"])
def test_fault_15_cache_with_windows_masks_padding_and_continued_prompts(name: str) -> None:
    model = make_model(name)
    rows = [some_tokens(1, length, seed=length) for length in (9, 4, 1)]
    prompts, mask = left_padded(rows)
    steps, longer = some_tokens(3, 3, seed=2), some_tokens(3, 5, seed=3)
    new = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)
    with torch.no_grad():
        cache = model.new_cache()
        got = [model(prompts.long(), attention_mask=mask, cache=cache)[:, -1:]]
        got += [model(steps[:, t : t + 1], cache=cache) for t in range(3)]
        last = model(longer, attention_mask=new, cache=cache)
        for n, row in enumerate(rows):
            full = model(torch.cat([row, steps[n : n + 1], longer[n : n + 1, new[n]]], 1))
            seen = row.shape[1] - 1
            assert_same(torch.cat(got, 1)[n], full[0, seen : seen + 4])
            assert_same(last[n, new[n]], full[0, seen + 4 :])


def test_fault_17_compiled_results_are_wrong_or_overwritten() -> None:
    torch._dynamo.reset()

    compiled = torch.compile(
        lambda call: flashmix.gated_deltanet(**call)[0].square(), fullgraph=True, backend="aot_eager"
    )
    calls = [tiny_call("gated_deltanet"), tiny_call("gated_deltanet") | {"v": torch.randn(1, 6, 2, 8)}]
    first = compiled(calls[0])
    copy = first.clone()
    second = compiled(calls[1])
    assert torch.equal(first, copy) and not torch.equal(first, second)
    for got, call in ((first, calls[0]), (second, calls[1])):
        assert torch.equal(got, flashmix.gated_deltanet(**call)[0].square())


def test_fault_18_detection_fails_without_a_gpu(monkeypatch: Any) -> None:
    def absent(*args: Any) -> None:
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("device_count", "current_device", "get_device_properties", "get_device_capability", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, absent)
    assert "GPU: none" in doctor.report()
    assert all(outputs(op, tiny_call(op)) for op in OPS)


def test_fault_19_import_needs_cuda_triton_or_a_compiler() -> None:
    code = """
import sys
for name in ("triton", "transformers", "numpy", "matplotlib", "tokenizers", "tqdm"):
    sys.modules[name] = None
import torch, flashmix, flashmix.models
q = torch.zeros(1, 3, 2, 4)
print(tuple(flashmix.retnet(q, q, q)[0].shape))
"""
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 3, 2, 4)", done.stderr


def test_fault_20_mean_loss_under_accumulation_and_a_frozen_head(monkeypatch: Any) -> None:
    hidden, weight = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    target = torch.randint(12, (2, 6))
    target[0, :5] = -100  # the micro batches hold 1 and 6 targets
    mean = flashmix.linear_cross_entropy(hidden, weight, target)
    sums = [flashmix.linear_cross_entropy(h, weight, t, reduction="sum") for h, t in zip(hidden, target, strict=True)]
    torch.testing.assert_close(sum(sums) / 7, mean)

    computed: list[list[str]] = []
    gradients = HeadGradients.__init__
    monkeypatch.setattr(
        HeadGradients,
        "__init__",
        lambda self, head, wanted: (computed.append(list(wanted)), gradients(self, head, wanted))[1],
    )
    flashmix.linear_cross_entropy(hidden.requires_grad_(), weight, target).backward()
    assert hidden.grad is not None and weight.grad is None and computed == [["hidden"]]


def test_fault_21_rotary_with_the_models_dim_or_past_the_table() -> None:
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=r"D = 8 channels, got 8: a table for 16 channels"):
        flashmix.rotary(x, *flashmix.rotary_table(6, 16))
    cos, sin = flashmix.rotary_table(6, 8)
    for positions in (1, torch.arange(1, 7)[None]):
        with pytest.raises(ValueError, match=r"^positions must be below the table's length 6, got 6$"):
            flashmix.rotary(x, cos, sin, positions=positions)
    turned = flashmix.rotary(x, cos, sin, positions=torch.tensor([[5, 5, 5, 5, 5, 5]]))
    assert not torch.isclose(turned, x).all(-1).any(), "every row is turned"


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (3, 200), (40, 40), (100, 7), (192, 128), (256, 256)])
def test_fault_22_head_dims_are_refused(dim: int, dim_v: int) -> None:
    q, k = torch.randn(2, 1, 9, 2, dim, dtype=torch.float64)
    v = torch.randn(1, 9, 2, dim_v, dtype=torch.float64)
    for impl in ("auto", "portable"):
        found = with_gradients("softmax_attention", {"q": q, "k": k, "v": v, "causal": True, "impl": impl})
        wanted, _ = attention_definition.softmax_attention(q, k, v, scale=dim**-0.5, causal=True)
        torch.testing.assert_close(found["output 0"], wanted)
        assert all_finite(found)


def trimmed(op: str, call: dict[str, Any]) -> dict[str, Any]:
    tokens = per_token(op, call)
    return {name: t[:, :5] if name in tokens else t for name, t in call.items()}


@pytest.mark.parametrize("Tq, Tk", [(6, 6), (3, 7), (7, 3), (1, 5)])
def test_fault_24_windows_off_by_one_or_aligned_elsewhere(Tq: int, Tk: int) -> None:
    """With one-hot values and equal scores the output is the mask itself, row by row divided by its count."""
    q, k, v = torch.zeros(1, Tq, 1, 2), torch.zeros(1, Tk, 1, 2), torch.eye(Tk).view(1, Tk, 1, Tk)
    for causal in (False, True):
        for left in (None, 0, 1, 2):
            for right in (None, 0, 1):
                seen = torch.zeros(Tq, Tk)
                for i in range(Tq):
                    p = i + Tk - Tq
                    for j in range(Tk):
                        after = 0 if causal else right
                        seen[i, j] = (left is None or j >= p - left) and (after is None or j <= p + after)
                o, _ = flashmix.softmax_attention(q, k, v, causal=causal, window=(left, right), impl="portable")
                torch.testing.assert_close(o[0, :, 0], seen / seen.sum(1, keepdim=True).clamp(min=1))
    for window in ((-1, 0), (0, -1), (-1, -1)):
        with pytest.raises(ValueError, match="must be a non-negative int or None"):
            flashmix.softmax_attention(q, k, v, window=window)


def test_fault_25_lse_of_a_row_that_sees_nothing() -> None:
    q, k, v = (torch.randn(1, tokens, 2, 4, requires_grad=True) for tokens in (5, 2, 2))
    o, lse = flashmix.softmax_attention(q, k, v, causal=True, return_lse=True)
    assert lse is not None and (lse[:, :, :3] == -torch.inf).all() and torch.isfinite(lse[:, :, 3:]).all()
    assert not o[:, :3].any()
    grads = torch.autograd.grad([o.sum() + lse[:, :, 3:].sum()], [q, k, v])
    assert not grads[0][:, :3].any() and all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("op", [op for op in OPS if op not in (*MECHANISMS, *WITHOUT_GRADIENT)])
def test_fault_26_results_that_are_not_reproducible(op: str) -> None:
    torch.set_num_threads(2)
    call = tiny_call(op, tokens=12)
    first = with_gradients(op, call)
    for _ in range(3):
        for name, t in with_gradients(op, call).items():
            assert torch.equal(t, first[name]), name


@pytest.mark.parametrize("op", OPS)
def test_fault_27_inputs_that_are_not_contiguous(op: str) -> None:
    def strided(t: Tensor) -> Tensor:
        return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]

    def transposed(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    def expanded(t: Tensor) -> Tensor:
        return t[:1].expand(t.shape)

    for change in (strided, transposed, expanded):
        plain, odd = tiny_call(op), tiny_call(op)
        for name, t in floating(odd).items():
            odd[name] = change(t)
            plain[name] = odd[name].clone(memory_format=torch.contiguous_format)
        for got, wanted in zip(outputs(op, odd), outputs(op, plain), strict=True):
            assert torch.equal(got, wanted), change.__name__


def test_fault_28_gradients_through_lse_sink_slopes_and_biases() -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, slopes: Tensor, decay: Tensor) -> Any:
        options = {"sink": sink, "alibi_slopes": slopes, "log_decay": decay}
        return flashmix.softmax_attention(q, k, v, causal=True, return_lse=True, **options)

    inputs = [leaf(1, 4, 2, 2), leaf(1, 4, 1, 2), leaf(1, 4, 1, 3), leaf(2), leaf(2), leaf(1, 4, 2)]
    assert torch.autograd.gradcheck(attend, inputs)
    target = torch.tensor([1, 0, 2])
    assert torch.autograd.gradcheck(
        lambda h, w, b: flashmix.linear_cross_entropy(h, w, target, bias=b, z_loss=0.1),
        [leaf(3, 2), leaf(4, 2), leaf(4)],
    )


@pytest.mark.parametrize("batch", [1, 256, 257])
def test_fault_29_decoding_a_large_batch(batch: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(batch, 1, 4, 8, generator=generator) for _ in range(3))
    beta, decay = torch.rand(batch, 1, 4, generator=generator), -torch.rand(batch, 1, 4, generator=generator)
    state = torch.randn(batch, 4, 8, 8, generator=generator)
    o, last = flashmix.delta_rule(q, k, v, beta, decay, initial_state=state, return_state=True)
    assert last is not None
    for n in {0, batch // 2, batch - 1}:
        row = slice(n, n + 1)
        part = (t[row] for t in (q, k, v, beta, decay))
        alone, alone_state = flashmix.delta_rule(*part, initial_state=state[row], return_state=True)
        assert torch.equal(o[row], alone) and alone_state is not None and torch.equal(last[row], alone_state)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 256, 257, 1024, 4096])
def test_fault_29_decoding_a_large_batch_on_a_gpu(batch: int) -> None:
    """The step where the fault was met, and the step of a whole layer: each sequence as if it were alone."""
    heads, D = (32, 128) if batch <= 1024 else (8, 128)
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x = {name: normal(batch, 1, heads, D).bfloat16() for name in ("q", "k", "v")}
    x |= {"beta": normal(batch, 1, heads).sigmoid(), "log_decay": -normal(batch, 1, heads).abs()}
    x |= {"k": flashmix.l2_norm(x["k"], impl="portable"), "state": normal(batch, heads, D, D)}
    whole = {
        "qkv": normal(batch, 3 * heads * D).bfloat16(),
        "strength": normal(batch, heads),
        "gate": normal(batch, heads, D),
    }
    whole |= {"state": x["state"].clone(), "conv_state": normal(batch, 3, 3 * heads * D).bfloat16()}
    weight = normal(3 * heads * D, 4)
    rows = sorted({0, batch // 2, batch - 1})
    alone = [
        ({n: t[r : r + 1].clone() for n, t in x.items()}, {n: t[r : r + 1].clone() for n, t in whole.items()})
        for r in rows
    ]
    o, y = flashmix.delta_rule_step(**x), flashmix.delta_net_step(**whole, conv_weight=weight, heads=heads)
    assert torch.isfinite(o).all() and torch.isfinite(y).all()
    for row, (a, b) in zip(rows, alone, strict=True):
        at = slice(row, row + 1)
        assert torch.equal(flashmix.delta_rule_step(**a), o[at]) and torch.equal(a["state"], x["state"][at])
        assert torch.equal(flashmix.delta_net_step(**b, conv_weight=weight, heads=heads), y[at])
        assert torch.equal(b["state"], whole["state"][at]) and torch.equal(b["conv_state"], whole["conv_state"][at])


def test_fault_30_a_misspelt_option_is_swallowed() -> None:
    def is_open(function: Any) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    for package in (flashmix, recurrence, modules, layers, models):
        for name in getattr(package, "__all__", MECHANISMS):
            thing = getattr(package, name)
            for method in ("__init__", "forward") if inspect.isclass(thing) else ():
                owner = next((c for c in thing.__mro__ if method in vars(c)), object)
                if owner.__module__.startswith("flashmix") and not getattr(owner, "_is_protocol", False):
                    assert not is_open(vars(owner)[method]), f"{package.__name__}.{name}.{method}"
            if inspect.isfunction(thing) and thing is not flashmix.explain:  # which passes them on
                assert not is_open(thing), f"{package.__name__}.{name}"
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        flashmix.softmax_attention(**tiny_call("softmax_attention"), casual=True)


ROWWISE = ("rotary", "rotary_qk", "rms_norm", "layer_norm", "group_norm", "l2_norm", "gated", "swiglu", "token_shift")
ROWWISE += ("softplus_decay", "bounded_decay", "write_strength", "short_conv", "short_conv_qkv")


def on_gpu(op: str, tokens: int = 6) -> dict[str, Any]:
    """A tiny call of the op's kernels, in bfloat16."""
    return tiny_call(op, torch.bfloat16, "cuda", tokens) | {"impl": "triton"}


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [65_538, 200_000])
@pytest.mark.parametrize("op", (*ROWWISE, *RECURRENCES))
def test_fault_01_more_batches_times_heads_than_a_grid_axis_holds(op: str, batch: int) -> None:
    one = on_gpu(op, 2)
    rows = {name for name, t in one.items() if isinstance(t, Tensor) and t.shape[0] == 1}
    call = one | {name: one[name].repeat_interleave(batch, 0) for name in rows}
    (wanted,) = outputs(op, one)[:1]
    assert torch.equal(outputs(op, call)[0], wanted.expand(batch, *wanted.shape[1:]))


def with_kernel_gradients(op: str, call: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients by name, of arguments as they lie; tables have no gradient there."""
    leaves = {name: t.detach().requires_grad_() for name, t in floating(call).items() if name not in ("cos", "sin")}
    found = outputs(op, call | leaves)
    grads = torch.autograd.grad(found, list(leaves.values()), [torch.ones_like(t) for t in found])
    return {f"output {i}": t.detach() for i, t in enumerate(found)} | dict(zip(leaves, grads, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ROWWISE)
@pytest.mark.usefixtures("much_memory")
def test_fault_02_offsets_past_31_bits(op: str) -> None:
    """The last rows of a tensor past 2^31 elements are what they are alone, and so are their gradients."""
    one = on_gpu(op, 2)
    rows = {name for name, t in one.items() if isinstance(t, Tensor) and t.shape[0] == 1}
    batch = 2**31 // max(one[name].numel() for name in rows) + 3
    many = one | {name: one[name].repeat_interleave(batch, 0) for name in rows}
    alone, together = with_kernel_gradients(op, one), with_kernel_gradients(op, many)
    for name in ("output 0", *rows):
        assert torch.equal(together[name][-3:], alone[name].expand(3, *alone[name].shape[1:])), name


@pytest.mark.gpu
def test_fault_21_positions_past_the_table_on_the_device() -> None:
    cos, sin = flashmix.rotary_table(6, 8, device="cuda")
    x = torch.randn(1, 6, 2, 8, device="cuda")
    far = torch.tensor([[0, 5, 6, -1, 2**40, -(2**40)]], device="cuda")
    near = torch.tensor([[0, 5, 5, 0, 5, 0]], device="cuda")
    turned = [flashmix.rotary(x, cos, sin, positions=places, impl="triton") for places in (far, near)]
    assert torch.equal(*turned)
    with flashmix.checks(True), pytest.raises(ValueError, match="positions must be"):
        flashmix.rotary(x, cos, sin, positions=far)


@pytest.mark.gpu
@pytest.mark.parametrize("op", (*ROWWISE, *RECURRENCES))
def test_fault_26_and_27_on_the_device(op: str) -> None:
    """Inputs that are not contiguous give the bits of those that are, and these the same 100 times."""

    def changes(t: Tensor) -> list[Tensor]:
        strided = torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]
        return [strided, t.transpose(0, -1).contiguous().transpose(0, -1), t[:1].expand(t.shape)]

    for change in range(3):
        odd, plain = on_gpu(op), on_gpu(op)
        for name, t in floating(odd).items():
            odd[name] = changes(t)[change]
            plain[name] = odd[name].contiguous()
        wanted = with_kernel_gradients(op, plain)
        for name, t in with_kernel_gradients(op, odd).items():
            assert torch.equal(t, wanted[name]), name
    for _ in range(100):
        for name, t in with_kernel_gradients(op, plain).items():
            assert torch.equal(t, wanted[name]), name


@pytest.mark.gpu
def test_fault_04_06_and_13_of_a_convolution_on_the_device() -> None:
    """Empty and very short sequences, shorter than the width: a pack has the bits of one by one, without a wait."""
    lengths = (0, 1, 2, 63, 0, 64, 65, 0)
    x = torch.randn(1, sum(lengths), 24, device="cuda", requires_grad=True)
    weight, state = (
        torch.randn(24, 4, device="cuda"),
        torch.randn(len(lengths), 3, 24, device="cuda", requires_grad=True),
    )
    packing = flashmix.Packing.from_lengths(lengths, device="cuda")
    flow = torch.randn_like(x)
    with nothing_waits():
        y, last = flashmix.short_conv(
            x, weight, initial_state=state, return_state=True, cu_seqlens=packing, impl="triton"
        )
        found = torch.autograd.grad([y, last], [x, state], [flow, torch.ones_like(last)])
    for n, (first, end) in enumerate(pairwise([0, *accumulate(lengths)])):
        part = x[:, first:end].detach().requires_grad_()
        own = state[n : n + 1].detach().requires_grad_()
        one, after = flashmix.short_conv(part, weight, initial_state=own, return_state=True, impl="triton")
        wanted = torch.autograd.grad([one, after], [part, own], [flow[:, first:end], torch.ones_like(after)])
        assert torch.equal(y[:, first:end], one) and torch.equal(last[n : n + 1], after)
        assert torch.equal(found[0][:, first:end], wanted[0]) and torch.equal(found[1][n : n + 1], wanted[1])


@pytest.mark.gpu
def test_fault_20_a_frozen_head_on_the_device() -> None:
    hidden, weight = torch.randn(12, 8, device="cuda", requires_grad=True), torch.randn(300, 8, device="cuda")
    target = torch.randint(300, (12,), device="cuda")
    with torch.profiler.profile() as profile:
        flashmix.linear_cross_entropy(hidden, weight, target, impl="triton").backward()
    assert weight.grad is None and hidden.grad is not None
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::addmm_") == 0
