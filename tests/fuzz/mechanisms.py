"""Random calls of the published mechanisms; they mean their papers' loops (small calls), or plain PyTorch in float64 (larger ones)."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from paper_cases import WIDE, Mechanism
from paper_loops import MECHANISMS, run_loop, state_names
from torch import Tensor

from .draw import Draw
from .recurrence import LAWS, bound, loose, wide
from .sample import OPS, Sample, Tensors, flattened

STAGES = 5  # those of the recurrence, and an operand of the engine that a mechanism makes
SCANNING = (
    "abc",
    "normalised_linear_attention",
    "preconditioned_gated_deltanet",
    "preconditioned_kda",
)  # heads of one channel
DENSE = ("s5", "lru")  # products with whole matrices, whose bits depend on how many rows there are
COUNTED = 20  # the most tokens that a state has counted
LOOPED = 60  # the most tokens times heads times sequences that a paper's loop runs


def drawn(draw: Draw, op: str) -> Sample:
    """A call of the mechanism `op`."""
    mechanism, dtype = MECHANISMS[op], draw.dtype()
    packed, stated = draw.chance(0.25), draw.chance(0.6)
    tokens = draw.tokens(70)
    lengths = draw.lengths(tokens) if packed else None
    H, group = draw.heads()
    K = min(draw.channels(), 16 if "F" in " ".join(mechanism.states) else 128)
    V = K if draw.chance(0.4) else min(draw.channels(), 128)
    size = {"B": 1 if packed else draw.batch(), "T": tokens, "n": draw.pick((1, 2, 3)), "H": H, "K": K, "V": V}
    size |= {"HV": H * group if mechanism.grouped else H, "M": draw.pick((1, 4, 7, 16, 32))}
    size["N"] = size["B"] if lengths is None else len(lengths)
    size |= {"R": min(K // 2, 4), "F": mechanism.features(K), "one": 1}
    if any(axes.endswith("M n") for axes in mechanism.states):
        size["n"] = 2  # real and imaginary parts
    elif op == "slstm":
        size["M"] = 4  # gates
    elif op == "mom":
        size["M"] = max(size["M"], size["n"])  # no more visits than memories
    size["L"] = 1 + (tokens + COUNTED).bit_length()
    if op.startswith("preconditioned") and draw.on_gpu:
        size["V"] = V
    x: Tensors = {}
    for name, axes in mechanism.shapes.items():
        if name in mechanism.optional and draw.chance(0.4):
            continue
        x[name] = _argument(draw, mechanism, name, tuple(size[axis] for axis in axes.split()))
    if stated:
        for name, axes in zip(state_names(op), mechanism.states, strict=True):
            state = draw.normal(*(size[axis] for axis in axes.split()))
            if axes == "N one":  # a number of tokens
                state = (state.abs() * 3).floor().clamp(max=COUNTED)
            elif axes == "N HV K K":  # a sum of outer products
                state = state @ state.mT
            x[name] = state.abs() + 0.1 if axes in ("N H K", "N H F") else state
    x = {n: t.to(wide(dtype) if n in WIDE or n.startswith("initial_state") else dtype) for n, t in x.items()}
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
        steps=STAGES,
        bound=bound(draw, x, min(K, V) if mechanism.unit == ("v",) else K),
        laws=LAWS - {"batch", "prefix", "packed"} if op in DENSE else LAWS,
        loose=loose(1 if op in SCANNING else K, V),
    )


def _argument(draw: Draw, mechanism: Mechanism, name: str, shape: tuple[int, ...]) -> Tensor:
    unit = mechanism.unit if "beta" in mechanism.shapes else ()
    if name in mechanism.draw:
        return mechanism.draw[name] * draw.unit(*shape)
    if name in mechanism.positive:
        return 0.05 + 0.95 * draw.uniform(*shape)
    if name in mechanism.routing:
        return (draw.uniform(*shape) - 0.5).clamp(min=0)
    if name == "ridge":
        return 0.5 + draw.uniform(*shape)
    if name in ("log_decay", "log_forget", "curvature_log_decay", "momentum_log_decay"):
        return draw.decay(*shape)
    if name in ("beta", "dt", "a", "curvature_beta", "gradient_beta") or name.endswith("_gate"):
        return draw.strength(*shape, most=2.0 if name == "beta" and not mechanism.weak else 1.0)
    if name == "kk" or name in unit:
        return draw.unit(*shape)
    return draw.normal(*shape)


def _loop(op: str, scale: float | None, x: Tensors) -> tuple[Tensor, ...]:
    return run_loop(op, x, None, scale)


def _plainly(op: str, options: dict[str, Any], x: Tensors) -> list[Tensor]:
    arguments: dict[str, Any] = {n: t for n, t in x.items() if not n.startswith("initial_state")}
    states = tuple(x[n] for n in state_names(op) if n in x)
    if states:
        arguments["initial_state"] = states if len(states) > 1 else states[0]
    return flattened(OPS[op](**arguments, **options, impl="portable"))
