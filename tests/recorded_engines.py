"""Recorded cases of the recurrence, of its steps and of softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from recorded_jobs import ALL, HALF_ON_CUDA, MOST, SIZES, SOME, SWEEP, Draw, OpJob, boundaries
from torch import Tensor

import flashmix

RULES = {
    "linear": ("linear_attention", "q:BTHK k:BTHK:unit v:BThV"),
    "delta": ("delta_rule", "q:BTHK k:BTHK:unit v:BThV beta:BTh!:twice"),
    "untied": ("delta_rule", "q:BTHK k:BTHK:unit v:BThV beta:BTh!:=1 write:BThK:unit erase:BThK:share"),
    "dplr": ("dplr", "q:BTHK k:BTHK:unit v:BThV a:BThK:away b:BThK:removed"),
}
GATES = {
    "none": "",
    "head": "log_decay:h!",
    "token": "log_decay:BTh!",
    "channel": "log_decay:BThK!",
    "value": "value_log_decay:BThV!",
}
ALL_GATES = ("none", "head", "token", "channel")
PAIRS = [(rule, gate) for rule in ("linear", "read_before", "delta", "untied", "dplr") for gate in ALL_GATES] + [
    ("linear", "value"),
    ("read_before", "value"),
    ("delta_before", "none"),
    ("delta_before", "token"),
    ("delta_before", "channel"),
    ("untied_before", "channel"),
]
MAIN_PAIRS = [
    ("linear", "head"),
    ("read_before", "channel"),
    ("delta", "token"),
    ("delta", "channel"),
    ("untied", "token"),
    ("dplr", "channel"),
    ("linear", "value"),
]


def recurrence(
    name: str, rule: str, gate: str, decay: str = "decay", beta: str = "", states: bool = True, **more: Any
) -> OpJob:
    """A case of the recurrence; `more` are fields of `OpJob`."""
    op, spec = RULES["linear" if rule == "read_before" else rule.removesuffix("_before")]
    spec = spec.replace(":twice", f":{beta}").replace(":=1 ", f":{beta} ") if beta else spec
    spec += (f" {GATES[gate]}:{decay}" if gate != "none" else "") + (" initial_state:NhKV!" if states else "")
    options = {
        "return_state": True,
        **({"read_before": True} if rule.endswith("before") else {}),
        **more.pop("options", {}),
    }
    return OpJob(f"recurrence/{rule}-{gate}/{name}", op, spec, options=options, **more)


def recurrence_jobs() -> Iterator[OpJob]:
    for rule, gate in PAIRS:
        yield recurrence("plain", rule, gate, dtypes=ALL)
        for decay in ("=0", "=-20", "=-1e4", "=-inf", "resets") if gate != "none" else ():
            yield recurrence(f"decay{decay}", rule, gate, decay)
    for rule in ("delta", "untied"):
        for beta in ("=0", "=1", "=2"):
            yield recurrence(f"beta{beta}", rule, "token", beta=beta, dtypes=SWEEP)
    for pair in MAIN_PAIRS:
        for T in (0, 1, 2, 31, 32, 33, 63, 64, 65, 129, 300):
            yield recurrence(f"T{T}", *pair, sizes={"T": T}, dtypes=SWEEP)
        for K, V in ((7, 24), (100, 3), (8, 72), (64, 64)):
            yield recurrence(f"K{K}V{V}", *pair, sizes={"K": K, "V": V, "T": 40})
        yield recurrence("K1V1", *pair, sizes={"K": 1, "V": 1, "T": 40, "B": 4, "N": 4, "H": 8, "h": 8}, dtypes=SWEEP)
        yield recurrence("grouped", *pair, sizes={"h": 6})
        yield recurrence("stateless", *pair, states=False)
        yield recurrence("no final state", *pair, options={"return_state": False}, dtypes=SWEEP)
        yield recurrence("gradient of v only", *pair, wanted=("v",), dtypes=SWEEP)
        yield recurrence("gradient of gate only", *pair, wanted=("log_decay", "value_log_decay"), dtypes=SWEEP)
        yield recurrence("scale", *pair, options={"scale": 0.7}, dtypes=SWEEP)
        yield recurrence("sliced", *pair, layout="sliced")
        yield recurrence("transposed", *pair, layout="transposed", dtypes=SWEEP)
        for n, lengths in (("packed", (5, 0, 64, 65, 1, 0, 33, 69, 0)), ("packed-empty", (0, 0)), ("packed-none", ())):
            packed = {"cu_seqlens": boundaries(*lengths)}
            yield recurrence(n, *pair, sizes={"B": 1, "T": sum(lengths), "H": 1, "N": len(lengths)}, options=packed)


def segmented_jobs() -> Iterator[OpJob]:
    """One long sequence of few heads: its chunks' states are passed on in segments."""
    shape = {"B": 1, "N": 1, "T": 16384, "H": 1, "h": 2}
    for rule, gate in PAIRS:
        for K in (64, 128, 256):
            yield recurrence(
                f"long-K{K}", rule, gate, sizes=shape | {"K": K, "V": K}, dtypes=HALF_ON_CUDA, only=("triton",)
            )
    for K, V in ((64, 128), (128, 64), (128, 256), (256, 64)):
        for pair in (("delta", "token"), ("delta", "channel"), ("linear", "head")):
            sizes = shape | {"K": K, "V": V, "h": 1}
            yield recurrence(f"long-K{K}V{V}", *pair, sizes=sizes, dtypes=HALF_ON_CUDA, only=("triton",))


