"""The cases of softmax attention: every implementation runs all that it supports, in every dtype."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from flashmix import Packing
from flashmix.ops.attention import definition, softmax_attention
from flashmix.ops.attention.portable.dropout import dropout_factor

# Between how many stages more than the formula kernels and plain PyTorch round, float32. Two: what a tile adds to o and l is rounded
# again wherever a later tile has a larger score, and P in backward is e^(s - m) times a rounded 1 / l, where softmax divides once.
KERNEL_STEPS = {torch.float32: 2}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call: shapes, options, which optional tensors it has. `lengths` packs the queries, `lengths_k` the keys."""

    name: str
    tokens: int = 150
    tokens_k: int | None = None
    batch: int = 2
    heads_q: int = 2
    heads: int = 2
    dim: int = 16
    dim_v: int | None = None
    causal: bool = True
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sink: bool = False
    alibi: bool | str = False  # "rows": each sequence has slopes of its own
    decay: bool = False
    gate: float = 0.2  # how strong gates are
    walls: float = 0.0  # the gate of every 90th key
    dropout_p: float = 0.0
    lengths: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    key_starts: tuple[int, ...] | None = None  # of each sequence of the batch
    key_lengths: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def ranges(self) -> dict[str, Tensor]:
        """`key_starts` and `key_lengths` where given."""
        given = {"key_starts": self.key_starts, "key_lengths": self.key_lengths}
        return {name: torch.tensor(numbers) for name, numbers in given.items() if numbers is not None}

    @property
    def plain(self) -> bool:
        """Whether torch's own attention does the same (it returns no lse)."""
        extras = (self.softcap, self.sink, self.alibi, self.decay, self.dropout_p, self.lengths, self.dim_v)
        if self.ranges and (self.tokens > 1 or self.window):
            return False
        if self.window and self.tokens > 1:
            return False
        aligned = not self.causal or self.tokens == 1 or self.tokens_k in (None, self.tokens)
        return not any(extras) and aligned and self.tokens > 0 and self.tokens_k != 0


EVERYTHING: dict[str, Any] = {"softcap": 3.0, "sink": True, "alibi": True, "decay": True, "heads_q": 8}

