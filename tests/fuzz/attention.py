"""Random calls of softmax attention and of attention to a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import flashmix
from flashmix.ops.attention.definition import softmax_attention
from flashmix.ops.rotary.definition import rotary

from .draw import FLOATS, Draw
from .sample import Sample, Tensors

WALL = -1e6  # what a gate is clamped at, see docs/numerics.md


def features(draw: Draw, heads_q: int, rows: int = 0) -> Tensors:
    """Sink and slopes, which `rows` sequences may have each for itself."""
    x: Tensors = {}
    if draw.chance(0.25):
        x["sink"] = draw.normal(heads_q).to(draw.pick(FLOATS[:2]))
    if draw.chance(0.25):
        own = (rows,) if rows and draw.chance(0.3) else ()
        x["alibi_slopes"] = draw.uniform(*own, heads_q).to(draw.pick(FLOATS[:2]))
    return x


def key_ranges(draw: Draw, B: int, tokens_k: int) -> Tensors:
    """The first key of each sequence, and the end of its keys, also past the tensors."""
    names = [name for name in ("key_starts", "key_lengths") if draw.chance(0.15)]
    ends = {name: [draw.free.randint(-2, tokens_k + 2) for _ in range(B)] for name in names}
    return {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in ends.items()}


def logit_steps(options: dict[str, Any], K: int) -> int:
    """Rounding steps for the logits of random queries and keys: their size, `scale sqrt(K)`, multiplies the rounding of exponents."""
    return max(0, round(abs(options.get("scale", 0.0)) * K**0.5) - 1)


def shared_options(draw: Draw) -> dict[str, Any]:
    """Scale, window and softcap."""
    options: dict[str, Any] = {}
    scale, windowed = draw.scale(), draw.chance(0.3)
    left, right = (draw.free.choice((None, 0, 1, 3, 17, 64)) for _ in range(2))
    if scale is not None:
        options["scale"] = scale
    if windowed:
        options["window"] = (left, right)
    if draw.chance(0.2):
        options["softcap"] = draw.free.choice((0.5, 2.0, 30.0))
    return options


ONE_KEY = 4.0  # budgets of a softmax over one key: its gradient is 0 in a plain evaluation, and what is left of two products elsewhere


@dataclass
class AttentionCase(Sample):
    """Packed keys have lengths of their own."""

    lengths_k: tuple[int, ...] | None = None

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        call = super().arguments(tensors)
        if self.lengths_k is not None:
            call["cu_seqlens_k"] = flashmix.Packing.from_lengths(self.lengths_k, device=tensors["q"].device)
        return call


def drawn(draw: Draw) -> Sample:
    """A call of `softmax_attention`."""
    dtype, packed, causal, other_keys = draw.dtype(), draw.chance(0.25), draw.chance(0.6), draw.chance(0.3)
    H, group = draw.heads()
    K = draw.channels()
    V = K if draw.chance(0.5) else draw.channels()
    tokens = draw.tokens()
    lengths = draw.lengths(tokens) if packed else None
    lengths_k = lengths
    tokens_k = draw.tokens() if other_keys else tokens
    if lengths is not None and other_keys:
        lengths_k = tuple(draw.free.randint(0, 40) for _ in lengths)
        tokens_k = sum(lengths_k)
    B = 1 if packed else draw.batch()
    options = shared_options(draw) | {"causal": causal}
    lse = draw.chance(0.5)
    x = {
        "q": draw.normal(B, tokens, H * group, K).to(dtype),
        "k": draw.normal(B, tokens_k, H, K).to(dtype),
        "v": draw.normal(B, tokens_k, H, V).to(dtype),
    } | features(draw, H * group, 0 if packed else B)
    if causal and draw.chance(0.3):
        x["log_decay"] = draw.decay(B, tokens_k, H * group).to(draw.pick(FLOATS[:2]))
    ranges = {} if packed else key_ranges(draw, B, tokens_k)
    x |= ranges
    own = frozenset(name for name in ("q", "k", "v", "log_decay") if name in x)
    meaning = {name: value for name, value in options.items() if name != "return_lse"}
    by_row = frozenset(name for name in ("alibi_slopes",) if name in x and x[name].dim() == 2)
    taken = ({"packed"} if other_keys or by_row else set()) | ({"packed", "prefix"} if ranges else set())
    case = AttentionCase(
        op="softmax_attention",
        dtype=dtype,
        tensors=x,
        means=partial(_means, meaning, lengths, lengths_k, lse),
        axes=("token", "lse")[: 2 if lse else 1],
        options=options | ({"return_lse": True} if lse else {}),
        per_token=own if tokens == tokens_k else frozenset(),
        per_row=own | frozenset(ranges) | by_row,
        fixed=frozenset(ranges),
        lengths=lengths,
        packs=True,
        steps=2 + logit_steps(options, K),
        bound=ONE_KEY if ranges or forgets(x) or 1 in (lengths_k or (tokens_k,)) else 1.0,
        causal=causal and not other_keys and not ranges,
        loose=frozenset({"batch", "packed", "prefix"}) if min(K, V) == 1 else frozenset(),  # products with a vector
        laws=frozenset({"repeat", "batch", "layout"} | ({"prefix", "packed"} - taken)),
    )
    case.lengths_k = lengths_k if other_keys else None
    return case


def forgets(x: Tensors) -> bool:
    """Whether a query sees little but its own key."""
    return "log_decay" in x and bool((x["log_decay"] < -3).any())


def _attend(options: dict[str, Any], x: Tensors) -> tuple[Tensor, Tensor]:
    scale = options.get("scale", x["q"].shape[-1] ** -0.5)
    x = dict(x)
    if "log_decay" in x:
        x["log_decay"] = x["log_decay"].clamp(min=max(WALL, torch.finfo(x["log_decay"].dtype).min))
    return softmax_attention(**x, **{**options, "scale": scale})


def _means(
    options: dict[str, Any], lengths: tuple[int, ...] | None, lengths_k: tuple[int, ...] | None, lse: bool, x: Tensors
) -> list[Tensor]:
    if lengths is None or lengths_k is None:
        return list(_attend(options, x))[: 2 if lse else 1]
    parts = []
    for (q0, q1), (k0, k1) in zip(*(pairwise(accumulate((0, *found))) for found in (lengths, lengths_k)), strict=True):
        ends = {"q": (q0, q1), "k": (k0, k1), "v": (k0, k1), "log_decay": (k0, k1)}
        parts.append(_attend(options, {n: t[:, slice(*ends[n])] if n in ends else t for n, t in x.items()}))
    if not parts:
        q, v = x["q"], x["v"]
        parts = [(q.new_zeros(1, 0, q.shape[2], v.shape[3]), q.new_zeros(1, q.shape[2], 0))]
    return [torch.cat([o for o, _ in parts], 1), torch.cat([row[0] for _, row in parts], 1)][: 2 if lse else 1]


@dataclass
class CacheCase(Sample):
    """The cache's tensors are arguments by name, and put together for the call."""

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        call = super().arguments(
            {n: t for n, t in tensors.items() if not n.startswith("cache_") and n not in ("cos", "sin")}
        )
        parts = (tensors[f"cache_{name}"] for name in ("keys", "values", "page_table", "lengths"))
        call["cache"] = flashmix.KVCache(*parts)
        return call | ({"rotary": (tensors["cos"], tensors["sin"])} if "cos" in tensors else {})