def step_jobs() -> Iterator[OpJob]:
    rules = {
        "linear": RULES["linear"],
        "delta": RULES["delta"],
        "dplr": RULES["dplr"],
        "erase": ("delta_rule", "q:BTHK k:BTHK:unit v:BThV beta:BTh!:uniform erase:BThK:unit"),
        "write": ("delta_rule", "q:BTHK k:BTHK:unit v:BThV beta:BTh!:uniform write:BThK:unit"),
        "untied": ("delta_rule", "q:BTHK k:BTHK:unit v:BThV beta:BTh!:uniform write:BThK:unit erase:BThK:share"),
    }

    def step(
        name: str, rule: str, gate: str, decay: str = "decay", kept: int = 0, slots: tuple[int, ...] = (), **more: Any
    ) -> OpJob:
        op, spec = rules[rule.removesuffix("_before")]
        sizes = {"T": 1, "P": 5 if slots else 2, "n": kept, **({"B": len(slots)} if slots else {})} | more.pop(
            "sizes", {}
        )
        spec += (f" {GATES[gate]}:{decay}" if gate != "none" else "") + f" state:PhKV{more.pop('state', '!')}"
        spec += f" history:BnhKV{'%' if spec.endswith('%') else '!'}:=7" if kept else ""
        options: dict[str, Any] = {"read_before": True} if rule.endswith("before") else {}
        options |= {"state_indices": torch.tensor(slots, dtype=more.pop("index", torch.int64))} if slots else {}
        written = ("state", "history") if kept else ("state",)
        return OpJob(f"step/{rule}-{gate}/{name}", f"{op}_step", spec, sizes, options, written=written, **more)

    for rule in (*rules, "linear_before", "delta_before", "dplr_before"):
        for gate in ALL_GATES:
            yield step("plain", rule, gate, dtypes=ALL)
    for pair in (
        ("linear", "token"),
        ("delta", "token"),
        ("delta", "channel"),
        ("untied", "head"),
        ("dplr", "channel"),
    ):
        for K, V in ((1, 1), (7, 24), (100, 3), (8, 72), (96, 80), (200, 130), (128, 128)):
            yield step(f"K{K}V{V}", *pair, sizes={"K": K, "V": V}, dtypes=SOME)
        for T, kept in ((3, 0), (3, 3), (16, 2), (5, 1)):
            yield step(f"T{T}-kept{kept}", *pair, sizes={"T": T}, kept=kept)
        yield step("pool", *pair, slots=(4, 0, 2))
        yield step("grouped", *pair, sizes={"h": 6}, dtypes=SOME)
        yield step("bfloat16 state", *pair, state="%", kept=1, dtypes={"cpu": "f32 bf16", "cuda": "f32 bf16"})
        yield step("sliced", *pair, layout="sliced", dtypes=SOME)
        yield step("idle", *pair, slots=(-1, 3, -1, 0), index=torch.int32)
        yield step("idle-T4-kept3", *pair, slots=(-1, 3, -1, 0), sizes={"T": 4}, kept=3, index=torch.int32)
        yield step("all-idle", *pair, slots=(-1, -1), sizes={"T": 2}, kept=1, dtypes=SOME)
        for decay in ("=0", "=-20", "=-1e4", "=-inf"):
            yield step(f"decay{decay}", *pair, decay=decay, dtypes=SOME)


