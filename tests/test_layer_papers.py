"""The layers of the later mechanisms against their papers' loops, with nothing of flashmix but the layer's own weights.

The loops are those of `tests/paper_loops.py`; what makes their arguments of the input is written out here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import WIDTH, assert_same, make_layer, numbers
from paper_loops import run_loop
from test_layers import convolve, delta_inputs, heads, rms
from torch import Tensor
from torch.nn.functional import elu, layer_norm, logsigmoid, silu, softplus

from flashmix.layers import (
    ABC,
    GSA,
    HGRN2,
    IPLR,
    RWKV6,
    Comba,
    DeltaProduct,
    GatedDeltaNet2,
    Lightning,
    LinearAttention,
    Mixer,
    Oja,
    PreconditionedGatedDeltaNet,
    PreconditionedKDA,
)

T = 7


def layer_and_input(name: str, kind: type[Mixer[Any]]) -> tuple[Any, Tensor]:
    """The layer in float64 with no parameter left at a round number, and an input."""
    layer, generator = make_layer(name), torch.Generator().manual_seed(3)
    assert type(layer) is kind
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer, numbers(T, WIDTH)


def loop(name: str, scale: float = 1.0, **arguments: Tensor) -> Tensor:
    """The paper's output `[T, HV, V]` of arguments of one sequence; those of weights have no token axis."""
    weights = ("bonus", "log_scale")
    return run_loop(name, {n: t if n in weights else t[None] for n, t in arguments.items()}, scale=scale)[0][0]


def linear(x: Tensor, module: Any) -> Tensor:
    return x @ module.weight.T


def low_rank(x: Tensor, module: Any) -> Tensor:
    hidden = x @ module.down.weight.T
    hidden = hidden if module.activation is None else torch.tanh(hidden)
    return hidden @ module.up.weight.T + (0 if module.up.bias is None else module.up.bias)


