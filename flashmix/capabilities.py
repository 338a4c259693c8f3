"""The capabilities of each public op, asked of the code: its signature, its checks and its implementations.

Each op is asked about tiny calls, which are checked as any call is and then not run (`flashmix.explain`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import flashmix
from flashmix.mechanisms.registry import MECHANISMS
from flashmix.op.choose import explain

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The arguments of a tiny call and their axes, see `_SIZES`; those of the mechanisms are in their registry.
_CALLS = {
    "linear_attention": "q:BTHK k:BTHK v:BTHK",
    "delta_rule": "q:BTHK k:BTHK v:BTHK beta:BTH",
    "dplr": "q:BTHK k:BTHK v:BTHK a:BTHK b:BTHK",
    "delta_net_step": "qkv:BC strength:BH state:BHKK conv_state:BwC conv_weight:CW",
    "linear_attention_step": "q:BTHK k:BTHK v:BTHK state:BHKK",
    "delta_rule_step": "q:BTHK k:BTHK v:BTHK beta:BTH state:BHKK",
    "dplr_step": "q:BTHK k:BTHK v:BTHK a:BTHK b:BTHK state:BHKK",
    "softmax_attention": "q:BTHK k:BTHK v:BTHK",
    "attention_with_cache": "q:BTHK k:BTHK v:BTHK",
    "rotary": "x:BTHK cos:PR sin:PR",
    "rotary_qk": "q:BTHK k:BTHK cos:PR sin:PR",
    "rms_norm": "x:BTD",
    "layer_norm": "x:BTD",
    "group_norm": "x:BTD",
    "l2_norm": "x:BTD",
    "gated": "gate:BTD up:BTD",
    "swiglu": "gate:BTD up:BTD",
    "softplus_decay": "x:BTH A_log:H dt_bias:H",
    "bounded_decay": "x:BTHK A_log:H dt_bias:HK",
    "write_strength": "x:BTH",
    "short_conv": "x:BTD weight:DW",
    "short_conv_qkv": "q:BTD k:BTD v:BTD q_weight:DW k_weight:DW v_weight:DW",
    "token_shift": "x:BTD",
    "scan": "x:BTD log_decay:BTD",
    "scan_max": "x:BTD log_decay:BTD",
    "scan_step": "x:BTD log_decay:BTD state:BD",
    "selective_scan": "u:BTD dt:BTD A:DR B:BTR C:BTR",
    "selective_scan_step": "u:BTD dt:BTD A:DR B:BTR C:BTR state:BDR",
    "cross_entropy": "logits:BTM target:BT",
    "linear_cross_entropy": "hidden:BTD weight:MD target:BT",
    "linear_kl_divergence": "hidden:BTD weight:MD teacher_hidden:BTD teacher_weight:MD",
    "linear_grpo": "hidden:BTD weight:MD target:BT advantages:B",
}
_OPTIONS: dict[str, Mapping[str, Any]] = {"delta_net_step": {"heads": 2}, "group_norm": {"groups": 2}}
# Steps per token, levels of the past, gates, heads, channels per head, positions, half of a head, channels, width of a convolution and
# the past it sees, vocabulary, channels of queries, keys and values together.
_SIZES = {"n": 2, "L": 8, "G": 4, "H": 2, "K": 8, "P": 16, "R": 4, "D": 8, "W": 4, "w": 3, "M": 12, "C": 48}
# The arguments that stay float32 with 16-bit inputs; a mechanism names those that only it has.
_WIDE: tuple[str, ...] = (
    "beta",
    "log_decay",
    "curvature_beta",
    "curvature_log_decay",
    "A_log",
    "A",
    "dt",
    "state",
    "strength",
    "conv_weight",
)


@dataclass(frozen=True)
class Capability:
    """What one op can do on a device."""

    op: str
    forward: bool
    backward: bool
    packed: bool  # sequences end to end, cu_seqlens
    state: bool  # a state (or cache) is handed in and comes back
    step: bool  # one token that goes on from a state
    dtypes: tuple[torch.dtype, ...]
    implementations: tuple[str, ...]  # those that run a tiny float32 call


def capabilities(device: torch.device | str = "cpu") -> dict[str, Capability]:
    """What each public op can do on `device`, by name.

    Example:
        >>> found = capabilities()["token_shift"]
        >>> found.backward, found.packed, found.step, found.implementations
        (True, True, True, ('portable',))
    """
    return {name: _capability(name, torch.device(device)) for name in public_ops()}


def public_ops() -> dict[str, Callable[..., Any]]:
    """The ops at the top of the package, by name: whatever takes `impl`."""
    things = {name: getattr(flashmix, name) for name in sorted(flashmix.__all__)}
    return {name: op for name, op in things.items() if inspect.isfunction(op) and "impl" in _keywords(op)}


def tiny_call(
    op: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tokens: int = 6,
    batch: int = 1,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The arguments of a tiny call of `op`, by name: two heads of 8 channels; the same numbers every time.

    `sizes` replaces those of single axes.
    """
    generator, sizes = torch.Generator().manual_seed(0), {**_SIZES, **(sizes or {}), "T": tokens, "B": batch}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mechanism = MECHANISMS.get(op)
    call = dict(_OPTIONS.get(op, {}) if mechanism is None else mechanism.options)
    float32 = _WIDE if mechanism is None else (*_WIDE, *mechanism.wide)
    positive = ("dt", "a") if mechanism is None else ("dt", "a", *mechanism.positive)
    for argument in (_CALLS[op] if mechanism is None else mechanism.call).split():
        name, axes = argument.split(":")
        shape = [sizes[axis] for axis in axes]
        if name == "target":
            call[name] = torch.randint(sizes["M"], shape, generator=generator).to(device)
            continue
        value = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        if name == "A" or name.endswith(("log_decay", "log_forget")):
            value = -value.abs()
        elif name.endswith("beta") or name in positive:
            value = value.abs()
        call[name] = value.to(device=device, dtype=wide if name in float32 else dtype)
    if "cache" in _keywords(getattr(flashmix, op)):
        call["cache"] = flashmix.KVCache.contiguous(batch, 16, sizes["H"], sizes["K"], device=device, dtype=dtype)
    return call


