"""Rows of `compare.py`: softmax attention, at the sizes of docs/attention_speed.md and of `attention_cpu.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from compare_case import BF16, WIDE, Call, Case, Cases, Part, graph, normal, quiet, trained, untrained
from torch import Tensor

import flashmix

# head dim, tokens, batch, heads, causal
ATTENTION = (
    (64, 4096, 4, 32, True), (64, 16384, 1, 32, True), (64, 16384, 1, 32, False), (80, 16384, 1, 16, True),
    (96, 16384, 1, 16, True), (128, 4096, 4, 16, True), (128, 4096, 4, 16, False), (128, 16384, 1, 16, True),
    (128, 16384, 1, 16, False), (192, 16384, 1, 16, True), (256, 4096, 4, 8, True), (256, 16384, 1, 8, True),
)  # fmt: skip


def attention(row: tuple[int, int, int, int, bool]) -> Case:
    dim, tokens, batch, heads, causal = row

    def make() -> dict[str, Part]:
        flow, *leaves = (normal(batch, tokens, heads, dim) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        run = partial(flashmix.softmax_attention, *leaves, causal=causal)
        return {"forward": Part(quiet(run)), "backward": backward(run, leaves, flow)}

    return Case(("forward", "backward"), make)


def backward(run: Call, leaves: list[Tensor], flow: Tensor) -> Part:
    held: list[Tensor] = []

    def back() -> None:
        if not held:
            held.append(run()[0])
        torch.autograd.grad(held[0], leaves, flow, retain_graph=True)

    return Part(back)


def features(dim: int, heads: int) -> Case:
    """Forward of each feature alone at 1 x 16384, causal."""
    names = ("plain", "sink", "softcap", "alibi", "weak alibi", "decay", "weak decay", "dropout")

    def make() -> dict[str, Part]:
        q, k, v = (normal(1, 16384, heads, dim) for _ in range(3))
        slopes, gates = torch.rand(heads), torch.rand(1, 16384, heads)
        options: tuple[dict[str, Any], ...] = (
            {},
            {"sink": torch.randn(heads)},
            {"softcap": 30.0},
            {"alibi_slopes": slopes},
            {"alibi_slopes": slopes * 1e-4},
            {"log_decay": -gates},
            {"log_decay": gates * -1e-4},
            {"dropout_p": 0.1},
        )
        run = partial(flashmix.softmax_attention, q, k, v, causal=True)
        return {name: Part(quiet(partial(run, **own))) for name, own in zip(names, options, strict=True)}

    return Case(names, make)


def windows() -> dict[str, Part]:
    run = partial(flashmix.softmax_attention, *(normal(1, 32768, 16, 128) for _ in range(3)), causal=True)
    return {"full": Part(quiet(run)), "window 1024": Part(quiet(partial(run, window=(1023, 0))))}


def packed(dense: bool) -> dict[str, Part]:
    """64 packed sequences of 64 to 4096 tokens (log-uniform), or a dense batch of as many tokens."""
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = torch.exp(torch.rand(64, generator=generator, device="cpu") * 4.158883 + 4.158883).long()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.get_default_device(), torch.int32)
    shape = (int(lengths.sum()) // 2048, 2048) if dense else (1, int(lengths.sum()))
    flow, *leaves = (normal(*shape, 16, 128) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    run = partial(flashmix.softmax_attention, *leaves, causal=True, cu_seqlens=None if dense else starts)
    return {"forward": Part(quiet(run)), "backward": backward(run, leaves, flow)}


def cached(batch: int, tokens: int, rotary: bool = False, page_size: int = 0) -> Part:
    """One new token a sequence, 32 query heads on 8, head dim 128, after `tokens` in the cache, in a graph."""
    if page_size:
        pages = torch.randperm(batch * (tokens // page_size + 1)).view(batch, -1).int()
        cache = flashmix.KVCache.paged(
            pages.numel(), page_size, pages, 8, 128, device=torch.get_default_device(), dtype=BF16
        )
    else:
        cache = flashmix.KVCache.contiguous(batch, tokens + 128, 8, 128, device=torch.get_default_device(), dtype=BF16)
    for held in (cache.keys, cache.values):
        held.normal_()
    q, k, v = (normal(batch, 1, h, 128) for h in (32, 8, 8))
    table = flashmix.rotary_table(tokens + 256, 128, device=torch.get_default_device()) if rotary else None

    def step() -> None:
        cache.lengths.fill_(tokens - 1)
        flashmix.attention_with_cache(q, cache, k, v, rotary=table)

    return graph([step])


def gpu_attentions() -> Cases:
    cases = {
        f"attention dim {d}, {t} tokens, {b} x {h} {'causal' if c else 'full'}": attention((d, t, b, h, c))
        for d, t, b, h, c in ATTENTION
    }
    cases |= {f"attention features dim {dim}": features(dim, heads) for dim, heads in ((128, 16), (64, 32))}
    cases["attention 32768 tokens"] = Case(("full", "window 1024"), windows)
    for name in ("packed", "dense"):
        cases[f"attention {name}"] = Case(("forward", "backward"), partial(packed, name == "dense"))
    for batch in (1, 16, 128):
        for tokens in (8192, 65536):
            make = partial(cached, batch, tokens)
            cases[f"attention decode {batch} x {tokens}"] = untrained(make, "graph", batch * tokens < 2**19)
    cases["attention decode 16 x 8192 rotary"] = untrained(partial(cached, 16, 8192, True), "graph")
    for size in (16, 128):
        make = partial(cached, 16, 65536, page_size=size)
        cases[f"attention decode 16 x 65536 pages of {size}"] = untrained(make, "graph")
    return cases


def cpu_attentions(heads: int = 8, dim: int = 64) -> Cases:
    """The rows of `attention_cpu.py`."""

    def make(tokens: int, impl: str, names: Sequence[str]) -> dict[str, Part]:
        every: dict[str, Any] = {"sink": torch.zeros(heads), "alibi_slopes": torch.rand(heads)}
        every |= {"softcap": 30.0, "log_decay": -torch.rand(1, tokens, heads), "window": (255, 0)}
        run = partial(flashmix.softmax_attention, causal=True, impl=impl, **{name: every[name] for name in names})
        return trained(lambda *x: run(*x)[0], [normal(1, tokens, heads, dim, dtype=WIDE) for _ in range(3)])

    features = ("sink", "softcap", "alibi_slopes", "log_decay")
    wanted: dict[str, tuple[int, str, tuple[str, ...]]] = {
        "auto": (4096, "auto", ()),
        "portable": (4096, "portable", ()),
    }
    wanted |= {name: (2048, "portable", (name,)) for name in (*features, "window")} | {
        "all": (2048, "portable", features)
    }
    return {
        f"attention 1 x {tokens} x {heads} x {dim} {name}": Case(
            ("forward", "both"), partial(make, tokens, impl, names)
        )
        for name, (tokens, impl, names) in wanted.items()
    }
