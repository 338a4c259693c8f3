"""Modules against their formulas, their parameters at the start, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_cases import assert_same, numbers
from torch.nn.functional import cross_entropy, logsigmoid, silu, softplus

from flashmix.modules import (
    BoundedDecay,
    ChannelMixing,
    ForgetGate,
    GatedMLP,
    GatedRMSNorm,
    LayerNorm,
    LinearCrossEntropy,
    LogSigmoidDecay,
    LowRank,
    MambaDecay,
    MixtureOfExperts,
    RMSNorm,
    RotaryEmbedding,
    RWKV6Decay,
    RWKV7Decay,
    ShortConvolution,
    SwiGLU,
    WriteStrength,
    next_token_targets,
)
from flashmix.op.packing import Packing
from flashmix.ops.rotary.scaling import LinearScaling


def test_norms() -> None:
    x, gate = numbers(2, 5, 8), numbers(2, 5, 8, seed=2)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    norm = RMSNorm(8).double()
    torch.nn.init.normal_(norm.weight)
    assert_same(norm(x), plain * norm.weight)
    assert_same(RMSNorm(8, affine=False)(x), plain)
    y, total = norm.add_and_norm(x, gate)
    assert_same(total, x + gate)
    assert_same(y, norm(x + gate))
    for activation, function in (("silu", silu), ("sigmoid", torch.sigmoid)):
        gated = GatedRMSNorm(8, activation=activation).double()
        torch.nn.init.normal_(gated.weight)
        assert_same(gated(x, gate), plain * gated.weight * function(gate))
    with pytest.raises(ValueError, match="activation must be one of 'silu', 'sigmoid', got 'relu'"):
        GatedRMSNorm(8, activation="relu")


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """The halves of the last axis as complex numbers, turned; cosines and sines rounded to float32 as in the table."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None, None] * base ** -(torch.arange(half, dtype=torch.float64) / half)
    c, s = angle.cos().float().double(), angle.sin().float().double()
    return torch.cat([x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1)


def test_rotary_embedding_grows_its_table_by_need() -> None:
    module, x = RotaryEmbedding(8, 100.0), numbers(2, 5, 3, 8)
    assert_same(module(x), rotated(x, torch.arange(5), 100.0))
    assert_same(module(x, positions=3), rotated(x, torch.arange(3, 8), 100.0))
    far = 10_000
    assert_same(module(x, positions=far), rotated(x, far + torch.arange(5), 100.0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [70_000, 70_001, 70_002, 70_003, 70_004]])
    assert_same(module(x, positions=positions, limit=70_005), rotated(x, positions, 100.0))
    packed = x.view(1, 10, 3, 8)
    packing = Packing.from_lengths([4, 0, 6])
    assert_same(module(packed, cu_seqlens=packing), rotated(packed, packing.positions, 100.0))
    assert not module.state_dict() and not list(module.buffers())


def test_rotary_embedding_turns_a_part_and_keeps_its_precision() -> None:
    x = numbers(1, 5, 2, 8)
    module = RotaryEmbedding(8, rotated=4)
    expected = torch.cat([rotated(x[..., :4], torch.arange(5), 10000.0), x[..., 4:]], -1)
    assert_same(module(x), expected)
    assert_same(module.to(torch.bfloat16)(x), expected)
    assert_same(copy.deepcopy(module)(x), expected)
    for channels, text in ((5, "multiple of the size of a pair = 2, got 5"), (10, "between 2 and 8, got 10")):
        with pytest.raises(ValueError, match=f"rotated must be .*{text}"):
            RotaryEmbedding(8, rotated=channels)
    with pytest.raises(ValueError, match="limit must be given with a tensor of positions"):
        module(x, positions=torch.zeros(1, 5, dtype=torch.int64))


def test_rotary_embedding_scales_and_takes_several_axes() -> None:
    x = numbers(1, 5, 2, 8)
    stretched = RotaryEmbedding(8, scaling=LinearScaling(4.0))
    assert_same(stretched(x, positions=8)[:, :1], RotaryEmbedding(8)(x, positions=2)[:, :1])
    assert "LinearScaling" in repr(stretched)
    module = RotaryEmbedding(8, axes=[0, 0, 1, 1])
    row, column = torch.tensor([[0, 1, 2, 300, 4]]), torch.tensor([[5, 0, 9, 1, 2]])
    got = module(x, positions=torch.stack([row, column], -1), limit=301)
    by_row, by_column = (RotaryEmbedding(8)(x, positions=p, limit=301) for p in (row, column))
    assert_same(got[..., [0, 1, 4, 5]], by_row[..., [0, 1, 4, 5]])
    assert_same(got[..., [2, 3, 6, 7]], by_column[..., [2, 3, 6, 7]])


def test_a_rotary_table_made_in_inference_mode_serves_training() -> None:
    module, x = RotaryEmbedding(8), numbers(1, 5, 2, 8).requires_grad_()
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()
    assert x.grad is not None


def test_short_convolution() -> None:
    module, x = ShortConvolution(6, 3, bias=True).double(), numbers(2, 7, 6)
    torch.nn.init.normal_(module.bias)
    whole, state = module(x, return_state=True)
    padded = torch.cat([x.new_zeros(2, 2, 6), x], dim=1)
    assert_same(whole, silu(sum(module.weight[:, i] * padded[:, i : i + 7] for i in range(3)) + module.bias))
    assert torch.equal(state, x[:, -2:])
    first, state = module(x[:, :4], return_state=True)
    second, _ = module(x[:, 4:], initial_state=state)
    assert_same(torch.cat([first, second], 1), whole)
    assert ShortConvolution(6, 3, activation=None)(x.float())[1] is None
    assert module.weight.abs().max() <= 3**-0.5
    with pytest.raises(ValueError, match="width must be between 2 and 64, got 1"):
        ShortConvolution(6, 1)


def test_mlp_and_low_rank() -> None:
    x = numbers(2, 5, 16)
    mlp = SwiGLU(16, 24).double()
    gate, up = (x @ mlp.gate_up.weight.T).chunk(2, -1)
    assert_same(mlp(x), (silu(gate) * up) @ mlp.down.weight.T)
    assert SwiGLU(100).down.in_features == 288  # 8/3 of 100 is 266.7
    assert SwiGLU(96).down.in_features == 256
    for activation, function in (("tanh", torch.tanh), ("sigmoid", torch.sigmoid), (None, lambda x: x)):
        low = LowRank(16, 3, 8, activation=activation, bias=True).double()
        assert not low.up.bias.any()
        torch.nn.init.normal_(low.up.bias)
        assert_same(low(x), function(x @ low.down.weight.T) @ low.up.weight.T + low.up.bias)


def test_decays_are_their_formulas() -> None:
    x = 3 * numbers(2, 5, 4, 8)
    head, channel, bounded = MambaDecay(4).double(), MambaDecay(4, 8).double(), BoundedDecay(4, 8, lower=-3.0).double()
    assert_same(head(x[..., 0]), -head.A_log.exp() * softplus(x[..., 0] + head.dt_bias))
    assert_same(channel(x), -channel.A_log.exp()[:, None] * softplus(x + channel.dt_bias))
    torch.nn.init.normal_(bounded.A_log)
    assert_same(bounded(x), -3.0 * torch.sigmoid(bounded.A_log.exp()[:, None] * (x + bounded.dt_bias)))
    assert_same(LogSigmoidDecay()(x), logsigmoid(x) / 16)
    assert_same(RWKV7Decay()(x), -0.6065306597126334 * torch.sigmoid(x))
    assert_same(RWKV6Decay()(x.clamp(max=7)), -x.clamp(max=7).exp())
    assert_same(ForgetGate()(x), torch.sigmoid(x).log())
    assert_same(ForgetGate(0.4)(x), (0.4 + 0.6 * torch.sigmoid(x)).log())
    with pytest.raises(ValueError, match=r"lower must be between 0\.0 and 0\.999999, got 1\.0"):
        ForgetGate(1.0)
    assert_same(WriteStrength()(x), torch.sigmoid(x))
    assert_same(WriteStrength(negative_eigenvalues=True)(x), 2 * torch.sigmoid(x))


def test_decays_are_float32_negative_and_finite_for_any_input() -> None:
    x = torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4], dtype=torch.bfloat16)[:, None].expand(5, 4)
    others = LogSigmoidDecay(), RWKV6Decay(), RWKV7Decay(), ForgetGate(), ForgetGate(0.5)
    for module in (MambaDecay(4), BoundedDecay(4), *others):
        leaf = x.clone().requires_grad_()
        g = module.to(torch.bfloat16)(leaf)
        assert g.dtype == torch.float32 and torch.isfinite(g).all() and (g <= 0).all()
        assert torch.isfinite(torch.autograd.grad(g.sum(), leaf)[0]).all()
    assert BoundedDecay(4)(x).min() >= -5


