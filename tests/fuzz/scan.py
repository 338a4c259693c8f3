"""Random calls of the scan, of its maximum and of its step, and of the selective scan and its step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.scan import definition
from flashmix.ops.scan.call import COUPLINGS
from flashmix.ops.scan.step.definition import scan_step
from flashmix.ops.selective_scan import definition as selective
from flashmix.ops.selective_scan.step.definition import selective_scan_step

from .draw import Draw
from .recurrence import LAWS, wide
from .sample import Sample, Tensors

SELECTED = 5  # the step size, the scan, the skip, the gate, and what is kept between them
STAGES = 2  # a factor, and the product of factors of an interval


def operands(draw: Draw, batch: int, tokens: int, dtype: torch.dtype) -> Tensors:
    """`x` with heads or without, and a decay of any of its shapes."""
    D = min(draw.channels(), 128)
    inner = (draw.pick((1, 2, 3)), D) if draw.chance(0.4) else (D,)
    shapes = {"channel": (batch, tokens, *inner), "constant": inner}
    if len(inner) == 2:
        shapes |= {"head": (batch, tokens, inner[0]), "constant by head": inner[:1]}
    shape = shapes[draw.pick(sorted(shapes))]
    decay = draw.decay(*shape).to(draw.pick((dtype, wide(dtype))))
    return {"x": draw.normal(batch, tokens, *inner).to(dtype), "log_decay": decay}


def drawn(draw: Draw, op: str) -> Sample:
    """A call of `scan` or `scan_max`."""
    dtype, packed, stated = draw.dtype(), draw.chance(0.25), draw.chance(0.6)
    tokens = draw.tokens()
    lengths = draw.lengths(tokens) if packed else None
    batch = 1 if packed else draw.batch()
    x = operands(draw, batch, tokens, dtype)
    options: dict[str, Any] = {"read_before": draw.chance(0.3)}
    if op == "scan":
        options["coupling"] = coupling(draw, x)
    if stated:
        rows = batch if lengths is None else len(lengths)
        x["initial_state"] = draw.normal(rows, *x["x"].shape[2:]).to(wide(dtype))
    own = frozenset({"x", "log_decay"} if x["log_decay"].dim() > 2 else {"x"})
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_scanned, op, options),
        axes=("token", "state"),
        options={"return_state": True, **options},
        per_token=own,
        per_row=own,
        states=("initial_state",),
        lengths=lengths,
        gradient=op == "scan",
        plain_dtype=torch.float32,
        steps=STAGES,
        laws=LAWS,
    )


def _scanned(op: str, options: dict[str, Any], x: Tensors) -> tuple[Tensor, ...]:
    return getattr(definition, op)(**x, **options)


def coupling(draw: Draw, x: Tensors) -> str | None:
    """How the decay says what is written; logits are of both signs."""
    kind = draw.free.choice((None, None, None, *COUPLINGS))
    if kind == "logit":
        logits = x["log_decay"]
        x["log_decay"] = torch.where(torch.arange(logits.numel()).view(logits.shape) % 3 == 0, -logits, logits)
    return kind


def drawn_step(draw: Draw) -> Sample:
    """A call of `scan_step`: states in place, in a batch or in a pool with idle sequences."""
    dtype, batch, tokens = draw.dtype(), draw.batch(), draw.free.choice((1, 1, 1, 2, 3, 5, 16))
    x = operands(draw, batch, tokens, dtype)
    x |= pool(draw, batch, x["x"].shape[2:], wide(dtype))
    options: dict[str, Any] = {"read_before": draw.chance(0.2), "coupling": coupling(draw, x)}
    own = frozenset({"x", "log_decay"} if x["log_decay"].dim() > 2 else {"x"})
    return Sample(
        op="scan_step",
        dtype=dtype,
        tensors=x,
        means=partial(_stepped, options),
        axes=("token", "whole"),
        options=options,
        per_token=own,
        per_row=own,
        gradient=False,
        written=("state",),
        plain_dtype=torch.float32,
        steps=STAGES,
        laws=frozenset({"repeat", "layout"}),
    )


def _stepped(options: dict[str, Any], x: Tensors) -> tuple[Tensor, ...]:
    return scan_step(**x, **options)


def pool(draw: Draw, batch: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensors:
    """States of a batch, or a pool of them with the slot of each sequence, some idle."""
    pooled = draw.chance(0.4)
    slots = max(batch + draw.free.randint(0, 2), 1) if pooled else batch
    x = {"state": draw.normal(slots, *sizes).to(dtype)}
    if pooled:
        order = draw.free.sample(range(slots), min(batch, slots))
        places = [slot if draw.free.random() < 0.8 else -1 for slot in (*order, *[-1] * (batch - len(order)))]
        x["state_indices"] = torch.tensor(places, dtype=draw.pick((torch.int32, torch.int64)))
    return x


def selective_operands(draw: Draw, batch: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, dict[str, Any]]:
    """The operands of a selective scan, and whether its step sizes are logits."""
    groups, S = draw.pick((0, 1, 2)), draw.pick((1, 2, 5, 16))
    D, logits = max(groups, 1) * min(draw.channels(), 64), draw.chance(0.5)
    shared = (batch, tokens, groups, S) if groups else (batch, tokens, S)
    dt = draw.normal(batch, tokens, D) if logits else draw.strength(batch, tokens, D, most=1.0)
    x = {"u": draw.normal(batch, tokens, D), "dt": dt, "A": -3 * draw.uniform(D, S)}
    x |= {"B": draw.normal(*shared), "C": draw.normal(*shared)}
    x |= {"z": draw.normal(batch, tokens, D)} if draw.chance(0.4) else {}
    x |= {"D": draw.normal(D)} if draw.chance(0.5) else {}
    x |= {"dt_bias": draw.normal(D)} if logits and draw.chance(0.5) else {}
    return {n: t.to(wide(dtype) if n in ("dt", "A", "D", "dt_bias") else dtype) for n, t in x.items()}, {
        "softplus": logits
    }


def drawn_selective(draw: Draw, op: str) -> Sample:
    """A call of `selective_scan` or of its step."""
    dtype, step = draw.dtype(), op.endswith("_step")
    packed, stated = not step and draw.chance(0.25), draw.chance(0.6)
    tokens = draw.free.choice((1, 1, 1, 2, 3, 5, 16)) if step else draw.tokens()
    lengths = draw.lengths(tokens) if packed else None
    batch = 1 if packed else draw.batch()
    x, options = selective_operands(draw, batch, tokens, dtype)
    sizes = x["A"].shape
    if step:
        x |= pool(draw, batch, sizes, wide(dtype))
    elif stated:
        x["initial_state"] = draw.normal(batch if lengths is None else len(lengths), *sizes).to(wide(dtype))
    own = frozenset({"u", "dt", "B", "C", "z"} & set(x))
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_selected, op, options),
        axes=("token", "whole" if step else "state"),
        options=options if step else options | {"return_state": True},
        per_token=own,
        per_row=own,
        states=() if step else ("initial_state",),
        lengths=lengths,
        gradient=not step,
        written=("state",) if step else (),
        plain_dtype=torch.float32,
        steps=SELECTED,
        laws=frozenset({"repeat", "layout"}) if step else LAWS,
    )


def _selected(op: str, options: dict[str, Any], x: Tensors) -> tuple[Tensor, ...]:
    return (selective_scan_step if op.endswith("_step") else selective.selective_scan)(**x, **options)
