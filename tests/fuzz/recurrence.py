"""Random calls of the recurrence's three rules, whole sequences and steps of one token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.recurrence import definition
from flashmix.ops.recurrence.step.definition import steps_in_pool

from .draw import FLOATS, Draw
from .sample import Sample, Tensors

CHUNKED, STEPPED = 4, 2  # between how many stages an implementation rounds more than the token loop
LAWS = frozenset({"repeat", "batch", "packed", "prefix", "layout"})
LOOSE = frozenset({"batch", "packed"})  # products of batches: torch's bits depend on how many there are


PARALLEL = 3.0  # how many budgets where keys are (nearly) parallel: six times the token loop's error
FEW_CHANNELS = 8  # with so few channels they always are


def bound(draw: Draw, x: Tensors, channels: int) -> float:
    """How many budgets a call may spend: more where it corrects under keys that are parallel."""
    return PARALLEL if corrects(x) and (draw.correlated or channels <= FEW_CHANNELS) else 1.0


def loose(K: int, V: int) -> frozenset[str]:
    """The laws of whole sequences that plain PyTorch keeps within the budget only: products with a vector are another path of torch."""
    return LOOSE | ({"prefix"} if min(K, V) == 1 else set())


def corrects(x: Tensors) -> bool:
    """Whether the rule reads what it writes over."""
    return any(name in x for name in ("beta", "kk", "erase", "b", "erase_gate"))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, decays and strengths of a call."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def narrow(draw: Draw, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a decay or a strength: any floating one may come, float64 only with float64."""
    return draw.pick(FLOATS[:3]) if draw.chance(0.2) and dtype != torch.float64 else wide(dtype)


def operands(draw: Draw, rule: str, sizes: dict[str, int], dtype: torch.dtype) -> Tensors:
    """The tensors of a rule without its state; keys have length 1, so that no state grows."""
    B, T, H, HV, K, V = (sizes[axis] for axis in ("B", "T", "H", "HV", "K", "V"))
    x = {
        "q": draw.normal(B, T, H, K).to(dtype),
        "k": draw.unit(B, T, H, K).to(dtype),
        "v": draw.normal(B, T, HV, V).to(dtype),
    }
    if rule == "delta_rule":
        x["beta"] = draw.strength(B, T, HV).to(narrow(draw, dtype))
        untied = draw.weighted({"none": 6, "erase": 1, "write": 1, "both": 2})
        keys = HV if draw.chance(0.5) else H
        if untied != "none":
            x["beta"] = (x["beta"] / 2).to(x["beta"].dtype)
            write = draw.unit(B, T, keys, K)
            if untied in ("write", "both"):
                x["write"] = write.to(dtype)
            if untied in ("erase", "both"):
                x["erase"] = ((write if untied == "both" else 0.5 * write) * draw.uniform(B, T, keys, 1)).to(dtype)
    if rule == "dplr":
        keys = HV if draw.chance(0.5) else H
        removal = draw.unit(B, T, keys, K)
        x["a"], x["b"] = -removal.to(dtype), (draw.strength(B, T, keys, 1, most=1.0) * removal).to(dtype)
    gate = draw.weighted({"none": 3, "head": 1, "token": 3, "channel": 3})
    if gate != "none":
        shape = {"head": (HV,), "token": (B, T, HV), "channel": (B, T, HV, K)}[gate]
        x["log_decay"] = draw.decay(*shape).to(narrow(draw, dtype))
    return x


def loop(rule: str, options: dict[str, Any], x: Tensors, state: str = "initial_state") -> tuple[Tensor, Tensor]:
    """The token loop of a rule on the arguments of its public op."""
    q, k, v, g, S = x["q"], x["k"], x["v"], x.get("log_decay"), x.get(state)
    options = {
        name: value for name, value in options.items() if name == "scale" or (name == "read_before" and rule != "dplr")
    }
    if rule == "linear_attention":
        return definition.linear_attention(
            q, k, v, g, initial_state=S, value_log_decay=x.get("value_log_decay"), **options
        )
    if rule == "dplr":
        return definition.dplr(q, k, v, x["a"], x["b"], g, initial_state=S, **options)
    if "erase" not in x and "write" not in x:
        return definition.delta_rule(q, k, v, x["beta"], g, initial_state=S, **options)
    strength = x["beta"].unsqueeze(-1)
    erase = x.get("erase")
    if erase is None:
        decay = torch.ones_like(strength) if g is None else g.exp()
        decay = decay if decay.dim() == 4 else decay.view(*(1, 1) * (decay.dim() == 1), *decay.shape, 1)
        erase = strength * decay * k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return definition.delta_rule_untied(q, erase, x.get("write", k), strength * v, g, initial_state=S, **options)


def drawn_sizes(draw: Draw, batch: int, tokens: int) -> dict[str, int]:
    H, group = draw.heads()
    K = draw.channels()
    V = K if draw.chance(0.4) else draw.channels()
    return {"B": batch, "T": tokens, "H": H, "HV": H * group, "K": K, "V": V}


