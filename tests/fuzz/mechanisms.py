"""Random calls of the published mechanisms; they mean their papers' loops (small calls), or plain PyTorch in float64 (larger ones)."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from paper_cases import WIDE, Mechanism, kind_of, kind_of_state
from paper_loops import MECHANISMS, run_loop, state_names
from torch import Tensor

from flashmix.mechanisms.registry import MECHANISMS as REGISTERED

from .draw import Draw
from .recurrence import LAWS, bound, loose, wide
from .sample import OPS, Sample, Tensors, flattened

STAGES = 5  # those of the recurrence, and an operand of the engine that a mechanism makes
SCANNING = (
    "abc",
    "based",
    "mlstm",
    "normalised_linear_attention",
    "preconditioned_gated_deltanet",
    "preconditioned_kda",
    "rebased",
)  # heads of one channel, a normaliser's among them
LEVELS = 8  # of log-linear attention: 2^7 tokens and more than there are
LOOPED = 60  # the most tokens times heads times sequences that a paper's loop runs


def drawn(draw: Draw, op: str) -> Sample:
    """A call of the mechanism `op`."""
    mechanism, dtype = MECHANISMS[op], draw.dtype()
    packed, stated = draw.chance(0.25), draw.chance(0.6)
    tokens = draw.tokens(70)
    lengths = draw.lengths(tokens) if packed else None
    H, group = draw.heads()
    axes_used = " ".join((*mechanism.shapes.values(), *mechanism.states)).split()
    K = min(draw.channels(), 16 if "F" in axes_used else 8 if "ridge" in mechanism.shapes else 128)
    K = max(K, 2) if "R" in axes_used else K
    V = K if draw.chance(0.4) else min(draw.channels(), 128)
    size = {"B": 1 if packed else draw.batch(), "T": tokens, "n": draw.pick((1, 2, 3)), "H": H, "K": K, "V": V}
    slots = draw.pick((1, 4, 7, 16, 32))
    size |= {
        "HV": H * group if mechanism.grouped else H,
        "M": 4 if "recurrent" in mechanism.shapes else max(slots, size["n"]),
    }
    size |= {"F": mechanism.features(K), "R": K // 2, "L": LEVELS, "one": 1, "two": 2}
    size["N"] = size["B"] if lengths is None else len(lengths)
    if op.startswith("preconditioned") and draw.on_gpu:
        size["V"] = V
    x: Tensors = {}
    for name, axes in mechanism.shapes.items():
        if name in mechanism.optional and draw.chance(0.4):
            continue
        x[name] = _argument(draw, mechanism, name, tuple(size[axis] for axis in axes.split()))
    if stated:
        for name, axes in zip(state_names(op), mechanism.states, strict=True):
            x[name] = _state(draw, kind_of_state(mechanism, name, axes), tuple(size[axis] for axis in axes.split()))
    kept = (*WIDE, *REGISTERED[op].wide)
    x = {n: t.to(wide(dtype) if n in kept or n.startswith("initial_state") else dtype) for n, t in x.items()}
    per_token = frozenset(name for name, axes in mechanism.shapes.items() if axes.startswith("B T") and name in x)
    options = dict(mechanism.options) | ({"steps": 16 + 2 * K} if op == "mesa_net" else {})
    takes_scale = "scale" in inspect.signature(OPS[op]).parameters and not mechanism.positive
    scale = draw.scale() if takes_scale else None
    options |= {} if scale is None else {"scale": scale}
    options["return_state"] = True
    small = size["B"] * size["T"] * size["HV"] <= LOOPED
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_loop, op, scale) if small else partial(_plainly, op, options),
        axes=("token", *["state"] * len(mechanism.states)),
        options=options,
        per_token=per_token,
        per_row=per_token,
        states=tuple(state_names(op)),
        lengths=lengths,
        plain_dtype=torch.float32,
        steps=STAGES * (2 if op == "oja" else 1),  # whose second call of the engine reads results of the first
        bound=cancelling(op, V) * bound(draw, x, min(K, V) if mechanism.unit == ("v",) else K),
        laws=LAWS,
        loose=loose(1 if op in SCANNING else K, V),
    )


def cancelling(op: str, channels: int) -> float:
    """How many budgets a mechanism may spend that is left with what cancels: every stage's rounding is multiplied by that."""
    if op == "mlstm":  # its divisor is a sum whose terms may
        return 2.0
    return 8.0 if op == "ttt_linear" and channels == 1 else 1.0  # its norm, of one channel


def _argument(draw: Draw, mechanism: Mechanism, name: str, shape: tuple[int, ...]) -> Tensor:
    kind = kind_of(mechanism, name)
    if kind in ("scaled", "unit"):
        return mechanism.draw.get(name, 1.0) * draw.unit(*shape)
    if kind == "decay":
        return draw.decay(*shape)
    if kind == "strength":
        return draw.strength(*shape, most=2.0 if name == "beta" and not mechanism.weak else 1.0)
    if kind == "normal":
        return draw.normal(*shape)
    drawn = draw.uniform(*shape)
    return {"routing": (drawn - 0.5).clamp(min=0), "ridge": drawn + 0.5}.get(kind, 0.05 + 0.95 * drawn)


def _state(draw: Draw, kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "count":
        return draw.integers(0, 6, *shape).double()
    state = draw.normal(*shape)
    return state.abs() + 0.1 if kind == "positive" else state @ state.mT if kind == "outer" else state


def _loop(op: str, scale: float | None, x: Tensors) -> tuple[Tensor, ...]:
    return run_loop(op, x, None, scale)


def _plainly(op: str, options: dict[str, Any], x: Tensors) -> list[Tensor]:
    arguments: dict[str, Any] = {n: t for n, t in x.items() if not n.startswith("initial_state")}
    states = tuple(x[n] for n in state_names(op) if n in x)
    if states:
        arguments["initial_state"] = states if len(states) > 1 else states[0]
    return flattened(OPS[op](**arguments, **options, impl="portable"))
