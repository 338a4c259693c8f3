"""What softmax attention promises beside its values: invariances bit for bit, memory, extremes, autograd, compile."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import CASES, EVERYTHING, Call, Case, make_call
from budget import assert_within_budget, relative_errors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashmix import Packing, explain
from flashmix.ops.attention import definition, softmax_attention
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.op import ATTENTION
from flashmix.ops.attention.portable.dropout import dropout_factor

pytestmark = pytest.mark.usefixtures("one_thread")
PER_TOKEN = ("q", "k", "v", "log_decay")
WHOLE = Case("whole", **EVERYTHING, heads=4, tokens=300, batch=1, window=(170, 0))


def run(call: Call, tensors: dict[str, Tensor], d_o: Tensor, **options: Any) -> dict[str, Tensor]:
    """o, lse and the gradients of these tensors under the case's options; the gradient of lse is left out."""
    case, leaves = call.case, {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    given = {"causal": case.causal, "window": case.window, "softcap": case.softcap} | options
    o, lse = softmax_attention(**leaves, **given, return_lse=True, impl="portable")
    gradients = torch.autograd.grad(o, list(leaves.values()), d_o)
    return {"o": o, "lse": lse} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor], names: list[str] | None = None) -> None:
    for name in names or list(wanted):
        assert torch.equal(found[name], wanted[name]), f"{name} differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 64, 127, 128, 129, 200, 257])
def test_a_prefix_does_not_depend_on_what_follows(length: int, dtype: torch.dtype) -> None:
    call = make_call(WHOLE, dtype)
    d_o = call.d_o.clone()
    d_o[:, length:] = 0
    whole = run(call, call.tensors, d_o)
    prefix = {name: x[:, :length] if name in PER_TOKEN else x for name, x in call.tensors.items()}
    alone = run(call, prefix, call.d_o[:, :length])
    assert torch.equal(whole["o"][:, :length], alone["o"])
    assert torch.equal(whole["lse"][:, :, :length], alone["lse"])
    for name in PER_TOKEN:
        assert torch.equal(whole[f"d_{name}"][:, :length], alone[f"d_{name}"]), f"d_{name} differs"


@pytest.mark.parametrize("impl", ["sdpa", "portable"])
def test_earlier_outputs_ignore_later_tokens(impl: str) -> None:
    call = make_call(Case("causal", tokens=300), torch.float32)
    q, k, v = call.tensors.values()
    before, _ = softmax_attention(q, k, v, causal=True, impl=impl)
    changed = [torch.cat([x[:, :150], -3 * x[:, 150:]], 1) for x in (q, k, v)]
    after, _ = softmax_attention(*changed, causal=True, impl=impl)
    assert torch.equal(before[:, :150], after[:, :150])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_does_not_depend_on_the_batch(threads: int) -> None:
    torch.set_num_threads(threads)
    call = make_call(Case("batch", **EVERYTHING, heads=2, tokens=200, batch=5, window=(150, 0)), torch.float32)
    batched = run(call, call.tensors, call.d_o)
    for n in range(5):
        one = {name: x[n : n + 1] if name in PER_TOKEN else x for name, x in call.tensors.items()}
        alone = run(call, one, call.d_o[n : n + 1])
        per_token = ["o", "lse", *(f"d_{name}" for name in PER_TOKEN)]
        assert_same_bits({name: batched[name][n : n + 1] for name in per_token}, alone, per_token)


@pytest.mark.parametrize("case", [case for case in CASES if case.lengths], ids=str)
def test_packed_is_one_by_one(case: Case) -> None:
    call = make_call(case, torch.float32)
    assert call.packing is not None and case.lengths is not None
    packing, packing_k = call.packing
    options = {"dropout_p": 0.0, "cu_seqlens": packing.cu_seqlens, "cu_seqlens_k": packing_k.cu_seqlens}
    packed = run(call, call.tensors, call.d_o, **options)
    q_ends, k_ends = packing.cu_seqlens.tolist(), packing_k.cu_seqlens.tolist()
    for n in range(packing.count):
        of_q, of_k = slice(q_ends[n], q_ends[n + 1]), slice(k_ends[n], k_ends[n + 1])
        ends = {"q": of_q, "k": of_k, "v": of_k, "log_decay": of_k}
        one = {name: x[:, ends[name]] if name in ends else x for name, x in call.tensors.items()}
        alone = run(call, one, call.d_o[:, of_q])
        assert torch.equal(packed["o"][:, of_q], alone["o"])
        assert torch.equal(packed["lse"][:, of_q], alone["lse"][0])
        for name in PER_TOKEN:
            if name in one:
                assert torch.equal(packed[f"d_{name}"][:, ends[name]], alone[f"d_{name}"]), f"d_{name} differs"


