"""Recorded cases of the named mechanisms, the row-wise ops, the convolutions and the losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from recorded_jobs import ALL, MOST, SOME, SWEEP, Draw, OpJob, boundaries

import flashmix

ROW = "q:BTHK k:BTHK:unit v:BThV"
CURVATURE = "curvature_beta:BTH!:uniform curvature_log_decay:BTH!:decay"
NAMED = {
    "retnet": ROW,
    "lightning": ROW,
    "mamba2": "x:BThV dt:BTh!:uniform A_log:h! B:BTHK:unit C:BTHK",
    "normalised_linear_attention": "q:BTHK:uniform k:BTHK:uniform v:BThV",
    "simple_gla": f"{ROW} log_decay:BTh!:decay",
    "gla": f"{ROW} log_decay:BThK!:decay",
    "hgrn2": "q:BTHK log_forget:BTHK!:decay v:BTHV",
    "rwkv6": "r:BTHK k:BTHK:unit v:BTHV log_decay:BTHK!:decay bonus:HK!",
    "deltanet": f"{ROW} beta:BTh!:twice",
    "gated_deltanet": f"{ROW} beta:BTh!:twice log_decay:BTh!:decay",
    "kda": f"{ROW} beta:BTh!:twice log_decay:BThK!:decay",
    "deltaproduct": "q:BTHK k:BTnHK:unit v:BTnhV beta:BTnh!:twice log_decay:BTh!:decay",
    "erase_then_delta": f"{ROW} erase_key:BTHK:unit erase_gate:BTh!:uniform beta:BTh!:twice log_decay:BThK!:decay",
    "rwkv7": "r:BTHK log_decay:BTHK!:decay k:BTHK:unit v:BTHV kk:BTHK:unit a:BTHK:uniform",
    "comba": "q:BTHK k:BTHK:unit p:BTHK:share v:BThV beta:BTh!:uniform log_decay:BTh!:decay",
    "gated_deltanet2": f"{ROW} erase_gate:BThK!:uniform write_gate:BThV!:uniform log_decay:BThK!:decay",
    "preconditioned_gated_deltanet": f"{ROW} beta:BTh!:uniform log_decay:BTh!:decay {CURVATURE}",
    "preconditioned_kda": f"{ROW} beta:BTh!:uniform log_decay:BThK!:decay {CURVATURE}",
    "gsa": "q:BTHK k:BTHK v:BThV s:BThS:uniform log_decay:BThS!:decay",
    "abc": "q:BTHK k:BTHK v:BThV s:BThS",
    "oja": "q:BTHK k:BTHK v:BThV:unit beta:BTh!:uniform log_decay:BThV!:decay",
    "iplr": "q:BTHK k:BTHK:unit v:BThV a:BThK:away b:BThK:removed",
}


def named_jobs() -> Iterator[OpJob]:
    for op, spec in NAMED.items():
        options = {"return_state": True, **({"layer": 1, "layers": 3} if op == "lightning" else {})}
        packed = options | {"cu_seqlens": boundaries(5, 0, 64, 1, 33)}
        sizes = {"h": 2} if op in ("gsa", "abc", "rwkv6", "rwkv7", "hgrn2") else {}
        variants: tuple[tuple[str, dict[str, Any]], ...] = (
            ("chained", {"chain": True, "dtypes": MOST}),
            ("one token", {"chain": True, "sizes": sizes | {"T": 1}}),
            ("packed", {"sizes": sizes | {"B": 1, "T": 103}, "options": packed, "chain": True}),
            ("plain", {"options": options | {"return_state": False}}),
            ("sliced", {"layout": "sliced"}),
            ("one head a group", {"sizes": sizes | {"h": 2, "K": 8, "V": 8}}),
        )
        for name, more in variants:
            yield OpJob(f"named/{op}/{name}", op, spec, **{"sizes": sizes, "options": options, "dtypes": SWEEP, **more})


NORMS = {"rms_norm": "weight:D", "layer_norm": "weight:D bias:D", "group_norm": "weight:D bias:D", "l2_norm": ""}
ACTIVATIONS = ("silu", "sigmoid", "gelu", "gelu_tanh", "relu", "relu2")


def norm_jobs() -> Iterator[OpJob]:
    for op, weights in NORMS.items():
        fixed = {"groups": 2} if op == "group_norm" else {}
        for D in (2, 8, 24, 64, 100, 256, 1000, 5000, 20000):
            yield OpJob(f"norm/{op}/D{D}", op, f"x:BTD {weights}", {"D": D, "T": 5}, fixed, MOST)
        for layout in ("sliced", "transposed"):
            yield OpJob(f"norm/{op}/{layout}", op, "x:BTHD", {"D": 32}, fixed, SOME, layout=layout)
        yield OpJob(f"norm/{op}/no tokens", op, "x:BTD", {"T": 0}, fixed, SOME)
        yield OpJob(f"norm/{op}/eps", op, "x:BTD", {}, fixed | {"eps": 0.1}, SOME)
        for extra, options in (
            (
                ("gate:BTD", {}),
                ("gate:BTD", {"gate_activation": "sigmoid"}),
                ("residual:BTD", {"return_residual": True}),
                ("residual:BTD!", {}),
                (f"{weights} gate:BTD residual:BTD!", {"return_residual": True}),
                ("", {"center": False}),
            )
            if op != "l2_norm"
            else ()
        ):
            if "center" not in options or op == "group_norm":
                for D in (64, 1000, 5000):
                    name = f"norm/{op}/D{D} {extra} {options}"
                    yield OpJob(name, op, f"x:BTD {extra}", {"D": D, "T": 7}, fixed | options, MOST)


def elementwise_jobs() -> Iterator[OpJob]:
    for name in ACTIVATIONS:
        for D in (1, 24, 1000):
            yield OpJob(f"gated/{name}/D{D}", "gated", "gate:BTD up:BTD", {"D": D}, {"activation": name}, ALL)
        yield OpJob(f"gated/{name}/sliced", "gated", "gate:BTD up:BTD", {}, {"activation": name}, SOME, layout="sliced")
    for layout in ("", "sliced", "transposed"):
        yield OpJob(f"gated/swiglu/{layout}", "swiglu", "gate:BTD up:BTD", {"D": 65}, {}, ALL, layout=layout)
        for op, options in (("softplus_decay", {}), ("bounded_decay", {}), ("bounded_decay", {"lower": -1.0})):
            for K in ("", "K"):
                spec = f"x:BTh{K} A_log:h! dt_bias:h{K}!"
                yield OpJob(f"decay/{op}/{options}{K}{layout}", op, spec, {}, options, MOST, layout=layout)
        for negative in (False, True):
            options = {"negative_eigenvalues": negative}
            yield OpJob(
                f"decay/write_strength/{negative}{layout}", "write_strength", "x:BTh", {}, options, MOST, layout=layout
            )


def convolution_jobs() -> Iterator[OpJob]:
    lengths = (5, 0, 64, 1, 2, 33)
    packed = {"B": 1, "T": sum(lengths), "N": len(lengths)}
    ends = {"cu_seqlens": boundaries(*lengths)}
    state = {"return_state": True}
    for W in (2, 3, 4, 9):
        width = {"W": W, "w": W - 1}
        for name, spec, sizes, options in (
            ("plain", "", {}, {}),
            ("no activation", "bias:D", {}, {"activation": None}),
            ("gelu", "", {}, {"activation": "gelu"}),
            ("residual", "bias:D residual:BTD", {}, {}),
            ("state", "initial_state:NwD", {}, state),
            ("D100", "bias:D", {"D": 100}, {}),
            ("T1", "initial_state:NwD", {"T": 1}, state),
            ("T300", "", {"T": 300, "D": 64}, state),
            ("T0", "initial_state:NwD", {"T": 0}, state),
            ("packed", "bias:D residual:BTD initial_state:NwD", packed, ends | state),
            ("packed, no state", "", packed, ends),
        ):
            yield OpJob(f"short_conv/W{W}/{name}", "short_conv", f"x:BTD weight:DW {spec}", width | sizes, options)
        for layout in ("sliced", "transposed"):
            yield OpJob(f"short_conv/W{W}/{layout}", "short_conv", "x:BTD weight:DW", width, {}, SOME, layout=layout)
        width |= {"D": 24, "E": 24, "M": 40, "C": 88}
        spec = "q:BTD k:BTE v:BTM q_weight:DW k_weight:EW v_weight:MW"
        for name, extra, sizes, options in (
            ("plain", "", {}, {}),
            ("bias", "q_bias:D k_bias:E v_bias:M", {}, {"activation": None}),
            ("state", "initial_state:NwC", {}, state),
            ("T1", "initial_state:NwC", {"T": 1}, state),
            ("packed", "initial_state:NwC", packed, ends | state),
        ):
            yield OpJob(f"short_conv_qkv/W{W}/{name}", "short_conv_qkv", f"{spec} {extra}", width | sizes, options)
        yield OpJob(f"short_conv_qkv/W{W}/sliced", "short_conv_qkv", spec, width, {}, SOME, layout="sliced")
    for name, spec, sizes, options in (
        ("plain", "", {}, {}),
        ("state", "initial_state:NnD", {"n": 1}, state),
        ("T1", "initial_state:NnD", {"n": 1, "T": 1}, state),
        ("packed", "initial_state:NnD", packed | {"n": 1}, ends | state),
        ("D1000", "", {"D": 1000}, state),
    ):
        yield OpJob(f"token_shift/all/{name}", "token_shift", f"x:BTD {spec}", sizes, options, ALL)
    for layout in ("sliced", "transposed"):
        yield OpJob(f"token_shift/all/{layout}", "token_shift", "x:BTD", {}, {}, SOME, layout=layout)


def rotary_jobs() -> Iterator[OpJob]:
    table = flashmix.rotary_table(200, 16)
    short = flashmix.rotary_table(200, 12, 500.0, dtype=torch.float64)
    draw = Draw("rotary positions")
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "from 7": {"positions": 7},
        "positions": {"positions": draw("below200", 2, 70)},
        "interleaved": {"interleaved": True},
        "inverse": {"inverse": True},
        "interleaved, inverse": {"interleaved": True, "inverse": True, "positions": draw("below200", 2, 70).int()},
        "axes": {"positions": draw("below200", 2, 70, 3), "axes": (0, 0, 1, 1, 1, 2, 2, 2)},
        "packed": {"cu_seqlens": boundaries(5, 0, 64, 1)},
        "rotated in part": {"cos": short[0], "sin": short[1]},
        "interleaved in part": {"cos": short[0], "sin": short[1], "interleaved": True},
    }
    for name, case in cases.items():
        options = {"cos": table[0], "sin": table[1]} | case
        sizes = {"B": 1} if name == "packed" else {}
        for op, spec in (("rotary", "x:BTHK"), ("rotary_qk", "q:BThK k:BTHK")):
            yield OpJob(f"rotary/{op}/{name}", op, spec, sizes, options, ALL)
            written = ("x",) if op == "rotary" else ("q", "k")
            yield OpJob(
                f"rotary/{op}/{name}, in place", op, spec, sizes, options | {"inplace": True}, SOME, written=written
            )
            for layout in ("sliced", "transposed"):
                yield OpJob(f"rotary/{op}/{name}, {layout}", op, spec, sizes, options, SOME, layout=layout)


def loss_jobs() -> Iterator[OpJob]:
    ends: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plain", {}),
        ("sum", {"reduction": "sum"}),
        ("none", {"reduction": "none"}),
        ("ignored", {"ignore_index": 3}),
        ("smoothed", {"label_smoothing": 0.1}),
        ("z", {"z_loss": 0.01}),
        ("capped", {"softcap": 5.0}),
        ("everything", {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "reduction": "sum"}),
    )
    for M in (5, 1000, 33000):
        sizes = {"M": M, "T": 9}
        for name, options in ends:
            spec = f"logits:BTM target:BT:below{M}"
            yield OpJob(f"cross_entropy/M{M}/{name}", "cross_entropy", spec, sizes, options)
            yield OpJob(
                f"cross_entropy/M{M}/{name}, overwritten",
                "cross_entropy",
                spec,
                sizes,
                options | {"overwrite_logits": True},
                SOME,
            )
            if M < 33000:
                spec = f"hidden:BTD weight:MD target:BT:below{M}"
                yield OpJob(f"linear_cross_entropy/M{M}/{name}", "linear_cross_entropy", spec, sizes, options)
                chunked = options | {"chunk": 4}
                yield OpJob(
                    f"linear_cross_entropy/M{M}/{name}, chunks",
                    "linear_cross_entropy",
                    f"{spec} bias:M",
                    sizes,
                    chunked,
                    SOME,
                )


def distillation_jobs() -> Iterator[OpJob]:
    sizes = {"M": 300, "T": 9}
    kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("plain", "", {}),
        ("masked", "mask:BT:mask", {}),
        ("biases", "bias:M teacher_bias:M", {}),
        ("warm", "", {"temperature": 2.0}),
        ("reverse", "", {"reverse": True}),
        ("sum", "mask:BT:mask", {"reduction": "sum"}),
        ("none", "", {"reduction": "none"}),
        ("chunks", "mask:BT:mask", {"chunk": 4, "reverse": True}),
    )
    for name, extra, options in kinds:
        spec = f"hidden:BTD weight:MD teacher_hidden:BTE teacher_weight:ME {extra}"
        yield OpJob(
            f"linear_kl_divergence/all/{name}",
            "linear_kl_divergence",
            spec,
            sizes,
            options,
            wanted=("hidden", "weight", "bias"),
        )
    old, reference = "old_log_probs:BT!:decay", "reference_log_probs:BT!:decay"
    kinds = (
        ("plain", "advantages:B!", {}),
        ("per token", "advantages:BT!", {}),
        ("old", f"advantages:B! {old}", {"clip": (0.1, 0.3)}),
        ("reference", f"advantages:B! {reference}", {"kl_weight": 0.1}),
        ("masked", "advantages:B! mask:BT:mask bias:M", {}),
        ("mean", f"advantages:B! {old} mask:BT:mask", {"reduction": "mean", "temperature": 0.7}),
        ("sum", f"advantages:B! {old} {reference}", {"reduction": "sum", "kl_weight": 0.1, "chunk": 4}),
        ("none", "advantages:BT!", {"reduction": "none"}),
    )
    for name, extra, options in kinds:
        spec = f"hidden:BTD weight:MD target:BT:below300 {extra}"
        yield OpJob(f"linear_grpo/all/{name}", "linear_grpo", spec, sizes, options, wanted=("hidden", "weight", "bias"))
