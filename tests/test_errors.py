"""Wrong arguments of every public op: the type and the text of the error, before anything is computed or changed.

Three tables: sweeps that spoil each tensor argument of each op in turn, what goes wrong with `cu_seqlens`, states and
`impl` wherever an op has them, and single rows with their exact text.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from paper_cases import H, K, Mechanism, T, zeros
from paper_loops import MECHANISMS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashmix
from flashmix import KVCache, Packing
from flashmix.capabilities import capabilities, public_ops, tiny_call
from flashmix.ops.recurrence import call as recurrence

OPS, FOUND = public_ops(), capabilities()

# Optional tensors of an op, so that a sweep has all that can be wrong; a missing shape is that of the first argument.
_STATE = {"initial_state": (1, H, K, K)}
_NORM: dict[str, tuple[int, ...]] = {"gate": (1, T, 8), "residual": (1, T, 8), "weight": (8,)}
OPTIONAL: dict[str, dict[str, tuple[int, ...]]] = {
    "linear_attention": {"log_decay": (1, T, H)} | _STATE,
    "delta_rule": {"log_decay": (1, T, H, K), "erase": (1, T, H, K), "write": (1, T, H, K)} | _STATE,
    "dplr": {"log_decay": (H,)} | _STATE,
    "linear_attention_step": {"log_decay": (1, T, H), "history": (1, 2, H, K, K)},
    "delta_rule_step": {
        "log_decay": (1, T, H, K),
        "erase": (1, T, H, K),
        "write": (1, T, H, K),
        "history": (1, T, H, K, K),
    },
    "dplr_step": {"log_decay": (H,)},
    "delta_net_step": {
        "conv_bias": (48,),
        "decay": (1, H, K),
        "A_log": (H,),
        "dt_bias": (H, K),
        "norm_weight": (K,),
        "gate": (1, H, K),
    },
    "softmax_attention": {"sink": (H,), "alibi_slopes": (H,), "log_decay": (1, T, H)},
    "attention_with_cache": {"sink": (H,), "alibi_slopes": (H,)},
    "rms_norm": _NORM,
    "layer_norm": _NORM | {"bias": (8,)},
    "group_norm": _NORM | {"bias": (8,)},
    "short_conv": {"bias": (8,), "residual": (1, T, 8), "initial_state": (1, 3, 8)},
    "short_conv_qkv": {"q_bias": (8,), "k_bias": (8,), "v_bias": (8,), "initial_state": (1, 3, 24)},
    "token_shift": {"initial_state": (1, 1, 8)},
    "scan": {"initial_state": (1, 8)},
    "scan_max": {"initial_state": (1, 8)},
    "selective_scan": {"D": (8,), "z": (1, T, 8), "initial_state": (1, 8, 4)},
    "selective_scan_step": {"D": (8,), "z": (1, T, 8)},
    "linear_cross_entropy": {"bias": (12,)},
    "linear_kl_divergence": {"bias": (12,), "teacher_bias": (12,)},
    "linear_grpo": {"bias": (12,), "old_log_probs": (1, T), "reference_log_probs": (1, T)},
}


def sized(case: Mechanism, axes: str) -> tuple[int, ...]:
    """The axes of an argument or state of a mechanism in these calls, where keys, values and slots have as many channels."""
    sizes = {
        "B": 1,
        "N": 1,
        "T": T,
        "H": H,
        "HV": H,
        "K": K,
        "V": K,
        "M": case.slots,
        "R": K // 2,
        "L": 8,
        "one": 1,
        "F": case.features(K),
        "n": 2,
        "two": 2,
    }
    return tuple(sizes[axis] for axis in axes.split())


for name, case in MECHANISMS.items():
    shapes = {argument: sized(case, case.shapes[argument]) for argument in case.optional}
    if len(case.states) == 1:
        shapes["initial_state"] = sized(case, *case.states)
    if shapes:
        OPTIONAL[name] = shapes
STATEFUL = [op for op in OPS if "initial_state" in inspect.signature(OPS[op]).parameters]
SEVERAL = {  # the shapes of several states
    name: tuple(sized(case, axes) for axes in case.states) for name, case in MECHANISMS.items() if len(case.states) > 1
}
ONE_STATE = [op for op in STATEFUL if op not in SEVERAL]
MATRIX_STATE = [op for op in ONE_STATE if op not in ("scan", "scan_max", "short_conv", "short_conv_qkv", "token_shift")]
PACKED = [op for op in OPS if "cu_seqlens" in inspect.signature(OPS[op]).parameters]

# Axes that may grow alone: the call stays a good one.
FREE_AXES = """
    softmax_attention.q 1; softmax_attention.v 3; rotary.x 0 1 2 3; rotary_qk.q 2 3; rotary_qk.k 2 3; softplus_decay.x 0 1;
    bounded_decay.x 0 1; write_strength.x 0 1 2; l2_norm.x 0 1 2; linear_attention_step.history 1; short_conv.x 1;
    token_shift.x 1; cross_entropy.logits 2; abc.s 3; abc.v 3; gsa.v 3; normalised_linear_attention.v 3;
    preconditioned_gated_deltanet.v 3; preconditioned_kda.v 3; mlstm.v 3; mamba3.x 3; based.v 3; rebased.v 3; lightnet.v 3;
    higher_order.v 3; raven.v 3; raven.routing 3; mom.k 2; mesa_net.v 3; momentum_deltanet.v 3; titans_linear.v 3;
    log_linear.v 3; log_linear.level_scales 3;
    log_linear_gated_deltanet.v 3; log_linear_gated_deltanet.level_scales 3;
    s4d.x 1; s5.x 1; lru.x 1