CASES = (
    Case("full", causal=False),
    Case("causal"),
    Case("grouped heads", heads_q=6),
    Case("one key head", heads_q=4, heads=1, batch=1),
    Case("own scale", scale=0.3),
    Case("more keys than queries", tokens=70, tokens_k=200),
    Case("more queries than keys", tokens=200, tokens_k=70),
    Case("few queries, many keys", tokens=9, tokens_k=200, heads_q=4),
    Case("few queries of one sequence, many keys", tokens=9, tokens_k=200, batch=1, heads_q=8, sink=True, decay=True),
    Case("one token", tokens=1, batch=8, heads_q=8, heads=4, sink=True),
    Case("one query, not causal", tokens=1, tokens_k=77, causal=False),
    Case("one causal query", tokens=1, tokens_k=77, heads_q=4),
    Case("one query in a window", tokens=1, tokens_k=77, heads_q=4, window=(30, 0)),
    Case("one query in a window on both sides", tokens=1, tokens_k=77, window=(12, 3), causal=False),
    Case("one query in a window with a sink", tokens=1, tokens_k=77, heads_q=8, window=(30, 0), sink=True),
    Case("one query, softcap", tokens=1, tokens_k=300, heads_q=4, softcap=2.0, dim_v=9),
    Case("one query, alibi of each sequence", tokens=1, tokens_k=90, heads_q=8, alibi="rows", batch=3, sink=True),
    Case("one query, everything", **EVERYTHING, tokens=1, tokens_k=90, window=(60, 0)),
    Case("no queries", tokens=0, tokens_k=9),
    Case("no keys", tokens=9, tokens_k=0),
    Case("no keys but a sink", tokens=9, tokens_k=0, sink=True, heads_q=8),
    Case("no sequences", batch=0),
    Case("window before", window=(40, 0)),
    Case("window over several blocks", tokens=400, window=(130, 0), batch=1),
    Case("window on both sides", window=(3, 20), causal=False),
    Case("window after", window=(None, 5), causal=False),
    Case("window to the second key of a block", tokens=384, window=(254, None), causal=False, batch=1),
    Case("window to the last key but one of a piece", tokens=520, window=(None, 510), causal=False, batch=1),
    Case("window that some rows find empty", tokens=150, tokens_k=40, window=(10, 0)),
    Case("window of two keys and a sink", window=(1, 0), sink=True, heads_q=8, heads=4),
    Case("softcap", softcap=2.0),
    Case("sink", sink=True, heads_q=8),
    Case("sink, not causal", sink=True, causal=False, tokens_k=90, heads_q=8),
    Case("alibi", alibi=True, heads_q=8),
    Case("alibi of each sequence", alibi="rows", heads_q=8, batch=3, tokens_k=90),
    Case("alibi on both sides", alibi=True, causal=False, tokens_k=90, heads_q=8),
    Case("decay", decay=True),
    Case("decay, grouped heads, more keys", decay=True, heads_q=4, tokens_k=300),
    Case("decay, more queries", decay=True, tokens_k=60),
    Case("weak decay over several tiles", decay=True, gate=0.001, tokens=100, tokens_k=560, batch=1),
    Case("decay with walls", decay=True, gate=0.01, walls=-40.0, tokens=400, batch=1),
    Case("decay that grows", decay=True, gate=-0.01, tokens=300, batch=1, sink=True, alibi=True),
    Case("dropout", dropout_p=0.3),
    Case("dims 1", dim=1, tokens=300, heads_q=4, heads=4),
    Case("dim of values 1", dim=8, dim_v=1, heads_q=4),
    Case("dims 7 and 9", dim=7, dim_v=9),
    Case("dims 100 and 24", dim=100, dim_v=24, sink=True, heads_q=8),
    Case("dims 256", dim=256, tokens=70, tokens_k=100, causal=False),
    Case("dims 192 and 128", dim=192, dim_v=128, window=(70, None), batch=1),
    Case("dims 80 and 72", dim=80, dim_v=72, tokens=200, heads_q=4, batch=1),
    Case("everything", **EVERYTHING, window=(60, 0), dropout_p=0.2, dim=24, dim_v=8),
    Case("everything, dims 96 and 40", **EVERYTHING, dim=96, dim_v=40, tokens=170, batch=1),
    Case("everything, several pieces of keys", **EVERYTHING, tokens=300, tokens_k=700, batch=1, dropout_p=0.2),
    Case("packed", lengths=(64, 1, 129, 30)),
    Case("packed, not causal", lengths=(64, 1, 30), causal=False),
    Case("packed, dims 100 and 24", dim=100, dim_v=24, lengths=(140, 3), window=(50, 5), causal=False),
    Case("packed, dims 40 and 90", dim=40, dim_v=90, lengths=(90, 0, 20), heads_q=4),
    Case("packed with empty sequences", lengths=(0, 64, 0, 0, 63, 65, 0)),
    Case("packed, other lengths of keys", lengths=(3, 64, 0, 20, 7), lengths_k=(90, 64, 5, 0, 3), heads_q=4),
    Case("packed everything", **EVERYTHING, lengths=(30, 0, 140, 1, 4), lengths_k=(90, 3, 140, 1, 0), dropout_p=0.2),
    Case("left-padded", batch=3, key_starts=(0, 61, 149), heads_q=4),
    Case("lengths of keys, not causal", batch=4, tokens_k=200, causal=False, key_lengths=(200, 1, 0, 130), sink=True),
    Case(
        "keys on both sides", batch=3, key_starts=(-4, 70, 90), key_lengths=(999, 140, 80), window=(60, 9), softcap=3.0
    ),
    Case(
        "one query, ranges of keys",
        batch=5,
        tokens=1,
        tokens_k=300,
        key_starts=(0, 7, 299, 40, 9),
        key_lengths=(300, 8, 300, 40, 1),
    ),
    Case(
        "one query, ranges of keys, a window and a sink",
        batch=4,
        tokens=1,
        tokens_k=90,
        heads_q=8,
        key_starts=(0, 7, 7, 40),
        key_lengths=(90, 80, 80, 41),
        window=(20, 0),
        sink=True,
    ),
    Case("packed, single queries", heads_q=8, lengths=(1, 1, 3, 1), lengths_k=(90, 4, 7, 1), window=(20, 0), sink=True),
    Case(
        "ranges, slopes and dropout",
        batch=2,
        alibi=True,
        dropout_p=0.2,
        key_starts=(5, 66),
        key_lengths=(140, 150),
        dim=70,
        dim_v=90,
    ),
)
# That kernels refuse.
PORTABLE_CASES = (
    Case("ranges and a decay", batch=3, tokens=60, key_starts=(0, 7, 30), key_lengths=(60, 50, 20), **EVERYTHING),
)