def drawn_cache(draw: Draw) -> Sample:
    """A call of `attention_with_cache`: pages in any order, sequences of any lengths, with or without new keys."""
    dtype, packed, appends, turned = draw.dtype(), draw.chance(0.3), draw.chance(0.75), draw.chance(0.3)
    H, group = draw.heads()
    K = draw.channels()
    V = K if draw.chance(0.5) else draw.channels()
    page, sequences = draw.pick((1, 3, 16)), draw.free.choice((1, 1, 2, 3, 5))
    new = [draw.free.choice((0, 1, 1, 2, 5, 17)) for _ in range(sequences)]
    if not packed:
        new = [max(new[0], 0)] * sequences
    before = [draw.free.choice((0, 1, 7, 30, 64)) + (0 if appends else count) for count in new]
    held = [old + (count if appends else 0) for old, count in zip(before, new, strict=True)]
    pages = max(1, -(-max(held) // page)) + draw.free.randint(0, 1)
    total = sequences * pages + draw.free.randint(0, 2)
    table = torch.randperm(total, generator=draw.generator)[: sequences * pages].view(sequences, pages)
    B, T = (1, sum(new)) if packed else (sequences, new[0])
    x = {
        "q": draw.normal(B, T, H * group, K).to(dtype),
        "cache_keys": draw.normal(total, page, H, K).to(dtype),
        "cache_values": draw.normal(total, page, H, V).to(dtype),
        "cache_page_table": table.to(draw.pick((torch.int32, torch.int64))),
        "cache_lengths": torch.tensor(before),
    } | features(draw, H * group)
    if appends:
        x |= {"k": draw.normal(B, T, H, K).to(dtype), "v": draw.normal(B, T, H, V).to(dtype)}
    if turned and K > 1:
        angles = draw.normal(max(held) + 1, max(1, K // (2 * draw.pick((1, 2)))))
        x |= {"cos": angles.cos(), "sin": angles.sin()}
        x = {
            n: t.to(torch.float64 if dtype == torch.float64 else torch.float32) if n in ("cos", "sin") else t
            for n, t in x.items()
        }
    lse = draw.chance(0.5)
    options = shared_options(draw) | ({"interleaved": True} if draw.chance(0.3) else {})
    return CacheCase(
        op="attention_with_cache",
        dtype=dtype,
        tensors=x,
        means=partial(_cached, options, tuple(new), packed, lse),
        axes=("token", *["whole"] * (lse + (3 if appends else 0))),
        options=options | ({"return_lse": True} if lse else {}),
        lengths=tuple(new) if packed else None,
        packs=True,
        gradient=False,
        written=("cache_keys", "cache_values", "cache_lengths") if appends else (),
        steps=3 + logit_steps(options, K),
        loose=frozenset({"layout"}),  # torch's own attention runs it
        laws=frozenset({"repeat", "layout"}),
    )


def turn(x: Tensors, t: Tensor, first: int, interleaved: bool) -> Tensor:
    """`t [1, T, H, K]` rotated from position `first` on."""
    if "cos" not in x or not t.shape[1]:
        return t
    cos, sin = x["cos"].to(t.dtype), x["sin"].to(t.dtype)
    at = first + torch.arange(t.shape[1])[None]
    half = cos.shape[1]
    if not interleaved:
        return rotary(t, cos, sin, at)
    pairs = t[..., : 2 * half].unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    turned = rotary(torch.cat([pairs, t[..., 2 * half :]], -1), cos, sin, at)
    back = turned[..., : 2 * half].unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    return torch.cat([back, t[..., 2 * half :]], -1)


def _cached(options: dict[str, Any], new: tuple[int, ...], packed: bool, lse: bool, x: Tensors) -> list[Tensor]:
    keys, values, lengths = x["cache_keys"].clone(), x["cache_values"].clone(), x["cache_lengths"].clone()
    page, table = keys.shape[1], x["cache_page_table"]
    interleaved = options.get("interleaved", False)
    meaning = {n: v for n, v in options.items() if n != "interleaved"} | {"causal": True}
    extras = {n: x[n] for n in ("sink", "alibi_slopes") if n in x}
    starts, found = [0, *accumulate(new)], []
    for n, count in enumerate(new):
        own = (slice(0, 1), slice(starts[n], starts[n + 1])) if packed else (slice(n, n + 1), slice(None))
        old = int(lengths[n])
        first = old if "k" in x else old - count
        if "k" in x:
            k = turn(x, x["k"][own], first, interleaved)[0].to(keys.dtype)
            for t in range(count):
                place = int(table[n, (old + t) // page]), (old + t) % page
                keys[place], values[place] = k[t], x["v"][own][0, t]
            lengths[n] += count
        at = [(int(table[n, t // page]), t % page) for t in range(int(lengths[n]))]
        k, v = (torch.stack([m[p] for p in at]) if at else m.new_zeros(0, *m.shape[2:]) for m in (keys, values))
        q = turn(x, x["q"][own], first, interleaved)
        found.append(_attend(meaning, {"q": q, "k": k[None], "v": v[None], **extras}))
    o = torch.cat([o for o, _ in found], 1 if packed else 0)
    rows = torch.cat([r[0] for _, r in found], 1) if packed else torch.cat([r for _, r in found])
    return [o, *([rows] if lse else []), *((keys, values, lengths) if "k" in x else ())]