def delta_net_step_jobs() -> Iterator[OpJob]:
    def step(name: str, decay: str, gate: str | None = "sigmoid", slots: tuple[int, ...] = (), **more: Any) -> OpJob:
        sizes = {"H": 2, "h": 2, "B": 2, "P": 2} | more.pop("sizes", {}) | ({"P": 5, "B": len(slots)} if slots else {})
        sizes = SIZES | sizes
        sizes |= {"w": sizes["W"] - 1, "C": 2 * sizes["H"] * sizes["K"] + sizes["h"] * sizes["V"]}
        spec = "qkv:BC strength:Bh conv_state:PwC state:PhKV! conv_weight:CW" + more.pop("extra", " norm_weight:V")
        if decay != "none":
            K = "" if decay == "token" else "K"
            spec += f" decay:Bh{K} A_log:h dt_bias:h{K}"
        spec += " gate:BhV" if gate else ""
        options = {"heads": sizes["H"], "gate_activation": gate or "silu"} | more.pop("options", {})
        options |= {"lower": -5.0} if decay == "bounded" else {}
        options |= {"state_indices": torch.tensor(slots)} if slots else {}
        written = ("state", "conv_state")
        return OpJob(f"delta_net_step/{decay}/{name}", "delta_net_step", spec, sizes, options, written=written, **more)

    for decay in ("none", "token", "channel", "bounded"):
        for gate in (None, "silu", "sigmoid"):
            yield step(f"gate {gate}", decay, gate)
    for decay in ("token", "channel"):
        for K, V in ((1, 1), (7, 24), (100, 3), (96, 80), (200, 130), (128, 128)):
            yield step(f"K{K}V{V}", decay, sizes={"K": K, "V": V}, dtypes=SOME)
        for W in (2, 3, 9):
            yield step(f"W{W}", decay, sizes={"W": W}, extra=" norm_weight:V conv_bias:C", dtypes=SOME)
        for HV in (4, 6, 10):
            yield step(f"grouped{HV}", decay, sizes={"h": HV}, dtypes=SOME)
        yield step("pool", decay, slots=(4, 0, 2))
        yield step("unweighted", decay, extra="", options={"negative_eigenvalues": True, "eps": 1e-3})
        yield step("idle", decay, slots=(-1, 3, -1, 0), sizes={"h": 10})