"""
FREE = {(*one.split()[0].split("."), int(axis)) for one in FREE_AXES.split(";") for axis in one.split()[1:]}
# Arguments of any number of axes, without another argument that would tell.
ANY_AXES = {("l2_norm", "x"), ("softplus_decay", "x"), ("bounded_decay", "x"), ("write_strength", "x")}


def full_call(op: str) -> dict[str, Any]:
    """A good call of `op` with all its optional tensors."""
    call = tiny_call(op)
    shapes = OPTIONAL.get(op, _STATE if op in MATRIX_STATE else {})
    call |= {name: torch.full(shape, -0.1) for name, shape in shapes.items()}
    return call | ({"causal": True} if op == "softmax_attention" else {})


def tensors(op: str) -> list[str]:
    return [name for name, value in full_call(op).items() if isinstance(value, Tensor)]


ARGUMENTS = [(op, name) for op in OPS for name in tensors(op)]
each_argument = pytest.mark.parametrize("op, name", ARGUMENTS, ids=[f"{op}-{name}" for op, name in ARGUMENTS])


class NothingComputed(TorchDispatchMode):
    """Fails on the first operation that reads or writes what floating inputs hold; views of them are fine."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.held = {t.untyped_storage()._cdata for t in inputs if t.is_floating_point()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = any(
            isinstance(t, Tensor) and t.untyped_storage()._cdata in self.held for t in [*args, *sum_lists(args)]
        )
        view = isinstance(result, Tensor) and result.untyped_storage()._cdata in self.held
        assert not reads or (view and not func._schema.is_mutable), f"{func} ran before the checks were done"
        return result


def sum_lists(args: tuple[Any, ...]) -> list[Any]:
    return [entry for value in args if isinstance(value, (list, tuple)) for entry in value]


def held_by(call: dict[str, Any]) -> list[Tensor]:
    """All tensors of a call, those of a cache among them."""
    found = [value for value in call.values() if isinstance(value, Tensor)]
    for value in call.values():
        if isinstance(value, KVCache):
            found += [t for t in (getattr(value, field.name) for field in fields(KVCache)) if isinstance(t, Tensor)]
    return found


