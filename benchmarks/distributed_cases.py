"""The calls of `distributed.py`: operands of a row of tokens for each kind of op, the same numbers on every rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashmix

Operands = dict[str, Tensor]
WINDOW = 4096


@dataclass(frozen=True)
class Kind:
    """An op with the operands of `[1, T, H, D]` that it takes; `shared` ones have no tokens. `order` is the layout it is best with."""

    operands: Callable[[Callable[..., Tensor], int, int, int], Operands]
    run: Callable[..., Any]
    order: str = "contiguous"
    shared: tuple[str, ...] = ()


def delta(normal: Callable[..., Tensor], T: int, H: int, D: int, gate: tuple[int, ...] = ()) -> Operands:
    found = {name: normal(1, T, H, D) for name in "qkv"}
    found["k"] = found["k"] / found["k"].float().norm(dim=-1, keepdim=True).to(found["k"].dtype)
    found["beta"] = normal(1, T, H).float().sigmoid()
    return found | {"log_decay": -0.1 * normal(1, T, H, *gate).float().abs()}


def channel_delta(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return delta(normal, T, H, D, (D,))


def linear(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return {name: x for name, x in delta(normal, T, H, D).items() if name != "beta"}


def channel_linear(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return {name: x for name, x in channel_delta(normal, T, H, D).items() if name != "beta"}


def value_linear(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    found = channel_linear(normal, T, H, D)
    return {"value_log_decay" if name == "log_decay" else name: x for name, x in found.items()}


def dplr(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    found = channel_delta(normal, T, H, D)
    beta = found.pop("beta")
    key = found["k"]
    return found | {"a": -key, "b": key * beta[..., None].to(key.dtype)}


def convolution(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return {"x": normal(1, T, H * D), "weight": normal(H * D, 4)}


def shift(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return {"x": normal(1, T, H * D)}


def attention(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return {"q": normal(1, T, H, D), "k": normal(1, T, max(1, H // 4), D), "v": normal(1, T, max(1, H // 4), D)}


def forgetting(normal: Callable[..., Tensor], T: int, H: int, D: int) -> Operands:
    return attention(normal, T, H, D) | {"log_decay": -0.1 * normal(1, T, H).float().abs()}


def attend(**options: Any) -> Callable[..., Any]:
    return lambda **operands: flashmix.softmax_attention(**operands, causal=True, **options)


KINDS = {
    "gated delta rule": Kind(delta, flashmix.delta_rule),
    "KDA": Kind(channel_delta, flashmix.delta_rule),
    "GLA": Kind(channel_linear, flashmix.linear_attention),
    "Mamba-2 form": Kind(linear, flashmix.linear_attention),
    "value decay": Kind(value_linear, flashmix.linear_attention),
    "RWKV-7": Kind(dplr, flashmix.dplr),
    "convolution": Kind(convolution, flashmix.short_conv, shared=("weight",)),
    "token shift": Kind(shift, flashmix.token_shift),
    "window": Kind(attention, attend(window=(WINDOW, 0))),
    "full attention": Kind(attention, attend(), order="zigzag"),
    "forget gate": Kind(forgetting, attend(), order="zigzag"),
}
# of the table: kind, heads
ROWS = (
    *((kind, heads) for kind in ("gated delta rule", "KDA") for heads in (16, 64, 4)),
    *((kind, heads) for kind in ("GLA", "Mamba-2 form", "RWKV-7") for heads in (16, 64)),
    *((kind, 16) for kind in ("convolution", "window", "full attention")),
)


def chosen(rows: Iterable[tuple[str, int]], options: argparse.Namespace) -> list[tuple[str, int]]:
    """The rows of a table that `--rows` or else `--kinds` name."""
    if options.rows is not None:
        return [row for row in rows if f"{row[0]}:{row[1]}" in options.rows]
    return [row for row in rows if options.kinds is None or row[0] in options.kinds]


# of the checks: kinds, layouts, lengths
LAYOUTS = (("contiguous", (1536,)), ("zigzag", (1536,)), ("uneven", (700, 0, 3, 801)))
# of recurrences as well: pieces so long that a card cuts them into segments
CUT = dict.fromkeys(
    ("gated delta rule", "KDA", "GLA", "Mamba-2 form"), (("contiguous", (17000,)), ("zigzag", (33000,)))
)


def operands_of(kind: str, T: int, H: int, D: int, device: str, dtype: torch.dtype) -> Operands:
    """The operands of a whole row, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    return KINDS[kind].operands(normal, T, H, D)


def outputs(kind: str, operands: Operands, packing: Any) -> Tensor:
    """The first output of a call."""
    found = KINDS[kind].run(**operands, cu_seqlens=packing)
    return found[0] if isinstance(found, tuple) else found


def taken(kind: str, operands: Operands, shard: Any) -> Operands:
    """This rank's part of the operands."""
    return {name: x if name in KINDS[kind].shared else shard.take(x) for name, x in operands.items()}


def with_gradients(kind: str, operands: Operands, packing: Any, flow: Tensor) -> list[Tensor]:
    """The output and the gradients of all operands."""
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    o = outputs(kind, leaves, packing)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), flow)]