def test_mamba_decay_starts_in_its_ranges() -> None:
    torch.manual_seed(0)
    decay = MambaDecay(1000, step_range=(0.01, 0.5), rate_range=(2.0, 4.0))
    rate, step = -decay.rate(), decay.step_size(torch.zeros(1000))
    assert 2 <= rate.min() < 2.1 and 3.9 < rate.max() <= 4
    assert 0.0099 <= step.min() < 0.011 and 0.45 < step.max() <= 0.501
    below = (step < (0.01 * 0.5) ** 0.5).double().mean().item()
    assert abs(below - 0.5) <= 4 * 0.5 / 1000**0.5, "log-uniform: half of them lie below the geometric mean"


def test_linear_cross_entropy() -> None:
    hidden, weight = numbers(2, 5, 8), numbers(11, 8, seed=2)
    target = torch.tensor([[0, 3, -100, 10, 2], [1, 1, 4, -100, 9]])
    logits = hidden @ weight.T
    for reduction in ("mean", "sum"):
        expected = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
        assert_same(LinearCrossEntropy(reduction=reduction)(hidden, weight, target), expected)
        assert_same(LinearCrossEntropy()(hidden, weight, target, reduction), expected)
    smooth = cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    assert_same(LinearCrossEntropy(label_smoothing=0.1)(hidden, weight, target), smooth)
    counted = target.flatten() != -100
    z = logits.flatten(0, 1)[counted].logsumexp(-1).square().mean()
    plain = LinearCrossEntropy()(hidden, weight, target)
    assert_same(LinearCrossEntropy(z_loss=0.5)(hidden, weight, target), plain + 0.5 * z)
    capped = cross_entropy(2 * torch.tanh(logits / 2).flatten(0, 1), target.flatten())
    assert_same(LinearCrossEntropy(softcap=2.0)(hidden, weight, target), capped)


