"""The layers and models that the tests run through, and how two ways of computing the same thing are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from paper_loops import MECHANISMS
from samples import every
from torch import Tensor

from flashmix.layers import Mixer
from flashmix.mechanisms.registry import MECHANISMS as REGISTERED
from flashmix.models import Decoder, preset

WIDTH = 16

# Softmax attention; the layers of the mechanisms are in `tests/papers/`.
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {"heads": 4},
    "attention_window": {"heads": 4, "kv_heads": 2, "window": 3},
    "attention_window_1": {"heads": 4, "window": 1},
    "attention_gated": {"heads": 4, "kv_heads": 1, "head_dim": 6, "rotary": 2, "qk_norm": True, "gated": True},
    "attention_no_positions": {"heads": 2, "rotary": 0},
    "attention_joint_norm": {
        "heads": 4,
        "kv_heads": 2,
        "qk_norm": True,
        "joint_qk_norm": True,
        "unit_offset": True,
        "eps": 1e-3,
        "scaling": {"kind": "llama3", "factor": 4.0, "trained": 8},
    },
}
# Options of the layers beyond those that the papers' loops run.
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "gla": {"gla_shared": {"heads": 4, "kv_heads": 2, "rank": 3, "eps": 1e-3, "conv_width": 3, "output_gate": "none"}},
    "retnet": {"retnet_shared": {"heads": 4, "kv_heads": 2, "eps": 1e-3, "conv_width": 2, "output_gate": "sigmoid"}},
    "gsa": {"gsa_shared": {"heads": 4, "kv_heads": 2, "slots": 3, "eps": 1e-3, "conv_width": 4, "conv_bias": True}},
    "hgrn2": {"hgrn2_convolution": {"heads": 2, "conv_width": 3}},
    "abc": {"abc_rotary": {"heads": 4, "kv_heads": 2, "slots": 3, "rotary": True, "bound": 8.0, "eps": 1e-3}},
    "lightning": {"lightning_eps": {"heads": 2, "eps": 1e-3}},
    "rwkv6": {
        "rwkv6_narrow": {"heads": 2, "head_dim": 4, "value_dim": 8, "shift_rank": 3, "decay_rank": 4, "eps": 1e-5}
    },
    "comba": {"comba_normalised_last": {"heads": 2, "normalise_last": True, "output_gate": "sigmoid"}},
    "deltaproduct": {"deltaproduct_without_decay": {"heads": 2, "steps": 2, "forget": False}},
}
LATENT: dict[str, dict[str, Any]] = {
    "latent_attention": {"heads": 2, "rank": 6, "shared_dim": 4},
    "latent_attention_query_rank": {"heads": 2, "rank": 6, "query_rank": 10, "shared_dim": 2, "value_dim": 4},
}


def _layers() -> dict[str, Callable[[], Mixer[Any]]]:
    """The layers that the tests run, by name: every one of the registry, some in several ways."""
    options = {"attention": ATTENTION, "latent_attention": LATENT} | {
        name: case.layers for name, case in MECHANISMS.items()
    }
    return {
        layer: partial(entry.layer, WIDTH, **given)
        for name, entry in REGISTERED.items()
        if entry.layer is not None
        for layer, given in (options[name] | MORE.get(name, {})).items()
    }


LAYERS = _layers()

# A layer is tested in all its ways on its own. These presets are tested as whole models too; the others differ from one of them in
# their layer only, and are in one test each.
MODELS = (
    *("retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "rwkv7", "abc"),
    *("transformer", "hybrid", "qwen3_next_like", "kimi_linear_like"),
)


def some_models(first: int) -> pytest.MarkDecorator:
    """For a test of every model: by default one in three of them, another third in the next test."""
    return pytest.mark.parametrize("name", every(3, MODELS, first))


def make_layer(name: str, dtype: torch.dtype = torch.float64) -> Mixer[Any]:
    torch.manual_seed(0)
    return LAYERS[name]().to(dtype)


def make_model(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(preset(f"{name}_nano", vocab_size=64), **options).to(dtype)


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def some_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(got: Tensor, expected: Tensor) -> None:
    """The same numbers computed in another order: float64 leaves some thousand roundings, a mistake is far larger."""
    assert got.dtype == expected.dtype == torch.float64
    limit = 2**14 * torch.finfo(torch.float64).eps  # 4e-12 of the largest value
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0.0, atol=limit * largest)


def left_padded(rows: list[Tensor], fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows of unequal length `[1, T, ...]` as one batch with the padding in front, and its mask."""
    longest = max(row.shape[1] for row in rows)
    batch = torch.full((len(rows), longest, *rows[0].shape[2:]), fill).to(rows[0].dtype)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        batch[index, longest - row.shape[1] :] = row[0]
        mask[index, longest - row.shape[1] :] = True
    return batch, mask