def table(found: dict[str, Capability]) -> str:
    """`found` as a table in Markdown."""
    columns = [field.name for field in fields(Capability)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for capability in found.values():
        lines.append("| " + " | ".join(_cell(getattr(capability, column)) for column in columns) + " |")
    return "\n".join(lines)


def _cell(value: str | bool | tuple[Any, ...]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else ", ".join(str(entry).removeprefix("torch.") for entry in value)


def _capability(name: str, device: torch.device) -> Capability:
    op, keywords = getattr(flashmix, name), _keywords(getattr(flashmix, name))
    carried = {"initial_state", "return_state"} <= keywords or bool({"cache", "state"} & keywords)
    ends = {"cu_seqlens": torch.tensor([0, 2, 2, 6], device=device)} if "cu_seqlens" in keywords else {}
    if "cache" in keywords:  # as many sequences as the cache has
        ends = {"cu_seqlens": torch.tensor([0, 6], device=device)}
    return Capability(
        op=name,
        forward=_runs(op, tiny_call(name, device=device)),
        backward=_runs(op, _asking_for_a_gradient(tiny_call(name, device=device))),
        packed=bool(ends) and _runs(op, tiny_call(name, device=device) | ends),
        state=carried,
        step=carried and _runs(op, tiny_call(name, device=device, tokens=1)),
        dtypes=tuple(dtype for dtype in DTYPES if _runs(op, tiny_call(name, dtype, device))),
        implementations=tuple(
            impl for impl, reason in explain(op, **tiny_call(name, device=device)).reasons.items() if reason is None
        ),
    )


def _runs(op: Callable[..., Any], call: dict[str, Any]) -> bool:
    """Whether the op's checks let the call pass and an implementation takes it."""
    try:
        return explain(op, **call).choice is not None
    except (RuntimeError, TypeError, ValueError):
        return False


def _asking_for_a_gradient(call: dict[str, Any]) -> dict[str, Any]:
    first = next(value for value in call.values() if isinstance(value, Tensor))
    first.requires_grad_()
    return call


def _keywords(op: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(op).parameters)