def test_next_token_targets() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert next_token_targets(tokens).tolist() == [[2, 3, -100], [5, 6, -100]]
    packed = torch.tensor([[1, 2, 3, 4, 5]])
    for lengths, expected in (
        ([2, 3], [2, -100, 4, 5, -100]),
        ([0, 1, 0, 4, 0], [-100, 3, 4, 5, -100]),
        ([5], [2, 3, 4, 5, -100]),
    ):
        assert next_token_targets(packed, Packing.from_lengths(lengths).cu_seqlens).tolist() == [expected]
    assert tokens.tolist() == [[1, 2, 3], [4, 5, 6]] and next_token_targets(tokens[:, :0]).shape == (2, 0)


def test_modules_take_device_and_dtype() -> None:
    makers = (
        lambda **where: RMSNorm(8, **where),
        lambda **where: GatedRMSNorm(8, **where),
        lambda **where: ShortConvolution(8, bias=True, **where),
        lambda **where: SwiGLU(8, **where),
        lambda **where: LowRank(8, 2, 8, bias=True, **where),
        lambda **where: MambaDecay(4, 8, **where),
        lambda **where: BoundedDecay(4, 8, **where),
    )
    for make in makers:
        module = make(device="meta", dtype=torch.bfloat16)
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
        assert repr(module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scores": "sigmoid", "balance": True, "groups": 2, "scale": 2.5},
        {"normalise": False, "shared": 6, "shared_gate": True, "active": 1},
    ],
    ids=["softmax", "sigmoid", "shared"],
)
def test_a_mixture_of_experts_is_its_formula(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 5, **{"experts": 6, "active": 3} | options).double()
    if layer.balance is not None:
        layer.balance.uniform_(-1, 1)
    x, expected = torch.randn(2, 7, 8).double(), []
    for row in x.flatten(0, 1):
        logits = layer.router(row)
        scores = logits.softmax(-1) if layer.scores == "softmax" else logits.sigmoid()
        order = scores if layer.balance is None else scores + layer.balance
        if layer.groups > 1:  # one of the two groups of three
            halves = order.view(2, 3)
            order = order.clone()
            order.view(2, 3)[1 - halves.topk(2).values.sum(-1).argmax()] = -torch.inf
        chosen = order.argsort(descending=True)[: layer.active]
        total = scores[chosen].sum() if layer.normalise else 1.0
        y = torch.zeros(8).double()
        for expert in chosen:
            gate, up = (layer.gate_up[expert] @ row).chunk(2)
            y = y + layer.scale * scores[expert] / total * (layer.down[expert] @ (silu(gate) * up))
        if layer.shared is not None and layer.shared_gate is not None:
            y = y + torch.sigmoid(layer.shared_gate(row)) * layer.shared(row)
        expected.append(y)
    assert_same(layer(x), torch.stack(expected).view_as(x))
    assert layer(x[:, :0]).shape == (2, 0, 8)


