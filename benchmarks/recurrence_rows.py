"""Rows of `recurrence_gpu.py`: the rules and sizes, their operands, who computes them, and their bounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor
from torch.nn.functional import normalize

from flashmix import abc, delta_rule, dplr, gsa, linear_attention, oja

COPY = {"h200": 4.28e12, "h100": 3.0e12}  # bytes a second that a copy reads and writes, by `timing.card`
PRODUCTS = 790e12  # FLOPs a second of one large matrix product on either
CHUNK = 64
SLOTS = 64  # of GSA and ABC


@dataclass(frozen=True)
class Row:
    """A rule and its sizes: `B` sequences of `T` tokens, `H` heads of keys `K` wide, `HV` of values `V` wide."""

    rule: str
    B: int
    T: int
    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def name(self) -> str:
        return f"{self.rule} {self.B}x{self.T}x{self.H}x{self.HV} K {self.K} V {self.V}"


@dataclass(frozen=True)
class Rule:
    """What a rule computes with: per token a `gate` for each value head ("token"), channel of keys ("channel") or of values ("value"), or
    slot ("slot"), a decay for each head ("head") or none; `corrected` and `raw` writes; the peer's module and function.
    """

    gate: str
    corrected: bool
    raw: bool
    module: str
    function: str


RULES = {
    "gated_delta_rule": Rule("token", True, False, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": Rule("channel", True, False, "fla.ops.kda", "chunk_kda"),
    "gla": Rule("channel", False, True, "fla.ops.gla", "chunk_gla"),
    "simple_gla": Rule("token", False, True, "fla.ops.simple_gla", "chunk_simple_gla"),
    "retention": Rule("head", False, True, "fla.ops.retention", "chunk_retention"),
    "delta_rule": Rule("none", True, False, "fla.ops.delta_rule", "chunk_delta_rule"),
    "gsa": Rule("slot", False, True, "fla.ops.gsa", "chunk_gsa"),
    "abc": Rule("none", False, True, "fla.ops.abc", "chunk_abc"),
    "oja": Rule("value", True, False, "fla.ops.gated_oja_rule", "chunk_gated_oja_rule"),
    "rwkv7": Rule("channel", True, True, "fla.ops.rwkv7", "chunk_rwkv7"),
}
MANY = (
    (4, 8192, 16, 64),
    (1, 32768, 16, 64),
    (1, 32768, 2, 8),
    (8, 4096, 16, 16),
    (1, 32768, 16, 16),
    (1, 32768, 4, 4),
)
TWO = ((8, 4096, 16, 16), (1, 32768, 16, 16))
ROWS = (
    *(Row("gated_delta_rule", *sizes) for sizes in MANY),
    *(Row("gated_delta_rule", 4, 8192, 16, 16, *widths) for widths in ((64, 64), (256, 256), (96, 80))),
    *(Row(rule, *sizes) for rule in RULES if rule != "gated_delta_rule" for sizes in TWO),
    *(Row("rwkv7", *sizes, 64, 64) for sizes in TWO),
)
Tensors = dict[str, Tensor]


def tensors(row: Row, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The operands, all but a fixed decay with gradients: unit q and k (of Oja's rule v too), decays in [-0.1, 0], strengths in [0, 1]."""
    rule = RULES[row.rule]
    torch.manual_seed(0)
    made: dict[str, Any] = {"device": device, "dtype": torch.float32}
    unit = partial(normalize, dim=-1)
    keys, values = (row.B, row.T, row.H, row.K), (row.B, row.T, row.HV, row.V)
    x = {"q": unit(torch.randn(keys, **made)), "k": unit(torch.randn(keys, **made)), "v": torch.randn(values, **made)}
    if row.rule == "rwkv7":
        removal = unit(torch.randn(keys, **made))
        x |= {"a": -removal, "b": removal * torch.rand(keys, **made)}
    if row.rule == "oja":
        x["v"] = unit(x["v"])
    if row.rule == "abc":
        x["s"] = torch.randn((*values[:3], SLOTS), **made)
    if rule.gate == "slot":
        x["g"] = -torch.rand((*values[:3], SLOTS), **made) * 0.1
        x["s"] = -torch.expm1(x["g"])
    x = {name: t if name == "g" else t.to(dtype) for name, t in x.items()}
    if rule.corrected and not rule.raw:
        x["beta"] = torch.rand(values[:3], **made)
    if rule.gate in ("token", "channel", "value"):
        shape = {"token": values[:3], "channel": (*values[:3], row.K), "value": values}[rule.gate]
        x["g"] = -torch.rand(shape, **made) * 0.1
    x = {name: t.requires_grad_() for name, t in x.items()}
    if rule.gate == "head":
        x["g"] = (1 - 2.0 ** (-5.0 - torch.arange(row.HV, **made))).log()
    return x