def error_of(op: str, call: dict[str, Any], error: type[Exception]) -> str:
    """The text of the error that the call raises; nothing was computed, and no argument was changed."""
    inputs = held_by(call)
    before = [t.clone() for t in inputs]
    with NothingComputed(inputs), pytest.raises(error) as raised:
        OPS[op](**call)
    assert type(raised.value) is error
    for t, copy in zip(inputs, before, strict=True):
        assert t.device.type == "meta" or torch.equal(t, copy)
    return str(raised.value)


def assert_names_an_argument(op: str, text: str, pattern: str) -> None:
    """The text follows `pattern`, and `{name}` in it is an argument that `op` has under this name."""
    found = re.fullmatch(pattern.replace("{name}", r"(?:the \w+(?: of heads| dim) of )?(?P<name>[\w.]+)"), text)
    assert found, f"{text!r} does not read {pattern!r}"
    argument = found["name"].split(".")[0]
    assert argument in inspect.signature(OPS[op]).parameters, f"{text!r} names {argument}, which {op} does not have"


@pytest.fixture(scope="module", autouse=True)
def good_calls() -> None:
    """Run first: what checks remember of good calls must let no wrong one pass."""
    for op in OPS:
        OPS[op](**full_call(op))


def test_the_tables_hold_every_public_op() -> None:
    assert set(OPS) == set(FOUND) and set(OPTIONAL) <= set(OPS)


def test_operands_that_fitted_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(recurrence, "_check_fit", lambda q, *rest: seen.append(q.shape[1]))
    call = tiny_call("delta_rule")
    for _ in range(2):
        flashmix.delta_rule(**call)
    assert not seen
    longer = {name: t if name == "initial_state" else torch.cat([t] * 7, 1) for name, t in call.items()}
    for _ in range(2):
        flashmix.delta_rule(**longer)
    assert seen == [7 * T]


@each_argument
def test_not_a_tensor(op: str, name: str) -> None:
    number = " or a number" if inspect.signature(OPS[op]).parameters[name].annotation == "Tensor | float" else ""
    text = error_of(op, full_call(op) | {name: [1.0]}, TypeError)
    assert text == f"{name} must be a torch.Tensor{number}, got list"


@each_argument
def test_another_device(op: str, name: str) -> None:
    call = full_call(op)
    if len(tensors(op)) == 1:
        return
    text = error_of(op, call | {name: call[name].to("meta")}, ValueError)
    assert_names_an_argument(op, text, r"{name} must be on (cpu|meta) like [\w.]+, got (meta|cpu)")


@each_argument
def test_integers(op: str, name: str) -> None:
    call = full_call(op)
    spoilt = call[name].to(torch.int32)
    text = error_of(op, call | {name: spoilt}, TypeError)
    assert re.fullmatch(rf"{name} must have (a floating dtype|dtype [\w ]+), got int32", text), text


@each_argument
def test_an_axis_too_many(op: str, name: str) -> None:
    if (op, name) in ANY_AXES:
        return
    call = full_call(op)
    count = 2 if (op, name) == ("softmax_attention", "alibi_slopes") else 1  # [1, HQ] are those of the only sequence
    text = error_of(op, call | {name: call[name].expand(*[1] * count, *call[name].shape)}, ValueError)
    assert_names_an_argument(op, text, r"{name} must have shape \[.*\], got \[.*\]")


@each_argument
def test_an_axis_too_long(op: str, name: str) -> None:
    call = full_call(op)
    for axis in range(call[name].dim()):
        if (op, name, axis) in FREE:
            continue
        longer = torch.cat([call[name], call[name].narrow(axis, 0, 1)], axis)
        text = error_of(op, call | {name: longer}, ValueError)
        assert_names_an_argument(op, text, r"{name} must .*, got .*")


