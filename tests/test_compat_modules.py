"""Norms, convolutions, rotary embeddings, MLPs and losses of flashmix.compat against their formulas, with the originals' defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, silu

from flashmix.compat import fla, flash_attn
from flashmix.compat.fla import modules

B, T, D, W, VOCABULARY = 2, 6, 8, 3, 11
Inputs = dict[str, Tensor]


def inputs() -> Inputs:
    torch.manual_seed(0)
    x = {n: torch.randn(B, T, D) for n in ("x", "residual", "g")}
    return x | {"weight": torch.randn(D), "bias": torch.randn(D), "rowscale": torch.rand(B, T)}


def check(got: Any, loop: Callable[[Inputs], Any], x: Inputs) -> None:
    results = [r if isinstance(r, (tuple, list)) else (r,) for r in (got, loop(widened(x)), loop(x))]
    for a, b, c in zip(*results, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        assert_within_budget("compat", a, b, c, steps=2)


def widened(x: Inputs) -> Inputs:
    return {n: y.double() if y.is_floating_point() else y for n, y in x.items()}


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, center: bool, groups: int = 1) -> Tensor:
    y = x.unflatten(-1, (groups, -1))
    y = y - y.mean(-1, keepdim=True) if center else y
    y = (y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("name", "center", "groups"), [("rms_norm", False, 1), ("layer_norm", True, 1), ("group_norm", True, 2)]
)
def test_norm_functions_of_fla(name: str, center: bool, groups: int, biased: bool, prenorm: bool) -> None:
    x = inputs()
    x["x"] = x["x"] / 100  # so that eps shows
    options = {"num_groups": groups} if groups > 1 else {}
    bias = x["bias"] if biased else None
    got = getattr(fla, name)(x["x"], x["weight"], bias, x["residual"] / 100, prenorm=prenorm, **options)

    def loop(x: Inputs) -> Any:
        total = x["x"] + x["residual"] / 100
        y = norm(total, x["weight"], x["bias"] if biased else None, eps=1e-5, center=center, groups=groups)
        return (y, total) if prenorm else y

    check(got, loop, x)
    plain = getattr(fla, name)(x["x"], x["weight"], bias, prenorm=True, **options)
    assert plain[1] is x["x"]


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("center", [False, True])
def test_gated_norms_of_fla(center: bool, activation: str) -> None:
    x = inputs()
    act = torch.sigmoid if activation == "sigmoid" else silu
    name = "layer" if center else "rms"
    got = getattr(fla, f"{name}_norm_gated")(x["x"], x["g"], x["weight"], x["bias"], activation)
    check(got, lambda x: norm(x["x"], x["weight"], x["bias"], eps=1e-6, center=center) * act(x["g"]), x)
    kind = modules.FusedLayerNormGated if center else modules.FusedRMSNormGated
    layer = kind(D, activation=activation)
    with torch.no_grad():
        layer.weight.copy_(x["weight"])
    assert layer.bias is None and layer.eps == 1e-5
    y, total = layer(x["x"], x["g"], x["residual"], prenorm=True)
    wanted = norm(x["x"] + x["residual"], x["weight"], None, eps=1e-5, center=center) * act(x["g"])
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(total, x["x"] + x["residual"])
    swish = (modules.FusedLayerNormSwishGate if center else modules.FusedRMSNormSwishGate)(D)
    torch.testing.assert_close(swish(x["x"], x["g"]), norm(x["x"], 1, None, eps=1e-5, center=center) * silu(x["g"]))


@pytest.mark.parametrize(
    ("layer", "center", "groups"),
    [
        (modules.RMSNorm(D), False, 1),
        (modules.RMSNorm(D, bias=True), False, 1),
        (modules.LayerNorm(D, bias=True), True, 1),
        (modules.GroupNorm(2, D, bias=True), True, 2),
        (modules.GroupNorm(2, D, is_rms_norm=True), False, 2),
        (modules.RMSNorm(D, elementwise_affine=False), False, 1),
    ],
)
def test_norm_modules_of_fla(layer: Any, center: bool, groups: int) -> None:
    x = inputs()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    weight = 1 if layer.weight is None else layer.weight
    torch.testing.assert_close(layer(x["x"]), norm(x["x"], weight, layer.bias, eps=1e-5, center=center, groups=groups))


def test_a_residual_in_float32_is_summed_and_returned_in_it() -> None:
    x, residual = torch.randn(T, D).bfloat16(), torch.randn(T, D)
    y, total = modules.RMSNorm(D)(x, residual, True, True)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(total, x.float() + residual)
    assert modules.RMSNorm(D)(x, None, True, True)[1].dtype == torch.float32


def test_gate_before_the_norm_of_fla() -> None:
    x = inputs()
    late = modules.RMSNormGated(D, group_size=4)
    torch.testing.assert_close(
        late(x["x"], x["g"]), norm(x["x"] * silu(x["g"]), 1, None, eps=1e-5, center=False, groups=2)
    )


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_norm_functions_of_flash_attn(center: bool, zero_centered: bool) -> None:
    x = inputs()
    function = flash_attn.layer_norm_fn if center else flash_attn.rms_norm_fn
    got = function(
        *(x["x"], x["weight"], x["bias"], x["residual"]),
        rowscale=x["rowscale"],
        prenorm=True,
        zero_centered_weight=zero_centered,
    )

    def loop(x: Inputs) -> Any:
        total = x["x"] * x["rowscale"][..., None] + x["residual"]
        return norm(total, x["weight"] + zero_centered, x["bias"], eps=1e-6, center=center), total

    check(got, loop, x)
    layer = flash_attn.RMSNorm(D, zero_centered_weight=zero_centered)
    torch.testing.assert_close(layer(x["x"]), norm(x["x"], 1, None, eps=1e-5, center=False))
    rms = flash_attn.layer_norm_fn(x["x"], x["weight"], None, is_rms_norm=True)
    check(rms, lambda x: norm(x["x"], x["weight"], None, eps=1e-6, center=False), x)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.rms_norm_fn(x["x"], x["weight"], None, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.RMSNorm(D, dropout_p=0.1)


def test_unit_norm_and_token_shift() -> None:
    x = inputs()
    check(fla.l2norm(x["x"]), lambda x: x["x"] / (x["x"].square().sum(-1, keepdim=True) + 1e-6).sqrt(), x)
    assert torch.equal(modules.L2Norm()(x["x"]), fla.l2_norm(x["x"]))
    before = torch.cat([torch.zeros(B, 1, D), x["x"][:, :-1]], 1)
    assert torch.equal(fla.token_shift(x["x"]), before - x["x"])
    y, last = fla.token_shift(x["x"], cache=x["g"][:, 0], output_cache=True)
    before[:, 0] = x["g"][:, 0]
    assert torch.equal(y, before - x["x"]) and torch.equal(last, x["x"][:, -1:])


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None = None) -> Tensor:
    """`[B, T, D]` after silu; the state is `[B, D, W]`, its oldest column unused."""
    past = x.new_zeros(B, W - 1, D) if state is None else state[..., 1:].mT
    x = torch.cat([past, x], 1)
    y = sum(weight[:, i] * x[:, i : x.shape[1] - W + 1 + i] for i in range(W))
    return silu(y if bias is None else y + bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_short_convolution_of_fla(bias: bool, final: bool) -> None:
    x = inputs()
    layer = modules.ShortConvolution(D, W, bias)
    assert layer.weight.shape == (D, 1, W) and set(layer.state_dict()) == ({"weight", "bias"} if bias else {"weight"})
    taps = layer.weight.detach().squeeze(1)
    extra = None if layer.bias is None else layer.bias.detach()
    y, state = layer(x["x"], output_final_state=final)
    torch.testing.assert_close(y, convolved(x["x"], taps, extra))
    assert (state is None) is not final
    if state is not None:
        assert torch.equal(state, x["x"][:, -W:].mT)
    past = torch.randn(B, D, W)
    y, state = layer(x["x"], x["residual"], cache=past, output_final_state=True)
    torch.testing.assert_close(y, convolved(x["x"], taps, extra, past) + x["residual"])
    torch.testing.assert_close(layer(x["x"], cache=past)[0], convolved(x["x"], taps, extra, past))
    short, state = layer(x["x"][:, :1], cache=past, output_final_state=True)
    torch.testing.assert_close(state, torch.cat([past[..., 1:], x["x"][:, :1].mT], -1))
    mask = torch.ones(B, T)
    mask[0, :2] = 0
    torch.testing.assert_close(layer(x["x"], mask=mask)[0], convolved(x["x"] * mask[..., None], taps, extra))
    with torch.no_grad():
        kept = past.clone()
        step, same = layer(x["x"][:, :1], cache=kept)
        assert same is kept and torch.equal(kept, state)
        torch.testing.assert_close(step, short)


def test_packed_convolution_of_fla() -> None:
    x = torch.randn(1, 7, D)
    weight, cu = torch.randn(D, W), torch.tensor([0, 2, 7])
    y, state = fla.causal_conv1d(x, weight, output_final_state=True, cu_seqlens=cu)
    for n, (a, b) in enumerate(((0, 2), (2, 7))):
        alone, last = fla.causal_conv1d(x[:, a:b], weight, output_final_state=True)
        assert torch.equal(y[:, a:b], alone) and torch.equal(state[n : n + 1], last)
    assert not state[0, :, 0].any()


def test_rotary_embedding_of_fla() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(B, T, 2, D), torch.randn(B, T, 1, D)
    for interleaved in (False, True):
        layer = modules.RotaryEmbedding(D, interleaved=interleaved)
        for offset in (0, 3, torch.tensor([3, 5])):
            turned = layer(q, k, offset, max_seqlen=16)
            places = torch.arange(T).expand(B, T) + (offset[:, None] if isinstance(offset, Tensor) else offset)
            angle = places[..., None] * 10000.0 ** -(torch.arange(0, D, 2) / D)
            cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
            for got, x in zip(turned, (q, k), strict=True):
                a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
                parts = a * cos - b * sin, b * cos + a * sin
                want = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
                torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="max_seqlen"):
        layer(q, k, torch.tensor([3, 5]))
    with pytest.raises(NotImplementedError, match="scale_base"):
        modules.RotaryEmbedding(D, scale_base=512.0)


def test_mlp_of_fla() -> None:
    layer = modules.GatedMLP(D)
    assert layer.gate_proj.weight.shape == (256, D)
    assert modules.GatedMLP(192).up_proj.out_features == 512
    x = inputs()["x"]
    torch.testing.assert_close(layer(x), layer.down_proj(silu(layer.gate_proj(x)) * layer.up_proj(x)))
    with pytest.raises(NotImplementedError, match="powlu"):
        modules.GatedMLP(D, hidden_act="powlu")


def logits() -> Inputs:
    torch.manual_seed(0)
    target = torch.randint(VOCABULARY, (T,))
    target[1] = -100
    return {"logits": 2 * torch.randn(T, VOCABULARY), "target": target}


def losses(
    x: Inputs, scale: float = 1.0, z: float = 0.0, smoothing: float = 0.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    y = scale * x["logits"]
    y = cap * torch.tanh(y / cap) if cap else y
    counted = (x["target"] != -100).to(y.dtype)
    z_loss = z * y.logsumexp(-1) ** 2 * counted
    return cross_entropy(y, x["target"], reduction="none", label_smoothing=smoothing) + z_loss, z_loss


@pytest.mark.parametrize("library", [fla, flash_attn])
def test_cross_entropy_is_a_loss_per_row(library: Any) -> None:
    x = logits()
    check(library.cross_entropy_loss(x["logits"], x["target"]), losses, x)
    options = {"label_smoothing": 0.1, "logit_scale": 0.5, "lse_square_scale": 0.3}
    got = library.cross_entropy_loss(x["logits"], x["target"], **options)
    check(got, lambda x: losses(x, 0.5, 0.3, 0.1), x)
    with pytest.raises(NotImplementedError, match="process_group"):
        library.cross_entropy_loss(x["logits"], x["target"], process_group=object())


def test_cross_entropy_modules() -> None:
    x = logits()
    for kind in (modules.FLA.names["FusedCrossEntropyLoss"], flash_attn.CrossEntropyLoss):
        check(kind()(x["logits"], x["target"]), lambda x: losses(x)[0].sum() / (T - 1), x)
        check(kind(reduction="none")(x["logits"], x["target"]), lambda x: losses(x)[0], x)
        got = kind(reduction="sum", lse_square_scale=0.2, return_z_loss=True)(x["logits"], x["target"])
        check(got, lambda x: [y.sum() for y in losses(x, z=0.2)], x)
        with pytest.raises(NotImplementedError, match="process_group"):
            kind(process_group=object())
    capped = fla.FusedCrossEntropyLoss(-100, "none", 0.0, 1.0, 0.1, 3.0, False, None, True)
    check(capped(x["logits"], x["target"]), lambda x: losses(x, z=0.1, cap=3.0), x)


def test_linear_losses_of_fla() -> None:
    torch.manual_seed(0)
    x = {"x": torch.randn(T, D), "weight": torch.randn(VOCABULARY, D), "bias": torch.randn(VOCABULARY)}
    x |= {"target": logits()["target"], "x2": torch.randn(T, D), "weight2": torch.randn(VOCABULARY, D)}

    def head(x: Inputs, scale: float = 1.0) -> Inputs:
        return {"logits": scale * linear(x["x"], x["weight"], x["bias"]), "target": x["target"]}

    loss = fla.FusedLinearCrossEntropyLoss(logit_scale=0.7, num_chunks=4)
    got = loss(x["x"], x["target"], x["weight"], x["bias"])
    check(got, lambda x: losses(head(x, 0.7))[0].sum() / (T - 1), x)
    got = fla.fused_linear_cross_entropy_loss(x["x"], x["target"], x["weight"], x["bias"], reduction="sum")
    check(got, lambda x: losses(head(x))[0].sum(), x)
    with pytest.raises(NotImplementedError, match="use_l2warp"):
        fla.FusedLinearCrossEntropyLoss(use_l2warp=True)
    with pytest.raises(TypeError, match="chunks"):
        fla.FusedLinearCrossEntropyLoss(chunks=4)

    def divergence(x: Inputs) -> Tensor:
        student, teacher = (log_softmax(linear(x[a], x[b]), -1) for a, b in (("x", "weight"), ("x2", "weight2")))
        return kl_div(student, teacher, log_target=True, reduction="batchmean")

    check(fla.FusedKLDivLoss()(x["x"], x["x2"], x["weight"], x["weight2"]), divergence, x)
