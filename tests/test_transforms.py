"""Every public op under every transform of torch: the right answer, or the sentence that the table in docs/numerics.md gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from samples import sample_of_rows
from test_errors import OPS, full_call
from torch import Tensor
from torch.autograd import forward_ad

import flashmix

Call = dict[str, Any]
NO_GRADIENT = {"teacher_hidden", "teacher_weight", "teacher_bias"}  # which must not ask for one
ROW_WISE = {
    "bounded_decay",
    "gated",
    "group_norm",
    "l2_norm",
    "layer_norm",
    "rms_norm",
    "rotary",
    "rotary_qk",
    "short_conv",
    "short_conv_qkv",
    "softplus_decay",
    "swiglu",
    "token_shift",
    "write_strength",
}
PLAIN = {"momentum_deltanet", "titans_linear", "ttt_linear"}  # chunks of plain PyTorch, which torch differentiates
WRITING = {
    "attention_with_cache",
    "delta_net_step",
    "delta_rule_step",
    "dplr_step",
    "linear_attention_step",
    "scan_step",
    "selective_scan_step",
}
WORKS = "yes"
NO_FORWARD, NO_SECOND = "`… has no forward-mode derivative`", "`… has no second derivative`"
NOT_WRITTEN, ONLY_FORWARD = "`… writes into its arguments: …`", "`… has no gradient…`"
# What the table says of a group of ops, by transform.
TABLE = {
    "compile": (WORKS, WORKS, WORKS, WORKS),
    "export": (WORKS, WORKS, WORKS, WORKS),
    "meta": (WORKS, WORKS, WORKS, WORKS),
    "autocast": (WORKS, WORKS, WORKS, WORKS),
    "checkpoint": (WORKS, WORKS, ONLY_FORWARD, ONLY_FORWARD),
    "grad": (WORKS, WORKS, ONLY_FORWARD, ONLY_FORWARD),
    "vmap": (WORKS, WORKS, NOT_WRITTEN, WORKS),
    "vmap(grad)": (WORKS, WORKS, ONLY_FORWARD, ONLY_FORWARD),
    "jvp": (WORKS, NO_FORWARD, NOT_WRITTEN, NO_FORWARD),
    "second derivative": (WORKS, NO_SECOND, ONLY_FORWARD, ONLY_FORWARD),
}


STEPS = 1024  # of float64's rounding: the formula, the portable path and C sum in different orders


def same(name: str, have: Tensor, want: Tensor) -> None:
    assert have.shape == want.shape
    assert_within_budget(name, have, want, want, steps=STEPS)


def group(op: str) -> int:
    return 0 if op in ROW_WISE | PLAIN else 2 if op in WRITING else 3 if op == "scan_max" else 1


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else first(result[0])


def run(op: str, **changed: Any) -> Tensor:
    """The first output of a call in float64, some of whose arguments are replaced; nothing is written twice."""
    return first(OPS[op](**{**call_of(op), **changed}))


def loss(y: Tensor) -> Tensor:
    """A number that depends on each entry of y in its own way, and not linearly."""
    return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum().square()


@lru_cache
def drawn(op: str) -> Call:
    """Drawn once: a random draw would stop vmap."""
    return full_call(op)


def call_of(op: str) -> Call:
    call = {n: t.clone() if isinstance(t, Tensor) else t for n, t in drawn(op).items()}
    if "cache" in call:
        call["cache"] = flashmix.KVCache.contiguous(1, 16, 2, 8, dtype=torch.float64)
    return {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in call.items()}


def floating(op: str) -> list[str]:
    return [
        n for n, t in call_of(op).items() if isinstance(t, Tensor) and t.is_floating_point() and n not in NO_GRADIENT
    ]


def reference(op: str, name: str, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    y = run(op, **{name: x})
    if not y.requires_grad:
        return torch.zeros_like(x)
    (grad,) = torch.autograd.grad(loss(y), x, allow_unused=True)
    return torch.zeros_like(x) if grad is None else grad


def gradient(op: str, name: str) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda x: loss(run(op, **{name: x})))


def under_grad(op: str) -> None:
    for name in floating(op)[:3]:
        x = call_of(op)[name]
        try:
            have = gradient(op, name)(x)
        except RuntimeError as error:
            if "appears to not have been used" not in str(error):  # torch's sentence where no output depends on x
                raise
            have = torch.zeros_like(x)
        same(name, have, reference(op, name, x))


def under_vmap(op: str) -> None:
    for name in floating(op)[:2]:
        rows = torch.stack([call_of(op)[name], call_of(op)[name] / 2])
        have = torch.func.vmap(lambda x, name=name: run(op, **{name: x}))(rows)
        same(name, have, torch.stack([run(op, **{name: x}) for x in rows]))


def under_vmap_of_grad(op: str) -> None:
    name = floating(op)[0]
    rows = torch.stack([call_of(op)[name], call_of(op)[name] / 2])
    same(name, torch.func.vmap(gradient(op, name))(rows), torch.stack([reference(op, name, x) for x in rows]))


def under_jvp(op: str) -> None:
    """The right tangent of every argument, or an error; where several arguments raise one, the same but for the op that it names."""
    refused = []
    for name in floating(op):
        try:
            right_tangent(op, name)
        except (NotImplementedError, RuntimeError) as error:
            refused.append(error)
            as_dual_numbers(op, name, error)
    assert len({str(error).split(" ", 1)[1] for error in refused}) < 2
    if refused:
        raise refused[0]


def as_dual_numbers(op: str, name: str, error: Exception) -> None:
    """The error that `torch.func.jvp` raised, but for the op that it names, or the right tangent (of what follows a kernel that writes)."""
    x = call_of(op)[name]
    try:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(run(op, **{name: forward_ad.make_dual(x, torch.ones_like(x))})).tangent
    except type(error) as other:
        assert str(other).split(" ", 1)[1] == str(error).split(" ", 1)[1]
        return
    step = torch.finfo(x.dtype).eps ** (1 / 3)
    want = (run(op, **{name: x + step}) - run(op, **{name: x - step})) / (2 * step)
    assert found is not None and (found - want).abs().max() <= step * want.abs().max()


def right_tangent(op: str, name: str) -> None:
    x = call_of(op)[name]
    direction = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    _, tangent = torch.func.jvp(lambda x: run(op, **{name: x}), (x,), (direction,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(run(op, **{name: forward_ad.make_dual(x, direction)})).tangent
    assert torch.equal(torch.zeros_like(tangent) if dual is None else dual, tangent)
    # The tangent against the gradient: <cotangent, J direction> = <J^T cotangent, direction>.
    leaf = x.clone().requires_grad_()
    y = run(op, **{name: leaf})
    cotangent = torch.rand(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    grad = None
    if y.requires_grad:
        (grad,) = torch.autograd.grad(y, leaf, cotangent, allow_unused=True)
    want = torch.zeros(()) if grad is None else (grad * direction).sum()
    same(name, (tangent * cotangent).sum(), want.to(tangent.dtype))


def under_second_derivative(op: str) -> None:
    name = floating(op)[0]
    x = call_of(op)[name].requires_grad_()
    (grad,) = torch.autograd.grad(loss(run(op, **{name: x})), x, create_graph=True)
    (second,) = torch.autograd.grad(loss(grad), x)
    assert second.shape == x.shape and bool(second.any())


def under_checkpoint(op: str) -> None:
    name = floating(op)[0]
    x = call_of(op)[name].requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: run(op, **{name: x}), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(loss(y), x)
    assert torch.equal(grad, reference(op, name, x))


def under_autocast(op: str) -> None:
    call = full_call(op)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = first(OPS[op](**call))
    assert y.dtype in (torch.float32, torch.bfloat16) and bool(torch.isfinite(y).all())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(op), run(op)) and run(op).dtype == torch.float64


def under_meta(op: str) -> None:
    call = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in full_call(op).items()}
    if "cache" in call:
        call["cache"] = flashmix.KVCache.contiguous(1, 16, 2, 8, device="meta")
    have, want = first(OPS[op](**call)), first(OPS[op](**full_call(op)))
    assert have.is_meta
    assert (have.shape, have.dtype) == (want.shape, want.dtype)


def under_compile(op: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda call: first(OPS[op](**call)), fullgraph=True, backend="aot_eager")
    same(op, compiled(call_of(op)), run(op))


class Exported(torch.nn.Module):
    def __init__(self, op: str, call: Call) -> None:
        super().__init__()
        self.op, self.names = OPS[op], [n for n, t in call.items() if isinstance(t, Tensor)]
        self.rest = {n: x for n, x in call.items() if n not in self.names}

    def forward(self, *tensors: Tensor) -> Tensor:
        return first(self.op(**dict(zip(self.names, tensors, strict=True)), **self.rest))


def under_export(op: str) -> None:
    call = call_of(op)
    module = Exported(op, call)
    with torch.no_grad():
        program = torch.export.export(module, tuple(call[n].clone() for n in module.names), strict=False)
        if "cache" not in call:  # whose buffers the program holds
            same(op, program.module()(*[call[n].clone() for n in module.names]), run(op))


CHECKS: dict[str, Callable[[str], None]] = {
    "compile": under_compile,
    "export": under_export,
    "meta": under_meta,
    "autocast": under_autocast,
    "checkpoint": under_checkpoint,
    "grad": under_grad,
    "vmap": under_vmap,
    "vmap(grad)": under_vmap_of_grad,
    "jvp": under_jvp,
    "second derivative": under_second_derivative,
}


# By default of each kind of op one or two under all, for to trace takes a second, and of the others each under a third of the rest;
# every mechanism is compiled by its layer, or in test_named.py.
TRACED = (
    *("delta_rule", "gated_deltanet", "linear_attention_step", "linear_cross_entropy", "mamba2", "rms_norm", "rotary"),
    *("scan", "selective_scan", "short_conv", "softmax_attention", "ttt_linear"),
)
EACH = [(op, transform) for op in OPS for transform in CHECKS]


@pytest.mark.parametrize(
    "op, transform",
    sample_of_rows(
        EACH,
        [
            (op, how)
            for place, (op, how) in enumerate(EACH)
            if op in TRACED or (how not in ("compile", "export") and place % 3 == 0)
        ],
    ),
)
def test_every_op_under_every_transform(op: str, transform: str) -> None:
    said = TABLE[transform][group(op)]
    if said == WORKS:
        CHECKS[transform](op)
        return
    pattern = re.escape(said.strip("`")).replace("…", r".*")
    with pytest.raises((NotImplementedError, RuntimeError), match=f"^{pattern}$"):
        CHECKS[transform](op)


def test_the_document_has_this_table() -> None:
    text = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text()
    for transform, cells in TABLE.items():
        assert f"| {transform} | {' | '.join(cells)} |" in text, transform


def test_a_gradient_through_plain_attention_is_taken_once() -> None:
    """torch's own attention has no second derivative; ours says so by its own name."""
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    o, _ = flashmix.softmax_attention(q, q, q, impl="sdpa")
    (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^softmax_attention has no second derivative$"):
        grad.sum().backward()
