"""Random calls of the row-wise ops: norms, gated products, decays, convolutions, shifts, rotations; and of the step of a whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.decay import definition as decays
from flashmix.ops.delta_net_step.definition import delta_net_step
from flashmix.ops.gated_product.definition import ACTIVATIONS
from flashmix.ops.norm import definition as norms
from flashmix.ops.rotary.definition import rotary
from flashmix.ops.short_conv import definition as convolutions
from flashmix.ops.token_shift.definition import token_shift

from .attention import turn
from .draw import FLOATS, Draw
from .sample import Sample, Tensors

LAWS = frozenset({"repeat", "batch", "packed", "prefix", "layout"})
LOOSE = frozenset({"layout"})  # of norms: sums over channels that do not lie side by side
ONE_CHANNEL = 4.0  # budgets of a norm over one channel: what eps alone keeps from being 1 or -1
FEW_CHANNELS = 2.0  # over two or three: two directions of the gradient (of two channels one) are taken off, and one is what is left
Means = Callable[[Tensors], Any]


def rows(draw: Draw, channels: int) -> tuple[int, ...]:
    """The shape of the rows of an op that takes `[..., D]`."""
    kind = draw.weighted({"B T D": 6, "B T H D": 2, "D": 0.5, "N D": 1})
    B, T = draw.batch(), draw.tokens()
    return {
        "B T D": (B, T, channels),
        "B T H D": (B, T, draw.pick((1, 2, 3)), channels),
        "D": (channels,),
        "N D": (T, channels),
    }[kind]


def wide_row(draw: Draw) -> int:
    """How many channels a row has: any number, not only a head's."""
    if draw.on_gpu:
        return draw.pick((1, 16, 64, 100, 256, 1000, 2048))
    return draw.channels() if draw.chance(0.9) else draw.pick((300, 513, 1024))