ATTENTION: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "grouped heads": {"h": 6},
    "one key head": {"h": 4, "H": 1, "B": 1},
    "own scale": {"scale": 0.3},
    "more keys than queries": {"T": 70, "t": 200},
    "more queries than keys": {"T": 200, "t": 70},
    "few queries, many keys": {"T": 9, "t": 200, "h": 4},
    "few queries of one sequence": {"T": 9, "t": 200, "B": 1, "h": 8, "extra": "sink decay"},
    "one token": {"T": 1, "B": 8, "h": 8, "H": 4, "extra": "sink"},
    "one query, not causal": {"T": 1, "t": 77, "causal": False},
    "one causal query": {"T": 1, "t": 77, "h": 4},
    "no queries": {"T": 0, "t": 9},
    "no keys": {"T": 9, "t": 0},
    "no keys but a sink": {"T": 9, "t": 0, "h": 8, "extra": "sink"},
    "no sequences": {"B": 0},
    "window before": {"window": (40, 0)},
    "window over several blocks": {"T": 400, "window": (130, 0), "B": 1},
    "window on both sides": {"window": (3, 20), "causal": False},
    "window after": {"window": (None, 5), "causal": False},
    "window to the second key of a block": {"T": 384, "window": (254, None), "causal": False, "B": 1},
    "window to the last key but one of a piece": {"T": 520, "window": (None, 510), "causal": False, "B": 1},
    "window that some rows find empty": {"t": 40, "window": (10, 0)},
    "window of two keys and a sink": {"window": (1, 0), "h": 8, "H": 4, "extra": "sink"},
    "softcap": {"softcap": 2.0},
    "sink": {"h": 8, "extra": "sink"},
    "sink, not causal": {"causal": False, "t": 90, "h": 8, "extra": "sink"},
    "alibi": {"h": 8, "extra": "alibi"},
    "alibi on both sides": {"causal": False, "t": 90, "h": 8, "extra": "alibi"},
    "decay": {"extra": "decay"},
    "decay, grouped heads": {"h": 4, "t": 300, "extra": "decay"},
    "decay, more queries": {"t": 60, "extra": "decay"},
    "weak decay": {"T": 100, "t": 560, "B": 1, "extra": "decay", "gate": "=-0.001"},
    "decay with walls": {"T": 400, "B": 1, "extra": "decay", "gate": "walls"},
    "decay that grows": {"T": 300, "B": 1, "extra": "sink alibi decay", "gate": "=0.01"},
    "dropout": {"dropout_p": 0.3},
    "dims 1": {"K": 1, "V": 1, "T": 300, "h": 4, "H": 4},
    "dim of values 1": {"K": 8, "V": 1, "h": 4},
    "dims 7 and 9": {"K": 7, "V": 9},
    "dims 100 and 24": {"K": 100, "V": 24, "h": 8, "extra": "sink"},
    "dims 256": {"K": 256, "V": 256, "T": 70, "t": 100, "causal": False},
    "dims 192 and 128": {"K": 192, "V": 128, "window": (70, None), "B": 1},
    "dims 80 and 72": {"K": 80, "V": 72, "T": 200, "h": 4, "B": 1},
    "dim 64": {"K": 64, "V": 64},
    "sliced": {"layout": "sliced"},
    "transposed": {"layout": "transposed", "h": 4},
    "everything": {"window": (60, 0), "dropout_p": 0.2, "K": 24, "V": 8},
    "everything, dims 96 and 40": {"K": 96, "V": 40, "T": 170, "B": 1},
    "everything, several pieces of keys": {"T": 300, "t": 700, "B": 1, "dropout_p": 0.2},
    "packed": {"lengths": (64, 1, 129, 30)},
    "packed, not causal": {"lengths": (64, 1, 30), "causal": False},
    "packed, dims 100 and 24": {"K": 100, "V": 24, "lengths": (140, 3), "window": (50, 5), "causal": False},
    "packed, dims 40 and 90": {"K": 40, "V": 90, "lengths": (90, 0, 20), "h": 4},
    "packed with empty sequences": {"lengths": (0, 64, 0, 0, 63, 65, 0)},
    "packed, other lengths of keys": {"lengths": (3, 64, 0, 20, 7), "lengths_k": (90, 64, 5, 0, 3), "h": 4},
    "packed, everything": {"lengths": (30, 0, 140, 1, 4), "lengths_k": (90, 3, 140, 1, 0), "dropout_p": 0.2},
}
EVERYTHING = {"softcap": 3.0, "h": 8, "extra": "sink alibi decay"}


def attention(name: str, case: dict[str, Any], **more: Any) -> OpJob:
    """A case of softmax attention, from sizes, options and what the spec has more."""
    usual = {"causal": True, "T": 150, "h": 2, "K": 16, "V": 16, "extra": "", "gate": "decay"}
    case = {**usual, **case}
    options: dict[str, Any] = {n: case[n] for n in ("causal", "scale", "window", "softcap", "dropout_p") if n in case}
    if "lengths" in case:
        keys = case.get("lengths_k", case["lengths"])
        options |= {"cu_seqlens": boundaries(*case["lengths"]), "cu_seqlens_k": boundaries(*keys)}
        case |= {"B": 1, "T": sum(case["lengths"]), "t": sum(keys)}
    extra = {"sink": " sink:h", "alibi": " alibi_slopes:h:uniform", "decay": f" log_decay:Bth:{case['gate']}"}
    sizes = {n: value for n, value in ({"t": case["T"]} | case).items() if len(n) == 1}
    spec = "q:BThK k:BtHK v:BtHV" + "".join(extra[word] for word in case["extra"].split())
    more = {"dtypes": MOST, "layout": case.get("layout", ""), **more}
    return OpJob(name, "softmax_attention", spec, sizes, options | more.pop("options", {"return_lse": True}), **more)