def mamba_decay(x: Tensor, decay: Any) -> Tensor:
    rate = decay.A_log.exp()
    return -(rate if decay.dt_bias.dim() == 1 else rate[:, None]) * softplus(x + decay.dt_bias)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def finish_gated_deltanet(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    gate = heads(linear(x, layer.gate), layer.value_heads)
    return linear((rms(o) * layer.norm.weight * silu(gate)).flatten(1), layer.output)


def finish_kda(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    gate = heads(low_rank(x, layer.gate), layer.value_heads)
    return linear((rms(o) * layer.norm.weight * torch.sigmoid(gate)).flatten(1), layer.output)


def kda_decay(layer: Any, x: Tensor) -> Tensor:
    return mamba_decay(heads(low_rank(x, layer.decay_projection), layer.value_heads), layer.decay)


def test_linear_attention_is_its_paper() -> None:
    layer, x = layer_and_input("linear_attention", LinearAttention)
    q, k, v = (heads(part, 2) for part in linear(x, layer.qkv).split(layer.sizes, -1))
    q, k = elu(q) + 1, elu(k) + 1
    weights = torch.einsum("ihc,jhc->hij", q, k).tril()  # equation 4 with the feature map, causal
    o = torch.einsum("hij,jhv->ihv", weights / weights.sum(-1, keepdim=True), v)
    assert_same(layer(x[None])[0], linear(o.flatten(1), layer.output))


def test_lightning_is_its_paper() -> None:
    layer, x = layer_and_input("lightning", Lightning)
    q, k, v, gate = (heads(part, 2) for part in linear(x, layer.qkvg).chunk(4, -1))
    o = []
    S = x.new_zeros(2, 8, 8)
    decay = torch.exp(-8 / 2 * (1 - torch.tensor(1 / 3, dtype=torch.float64)) * torch.arange(2, dtype=torch.float64))
    for t in range(T):
        S = decay[:, None, None] * S + torch.einsum("hk,hv->hkv", silu(k[t]), silu(v[t]))
        o.append(torch.einsum("hk,hkv->hv", silu(q[t]), S) * 8**-0.5)
    expected = rms(torch.stack(o)) * layer.norm.weight * torch.sigmoid(gate)
    assert_same(layer(x[None])[0], linear(expected.flatten(1), layer.output))


def test_hgrn2_is_its_paper() -> None:
    layer, x = layer_and_input("hgrn2", HGRN2)
    q, f, v = (heads(part, 2) for part in linear(x, layer.qfv).chunk(3, -1))
    forget = 0.25 + 0.75 * torch.sigmoid(f)
    o = loop("hgrn2", q=silu(q), log_forget=forget.log(), v=v).flatten(1)
    assert_same(layer(x[None])[0], linear(rms(o) * layer.norm.weight, layer.output))


def test_rwkv6_is_its_paper() -> None:
    layer, x = layer_and_input("rwkv6", RWKV6)
    step = torch.cat([x.new_zeros(1, WIDTH), x[:-1]]) - x
    low = torch.tanh(linear(x + step * layer.first_mix, layer.shift_down)).unflatten(-1, (5, 3))
    r, w, k, v, g = (x + step * (layer.shift_mix[i] + low[:, i] @ layer.shift_up[i]) for i in range(5))
    r, k, v = heads(linear(r, layer.receptance), 2), heads(linear(k, layer.key), 2), heads(linear(v, layer.value), 2)
    decay = -torch.exp(heads(low_rank(w, layer.decay_projection), 2))
    o = loop("rwkv6", r=r, k=k, v=v, log_decay=decay, bonus=layer.bonus)
    o = layer_norm(o, (8,), eps=64e-5).flatten(1) * layer.norm_weight + layer.norm_bias
    assert_same(layer(x[None])[0], linear(o * silu(linear(g, layer.gate)), layer.output))


def test_gsa_is_its_paper() -> None:
    layer, x = layer_and_input("gsa", GSA)
    q, k, v, f = (heads(part, 2) for part in linear(x, layer.qkvf).split(layer.sizes, -1))
    decay = logsigmoid(f) / 8
    o = loop("gsa", q=silu(q), k=silu(k), v=silu(v), s=1 - decay.exp(), log_decay=decay)
    assert_same(layer(x[None])[0], linear(rms(silu(o).flatten(1)) * layer.norm.weight, layer.output))


def test_abc_is_its_paper() -> None:
    layer, x = layer_and_input("abc", ABC)
    q, k, v, s, gate = (heads(part, 2) for part in linear(x, layer.qkvsg).split(layer.sizes, -1))
    o = loop("abc", scale=4**-0.5, q=q, k=k, v=v, s=s)
    assert_same(layer(x[None])[0], linear((rms(o) * layer.norm.weight * silu(gate)).flatten(1), layer.output))


def test_comba_is_its_paper() -> None:
    layer, x = layer_and_input("comba", Comba)
    q, k, v = delta_inputs(layer, x)
    b, a = linear(x, layer.strength_and_decay).chunk(2, -1)
    closeness, correction = (w.repeat_interleave(2)[:, None] for w in (layer.closeness, layer.correction))
    p = torch.sigmoid(closeness) * k
    q = q - correction * p * 8**-0.5  # q is scaled already
    o = loop("comba", q=q, k=k, p=p, v=v, beta=torch.sigmoid(b), log_decay=mamba_decay(a, layer.decay))
    assert_same(layer(x[None])[0], finish_gated_deltanet(layer, x, o))


def test_gated_deltanet2_is_its_paper() -> None:
    layer, x = layer_and_input("gated_deltanet2", GatedDeltaNet2)
    q, k, v = delta_inputs(layer, x)
    gates = {n: torch.sigmoid(heads(linear(x, getattr(layer, n)), 4)) for n in ("erase", "write")}
    o = loop(
        "gated_deltanet2", q=q, k=k, v=v, erase_gate=gates["erase"], write_gate=gates["write"], log_decay=kda_decay(layer, x)
    )  # fmt: skip
    assert_same(layer(x[None])[0], finish_kda(layer, x, o))


@pytest.mark.parametrize("name", ["preconditioned_gated_deltanet", "preconditioned_kda"])
def test_preconditioned_is_its_paper(name: str) -> None:
    by_channel = name == "preconditioned_kda"
    layer, x = layer_and_input(name, PreconditionedKDA if by_channel else PreconditionedGatedDeltaNet)
    q, k, v = delta_inputs(layer, x)
    group = layer.value_heads // layer.heads
    b2, a2 = (part.repeat_interleave(group, 1) for part in linear(x, layer.curvature.projection).chunk(2, -1))
    rate, bias, log_scale = (
        w.repeat_interleave(group)
        for w in (layer.curvature.decay.A_log, layer.curvature.decay.dt_bias, layer.curvature.log_scale)
    )
    if by_channel:
        beta, decay = torch.sigmoid(linear(x, layer.strength)), kda_decay(layer, x)
    else:
        b, a = linear(x, layer.strength_and_decay).chunk(2, -1)
        beta, decay = torch.sigmoid(b), mamba_decay(a, layer.decay)
    o = loop(
        name, q=q, k=k, v=v, beta=beta, log_decay=decay, curvature_beta=torch.sigmoid(b2),
        curvature_log_decay=-rate.exp() * softplus(a2 + bias), log_scale=log_scale,
    )  # fmt: skip
    assert_same(layer(x[None])[0], (finish_kda if by_channel else finish_gated_deltanet)(layer, x, o))


def test_preconditioned_layers_refuse_negative_eigenvalues() -> None:
    for kind in (PreconditionedGatedDeltaNet, PreconditionedKDA):
        with pytest.raises(ValueError, match="negative_eigenvalues must be false where writes are preconditioned"):
            kind(WIDTH, 2, negative_eigenvalues=True)


def test_oja_is_its_paper() -> None:
    layer, x = layer_and_input("oja", Oja)
    q, k, v = delta_inputs(layer, x)
    o = loop("oja", q=q, k=k, v=unit(v), beta=torch.sigmoid(linear(x, layer.strength)), log_decay=kda_decay(layer, x))
    assert_same(layer(x[None])[0], finish_kda(layer, x, o))


def test_iplr_is_its_paper() -> None:
    layer, x = layer_and_input("iplr", IPLR)
    q, k, v = delta_inputs(layer, x)
    removal = unit(heads(linear(x, layer.removal), 4))
    beta = torch.sigmoid(linear(x, layer.strength))[..., None]
    o = loop("iplr", q=q, k=k, v=v, a=-removal, b=beta * removal)
    assert_same(layer(x[None])[0], linear((rms(o) * layer.norm.weight).flatten(1), layer.output))


def test_deltaproduct_is_its_paper() -> None:
    layer, x = layer_and_input("deltaproduct", DeltaProduct)
    keys, values, n = layer.keys, layer.values, layer.steps
    q, k, v = convolve(linear(x, layer.qkv), layer.convolution.weight).split([keys, n * keys, n * values], -1)
    q, k = unit(heads(q, 2)) * 8**-0.5, unit(k.unflatten(-1, (n, 2, 8)))
    beta, a = linear(x, layer.strength_and_decay).split([n * 4, 4], -1)
    o = loop(
        "deltaproduct", q=q, k=k, v=v.unflatten(-1, (n, 4, 8)), beta=torch.sigmoid(beta).unflatten(-1, (n, 4)),
        log_decay=mamba_decay(a, layer.decay),
    )  # fmt: skip
    assert_same(layer(x[None])[0], finish_gated_deltanet(layer, x, o))