@pytest.mark.parametrize("impl", ["sdpa", "portable"])
def test_repeats_give_the_same_bits(impl: str) -> None:
    torch.set_num_threads(2)
    call = make_call(Case("causal", tokens=300, heads_q=4), torch.float32)
    first = call.op(impl, return_lse=False)
    for _ in range(3):
        assert_same_bits(call.op(impl, return_lse=False), first)


def test_partial_results_merge_through_lse() -> None:
    call = make_call(Case("merge", tokens=100, heads_q=4, causal=False, sink=True), torch.float64)
    q, k, v, sink = (x.requires_grad_() for x in call.tensors.values())
    whole, _ = softmax_attention(q, k, v, sink=sink)
    wanted = torch.autograd.grad(whole, (q, k, v, sink), call.d_o)

    parts = [softmax_attention(q, k[:, :30], v[:, :30], sink=sink, return_lse=True)]
    parts.append(softmax_attention(q, k[:, 30:], v[:, 30:], return_lse=True))
    lse = torch.stack([part_lse for _, part_lse in parts])
    share = torch.softmax(lse, 0).transpose(2, 3)[..., None]  # [2, B, Tq, HQ, 1]
    merged = sum(s * o for s, (o, _) in zip(share, parts, strict=True))
    found = torch.autograd.grad(merged, (q, k, v, sink), call.d_o)
    for got, want in zip((merged, *found), (whole, *wanted), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["sdpa", "portable"])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_huge_scores_stay_finite(size: float, impl: str) -> None:
    call = make_call(Case("huge", tokens=150), torch.float32)
    call.tensors["q"] = call.tensors["q"] * size
    found = call.op(impl, return_lse=False)
    assert all(torch.isfinite(x).all() for x in found.values())
    capped, _ = softmax_attention(**call.tensors, causal=True, softcap=5.0)
    assert torch.isfinite(capped).all()
    if size < 1e8:  # there a score is known to 60 units, and nothing can be compared
        reference, baseline = call.definition(torch.float64, False), call.definition(torch.float32, False)
        assert_within_budget("o", found["o"], reference["o"], baseline["o"])


def test_rows_that_see_nothing_give_zero_and_pass_no_gradient() -> None:
    call = make_call(Case("empty rows", tokens=150, tokens_k=40, window=(10, 0)), torch.float32)
    call.d_lse.fill_(1.0)
    found = call.op("portable")
    assert (found["o"][:, :110] == 0).all() and (found["lse"][:, :, :110] == -torch.inf).all()
    assert (found["d_q"][:, :110] == 0).all()
    assert all(torch.isfinite(x).all() for name, x in found.items() if name != "lse")


def test_one_visible_key_gives_its_value() -> None:
    call = make_call(Case("one key", tokens=300, window=(0, 0)), torch.float32)
    found = call.op("portable", return_lse=False)
    assert torch.equal(found["o"], call.tensors["v"])
    assert torch.equal(found["d_v"], call.d_o)
    size = (call.d_o.norm(dim=-1) * call.tensors["v"].norm(dim=-1)).max() * call.tensors["k"].abs().max()
    assert found["d_q"].abs().max() <= 2 * torch.finfo(torch.float32).eps * size, "a sum of one probability is constant"


