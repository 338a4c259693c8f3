"""The layers and models that the tests run through, and how two ways of computing the same thing are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmix.layers import (
    ABC,
    GLA,
    GSA,
    HGRN2,
    IPLR,
    KDA,
    RWKV6,
    RWKV7,
    Comba,
    DeltaNet,
    DeltaProduct,
    GatedDeltaNet,
    GatedDeltaNet2,
    Lightning,
    LinearAttention,
    Mamba2,
    Mixer,
    Oja,
    PreconditionedGatedDeltaNet,
    PreconditionedKDA,
    RetNet,
    SoftmaxAttention,
)
from flashmix.models import PRESETS, Decoder, preset

WIDTH = 16

LAYERS: dict[str, Callable[[], Mixer[Any]]] = {
    "retnet": lambda: RetNet(WIDTH, 2),
    "gla": lambda: GLA(WIDTH, 2, rank=4),
    "mamba2": lambda: Mamba2(WIDTH, 4, state_dim=8),
    "mamba2_groups": lambda: Mamba2(WIDTH, 4, state_dim=8, groups=2, conv_width=2),
    "deltanet": lambda: DeltaNet(WIDTH, 2, negative_eigenvalues=True),
    "gated_deltanet": lambda: GatedDeltaNet(WIDTH, 2, value_heads=4, value_dim=6),
    "kda": lambda: KDA(WIDTH, 2),
    "kda_bounded": lambda: KDA(WIDTH, 2, lower=-5.0, rank=3),
    "rwkv7": lambda: RWKV7(WIDTH, 2),
    "linear_attention": lambda: LinearAttention(WIDTH, 2),
    "lightning": lambda: Lightning(WIDTH, 2, layer=1, layers=3),
    "hgrn2": lambda: HGRN2(WIDTH, 2, lower=0.25),
    "rwkv6": lambda: RWKV6(WIDTH, 2, shift_rank=3, decay_rank=4),
    "gsa": lambda: GSA(WIDTH, 2, slots=5),
    "abc": lambda: ABC(WIDTH, 2, slots=5, head_dim=4),
    "deltaproduct": lambda: DeltaProduct(WIDTH, 2, value_heads=4, steps=3),
    "comba": lambda: Comba(WIDTH, 2, value_heads=4),
    "gated_deltanet2": lambda: GatedDeltaNet2(WIDTH, 2, value_heads=4, rank=3),
    "preconditioned_gated_deltanet": lambda: PreconditionedGatedDeltaNet(WIDTH, 2, value_heads=4),
    "preconditioned_kda": lambda: PreconditionedKDA(WIDTH, 2, rank=3),
    "oja": lambda: Oja(WIDTH, 2, value_heads=4, value_dim=6, rank=3),
    "iplr": lambda: IPLR(WIDTH, 2, value_heads=4),
    "attention": lambda: SoftmaxAttention(WIDTH, 4),
    "attention_window": lambda: SoftmaxAttention(WIDTH, 4, kv_heads=2, window=3),
    "attention_window_1": lambda: SoftmaxAttention(WIDTH, 4, window=1),
    "attention_gated": lambda: SoftmaxAttention(WIDTH, 4, kv_heads=1, head_dim=6, rotary=2, qk_norm=True, gated=True),
    "attention_no_positions": lambda: SoftmaxAttention(WIDTH, 2, rotary=0),
}

# A layer is tested in all its ways on its own; of these presets the whole model is too, the others in one test each: they
# differ from one of these in their layer only.
ONLY_LAYERS_DIFFER = (
    "linear_attention", "lightning", "hgrn2", "rwkv6", "gsa", "deltaproduct", "comba", "gated_deltanet2",
    "preconditioned_gated_deltanet", "preconditioned_kda", "oja", "iplr",
)  # fmt: skip
MODELS = tuple(name for name in PRESETS if name not in ONLY_LAYERS_DIFFER)


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
