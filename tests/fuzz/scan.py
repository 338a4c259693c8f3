"""Random calls of the scan, of its maximum and of its step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.scan import definition
from flashmix.ops.scan.step.definition import scan_step

from .draw import Draw
from .recurrence import LAWS, wide
from .sample import Sample, Tensors

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
    read_before = draw.chance(0.3)
    if stated:
        rows = batch if lengths is None else len(lengths)
        x["initial_state"] = draw.normal(rows, *x["x"].shape[2:]).to(wide(dtype))
    own = frozenset({"x", "log_decay"} if x["log_decay"].dim() > 2 else {"x"})
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_scanned, op, read_before),
        axes=("token", "state"),
        options={"return_state": True, "read_before": read_before},
        per_token=own,
        per_row=own,
        states=("initial_state",),
        lengths=lengths,
        gradient=op == "scan",
        plain_dtype=torch.float32,
        steps=STAGES,
        laws=LAWS,
    )


def _scanned(op: str, read_before: bool, x: Tensors) -> tuple[Tensor, ...]:
    return getattr(definition, op)(**x, read_before=read_before)


def drawn_step(draw: Draw) -> Sample:
    """A call of `scan_step`: states in place, in a batch or in a pool with idle sequences."""
    dtype, batch, tokens = draw.dtype(), draw.batch(), draw.free.choice((1, 1, 1, 2, 3, 5, 16))
    x, pooled = operands(draw, batch, tokens, dtype), draw.chance(0.4)
    slots = max(batch + draw.free.randint(0, 2), 1) if pooled else batch
    x["state"] = draw.normal(slots, *x["x"].shape[2:]).to(wide(dtype))
    if pooled:
        order = draw.free.sample(range(slots), min(batch, slots))
        places = [slot if draw.free.random() < 0.8 else -1 for slot in (*order, *[-1] * (batch - len(order)))]
        x["state_indices"] = torch.tensor(places, dtype=draw.pick((torch.int32, torch.int64)))
    options: dict[str, Any] = {"read_before": draw.chance(0.2)}
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