@pytest.mark.parametrize("gate", [0.0, -20.0, -1e4, -torch.inf])
def test_any_gate_gives_finite_results(gate: float) -> None:
    """The definition cannot take -inf (-inf minus -inf); e^-1e5 is the same 0."""
    call = make_call(Case("gate", tokens=200, decay=True, heads_q=4), torch.float32)
    gates = call.tensors["log_decay"]
    closed = torch.rand(gates.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    call.tensors["log_decay"] = torch.where(closed, gate, gates)
    found = call.op("portable")
    assert all(torch.isfinite(x).all() for x in found.values())
    call.tensors["log_decay"] = call.tensors["log_decay"].clamp(min=-1e5)
    reference, baseline = call.definition(torch.float64), call.definition(torch.float32)
    for name in found:
        assert_within_budget(f"gate {gate}, {name}", found[name], reference[name], baseline[name])


def test_rows_outside_all_sequences_are_zero() -> None:
    """Boundaries that only the device knows are not checked; they never read or write outside a tensor."""
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    for ends in ([0, 3, 5], [0, 3, 99], [4, 2, 6], [-5, 3, 9]):
        packing = Packing.unchecked(torch.tensor(ends), 9)
        o, lse = ATTENTION(operator_call({"q": q, "k": q, "v": q}, packing=packing, packing_k=packing), "portable")
        (d_q,) = torch.autograd.grad(o.sum(), q)
        outside = torch.ones(9, dtype=torch.bool)
        for start, end in pairwise(ends):
            outside[max(start, 0) : max(end, 0)] = False
        assert torch.isfinite(o).all() and torch.isfinite(d_q).all()
        assert not o[0, outside].any() and not d_q[0, outside].any() and (lse[:, outside] == -torch.inf).all()


@pytest.mark.parametrize("impl", ["sdpa", "portable"])
def test_more_heads_than_a_grid_has_blocks(impl: str) -> None:
    q = torch.randn(32769, 3, 2, 4)
    o, _ = softmax_attention(q, q, q, causal=True, impl=impl)
    torch.testing.assert_close(o[-1:], softmax_attention(q[-1:], q[-1:], q[-1:], causal=True, impl=impl)[0])
    assert torch.equal(o[:, 0], q[:, 0])


def test_strided_and_expanded_inputs() -> None:
    call = make_call(Case("strided", tokens=70, heads_q=4, heads=2), torch.float32)
    q, k, v = call.tensors.values()
    for impl in ("sdpa", "portable"):
        wanted = run_plain(q, k, v, impl)
        spread = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
        assert spread[0].stride(-1) == 2
        assert_same_bits(run_plain(*spread, impl), wanted)
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert_same_bits(run_plain(*turned, impl), wanted)
        one = [x[:1] for x in (q, k, v)]
        for name, x in run_plain(*(x.expand(3, -1, -1, -1) for x in one), impl).items():
            assert torch.equal(x[2:], run_plain(*one, impl)[name])


def run_plain(q: Tensor, k: Tensor, v: Tensor, impl: str) -> dict[str, Tensor]:
    """The gradient that flows back is expanded too."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, _ = softmax_attention(*leaves, causal=True, impl=impl)
    gradients = torch.autograd.grad(o.sum(), leaves)
    return dict(zip(("o", "d_q", "d_k", "d_v"), (o.detach(), *gradients), strict=True))


def test_only_what_is_asked_for_has_a_gradient() -> None:
    call = make_call(Case("some", **EVERYTHING, tokens=40), torch.float32)
    call.tensors["v"].requires_grad_()
    _, lse = softmax_attention(**call.tensors, causal=True, return_lse=True)
    o, _ = softmax_attention(**call.tensors, causal=True)
    o.sum().backward()
    assert call.tensors["v"].grad is not None and call.tensors["q"].grad is None
    assert lse is not None


def test_the_sum_of_a_row_is_added_in_pairs() -> None:
    """`do . o` is taken off the gradients of all scores of a row; a dot product of so many channels errs 1.4 times as much.

    v and do are whole numbers, so that the plain formula's products of them are exact in whatever order a CPU adds them.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (512, 1, 1, 8), "k": (512, 4, 1, 8)}
    x = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    x["v"], flow = (torch.randint(-8, 9, (512, n, 1, 256), generator=generator).float() for n in (4, 1))

    def gradient(attend: Any, dtype: torch.dtype) -> Tensor:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
        o = attend(*leaves.values(), scale=0.7)
        return torch.autograd.grad(o if isinstance(o, Tensor) else o[0], leaves["q"], flow.to(dtype))[0]

    exact, plain = (gradient(definition.softmax_attention, dtype) for dtype in (torch.float64, torch.float32))
    found = gradient(partial(softmax_attention, impl="portable"), torch.float32)
    assert relative_errors(found, exact)[0] <= 4.8 * relative_errors(plain, exact)[0]


def test_gradient_of_lse_alone() -> None:
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = softmax_attention(q, k, v, causal=True, return_lse=True)
    _, wanted = definition.softmax_attention(q, k, v, causal=True, scale=8**-0.5)
    assert lse is not None
    for got, want in zip(
        torch.autograd.grad(lse.sum(), (q, k)), torch.autograd.grad(wanted.sum(), (q, k)), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["sdpa", "portable"])
def test_a_second_derivative_is_a_clear_error(impl: str) -> None:
    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    o, _ = softmax_attention(q, q, q, causal=True, impl=impl)
    (gradient,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"no second derivative|is not implemented"):
        gradient.sum().backward()


def test_dropout_follows_torchs_generator() -> None:
    q = torch.randn(1, 64, 2, 8)
    torch.manual_seed(1)
    first, second = (softmax_attention(q, q, q, dropout_p=0.5)[0] for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, softmax_attention(q, q, q, dropout_p=0.5)[0])
    assert not torch.equal(first, second)


def test_dropout_keeps_the_right_share_independently() -> None:
    index = torch.arange(512)
    for seed in (0, 2**61 + 5):
        factor = dropout_factor(torch.tensor(seed), index[:4, None, None], index[:, None], index, 0.1, torch.float64)
        assert set(factor.unique().tolist()) == {0.0, 1 / 0.9}
        kept = (factor > 0).double()
        deviation = (0.1 * 0.9 / kept.numel()) ** 0.5
        assert abs(kept.mean().item() - 0.9) < 5 * deviation
        centred = (kept - 0.9) / (0.1 * 0.9) ** 0.5
        for shift in (1, 2, 64):
            for dim in (0, 1, 2):
                correlation = (centred * centred.roll(shift, dim)).mean().item()
                assert abs(correlation) < 5 / kept.numel() ** 0.5 or (dim == 0 and shift % 4 == 0)


def test_checkpointing_repeats_dropout() -> None:
    q = torch.randn(1, 40, 2, 8, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return softmax_attention(x, x, x, causal=True, dropout_p=0.3)[0]

    torch.manual_seed(3)
    (wanted,) = torch.autograd.grad(attend(q).square().sum(), q)
    torch.manual_seed(3)
    (found,) = torch.autograd.grad(checkpoint(attend, q, use_reentrant=False).square().sum(), q)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("options", [{}, {"window": (7, 0)}], ids=["sdpa", "portable"])
def test_autocast_runs_in_its_dtype(options: dict[str, Any]) -> None:
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = softmax_attention(q, q, q, causal=True, return_lse="window" in options, **options)
    half = q.detach().bfloat16()
    assert o.dtype == torch.bfloat16 and (lse is None or lse.dtype == torch.float32)
    assert torch.equal(o, softmax_attention(half, half, half, causal=True, **options)[0])
    o.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def peak_memory(tokens: int) -> int:
    """The most bytes that forward and backward hold at a time beside their inputs."""
    q, k, v = (torch.randn(1, tokens, 1, 8, requires_grad=True) for _ in range(3))
    sink, slopes = torch.zeros(1), torch.ones(1)
    gates = torch.full((1, tokens, 1), -0.01, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        o, _ = softmax_attention(q, k, v, causal=True, sink=sink, alibi_slopes=slopes, log_decay=gates, softcap=9.0)
        o.sum().backward()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_grows_linearly() -> None:
    short, middle, long = (peak_memory(tokens) for tokens in (1024, 2048, 4096))
    assert long - middle <= 2.2 * (middle - short), f"{short}, {middle}, {long} bytes"
    assert long < 4096 * 4096, "a quarter of the scores"


def test_explain_names_the_reason() -> None:
    q = torch.randn(1, 8, 2, 4)
    assert explain(softmax_attention, q, q, q, causal=True).choice == "sdpa"
    told = explain(softmax_attention, q, q, q, causal=True, softcap=2.0)
    assert (
        told.choice == "portable"
        and told.reasons["sdpa"] == "torch's scaled_dot_product_attention does not take softcap"
    )


def operator_call(tensors: dict[str, Tensor], **options: Any) -> AttentionCall:
    """A causal call with these tensors, past the checks of the public function."""
    fields = dict.fromkeys(("sink", "alibi_slopes", "log_decay", "seed", "packing", "packing_k", "left", "softcap"))
    given = {"scale": 0.3, "right": 0, "dropout_p": 0.0, "return_lse": True}
    return AttentionCall(**{**fields, **given, **tensors, **options})


OPERATOR = [
    Case(
        "everything", **EVERYTHING, batch=1, tokens=5, tokens_k=7, heads=4, dim=3, dim_v=2, window=(3, 0), dropout_p=0.4
    ),
    Case("packed", lengths=(3, 0, 2), lengths_k=(4, 1, 2), dim=2),
]


@pytest.mark.parametrize("case", OPERATOR, ids=str)
def test_opcheck(case: Case) -> None:
    call = make_call(case, torch.float32)
    tensors = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}
    options = {"left": None if case.window is None else case.window[0], "softcap": case.softcap}
    if call.packing is not None:
        options |= dict(zip(("packing", "packing_k"), call.packing, strict=True))
    seed = torch.tensor(7) if case.dropout_p else None
    made = operator_call(tensors, seed=seed, dropout_p=case.dropout_p, **options)
    torch.library.opcheck(ATTENTION.operator, (*ATTENTION.flat(made), True, "portable"))


@pytest.mark.parametrize("case", [Case("plain", tokens=40), OPERATOR[1], Case("all", **EVERYTHING, tokens=40)], ids=str)
def test_compiled_is_eager(case: Case) -> None:
    call = make_call(case, torch.float32)
    tensors = {name: tensor.requires_grad_() for name, tensor in call.tensors.items()}
    options: dict[str, Any] = {"causal": True, "softcap": case.softcap}
    if call.packing is not None:
        options |= {"cu_seqlens": call.packing[0].cu_seqlens, "cu_seqlens_k": call.packing[1].cu_seqlens}

    def loss(named: dict[str, Tensor]) -> Tensor:
        return softmax_attention(**named, **options)[0].square().sum()

    wanted = torch.autograd.grad(loss(tensors), list(tensors.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("strided", ["k", "v", "k and v"])
def test_few_queries_and_keys_whose_channels_lie_apart(strided: str) -> None:
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 37, 2, 8), torch.randn(1, 37, 2, 8)
    wanted, _ = softmax_attention(q, k, v, causal=True, impl="portable")
    apart = {
        n: t.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0) if n in strided else t
        for n, t in (("k", k), ("v", v))
    }
    got, _ = softmax_attention(q, **apart, causal=True, impl="portable")
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_0_or_less(scale: float, causal: bool) -> None:
    """Torch's own attention scales its causal mask too: -inf would become NaN or inf."""
    q, k, v = torch.randn(3, 2, 30, 2, 8)
    wanted, _ = definition.softmax_attention(*(t.double() for t in (q, k, v)), scale=scale, causal=causal)
    baseline, _ = definition.softmax_attention(q, k, v, scale=scale, causal=causal)
    got, _ = softmax_attention(q, k, v, scale=scale, causal=causal)
    assert_within_budget("o", got, wanted, baseline)


def test_heads_of_what_hopper_keeps_can_be_taken_apart() -> None:
    """Over ranks the heads of a call are computed in groups, forward in others than backward."""
    pytest.importorskip("triton")
    from flashmix.ops.attention import gluon_hopper

    call = operator_call({name: torch.zeros(1, 5, 4, 16) for name in "qkv"})
    m, l = torch.randn(2, 1, 4, 5).unbind()
    kept = gluon_hopper.of_rows(call, (m, l))
    assert [x.shape for x in kept] == [x.shape for x in gluon_hopper.keeps(call)]
    assert all(map(torch.equal, gluon_hopper.by_rows(call, kept), (m, l)))
    one = call.but(**{name: getattr(call, name)[:, :, 1:2] for name in "qkv"})
    part = gluon_hopper.by_rows(one, gluon_hopper.of_rows(one, (m[:, 1:2], l[:, 1:2])))
    assert all(map(torch.equal, part, (m[:, 1:2], l[:, 1:2])))