def attention_jobs() -> Iterator[OpJob]:
    for n, case in ATTENTION.items():
        case = (EVERYTHING if "everything" in n else {}) | case
        group = f"attention/{n}"
        yield attention(f"{group}/lse", case)
        yield attention(
            f"{group}/no lse", case, options={}, dtypes={"cpu": "f32 bf16", "cuda": "f32 bf16"}, only=("triton", "sdpa")
        )
    variants: dict[str, dict[str, Any]] = {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": (300, 0)},
        "softcap": {"softcap": 20.0},
        "sink": {"extra": "sink"},
        "alibi": {"extra": "alibi"},
        "log_decay": {"extra": "decay"},
        "packed": {"lengths": (300, 500, 0, 224)},
    }
    for dim in (64, 80, 96, 128, 192, 256):
        for n, case in variants.items():
            shape = {"T": 1024, "K": dim, "V": dim, "h": 4, "H": 2}
            yield attention(f"attention/large-{dim}-{n}/bf16", shape | case, dtypes=HALF_ON_CUDA, only=("triton",))


class CacheJob:
    """Attention of tokens that arrive in pieces to a cache."""

    def __init__(self, name: str, paged: bool = False, interleaved: bool = False, dim: int = 8, **options: Any) -> None:
        self.name = self.group = f"attention_with_cache/{name}"
        self.paged, self.interleaved, self.dim, self.options = paged, interleaved, dim, options

    def dtypes_on(self, device: str) -> list[str]:
        return MOST[device].split()

    def _calls(self, dtype: torch.dtype, device: str, pieces: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        draw = Draw(self.name)

        def normal(*shape: int) -> Tensor:
            return draw("normal", *shape).to(dtype).to(device)

        table = torch.randperm(30, generator=draw.generator).view(3, 10)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        if self.paged:
            cache = flashmix.KVCache.paged(30, 5, table.int().to(device), 2, self.dim, **kind)
        else:
            cache = flashmix.KVCache.contiguous(3, 48, 2, self.dim, **kind)
        rotary = flashmix.rotary_table(64, self.dim, **kind)
        options = {n: normal(4).abs() if option == "draw" else option for n, option in self.options.items()}
        for piece in pieces:
            rows, tokens = (1, sum(piece)) if isinstance(piece, tuple) else (3, piece)
            call = {
                "q": normal(rows, tokens, 4, self.dim),
                "cache": cache,
                "rotary": rotary,
                "interleaved": self.interleaved,
            }
            call |= {name: normal(rows, tokens, 2, self.dim) for name in "kv"} | options
            yield call | ({"cu_seqlens": boundaries(*piece).to(device)} if isinstance(piece, tuple) else {})

    def implementations(self, dtype: torch.dtype, device: str) -> list[str]:
        call = next(self._calls(dtype, device, (1,)))
        return [
            name for name, why in flashmix.explain(flashmix.attention_with_cache, **call).reasons.items() if why is None
        ]

    def results(self, dtype: torch.dtype, device: str, impl: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index, call in enumerate(self._calls(dtype, device, (7, 1, 1, 0, 3, (5, 0, 1), (1, 1, 1), 10, 1))):
            for name, lse in (("appended", True), ("again", False)):  # then the queries alone, to the same keys
                found[f"{index} {name}"] = flashmix.attention_with_cache(**call, return_lse=lse, impl=impl)
                call = {n: value for n, value in call.items() if n not in ("k", "v")}
            found[f"{index} cache"] = [call["cache"].keys, call["cache"].values, call["cache"].lengths]
        return found


def cache_jobs() -> Iterator[CacheJob]:
    for paged in (False, True):
        for name, options in (
            ("plain", {}),
            ("window", {"window": (9, 0)}),
            ("softcap", {"softcap": 2.0}),
            ("sink", {"sink": "draw"}),
            ("alibi", {"alibi_slopes": "draw"}),
            ("scale and narrow window", {"scale": 0.9, "window": (0, None)}),
            ("interleaved", {"interleaved": True}),
            ("dim 64", {"dim": 64}),
            ("dim 100", {"dim": 100}),
        ):
            yield CacheJob(f"{'paged' if paged else 'contiguous'}-{name}", paged, **options)