def test_norms_by_groups_and_with_a_unit_offset() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()
    norm = RMSNorm(8, 1e-3, groups=2, unit_offset=True).double()
    assert not norm.weight.any()
    torch.nn.init.normal_(norm.weight)
    rows = (x + residual).unflatten(-1, (2, 4))
    expected = (rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * (1 + norm.weight)
    assert_same(norm(x + residual), expected)
    assert_same(norm.add_and_norm(x, residual)[0], expected)


def test_a_gated_mlp_with_biases() -> None:
    torch.manual_seed(0)
    layer, x = GatedMLP(6, 9, activation="gelu_tanh", bias=True).double(), numbers(2, 4, 6)
    assert not layer.gate_up.bias.any() and not layer.down.bias.any()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    gate, up = (x @ layer.gate_up.weight.T + layer.gate_up.bias).chunk(2, dim=-1)
    product = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_same(layer(x), product @ layer.down.weight.T + layer.down.bias)


@pytest.mark.parametrize(("receptance", "factor_of"), [(False, "previous"), (True, "previous"), (True, "current")])
def test_channel_mixing_is_its_formula(receptance: bool, factor_of: str) -> None:
    torch.manual_seed(0)
    layer = ChannelMixing(6, 9, receptance=receptance, factor_of=factor_of).double()
    x, start = numbers(2, 4, 6), numbers(2, 6, seed=2)
    before = torch.cat([start[:, None], x[:, :-1]], dim=1)
    own = layer.key_mix if factor_of == "current" else 1 - layer.key_mix
    key = own * x + (1 - own) * before
    expected = (key @ layer.key.weight.T).relu() ** 2 @ layer.value.weight.T
    if receptance:
        own = layer.receptance_mix if factor_of == "current" else 1 - layer.receptance_mix
        gate = own * x + (1 - own) * before
        expected = expected * torch.sigmoid(gate @ layer.receptance.weight.T)
    y, state = layer(x, initial_state=start.unsqueeze(1), return_state=True)
    assert_same(y, expected)
    assert torch.equal(state, x[:, -1:])


def test_layer_norm() -> None:
    norm, x, residual = LayerNorm(8, 1e-3).double(), numbers(2, 5, 8), numbers(2, 5, 8, seed=2)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    expected = torch.nn.functional.layer_norm(x + residual, (8,), norm.weight, norm.bias, 1e-3)
    assert_same(norm(x + residual), expected)
    y, total = norm.add_and_norm(x, residual)
    assert_same(y, expected)
    assert torch.equal(total, x + residual)