@pytest.mark.parametrize("op", OPS)
def test_a_mixture_of_dtypes(op: str) -> None:
    """The second tensor in bfloat16 beside float32: an error where the two belong together."""
    call, (first, *rest) = full_call(op), tensors(op)
    together = [name for name in rest if tiny_call(op, torch.bfloat16).get(name, call[first]).dtype == torch.bfloat16]
    together = [
        name for name in together if not name.startswith(("cos", "sin", "weight", "advantages", "teacher_", "dt_bias"))
    ]
    for name in together:
        text = error_of(op, call | {name: call[name].bfloat16()}, TypeError)
        assert_names_an_argument(op, text, r"{name} must have dtype (\w+) like \w+, got \w+")


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_keyword(op: str) -> None:
    parameters = inspect.signature(OPS[op]).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    text = error_of(op, full_call(op) | {"implementation": "auto"}, TypeError)
    assert text.endswith("got an unexpected keyword argument 'implementation'")


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_implementation(op: str) -> None:
    """Mechanisms may have computed an operand of their engine by then."""
    names = ", ".join(map(repr, flashmix.explain(OPS[op], **tiny_call(op)).reasons))
    with pytest.raises(ValueError) as raised:
        OPS[op](**tiny_call(op), impl="fast")
    assert str(raised.value) == f"impl must be one of 'auto', {names}, got 'fast'"