def ours(row: Row, x: Tensors, impl: str = "triton") -> Tensor:
    q, k, v, g = x["q"], x["k"], x["v"], x.get("g")
    if row.rule == "rwkv7":
        return dplr(q, k, v, x["a"], x["b"], g, scale=1.0, impl=impl)[0]
    if row.rule == "gsa":
        return gsa(q, k, v, x["s"], x["g"], impl=impl)[0]
    if row.rule == "abc":
        return abc(q, k, v, x["s"], impl=impl)[0]
    if row.rule == "oja":
        return oja(q, k, v, x["beta"], g, impl=impl)[0]
    if RULES[row.rule].corrected:
        return delta_rule(q, k, v, x["beta"], g, impl=impl)[0]
    return linear_attention(q, k, v, g, impl=impl)[0]


def peers(row: Row, x: Tensors, bounded: bool = False) -> Tensor:
    """The same of flash-linear-attention; `bounded` promises it that decays are at least e^-5, to those that ask."""
    rule = RULES[row.rule]
    call = getattr(importlib.import_module(rule.module), rule.function)
    named = {name: t for name, t in x.items() if t.requires_grad}  # retention makes its own decay
    if row.rule == "rwkv7":
        named["r"], named["w"] = named.pop("q"), named.pop("g")
    if row.rule == "oja":
        named["gv"] = named.pop("g")
    extra = {"safe_gate": True} if bounded and row.rule in ("kda", "rwkv7") else {}
    return call(**named, **extra)[0]


def passes(row: Row) -> list[tuple[bool, bool, int, int]]:
    """The recurrences that a rule is made of: corrected and raw writes, channels of keys and of values."""
    rule = RULES[row.rule]
    if row.rule in ("gsa", "abc"):
        return [(False, True, row.K, SLOTS), (False, True, SLOTS, row.V)]
    if row.rule == "oja":
        return [(True, False, row.V, row.K), (False, True, row.K, row.V)]
    return [(rule.corrected, rule.raw, row.K, row.V)]


def flops(row: Row) -> int:
    """Products of the chunked forward: with the state (K V each) and in a chunk (CHUNK K and CHUNK V each), two FLOPs an element."""
    total = 0
    for corrected, raw, K, V in passes(row):
        writes = corrected + raw
        state = writes + 1 + corrected  # a write each, the output, what is corrected
        scores = writes * (1 + corrected)  # pairs of a reader (q, a) with a writer (k, b)
        within = scores if raw else 2  # each times values; tied: the solved and the written
        total += state * K * V + CHUNK * (scores * K + within * V)
    return 2 * row.B * row.T * row.HV * total


def bounds(row: Row, x: Tensors) -> tuple[float, float]:
    """Milliseconds forward, and forward + backward: the backward reads the operands and dO once, writes the gradients, and has two
    products for each of the forward's. On another card than those of `COPY` they are an H200's.
    """
    copy = COPY.get(timing.card(), COPY["h200"])
    inputs = sum(t.nbytes for t in x.values())
    output = row.B * row.T * row.HV * row.V * x["v"].element_size()
    gradients = sum(t.nbytes for t in x.values() if t.requires_grad)
    forward = max((inputs + output) / copy, flops(row) / PRODUCTS) * 1e3
    backward = max((inputs + output + gradients) / copy, 2 * flops(row) / PRODUCTS) * 1e3
    return forward, forward + backward


def gradients(run: Callable[[Tensors], Tensor], x: Tensors, do: Tensor) -> Tensors:
    """The output and the gradients, by name."""
    o = run(x)
    leaves = {name: t for name, t in x.items() if t.requires_grad}
    found = torch.autograd.grad(o, list(leaves.values()), do)
    return {"o": o.detach(), **{"d" + name: t for name, t in zip(leaves, found, strict=True)}}


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
