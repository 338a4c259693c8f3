"""Which implementations keep the laws "alone = in a batch" and "strided = contiguous" bit for bit at odd sizes: the table of
docs/numerics.md. A cell "no" is seen to fail, so that the table says so no longer than it is true.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import PAIRS, Case, make_inputs, run_op
from torch import Tensor

import flashmix
from flashmix.ops.recurrence.native.binding import missing
from flashmix.ops.scaled_rows import scaled_rows

Run = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
Draw = Callable[[int], tuple[dict[str, Tensor], Run]]
DOC = Path(__file__).parent.parent / "docs" / "numerics.md"
CALLS = 40


def recurrence(impl: str, multiple: int = 1) -> Draw:
    """Calls of the recurrence whose head dimensions are multiples of `multiple`."""

    def draw(seed: int) -> tuple[dict[str, Tensor], Run]:
        rng = random.Random(seed)
        rule, gate = rng.choice([pair for pair in PAIRS if pair[1] not in ("value", "head")])
        K, V = (multiple * rng.randint(1, 40 // multiple) for _ in range(2))
        heads = rng.choice((1, 2, 3))
        case = Case("", rule, gate, B=rng.randint(2, 7), T=rng.randint(2, 120), H=1, HV=heads, K=K, V=V)
        return make_inputs(case, torch.float32, seed), lambda x: run_op(case, x, impl)

    return draw


def attention(impl: str) -> Draw:
    def draw(seed: int) -> tuple[dict[str, Tensor], Run]:
        rng = random.Random(seed)
        shape = rng.randint(2, 5), rng.randint(2, 90), rng.randint(1, 4), rng.randint(1, 70)
        q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed))

        def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return flashmix.softmax_attention(**x, causal=True, impl=impl)[:1]

        return {"q": q, "k": k, "v": v}, run

    return draw


def rows(function: Callable[[Tensor], Tensor]) -> Draw:
    def draw(seed: int) -> tuple[dict[str, Tensor], Run]:
        rng = random.Random(seed)
        x = torch.randn(rng.randint(2, 60), rng.randint(1, 130), generator=torch.Generator().manual_seed(seed))
        return {"x": x}, lambda x: (function(x["x"]),)

    return draw


def targets(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.int64)


WEIGHT = torch.randn(37, 130, generator=torch.Generator().manual_seed(0))
# each row of the table: its calls; alone = in a batch; tokens or rows apart = contiguous; channels apart = contiguous
TABLE: dict[str, tuple[Draw, str, str, str]] = {
    "recurrence, C": (recurrence("native"), "yes", "yes", "yes"),
    "recurrence, plain PyTorch, `K` and `V` multiples of 4": (recurrence("portable", 4), "yes", "yes", "yes"),
    "recurrence, plain PyTorch, other sizes": (recurrence("portable"), "no", "yes", "yes"),
    "attention, plain PyTorch": (attention("portable"), "yes", "yes", "yes"),
    "attention, torch's own (`sdpa`)": (attention("sdpa"), "no", "no", "no"),
    "`rms_norm`, `l2_norm`": (rows(flashmix.rms_norm), "yes", "yes", "no"),
    "`layer_norm`, `group_norm`": (rows(flashmix.layer_norm), "yes", "yes", "yes"),
    "`cross_entropy` by token": (
        rows(lambda x: flashmix.cross_entropy(x, targets(x), reduction="none")),
        "yes",
        "yes",
        "no",
    ),
    "`linear_cross_entropy` by token": (
        rows(lambda x: flashmix.linear_cross_entropy(x, WEIGHT[:, : x.shape[1]], targets(x), reduction="none")),
        "yes",
        "yes",
        "yes",
    ),
}


def alone(x: dict[str, Tensor], run: Run) -> bool:
    whole, n = run(x), next(iter(x.values())).shape[0] - 1
    part = run({name: t[n:] for name, t in x.items()})
    return all(torch.equal(p, w[n:]) for p, w in zip(part, whole, strict=True))


def strided(dim: int) -> Callable[[dict[str, Tensor], Run], bool]:
    """Laid out with the axis `dim` (1: tokens, of rows the only one; -1: channels) outermost."""

    def law(x: dict[str, Tensor], run: Run) -> bool:
        def apart(t: Tensor) -> Tensor:
            if dim == 1 and t.dim() == 2:
                return torch.empty(t.shape[0], t.shape[1] + 3)[:, : t.shape[1]].copy_(t)
            return t.transpose(0, dim).contiguous().transpose(0, dim)

        other = run({name: t if name == "initial_state" else apart(t) for name, t in x.items()})
        return all(torch.equal(o, w) for o, w in zip(other, run(x), strict=True))

    return law


LAWS = {"alone": (1, alone), "tokens apart": (2, strided(1)), "channels apart": (3, strided(-1))}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("what", TABLE)
def test_the_table(what: str, law: str) -> None:
    if "C" in what.split(", ") and missing() is not None:
        pytest.skip(str(missing()))
    place, holds = LAWS[law]
    draw, claim = TABLE[what][0], TABLE[what][place]
    broken = [seed for seed in range(CALLS) if not holds(*draw(seed))]
    if claim == "yes":
        assert not broken, f"{len(broken)} of {CALLS} calls: seeds {broken[:5]}"
    elif not broken:
        pytest.skip("it held on this machine")


def test_the_table_is_in_the_docs() -> None:
    text = DOC.read_text()
    for what, (_, *cells) in TABLE.items():
        assert f"| {what} | {' | '.join(cells)} |" in text, what


def test_strides_of_gates_change_no_bit_of_the_slstm() -> None:
    strided = torch.randn(4, 1, 26, 2, 44).mT[..., ::2, :].transpose(2, 3)  # [4, 1, 22, 2, 26]
    y, _ = flashmix.slstm(*strided, impl="portable")
    assert torch.equal(y, flashmix.slstm(*strided.contiguous(), impl="portable")[0])


def test_strides_of_rows_change_no_bit_of_the_gradient_of_their_factors() -> None:
    """Nor do rows behind them: sums over channels have one order, where torch's own has another for the last of many."""
    x = torch.randn(5, 15, 1, 21).permute(0, 3, 2, 1)  # [5, 21, 1, 15]
    factor, flow = torch.randn(5, 21, 1), torch.randn(5, 21, 1, 15)

    def gradient(x: Tensor, tokens: int) -> Tensor:
        leaf = factor[:, :tokens].clone().requires_grad_()
        y = scaled_rows(x[:, :tokens], leaf, "portable")
        return torch.autograd.grad(y, leaf, flow[:, :tokens])[0]

    wanted = gradient(x, 21)
    assert torch.equal(wanted, gradient(x.contiguous(), 21))
    assert torch.equal(wanted[:, :19], gradient(x, 19))