def other(draw: Draw, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a further argument: mostly that of the first, sometimes another."""
    return draw.pick(FLOATS[:3]) if draw.chance(0.2) and dtype != torch.float64 else dtype


def by_rows(op: str, x: Tensors, means: Means, dtype: torch.dtype, first: str, **more: Any) -> Sample:
    """A sample whose result has the axes of the argument `first`; all arguments of its shape are per token."""
    shape = x[first].shape
    own = (
        frozenset(n for n, t in x.items() if t.shape[: len(shape) - 1] == shape[:-1]) if len(shape) > 2 else frozenset()
    )
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=means,
        axes=more.pop("axes", ("token",)),
        per_token=own,
        per_row=own,
        laws=LAWS,
        **more,
    )


def drawn_norm(draw: Draw, op: str) -> Sample:
    dtype, D = draw.dtype(), wide_row(draw)
    groups = draw.pick((1, 2, 3, 4)) if op == "group_norm" else 1
    D = max(groups, D - D % groups)
    shape = rows(draw, D)
    x: Tensors = {"x": draw.normal(*shape).to(dtype)}
    options: dict[str, Any] = {"groups": groups} if op == "group_norm" else {}
    names = {"l2_norm": (), "rms_norm": ("weight", "gate", "residual")}.get(op, ("weight", "bias", "gate", "residual"))
    for name in names:
        if draw.chance(0.4):
            x[name] = draw.normal(*((D,) if name in ("weight", "bias") else shape)).to(other(draw, dtype))
    if "gate" in x:
        options["gate_activation"] = draw.pick(tuple(ACTIVATIONS))
    if draw.chance(0.4):
        options["eps"] = draw.pick((1e-6, 1e-3, 1e-5))
    if op == "group_norm" and draw.chance(0.4):
        options["center"] = False
    both = op != "l2_norm" and draw.chance(0.3)
    shown = options | ({"return_residual": True} if both else {})
    means = partial(_norm, op, options, both)
    bound = {1: ONE_CHANNEL, 2: FEW_CHANNELS, 3: FEW_CHANNELS}.get(D // groups, 1.0)
    axes = ("token", "token")[: 1 + both]
    sample = by_rows(op, x, means, dtype, "x", options=shown, axes=axes, steps=3, loose=LOOSE, bound=bound)
    # of one channel its gradient is eps / (x^2 + eps) of two numbers that cancel
    return replace(sample, fixed=frozenset({"x"})) if op == "l2_norm" and D == 1 else sample


def _norm(op: str, options: dict[str, Any], both: bool, x: Tensors) -> list[Tensor]:
    if op == "l2_norm":
        return [norms.l2_norm(x["x"], **options)]
    h = x["x"] + x["residual"] if "residual" in x else x["x"]
    eps = options.get("eps", 1e-6 if op == "rms_norm" else 1e-5)
    norm = (
        norms.layer_norm
        if op == "layer_norm" or (op == "group_norm" and options.get("center", True))
        else norms.rms_norm
    )
    y = torch.cat([norm(block, eps=eps) for block in h.chunk(options.get("groups", 1), dim=-1)], dim=-1)
    y = y if "weight" not in x else y * x["weight"]
    y = y if "bias" not in x else y + x["bias"]
    y = y if "gate" not in x else y * ACTIVATIONS[options["gate_activation"]](x["gate"])
    return [y, h][: 1 + both]


def drawn_gated(draw: Draw, op: str) -> Sample:
    dtype = draw.dtype()
    shape = rows(draw, wide_row(draw))
    name = draw.pick(tuple(ACTIVATIONS)) if op == "gated" else "silu"
    x = {"gate": 3 * draw.normal(*shape), "up": draw.normal(*shape)}
    x = {n: t.to(dtype) for n, t in x.items()}

    def means(x: Tensors) -> list[Tensor]:
        return [ACTIVATIONS[name](x["gate"]) * x["up"]]

    return by_rows(op, x, means, dtype, "gate", options={"activation": name} if op == "gated" else {}, steps=2)


def drawn_decay(draw: Draw, op: str) -> Sample:
    dtype, by_channel = draw.dtype(), draw.chance(0.4)
    H, K = draw.pick((1, 2, 3, 8)), draw.channels()
    shape = (draw.batch(), draw.tokens(), H, *((K,) if by_channel else ()))
    x = {"x": draw.free.choice((1.0, 10.0)) * draw.normal(*shape)}
    x = {"x": x["x"].to(dtype)}
    options: dict[str, Any] = {}
    if op != "write_strength":
        x["A_log"], x["dt_bias"] = draw.normal(H).to(other(draw, dtype)), draw.normal(*shape[2:]).to(other(draw, dtype))
    if op == "bounded_decay" and draw.chance(0.5):
        options["lower"] = draw.free.choice((-5.0, -1.0, -1e-3))
    if op == "write_strength":
        options["negative_eigenvalues"] = draw.chance(0.5)

    def means(x: Tensors) -> list[Tensor]:
        return [getattr(decays, op)(**x, **options)]

    own = frozenset({"x"})
    sample = by_rows(op, x, means, dtype, "x", options=options, steps=2)
    sample.per_token = sample.per_row = own
    return sample


def drawn_conv(draw: Draw, op: str) -> Sample:
    """A call of `short_conv`, `short_conv_qkv` or `token_shift`."""
    dtype, packed = draw.dtype(), draw.chance(0.3)
    T, W = draw.tokens(), draw.pick((1, 2, 3, 4, 4, 7))
    lengths = draw.lengths(T) if packed else None
    B = 1 if packed else draw.batch()
    parts = ("q", "k", "v") if op == "short_conv_qkv" else ("x",)
    sizes = {name: wide_row(draw) for name in parts}
    x = {name: draw.normal(B, T, D).to(dtype) for name, D in sizes.items()}
    per_token = set(parts)
    weights, bias = other(draw, dtype), draw.chance(0.4)
    for name, D in sizes.items() if op != "token_shift" else ():
        mark = f"{name}_" if len(parts) > 1 else ""
        x[f"{mark}weight"] = draw.normal(D, W).to(weights)
        if bias:
            x[f"{mark}bias"] = draw.normal(D).to(weights)
    options: dict[str, Any] = {"return_state": True}
    if op == "short_conv" and draw.chance(0.3):
        x["residual"] = draw.normal(B, T, sizes["x"]).to(dtype)
        per_token.add("residual")
    if op != "token_shift":
        options["activation"] = draw.pick((None, "silu", *ACTIVATIONS))
    if draw.chance(0.5):
        past = 1 if op == "token_shift" else W - 1
        x["initial_state"] = draw.normal(B if lengths is None else len(lengths), past, sum(sizes.values())).to(dtype)
    axes = (*["token"] * len(parts), "state")
    means = partial(_convolved, op, options.get("activation"))
    own = frozenset(per_token)
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=means,
        axes=axes,
        options=options,
        per_token=own,
        per_row=own,
        states=("initial_state",),
        lengths=lengths,
        steps=2,
        laws=LAWS,
    )


def _convolved(op: str, activation: str | None, x: Tensors) -> tuple[Tensor, ...]:
    if op == "token_shift":
        return token_shift(**x)
    if op == "short_conv":
        return convolutions.short_conv(**x, activation=activation)
    inputs, weights = (x["q"], x["k"], x["v"]), (x["q_weight"], x["k_weight"], x["v_weight"])
    biases = (x["q_bias"], x["k_bias"], x["v_bias"]) if "q_bias" in x else None
    return convolutions.short_conv_qkv(inputs, weights, biases, x.get("initial_state"), activation)


def drawn_rotary(draw: Draw, op: str) -> Sample:
    """Positions counted, from a number, given, packed or on several axes; in place or not."""
    dtype, D = draw.dtype(), max(2, draw.channels())
    half = draw.pick((D // 2, max(1, D // 4)))
    kind = draw.pick(("counted", "from", "given", "packed", "axes"))
    T = draw.tokens(70)
    B = 1 if kind == "packed" else draw.batch()
    names = ("q", "k") if op == "rotary_qk" else ("x",)
    x = {name: draw.normal(B, T, draw.pick((1, 2, 3)), D).to(dtype) for name in names}
    start = draw.free.randint(0, 9) if kind == "from" else 0
    room = T + start + draw.free.randint(0, 5)
    angles = 6 * draw.normal(room, half)
    table = dtype if draw.chance(0.2) else torch.float64 if dtype == torch.float64 else torch.float32
    x |= {"cos": angles.cos().to(table), "sin": angles.sin().to(table)}
    options: dict[str, Any] = {"interleaved": draw.chance(0.4), "inverse": draw.chance(0.2)}
    places = (torch.int32, torch.int64)
    if kind == "from":
        options["positions"] = start
    if kind in ("given", "axes"):
        shape = (B, T, 2) if kind == "axes" else (B, T)
        x["positions"] = draw.integers(0, room, *shape).to(draw.pick(places))
    if kind == "axes":
        options["axes"] = [draw.fixed.randrange(2) for _ in range(half)]
    in_place = draw.chance(0.2)
    options |= {"inplace": True} if in_place else {}
    lengths = draw.lengths(T) if kind == "packed" else None
    own = frozenset((*names, "positions") if "positions" in x else names)
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_turned, names, options, lengths),
        axes=("token",) * len(names),
        options=options,
        per_token=own,
        per_row=own,
        lengths=lengths,
        packs=True,
        gradient=not in_place,
        written=names if in_place else (),
        fixed=frozenset(("cos", "sin")),
        steps=2,
        laws=LAWS - {"packed"} - ({"prefix"} if kind != "given" else set()),
    )


def _turned(
    names: tuple[str, ...], options: dict[str, Any], lengths: tuple[int, ...] | None, x: Tensors
) -> list[Tensor]:
    B, T = x[names[0]].shape[:2]
    at = options.get("positions", 0) + torch.arange(T).expand(B, T)
    if lengths is not None:
        at = torch.cat([torch.arange(length) for length in (*lengths, 0)])[None]
    at = x.get("positions", at).long()
    cos, sin = x["cos"], -x["sin"] if options["inverse"] else x["sin"]
    if "axes" in options:  # a table of its own for each token
        columns = torch.arange(cos.shape[1])
        rows = at[..., torch.tensor(options["axes"])].flatten(0, 1)
        cos, sin = cos[rows, columns], sin[rows, columns]
        at = torch.arange(B * T).view(B, T)
    found = []
    for name in names:
        t = x[name]
        if not options["interleaved"]:
            found.append(rotary(t, cos, sin, at))
            continue
        rows_of_table = {"cos": cos[at.flatten()], "sin": sin[at.flatten()]}
        flat = turn(rows_of_table, t.flatten(0, 1)[None], 0, True)
        found.append(flat.view(t.shape))
    return found * (2 if options.get("inplace") else 1)


def drawn_layer_step(draw: Draw) -> Sample:
    """A call of `delta_net_step`."""
    dtype, pooled, by_channel = draw.dtype(), draw.chance(0.4), draw.chance(0.5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    B, (H, group) = draw.batch(), draw.heads()
    HV, K, V, W = H * group, draw.channels(), draw.channels(), draw.pick((2, 3, 4, 4, 7))
    C = 2 * H * K + HV * V
    slots = max(1, B + draw.free.randint(0, 2)) if pooled else B
    kept = torch.bfloat16 if draw.chance(0.25) and dtype != torch.float64 else wide
    x = {
        "qkv": draw.normal(B, C).to(dtype),
        "strength": draw.normal(B, HV).to(other(draw, dtype)),
        "state": draw.normal(slots, HV, K, V).to(kept),
        "conv_state": draw.normal(slots, W - 1, C).to(dtype),
        "conv_weight": draw.normal(C, W).to(wide),
    }
    options: dict[str, Any] = {"heads": H, "negative_eigenvalues": draw.chance(0.3)}
    if draw.chance(0.4):
        x["conv_bias"] = draw.normal(C).to(wide)
    if draw.chance(0.7):
        inner = (HV, K) if by_channel else (HV,)
        x |= {
            "decay": draw.normal(B, *inner).to(other(draw, dtype)),
            "A_log": draw.normal(HV).to(wide),
            "dt_bias": draw.normal(*inner).to(wide),
        }
        options |= {"lower": draw.pick((-5.0, -1.0))} if draw.chance(0.4) else {}
    if draw.chance(0.6):
        x["norm_weight"] = draw.normal(V).to(other(draw, dtype))
    if draw.chance(0.6):
        x["gate"] = draw.normal(B, HV, V).to(other(draw, dtype))
        options["gate_activation"] = draw.pick(("silu", "sigmoid"))
    if pooled:
        order = draw.free.sample(range(slots), min(B, slots))
        places = [slot if draw.free.random() < 0.8 else -1 for slot in (*order, *[-1] * (B - len(order)))]
        x["state_indices"] = torch.tensor(places, dtype=draw.pick((torch.int32, torch.int64)))
    return Sample(
        op="delta_net_step",
        dtype=dtype,
        tensors=x,
        means=partial(_layer_step, options),
        axes=("row", "whole", "whole"),
        options=options,
        gradient=False,
        written=("state", "conv_state"),
        plain_dtype=torch.float32,
        steps=6,
        laws=frozenset({"repeat", "layout"}),
    )


def _layer_step(options: dict[str, Any], x: Tensors) -> list[Tensor]:
    rest = {n: t for n, t in x.items() if n not in ("qkv", "strength")}
    rest |= {n: rest[n][:, None] for n in ("decay", "gate") if n in rest}
    o, *states = delta_net_step(x["qkv"][:, None], x["strength"][:, None], **rest, **options)
    return [o[:, 0], *states]
