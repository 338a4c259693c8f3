"""Layers with the weights of transformers' classes give their output, in float32 to the budget."""

from __future__ import annotations

from typing import Any

import torch
from budget import assert_within_budget
from hf_cases import transformers
from torch import Tensor, nn

from flashmix.layers import MLSTM, RGLRU, RWKV4, Mamba

WIDTH, TOKENS = 16, 48


def random_weights(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def inputs() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_agrees(layer: nn.Module, theirs: nn.Module, *arguments: Any) -> None:
    """The error of ours against theirs in float64 is within twice that of theirs in float32."""
    x = inputs()
    with torch.no_grad():
        got, plain = layer(x), theirs(x, *arguments)
        exact = theirs.double()(x.double(), *arguments)
    plain, exact = (t[0] if isinstance(t, tuple) else t for t in (plain, exact))
    assert_within_budget(type(layer).__name__, got, exact, plain, steps=4)


def test_rg_lru_is_that_of_recurrent_gemma() -> None:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    config = transformers.RecurrentGemmaConfig(hidden_size=WIDTH, lru_width=24, num_attention_heads=4)
    theirs: Any = random_weights(RecurrentGemmaRecurrentBlock(config, 0))
    layer, unit = RGLRU(WIDTH, 4, inner=24), theirs.rg_lru
    weights = {
        "input.weight": torch.cat([theirs.linear_y.weight, theirs.linear_x.weight]),
        "input.bias": torch.cat([theirs.linear_y.bias, theirs.linear_x.bias]),
        "convolution.weight": theirs.conv_1d.weight.squeeze(1),
        "convolution.bias": theirs.conv_1d.bias,
        "recurrence_weight": unit.recurrent_gate_weight,
        "recurrence_bias": unit.recurrent_gate_bias,
        "input_weight": unit.input_gate_weight,
        "input_bias": unit.input_gate_bias,
        "decay.weight": unit.recurrent_param.view(4, -1),
        "output.weight": theirs.linear_out.weight,
        "output.bias": theirs.linear_out.bias,
    }
    layer.load_state_dict(weights)
    positions = torch.arange(TOKENS).expand(2, -1)
    assert_agrees(layer, theirs, positions, torch.ones(2, TOKENS), False)


def test_mlstm_is_that_of_xlstm() -> None:
    from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

    config = transformers.xLSTMConfig(hidden_size=WIDTH, num_heads=2, qk_dim_factor=0.5, chunk_size=16, mode="train")
    theirs: Any = random_weights(xLSTMLayer(config))
    layer = MLSTM(WIDTH, 2)
    projections = (theirs.q, theirs.k, theirs.v, theirs.ogate_preact)
    weights = {
        "qkvg.weight": torch.cat([part.weight for part in projections]),
        "gates.weight": torch.cat([theirs.igate_preact.weight, theirs.fgate_preact.weight]),
        "gates.bias": torch.cat([theirs.igate_preact.bias, theirs.fgate_preact.bias]),
        "norm_weight": theirs.multihead_norm.weight,
        "output.weight": theirs.out_proj.weight,
    }
    layer.load_state_dict(weights)
    assert_agrees(layer, theirs)


def test_rwkv4_is_that_of_rwkv() -> None:
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    config = transformers.RwkvConfig(hidden_size=WIDTH, attention_hidden_size=24)
    theirs: Any = random_weights(RwkvSelfAttention(config))
    layer, other = RWKV4(WIDTH, inner=24), {"decay.weight": "time_decay", "bonus": "time_first"}
    other |= {f"{name}_mix": f"time_mix_{name}" for name in ("key", "value", "receptance")}
    given = theirs.state_dict()
    layer.load_state_dict({name: given[other.get(name, name)].squeeze() for name in layer.state_dict()})
    assert_agrees(layer, theirs)


def test_mamba_with_heads_is_that_of_zamba() -> None:
    from transformers.models.zamba.modeling_zamba import ZambaMambaMixer

    config = transformers.ZambaConfig(
        hidden_size=WIDTH, n_mamba_heads=4, mamba_d_state=8, mamba_dt_rank=3, use_mamba_kernels=False
    )
    theirs: Any = random_weights(ZambaMambaMixer(config, 0))
    layer = Mamba(WIDTH, state_dim=8, rank=3, heads=4)
    projected = theirs.in_proj.weight
    weights = {
        "input.weight": torch.cat([projected[0::2], projected[1::2]]),  # theirs lie side by side, input and gate
        "convolution.weight": theirs.conv1d.weight.squeeze(1),
        "convolution.bias": theirs.conv1d.bias,
        "selection.weight": theirs.x_proj_weight,
        "step.weight": theirs.dt_proj_weight,
        "decay.A_log": theirs.A_log.flatten(0, 1),
        "decay.dt_bias": theirs.dt_proj_bias.flatten(),
        "skip": theirs.D.flatten(),
        "output.weight": theirs.out_proj.weight,
    }
    layer.load_state_dict(weights)
    assert_agrees(layer, theirs)
    with torch.no_grad():  # token after token, with a cache
        x, cache = inputs(), layer.new_cache()
        parts = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x[:, :5]))