def rule_options(draw: Draw, rule: str) -> dict[str, Any]:
    options: dict[str, Any] = {"read_before": draw.chance(0.2)} if rule != "dplr" else {}
    scale = draw.scale()
    return options if scale is None else options | {"scale": scale}


def drawn_rule(draw: Draw, rule: str) -> Sample:
    """A call of `linear_attention`, `delta_rule` or `dplr`."""
    dtype, packed, stated = draw.dtype(), draw.chance(0.25), draw.chance(0.6)
    tokens = draw.tokens()
    lengths = draw.lengths(tokens) if packed else None
    sizes = drawn_sizes(draw, 1 if packed else draw.batch(), tokens)
    options = rule_options(draw, rule) | {"return_state": True}
    x = operands(draw, rule, sizes, dtype)
    by_value = draw.chance(0.25)
    if rule == "linear_attention" and by_value and "log_decay" not in x:
        x["value_log_decay"] = draw.decay(*(sizes[axis] for axis in ("B", "T", "HV", "V"))).to(wide(dtype))
    if stated:
        rows = sizes["B"] if lengths is None else len(lengths)
        x["initial_state"] = draw.normal(rows, sizes["HV"], sizes["K"], sizes["V"]).to(wide(dtype))
    per_token = frozenset(name for name, t in x.items() if t.dim() > 1 and name != "initial_state")
    return Sample(
        op=rule,
        dtype=dtype,
        tensors=x,
        means=partial(loop, rule, options),
        axes=("token", "state"),
        options=options,
        per_token=per_token,
        per_row=per_token,
        states=("initial_state",),
        lengths=lengths,
        plain_dtype=torch.float32,
        steps=CHUNKED,
        bound=bound(draw, x, sizes["K"]),
        own_dtype="erase" not in x and "write" not in x,
        laws=LAWS,
        loose=loose(sizes["K"], sizes["V"]),
    )


def drawn_step(draw: Draw, op: str) -> Sample:
    """A call of one of the steps: states in place, in a batch or in a pool with idle sequences, with or without a history."""
    rule, dtype = op.removesuffix("_step"), draw.dtype()
    batch, tokens = draw.batch(), draw.free.choice((1, 1, 1, 2, 3, 5, 16))
    sizes = drawn_sizes(draw, batch, tokens)
    options = rule_options(draw, rule)
    if rule == "dplr":
        options["read_before"] = draw.chance(0.2)
    x = operands(draw, rule, sizes, dtype)
    kept = torch.bfloat16 if draw.chance(0.25) and dtype != torch.float64 else wide(dtype)
    pooled, with_history = draw.chance(0.4), draw.chance(0.3)
    slots = batch + draw.free.randint(0, 2) if pooled else batch
    slots = max(slots, 1) if pooled else slots
    inner = (sizes["HV"], sizes["K"], sizes["V"])
    x["state"] = draw.normal(slots, *inner).to(kept)
    if pooled:
        order = draw.free.sample(range(slots), min(batch, slots))
        places = [slot if draw.free.random() < 0.8 else -1 for slot in (*order, *[-1] * (batch - len(order)))]
        x["state_indices"] = torch.tensor(places, dtype=draw.pick((torch.int32, torch.int64)))
    kept_tokens = draw.free.randint(1, tokens)
    if with_history:
        x["history"] = draw.normal(batch, kept_tokens, *inner).to(kept)
    own = frozenset(name for name, t in x.items() if t.dim() > 1 and name not in ("state", "history"))
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=partial(_steps, rule, options),
        axes=("token", "whole", "row")[: 3 if with_history else 2],
        options=options,
        per_token=own,
        per_row=own,
        gradient=False,
        written=("state", "history")[: 2 if with_history else 1],
        plain_dtype=torch.float32,
        steps=STEPPED + tokens // 4 + 3 * ("erase" in x or "write" in x),
        laws=frozenset({"repeat", "layout"}),
    )


def _steps(rule: str, options: dict[str, Any], x: Tensors) -> list[Tensor]:
    operand = {name: t for name, t in x.items() if name not in ("state", "state_indices", "history")}
    read_before = options.get("read_before", False)

    def one(part: Tensors, S: Tensor) -> tuple[Tensor, Tensor]:
        o, after = loop(rule, options, part | {"initial_state": S})
        if rule == "dplr" and read_before:  # the same output of the state before
            scale = options.get("scale", part["q"].shape[-1] ** -0.5)
            q = part["q"].repeat_interleave(S.shape[1] // part["q"].shape[2], dim=2)[:, 0]
            o = scale * torch.einsum("bhk,bhkv->bhv", q, S)[:, None]
        return o, after

    indices = x.get("state_indices")
    o, pool, states = steps_in_pool(one, operand, x["state"], indices)
    if "history" not in x:
        return [o, pool]
    history, kept = x["history"].clone(), x["history"].shape[1]
    for n in range(history.shape[0]):
        if indices is None or int(indices[n]) >= 0:
            history[n] = states[n, states.shape[1] - kept :]
    return [o, pool, history]