# name: what is wrong, the error, its text
BOUNDARIES: dict[str, tuple[Any, type[Exception], str]] = {
    "unsorted": (torch.tensor([0, 4, 2, 6]), ValueError, "cu_seqlens must not decrease, got 4 followed by 2"),
    "short": (torch.tensor([0, 3, 5]), ValueError, "cu_seqlens must end at the token count 6, got 5"),
    "long": (torch.tensor([0, 7]), ValueError, "cu_seqlens must end at the token count 6, got 7"),
    "not from 0": (torch.tensor([1, 6]), ValueError, "cu_seqlens must start at 0, got 1"),
    "negative": (torch.tensor([0, -1, 6]), ValueError, "cu_seqlens must not decrease, got 0 followed by -1"),
    "float": (torch.tensor([0.0, 6.0]), TypeError, "cu_seqlens must have dtype int32 or int64, got float32"),
    "int16": (torch.tensor([0, 6]).short(), TypeError, "cu_seqlens must have dtype int32 or int64, got int16"),
    "two axes": (torch.tensor([[0, 6]]), ValueError, "cu_seqlens must have shape [N+1], got [1, 2]"),
    "no entry": (torch.tensor([], dtype=torch.int64), ValueError, "cu_seqlens must have shape [N+1], got [0]"),
    "lengths": ([0, 6], TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    "another device": (
        torch.tensor([0, 6]).to("meta"),
        ValueError,
        "cu_seqlens must be on cpu like the inputs, got meta",
    ),
    "another packing": (Packing.from_lengths([2, 3]), ValueError, "cu_seqlens must end at the token count 6, got 5"),
}


@pytest.mark.parametrize("wrong", BOUNDARIES)
@pytest.mark.parametrize("op", PACKED)
def test_wrong_boundaries(op: str, wrong: str) -> None:
    cu_seqlens, error, text = BOUNDARIES[wrong]
    assert error_of(op, tiny_call(op) | {"cu_seqlens": cu_seqlens}, error) == text


@pytest.mark.parametrize("op", PACKED)
def test_packed_with_a_batch(op: str) -> None:
    shorter, call = tiny_call(op, tokens=T - 1), tiny_call(op)
    for name, value in call.items():
        if isinstance(value, Tensor) and value.shape != shorter[name].shape:  # per token
            call[name] = torch.cat([value, value])
    text = "cu_seqlens must come with inputs of batch size 1 (sequences end to end), got 2"
    assert error_of(op, call | {"cu_seqlens": torch.tensor([0, 6])}, ValueError) == text


@pytest.mark.parametrize("op", SEVERAL)
def test_wrong_states_of_several(op: str) -> None:
    shapes, call = SEVERAL[op], tiny_call(op)
    like = f"like {next(name for name, value in call.items() if isinstance(value, Tensor))}"
    good = tuple(torch.zeros(shape) for shape in shapes)
    OPS[op](**call, initial_state=good)
    for wrong, got in (
        (good[:1], "1"),
        (good[0], "Tensor"),
        ((*good, good[0]), str(len(good) + 1)),
        (list(good), "list"),
    ):
        text = error_of(op, call | {"initial_state": wrong}, TypeError)
        assert text == f"initial_state must be a tuple of {len(good)} tensors, got {got}"
    for place, state in enumerate(good):

        def states(other: Any, place: int = place) -> dict[str, Any]:
            return call | {"initial_state": (*good[:place], other, *good[place + 1 :])}

        name = f"initial_state[{place}]"
        text = error_of(op, states(torch.cat([state, state])), ValueError)
        assert text == f"{name} must have shape {list(state.shape)}, got {[2, *state.shape[1:]]}"
        assert error_of(op, states(state.half()), TypeError) == f"{name} must have dtype float32, got float16"
        assert error_of(op, states(state.to("meta")), ValueError) == f"{name} must be on cpu {like}, got meta"
        assert error_of(op, states(None), TypeError) == f"{name} must be a torch.Tensor, got NoneType"
    packed = call | {"initial_state": good, "cu_seqlens": torch.tensor([0, 2, 2, 6])}
    text = error_of(op, packed, ValueError)
    assert text == f"initial_state[0] must have shape {[3, *shapes[0][1:]]}, got {list(shapes[0])}"


@pytest.mark.parametrize("op", ONE_STATE)
def test_wrong_states(op: str) -> None:
    call = full_call(op)
    shape = list(call["initial_state"].shape)

    def text(error: type[Exception], **change: Any) -> str:
        return error_of(op, call | change, error)

    for wrong in ([2, *shape[1:]], [*shape[:-1], 9], shape[1:], [*shape[:1], 5, *shape[2:]]):
        assert text(ValueError, initial_state=torch.zeros(wrong)) == (
            f"initial_state must have shape {shape}, got {list(wrong)}"
        )
    packed = {"cu_seqlens": torch.tensor([0, 2, 2, 6])}
    assert text(ValueError, **packed) == f"initial_state must have shape {[3, *shape[1:]]}, got {shape}"
    like = "" if op in (*MATRIX_STATE, "scan", "scan_max") else " like q" if op == "short_conv_qkv" else " like x"
    for dtype in (torch.float16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        assert text(TypeError, initial_state=torch.zeros(shape, dtype=dtype)) == (
            f"initial_state must have dtype float32{like}, got {name}"
        )


RECURRENCE = {"q": zeros(2, T, 2, 4), "k": zeros(2, T, 2, 4), "v": zeros(2, T, 2, 3), "beta": zeros(2, T, 2)}
_SHAPES = "[2] or [1, 6, 2] or [1, 6, 2, 8]"
# op: (what is wrong, the error, its text)
ROWS: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "linear_attention": [
        ({"v": zeros(1, T, 3, K)}, ValueError,
         "the number of heads of v must be a positive multiple of the number of heads of q = 2, got 3"),
        ({"v": zeros(1, T, 1, K)}, ValueError,
         "the number of heads of v must be a positive multiple of the number of heads of q = 2, got 1"),
        ({"v": zeros(1, T, 0, K)}, ValueError,
         "the number of heads of v must be a positive multiple of the number of heads of q = 2, got 0"),
        ({"k": zeros(1, T, H, 4)}, ValueError, "k must have shape [1, 6, 2, 8], got [1, 6, 2, 4]"),
        ({"q": zeros(1, T, H)}, ValueError, "q must have shape [B, T, H, K], got [1, 6, 2]"),
        ({"q": zeros(1, T, H, K, dtype=torch.int64)}, TypeError,
         "q must have dtype float32 or bfloat16 or float16 or float64, got int64"),
        ({"k": zeros(1, T, H, K).bfloat16()}, TypeError, "k must have dtype float32 like q, got bfloat16"),
        ({"v": zeros(1, T, H, 0)}, ValueError, "q and v must have at least one channel, got K = 8 and V = 0"),
        ({"log_decay": zeros(1, T, H, 4)}, ValueError, f"log_decay must have shape {_SHAPES}, got [1, 6, 2, 4]"),
        ({"log_decay": zeros(T, H)}, ValueError, f"log_decay must have shape {_SHAPES}, got [6, 2]"),
        ({"log_decay": zeros(H, 1, 1)}, ValueError, f"log_decay must have shape {_SHAPES}, got [2, 1, 1]"),
        ({"log_decay": -0.1}, TypeError, "log_decay must be a torch.Tensor, got float"),
        ({"initial_state": zeros(1, H, K, K).half()}, TypeError, "initial_state must have dtype float32, got float16"),
    ],
    "delta_rule": [
        ({"beta": zeros(1, T, H, 1)}, ValueError, "beta must have shape [1, 6, 2], got [1, 6, 2, 1]"),
        ({"beta": zeros(1, T, 4)}, ValueError, "beta must have shape [1, 6, 2], got [1, 6, 4]"),
        ({"beta": 1.0}, TypeError, "beta must be a torch.Tensor, got float"),
        ({"erase": zeros(1, T, 4, K)}, ValueError, "erase must have shape [1, 6, 2, 8], got [1, 6, 4, 8]"),
        ({"write": zeros(1, T, H, 4)}, ValueError, "write must have shape [1, 6, 2, 8], got [1, 6, 2, 4]"),
    ],
    "dplr": [
        ({"a": zeros(1, T, 3, K)}, ValueError, "a must have shape [1, 6, 2, 8], got [1, 6, 3, 8]"),
        ({"b": zeros(1, T, H)}, ValueError, "b must have shape [B, T, H, K], got [1, 6, 2]"),
    ],
    "softmax_attention": [
        ({"window": (-1, 0)}, ValueError, "window left must be a non-negative int or None (unbounded), got -1"),
        ({"window": (1.5, 0)}, ValueError, "window left must be a non-negative int or None (unbounded), got 1.5"),
        ({"window": 4}, ValueError, "window must be (left, right), got 4"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive, got -1.0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
        ({"k": zeros(1, T, 3, K), "v": zeros(1, T, 3, K)}, ValueError,
         "the number of heads of q must be a positive multiple of that of k = 3, got 2"),
        ({"q": zeros(1, T, H, 513), "k": zeros(1, T, H, 513)}, ValueError,
         "the head dim of q must be between 1 and 512, got 513"),
        ({"q": zeros(1, T, H, 257).requires_grad_(), "k": zeros(1, T, H, 257)}, ValueError,
         "the head dim of q must be between 1 and 256, got 257"),
        ({"log_decay": zeros(1, T, H)}, ValueError,
         "log_decay must come with causal=True (the decay from a key in the future is not defined), got causal=False"),
        ({"cu_seqlens_k": torch.tensor([0, T])}, ValueError,
         "cu_seqlens_k must come with cu_seqlens, the boundaries of the queries, got None"),
        ({"cu_seqlens": torch.tensor([0, T]), "cu_seqlens_k": torch.tensor([0, 2, T])}, ValueError,
         "cu_seqlens_k must have shape [2], got [3]"),
        ({"impl": "sdpa", "sink": zeros(H)}, ValueError,
         "impl='sdpa' cannot run this: torch's scaled_dot_product_attention does not take a sink"),
    ],
    "attention_with_cache": [
        ({"cache": None}, TypeError, "cache must be a KVCache, got NoneType"),
        ({"v": None}, ValueError, "k and v must be given together, got only k"),
        ({"q": zeros(1, T, H, K).double()}, TypeError, "cache.keys must have dtype float64 like q, got float32"),
        ({"q": zeros(1, 20, H, K), "k": zeros(1, 20, H, K), "v": zeros(1, 20, H, K)}, ValueError,
         "the cache must have room for 20 tokens in sequence 0, got 16"),
        ({"rotary": flashmix.rotary_table(4, K)}, ValueError, "positions must be below the table's length 4, got 5"),
    ],
    "rotary": [
        ({"cos": zeros(16, 16), "sin": zeros(16, 16)}, ValueError,
         "cos must have at most D/2 = 4 columns for heads of D = 8 channels, got 16: a table for 32 channels "
         "(the head's dim belongs in rotary_table, not the model's)"),
        ({"positions": 11}, ValueError, "positions must be below the table's length 16, got 16"),
        ({"positions": -1}, ValueError, "positions must be non-negative, got -1"),
        ({"positions": 1.0}, TypeError, "positions must be None, an int or a tensor, got float"),
        ({"positions": torch.arange(T)}, ValueError, "positions must have shape [1, 6], got [6]"),
        ({"positions": torch.full((1, T), 16)}, ValueError, "positions must be below the table's length 16, got 16"),
        ({"positions": torch.full((1, T), -3)}, ValueError, "positions must be non-negative, got -3"),
        ({"positions": zeros(1, T)}, TypeError, "positions must have dtype int32 or int64, got float32"),
        ({"positions": torch.arange(T)[None].to("meta")}, ValueError, "positions must be on cpu like x, got meta"),
        ({"positions": torch.arange(T)[None], "cu_seqlens": torch.tensor([0, T])}, ValueError,
         "positions must be None or an int together with cu_seqlens, got a tensor"),
        ({"positions": zeros(1, T, 2).long(), "axes": [0, 1]}, ValueError, "axes must have R/2 = 4 entries, got 2"),
        ({"positions": zeros(1, T, 2).long(), "axes": [0, 1, 2, 0]}, ValueError, "axes must be between 0 and 1, got 2"),
        ({"axes": [0, 0, 0, 0]}, TypeError, "positions must be a torch.Tensor, got NoneType"),
    ],
    "rms_norm": [
        ({"weight": zeros(4)}, ValueError, "weight must have shape [8], got [4]"),
        ({"gate": zeros(1, T, 4)}, ValueError, "gate must have shape [1, 6, 8], got [1, 6, 4]"),
        ({"gate_activation": "swish"}, ValueError,
         "gate_activation must be one of 'silu', 'sigmoid', 'gelu', 'gelu_tanh', 'relu', 'relu2', got 'swish'"),
        ({"x": torch.tensor(1.0)}, ValueError, "x must have shape [..., D], got []"),
    ],
    "group_norm": [
        ({"groups": 3}, ValueError, "D must be a positive multiple of groups = 3, got 8"),
        ({"groups": 0}, ValueError, "D must be a positive multiple of groups = 0, got 8"),
    ],
    "gated": [
        ({"activation": "swish"}, ValueError,
         "activation must be one of 'silu', 'sigmoid', 'gelu', 'gelu_tanh', 'relu', 'relu2', got 'swish'"),
    ],
    "short_conv": [
        ({"weight": zeros(8, 0)}, ValueError, "weight must have shape [8, W] with W >= 1, got [8, 0]"),
        ({"weight": zeros(4, 8)}, ValueError, "weight must have shape [8, 8], got [4, 8]"),
        ({"x": zeros(1, T, H, K)}, ValueError, "x must have shape [B, T, D], got [1, 6, 2, 8]"),
    ],
    "cross_entropy": [
        ({"target": torch.full((1, T), 12)}, ValueError,
         "target must be below the vocabulary 12 and not negative, or ignore_index = -100, got 12"),
        ({"target": torch.full((1, T), -1)}, ValueError,
         "target must be below the vocabulary 12 and not negative, or ignore_index = -100, got -1"),
        ({"target": zeros(1, T)}, TypeError, "target must have dtype int64, got float32"),
        ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'average'"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0.0 and 1.0, got 1.5"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    ],
    "linear_cross_entropy": [
        ({"weight": zeros(12, 4)}, ValueError, "weight must have shape [12, 8], got [12, 4]"),
        ({"weight": zeros(0, 8)}, ValueError, "weight must have shape [V, D] with V >= 1, got [0, 8]"),
        ({"chunk": 0}, ValueError, "chunk must be positive, got 0"),
        ({"target": torch.zeros(T, dtype=torch.int64)}, ValueError, "target must have shape [1, 6], got [6]"),
    ],
    "linear_kl_divergence": [
        ({"teacher_weight": zeros(11, 8)}, ValueError, "teacher_weight must have shape [12, 8], got [11, 8]"),
        ({"teacher_hidden": zeros(1, 5, 8)}, ValueError, "teacher_hidden must have shape [1, 6, 8], got [1, 5, 8]"),
        ({"teacher_weight": zeros(12, 8, requires_grad=True)}, ValueError,
         "teacher_weight must not require a gradient (it gets none; detach it), got one that does"),
        ({"mask": zeros(1, T)}, TypeError, "mask must have dtype bool, got float32"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive, got 0.0"),
    ],
    "linear_grpo": [
        ({"advantages": zeros(2)}, ValueError, "advantages must have shape [1], got [2]"),
        ({"hidden": zeros(T, 8)}, ValueError, "hidden must have shape [B, T, D], got [6, 8]"),
        ({"kl_weight": 0.1}, ValueError, "reference_log_probs must be given when kl_weight is not 0, got None"),
        ({"clip": (-0.1, 0.2)}, ValueError, "clip must be between 0.0 and inf, got -0.1"),
        ({"reduction": "batch"}, ValueError, "reduction must be one of 'sequence', 'mean', 'sum', 'none', got 'batch'"),
    ],
}  # fmt: skip


ROWS |= {name: case.errors for name, case in MECHANISMS.items() if case.errors}


@pytest.mark.parametrize("op", ROWS)
def test_exact_text(op: str) -> None:
    for change, error, text in ROWS[op]:
        assert error_of(op, tiny_call(op) | change, error) == text


def test_grouped_heads_and_batches_that_differ() -> None:
    """A batch of two, where a mistake in one row cannot pass as broadcasting."""
    call = RECURRENCE
    for name, wrong, text in (
        ("k", zeros(1, T, 2, 4), "k must have shape [2, 6, 2, 4], got [1, 6, 2, 4]"),
        ("v", zeros(2, 1, 2, 3), "v must have shape [2, 6, 2, 3], got [2, 1, 2, 3]"),
        ("beta", zeros(2, T, 1), "beta must have shape [2, 6, 2], got [2, 6, 1]"),
    ):
        assert error_of("delta_rule", call | {name: wrong}, ValueError) == text
    grouped = call | {"v": zeros(2, T, 4, 3), "beta": zeros(2, T, 2)}
    assert error_of("delta_rule", grouped, ValueError) == "beta must have shape [2, 6, 4], got [2, 6, 2]"


@pytest.mark.parametrize("make, error, text", [
    (lambda: flashmix.rotary_table(16, 7), ValueError, "dim must be even and positive (channels turn in pairs), got 7"),
    (lambda: flashmix.rotary_table(16, 0), ValueError, "dim must be even and positive (channels turn in pairs), got 0"),
    (lambda: flashmix.rotary_table(-1, 8), ValueError, "positions must be non-negative, got -1"),
    (lambda: Packing.from_lengths([3, -1]), ValueError, "lengths must be non-negative, got [3, -1]"),
    (lambda: Packing(torch.tensor([0, 4]), 5), ValueError, "cu_seqlens must end at the token count 5, got 4"),
    (lambda: KVCache.paged(4, 2, torch.arange(4), 1, 8), ValueError, "page_table must have shape [sequences, pages], got [4]"),
    (lambda: flashmix.explain(len, []), TypeError, "'len' is not a flashmix op: it chose no implementation"),
])  # fmt: skip
def test_what_is_no_op(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == text