@dataclass
class Call:
    """A case with numbers: the differentiable tensors by argument name, and what flows back into o and lse."""

    case: Case
    tensors: dict[str, Tensor]
    d_o: Tensor
    d_lse: Tensor
    packing: tuple[Packing, Packing] | None
    drawn_on: str = "cpu"  # whose generator gives the seed of dropout

    def on(self, device: str) -> Call:
        """The same call on another device."""
        packing = None
        if self.packing is not None:
            first, second = (Packing(p.cu_seqlens.to(device), p.total) for p in self.packing)
            packing = (first, second)
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Call(self.case, tensors, self.d_o.to(device), self.d_lse.to(device), packing)

    def op(self, impl: str = "portable", return_lse: bool = True) -> dict[str, Tensor]:
        """What the op gives, and its gradients, by name."""
        case, tensors = self.case, leaves(self.tensors)
        torch.manual_seed(0)
        boundaries = {} if self.packing is None else {"cu_seqlens": self.packing[0], "cu_seqlens_k": self.packing[1]}
        o, lse = softmax_attention(
            **tensors,
            causal=case.causal,
            scale=case.scale,
            window=case.window,
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            **{name: numbers.to(self.d_o.device) for name, numbers in case.ranges.items()},
            **boundaries,
            return_lse=return_lse,
            impl=impl,
        )
        return self._with_gradients(tensors, o, lse)

    def definition(self, dtype: torch.dtype, return_lse: bool = True) -> dict[str, Tensor]:
        """The same from the definition, evaluated in `dtype`."""
        tensors = leaves({name: tensor.to(dtype) for name, tensor in self.tensors.items()})
        if self.packing is None:
            o, lse = self._define(tensors, 0)
        else:
            parts = []
            (starts_q, starts_k) = ([0, *accumulate(lengths)] for lengths in (self.case.lengths, self.lengths_k))
            for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
                ends = {"q": (q0, q1), "k": (k0, k1), "v": (k0, k1), "log_decay": (k0, k1)}
                part = {n: t[:, slice(*ends[n])] if n in ends else t for n, t in tensors.items()}
                parts.append(self._define(part, q0))
            o, lse = torch.cat([o for o, _ in parts], 1), torch.cat([lse[0] for _, lse in parts], 1)
        return self._with_gradients(tensors, o, lse if return_lse else None)

    @property
    def lengths_k(self) -> tuple[int, ...] | None:
        return self.case.lengths_k or self.case.lengths

    def _define(self, tensors: dict[str, Tensor], first_row: int) -> tuple[Tensor, Tensor]:
        case, (batch, tokens, heads_q, dim), tokens_k = self.case, tensors["q"].shape, tensors["k"].shape[1]
        dropout = None
        if case.dropout_p:
            torch.manual_seed(0)
            rows = first_row + torch.arange(batch)[:, None] * tokens + torch.arange(tokens)
            heads, keys = torch.arange(heads_q)[:, None, None], torch.arange(tokens_k)
            dropout = dropout_factor(
                torch.randint(2**62, (), device=self.drawn_on).cpu(),
                heads,
                rows[:, None, :, None],
                keys,
                case.dropout_p,
                tensors["q"].dtype,
            )
        return definition.softmax_attention(
            **tensors,
            scale=dim**-0.5 if case.scale is None else case.scale,
            causal=case.causal,
            window=case.window,
            softcap=case.softcap,
            dropout=dropout,
            **case.ranges,
        )

    def _with_gradients(self, tensors: dict[str, Tensor], o: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
        outputs = {"o": o} if lse is None else {"o": o, "lse": lse}
        flows = [self.d_o.to(o.dtype)]
        if lse is not None:  # nothing flows into the lse of a row that sees nothing
            flows.append(self.d_lse.to(lse.dtype).masked_fill(lse == -torch.inf, 0))
        roots = [(root, flow) for root, flow in zip(outputs.values(), flows, strict=True) if root.requires_grad]
        gradients = torch.autograd.grad(
            [root for root, _ in roots], list(tensors.values()), [flow for _, flow in roots], allow_unused=True
        )
        found = {name: tensor.detach() for name, tensor in outputs.items()}
        for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
            found[f"d_{name}"] = torch.zeros_like(tensor) if gradient is None else gradient
        return found


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}


def make_call(case: Case, dtype: torch.dtype, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    batch, tokens, tokens_k = case.batch, case.tokens, case.tokens if case.tokens_k is None else case.tokens_k
    packing = None
    if case.lengths is not None:
        lengths_k = case.lengths_k or case.lengths
        packing = (Packing.from_lengths(case.lengths), Packing.from_lengths(lengths_k))
        batch, tokens, tokens_k = 1, sum(case.lengths), sum(lengths_k)
    dim_v = case.dim_v or case.dim
    tensors = {
        "q": normal(batch, tokens, case.heads_q, case.dim),
        "k": normal(batch, tokens_k, case.heads, case.dim),
        "v": normal(batch, tokens_k, case.heads, dim_v),
    }
    if case.sink:
        tensors["sink"] = normal(case.heads_q)
    if case.alibi:
        rows = (batch,) if case.alibi == "rows" else ()
        tensors["alibi_slopes"] = normal(*rows, case.heads_q).abs() / 10
    if case.decay:
        gates = -normal(batch, tokens_k, case.heads_q).abs() * case.gate
        if case.walls:
            gates[:, 40::90] = case.walls
        tensors["log_decay"] = gates
    lse_shape = (case.heads_q, tokens) if packing else (batch, case.heads_q, tokens)
    return Call(case, tensors, normal(batch, tokens, case.heads_q, dim_v), normal(*lse_shape), packing)
