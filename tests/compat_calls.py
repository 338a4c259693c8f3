"""One call of each name of flashmix.compat, with the inputs that tests/test_compat_fla.py draws, larger and more of them.

A call is `call(thing, inputs)`, where the thing is the function or class: flashmix's, or the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_compat_fla as drawn
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flashmix.compat.coverage import SURFACES
from flashmix.ops.rotary.op import rotary_table

Inputs = dict[str, Tensor]
Call = Callable[[Any, Inputs], Any]
SIZES = {"T": 70, "K": 32, "V": 32}  # more than one chunk, and channels that the originals take
D, VOCABULARY, WIDTH = 64, 99, 4
FLOAT32 = ("S", "A", "A_log", "dt_bias", "dt_bias_k", "g", "gk", "gv", "g_s", "g_atk", "log_mu", "lamb", "lower")
CALLS: dict[str, Call] = {}  # by library and name


def inputs(steps: int) -> Inputs:
    """What calls read, by name, in float32: integers are boundaries, targets and masks."""
    B, T, H, K = drawn.B, drawn.T, drawn.H, drawn.K
    x = drawn.inputs(steps=steps)
    x |= {"a": x["a"] / 3, "log_mu": -torch.rand(B, T, H), "lamb": 0.3 + torch.rand(H, K)}
    x |= {name: torch.randn(B, T, D) for name in ("x", "residual", "gate")}
    x |= {"weight": 1 + torch.randn(D) / 4, "bias": torch.randn(D), "rowscale": torch.rand(B, T)}
    x |= {
        "taps": torch.randn(D, WIDTH),
        "taps_of_module": torch.randn(D, 1, WIDTH),
        "conv_state": torch.randn(B, D, WIDTH),
    }
    x |= {"logits": torch.randn(B * T, VOCABULARY), "head": torch.randn(VOCABULARY, D) / 8}
    x |= {"target": torch.randint(VOCABULARY, (B * T,)), "head_2": torch.randn(VOCABULARY, D) / 8}
    x |= {"log_p": torch.randn(B, VOCABULARY).log_softmax(-1), "q4": torch.randn(B, T, 2 * H, K)}
    x |= {"qkv": torch.randn(B, T, 3, H, K), "new": torch.randn(B, 3, H, K), "cu": torch.tensor([0, 20, 20, T])}
    x |= {
        "lens": torch.tensor([20, 0, T - 20]),
        "mask": torch.ones(B, T).tril(T - 9),
        "lengths": torch.tensor([30, 41]),
    }
    x |= {"u_scan": torch.randn(B, D, T), "delta_scan": torch.rand(B, D, T), "z_scan": torch.randn(B, D, T)}
    x |= {"B_scan": torch.randn(B, 16, T), "C_scan": torch.randn(B, 16, T), "log_A": torch.rand(D, 16)}
    x |= {
        "dt": torch.rand(B, T, H),
        "B_": torch.randn(B, T, 1, K),
        "C_": torch.randn(B, T, 1, K),
        "skip": torch.randn(H),
    }
    x["cos"], x["sin"] = rotary_table(T + 4, K)
    return x


def of(library: str, names: str) -> Callable[[Call], Call]:
    def add(call: Call) -> Call:
        CALLS.update({f"{library}.{name}": call for name in names.split()})
        return call

    return add


def take(x: Inputs, text: str) -> list[Tensor]:
    return [x[name] for name in text.split()]


def teacher(x: Inputs) -> list[Tensor]:
    """Hidden states and heads of a student and of a teacher, who gets no gradient."""
    hidden, other = (x[n].flatten(0, 1) for n in ("x", "residual"))
    return [hidden, other.detach(), x["head"], x["head_2"].detach()]


def module(made: nn.Module, like: Tensor, **weights: Tensor) -> nn.Module:
    """The module in the dtype and on the device of a tensor, its parameters replaced by these tensors."""
    made = made.to(like.device, like.dtype)
    for name, weight in weights.items():
        owner, _, last = name.rpartition(".")
        holder = made.get_submodule(owner)
        delattr(holder, last)
        setattr(holder, last, weight)
    return made


for case, (name, call, *_) in drawn.CASES.items():
    if case.endswith("-0"):
        CALLS[f"fla.{name}"] = call
STEPS = {f"fla.{name}": steps for case, (name, _, _, steps) in drawn.CASES.items() if case.endswith("-0")}


@of("fla", "rms_norm layer_norm")
def _(f: Any, x: Inputs) -> Any:
    return f(*take(x, "x weight bias"), residual=x["residual"], prenorm=True)


of("fla", "group_norm")(lambda f, x: f(*take(x, "x weight bias"), num_groups=4))
of("fla", "l2norm l2_norm")(lambda f, x: f(x["x"]))
of("fla", "rms_norm_gated layer_norm_gated")(lambda f, x: f(*take(x, "x gate weight bias")))
of("fla", "RMSNorm LayerNorm")(lambda f, x: module(f(D), x["x"], weight=x["weight"])(x["x"]))
of("fla", "GroupNorm")(lambda f, x: module(f(4, D), x["x"], weight=x["weight"])(x["x"]))
of("fla", "L2Norm")(lambda f, x: f()(x["x"]))
GATED = "FusedRMSNormGated FusedLayerNormGated FusedRMSNormSwishGate FusedLayerNormSwishGate"
of("fla", GATED)(lambda f, x: module(f(D), x["x"], weight=x["weight"])(x["x"], x["gate"]))
of("fla", "RMSNormGated")(
    lambda f, x: module(f(D, norm_before_gate=True), x["x"], weight=x["weight"])(x["x"], x["gate"])
)
of("fla", "RotaryEmbedding")(lambda f, x: f(x["q"].shape[-1], device=x["q"].device)(x["q"], x["raw_k"]))
of("fla", "rotary_embedding")(lambda f, x: f(*take(x, "q cos sin")))
of("fla", "token_shift")(lambda f, x: f(x["x"]))
of("fla", "causal_conv1d")(lambda f, x: f(*take(x, "x taps bias"), activation="silu", output_final_state=True))
of("fla", "ShortConvolution")(lambda f, x: module(f(D, WIDTH), x["x"], weight=x["taps_of_module"])(x["x"])[0])
of("fla", "cross_entropy_loss")(lambda f, x: f(x["logits"], x["target"])[0])
of("fla", "FusedCrossEntropyLoss")(lambda f, x: f()(x["logits"], x["target"]))
of("fla", "fused_linear_cross_entropy_loss")(lambda f, x: f(x["x"].flatten(0, 1), x["target"], x["head"]))
of("fla", "FusedLinearCrossEntropyLoss")(lambda f, x: f()(x["x"].flatten(0, 1), x["target"], x["head"]))
of("fla", "fused_kl_div_loss")(lambda f, x: f(*teacher(x)))
of("fla", "FusedKLDivLoss")(lambda f, x: f()(*teacher(x)))
of("fla", "prepare_lens prepare_position_ids prepare_sequence_ids")(lambda f, x: f(x["cu"]))
of("fla", "prepare_cu_seqlens_from_lens")(lambda f, x: f(x["lens"]))


@of("fla", "GatedMLP")
def _(f: Any, x: Inputs) -> Any:
    up, down = x["head"][:64], x["head_2"][:64]
    weights = {"gate_proj.weight": up, "up_proj.weight": down, "down_proj.weight": up.mT}
    return module(f(D, intermediate_size=64), x["x"], **weights)(x["x"])


@of("fla", "chunk_mesa_net")
def _(f: Any, x: Inputs) -> Any:
    return f(*take(x, "q k v g beta lamb"), output_final_state=True)


@of("fla", "mesa_net_decoding_one_step")
def _(f: Any, x: Inputs) -> Any:
    square = x["k"][:, 1].unsqueeze(-1) * x["k"][:, 1].unsqueeze(-2)
    one = [x[n][:, 0] for n in ("q", "k", "v", "g")]
    return f(*one, x["lamb"], x["beta"][:, 0], square.float(), x["S"])


@of("fla", "chunk_momentum_delta_rule fused_recurrent_momentum_delta_rule")
def _(f: Any, x: Inputs) -> Any:
    return f(*take(x, "q k v g log_mu"), beta=x["beta"], output_final_state=True)


@of("fla", "fused_recurrent_rwkv4")
def _(f: Any, x: Inputs) -> Any:
    state = torch.zeros(x["x"].shape[0], 3, 1, D, device=x["x"].device)
    state[:, 2] = -1e30
    return f(x["taps"][:, 0].float(), x["bias"].float(), x["x"], x["residual"], state.to(x["dt_bias"].dtype))


# ---- flash-attn ----


def packed(x: Inputs, name: str) -> Tensor:
    return x[name].flatten(0, 1)


def boundaries(x: Inputs) -> Tensor:
    T = x["q"].shape[1]
    return torch.tensor([0, 20, 20 + T, 2 * T], dtype=torch.int32, device=x["q"].device)


BOTH = ("flash_attn", "flash_attn_interface")
for library in BOTH:
    of(library, "flash_attn_func")(lambda f, x: f(*take(x, "q4 k v"), causal=True, window_size=(30, 0)))
    of(library, "flash_attn_qkvpacked_func")(lambda f, x: f(x["qkv"], causal=True))
    of(library, "flash_attn_varlen_func")(
        lambda f, x: f(*(packed(x, n) for n in ("q4", "k", "v")), *[boundaries(x)] * 2, 70, 70, causal=True)
    )

    @of(library, "flash_attn_with_kvcache")
    def _(f: Any, x: Inputs) -> Any:
        caches = x["k"].clone(), x["v"].clone()
        new, lengths = x["new"], x["lengths"].int()
        return f(x["q4"][:, :3], *caches, new, new, cache_seqlens=lengths, causal=True), caches


of("flash_attn", "flash_attn_kvpacked_func")(lambda f, x: f(x["q4"], x["qkv"][:, :, 1:], causal=True))
of("flash_attn", "flash_attn_varlen_qkvpacked_func")(
    lambda f, x: f(packed(x, "qkv"), boundaries(x), 70, causal=True, softcap=5.0)
)
of("flash_attn", "flash_attn_varlen_kvpacked_func")(
    lambda f, x: f(packed(x, "q4"), packed(x, "qkv")[:, 1:], *[boundaries(x)] * 2, 70, 70, causal=True)
)
of("flash_attn", "apply_rotary_emb apply_rotary_emb_func")(lambda f, x: f(*take(x, "q cos sin"), seqlen_offsets=4))
of("flash_attn", "apply_rotary_emb_qkv_")(lambda f, x: f(x["qkv"].clone(), x["cos"], x["sin"]))
of("flash_attn", "apply_rotary_emb_kv_")(lambda f, x: f(x["qkv"][:, :, 1:].clone(), x["cos"], x["sin"]))
of("flash_attn", "RotaryEmbedding")(lambda f, x: f(x["q"].shape[-1], device=x["q"].device)(x["qkv"]))
of("flash_attn", "cross_entropy_loss")(lambda f, x: f(x["logits"], x["target"])[0])
of("flash_attn", "CrossEntropyLoss")(lambda f, x: f()(x["logits"], x["target"]))
of("flash_attn", "RMSNorm")(lambda f, x: module(f(D), x["x"], weight=x["weight"])(x["x"]))
of("flash_attn", "layer_norm_fn rms_norm_fn")(
    lambda f, x: f(*take(x, "x weight bias residual"), rowscale=x["rowscale"], prenorm=True)
)
of("flash_attn", "unpad_input")(lambda f, x: f(x["x"], x["mask"])[:3])
of("flash_attn", "pad_input")(lambda f, x: f(x["logits"], torch.arange(140, device=x["logits"].device) * 2, 2, 140))
of("flash_attn", "index_first_axis")(lambda f, x: f(x["logits"], x["cu"]))
of("flash_attn", "index_put_first_axis")(lambda f, x: f(x["logits"][:4], x["lens"].new_tensor([3, 9, 0, 7]), 12))


# ---- mamba_ssm and causal_conv1d ----


@of("mamba_ssm", "mamba_chunk_scan mamba_chunk_scan_combined")
def _(f: Any, x: Inputs) -> Any:
    options = {"D": x["skip"], "z": x["v"], "dt_bias": x["dt_bias"], "dt_softplus": True}
    return f(x["raw_k"], x["dt"], -x["A_log"].exp(), x["B_"], x["C_"], 64, **options)


@of("mamba_ssm", "selective_scan_fn")
def _(f: Any, x: Inputs) -> Any:
    options = {"z": x["z_scan"], "delta_bias": x["lower"], "delta_softplus": True, "return_last_state": True}
    return f(*take(x, "u_scan delta_scan"), -x["log_A"].float().exp(), *take(x, "B_scan C_scan"), **options)


@of("mamba_ssm", "selective_state_update")
def _(f: Any, x: Inputs) -> Any:
    state = x["S"].mT.contiguous()  # [B, H, P, N]
    channels, H = state.shape[2:], state.shape[1]
    dt = x["dt"][:, 0, :, None].expand(-1, H, channels[0])
    A = -x["A_log"].exp()[:, None, None].expand(H, *channels)
    return f(state, x["v"][:, 0], dt, A, x["B_"][:, 0], x["C_"][:, 0]), state


of("mamba_ssm", "layernorm_fn rmsnorm_fn")(lambda f, x: f(*take(x, "x weight bias"), z=x["gate"]))
of("mamba_ssm", "RMSNorm")(lambda f, x: module(f(D), x["x"], weight=x["weight"])(x["x"], x["gate"]))
of("causal_conv1d", "causal_conv1d_fn")(lambda f, x: f(*take(x, "u_scan taps bias"), activation="silu"))


@of("causal_conv1d", "causal_conv1d_update")
def _(f: Any, x: Inputs) -> Any:
    state = x["conv_state"].clone()
    return f(x["x"][:, 0], state, x["taps"], x["bias"], activation="silu"), state


THINGS = {f"{surface.library}.{name}": thing for surface in SURFACES for name, thing in surface.names.items()}
NO_GRADIENT = ("prepare_", "_with_kvcache", "_update", "decoding", "pad_input", "index_")


def values(name: str, device: str, dtype: torch.dtype) -> Inputs:
    """What the call of a name gets, while `sizes` holds: the same values whatever the device and dtype."""
    torch.manual_seed(0)
    x = inputs(STEPS.get(name, 1))
    x["lower"] = torch.rand(D)
    return {n: _given(n, y, device, dtype) for n, y in x.items()}


@contextmanager
def sizes() -> Iterator[None]:
    """Within it inputs have `SIZES`."""
    with pytest.MonkeyPatch.context() as patch:
        for size, value in SIZES.items():
            patch.setattr(drawn, size, value)
        yield


def flow(result: Tensor, place: int = 0) -> Tensor:
    """The gradient that a result gets, by its place among those that have one: numbers that bfloat16 holds."""
    noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(1000 + place))
    return noise.to(result.device).bfloat16().to(result.dtype)


def run(name: str, thing: Any, device: str, dtype: torch.dtype, gradient: bool = True) -> dict[str, Tensor]:
    """Results, and gradients of the inputs they depend on, of the same values whatever the device and dtype."""
    with sizes():
        given = values(name, device, dtype)
        wanted = gradient and not any(part in name for part in NO_GRADIENT)
        for y in given.values():
            y.requires_grad_(wanted and y.is_floating_point())
        found = [y for y in drawn.flat(CALLS[name](thing, given)) if isinstance(y, Tensor)]
    results = {f"result {i}": y.detach() for i, y in enumerate(found)}
    ends = [y for y in found if y.requires_grad]
    if not (wanted and ends):
        return results
    leaves = {n: y for n, y in given.items() if y.requires_grad}
    total = sum((y * flow(y, place)).sum() for place, y in enumerate(ends))
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return results | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}


def _given(name: str, tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """A value that bfloat16 holds, in the dtype that a user gives: gates, states and rates in float32."""
    if not tensor.is_floating_point():
        return tensor.to(device)
    if name in ("k", "kk", "unit_v"):
        tensor = normalize(tensor, dim=-1)
    kept = torch.float32 if name in FLOAT32 and dtype != torch.float64 else dtype
    return tensor.bfloat16().to(device, kept)
