"""The models of `model.py`: flashmix's, and those of flash-linear-attention and transformers with the same sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes that all models of a run share; `depth` is a multiple of 4."""

    width: int = 2048
    depth: int = 24
    heads: int = 16
    mlp_width: int = 5632
    vocabulary: int = 32000

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass
class Contender:
    """A model, its loss of tokens and targets `[B, T]`, and its ways to continue prompts greedily by some tokens."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    generators: dict[str, Callable[[Tensor, int], Any]]
    notes: tuple[str, ...] = ()


ROWS = {
    "gated_deltanet": ("gated_deltanet",),
    "kda_hybrid": ("kda", "kda", "kda", "attention"),
    "transformer": ("attention",),
}
"""The mixers of each row, repeated up to the depth."""


def mixers(row: str, sizes: Sizes) -> list[str]:
    return [ROWS[row][index % len(ROWS[row])] for index in range(sizes.depth)]


def ours(row: str, sizes: Sizes, **placement: Any) -> Contender:
    from flashmix.models import Decoder, DecoderConfig, LayerConfig, generate

    layers = [LayerConfig(mixer, {"heads": sizes.heads}) for mixer in mixers(row, sizes)]
    config = DecoderConfig(sizes.vocabulary, sizes.width, layers, mlp_width=sizes.mlp_width)
    model = Decoder(config, **placement)
    ways: dict[str, Callable[[Tensor, int], Any]] = {"no graph": partial(generate, model, cuda_graph=False)}
    if next(model.parameters()).is_cuda:
        ways["graph"] = partial(generate, model, cuda_graph=True)
    return Contender(model, lambda tokens, targets: model(tokens, targets=targets), ways)


def with_lm_head(model: nn.Module, notes: tuple[str, ...] = (), **options: Any) -> Contender:
    """A model of transformers' kind: it shifts the labels itself, so it is given the tokens as labels."""
    call: Any = model

    def generate(prompts: Tensor, count: int) -> Any:
        return call.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    return Contender(
        model, lambda tokens, _: call(input_ids=tokens, labels=tokens, **options).loss, {"": generate}, notes
    )


def transformers_llama(row: str, sizes: Sizes, device: Any = None, dtype: Any = None) -> Contender:
    if row != "transformer":
        raise NotImplementedError(f"transformers has no model of the row {row} with these sizes")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        max_position_embeddings=65536,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    return with_lm_head(model, use_cache=False)


def fla(row: str, sizes: Sizes, device: Any = None, dtype: Any = None) -> Contender:
    """flash-linear-attention's model with its fused norm, SwiGLU and linear cross-entropy."""
    shared: dict[str, Any] = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.depth,
        "num_heads": sizes.heads,
        "intermediate_size": sizes.mlp_width,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 65536,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": True,
    }
    notes = []
    if "attention" in ROWS[row]:
        notes += flash_attention_from_torch()
    if row == "gated_deltanet":
        from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

        notes += lifted()
        config = GatedDeltaNetConfig(**shared, head_dim=sizes.head_dim, expand_v=1.0)
        build: Any = GatedDeltaNetForCausalLM
    elif row == "kda_hybrid":
        from fla.models import KDAConfig, KDAForCausalLM

        layers = [index for index, mixer in enumerate(mixers(row, sizes)) if mixer == "attention"]
        config = KDAConfig(**shared, head_dim=sizes.head_dim, attn={"layers": layers, "num_heads": sizes.heads})
        build = KDAForCausalLM
    else:
        from fla.models import TransformerConfig, TransformerForCausalLM

        config = TransformerConfig(**shared)
        build = TransformerForCausalLM
    with torch.device(device):
        model = build(config).to(dtype)
    return with_lm_head(model, tuple(notes), use_cache=False)


def lifted() -> list[str]:
    """Lets flash-linear-attention's backward run with a Triton with which it refuses to, for wrong results: only its time counts."""
    module = importlib.import_module("fla.ops.common.chunk_o")
    if module.TRITON_ABOVE_3_7_1:
        return []
    mock.patch.object(module, "TRITON_ABOVE_3_7_1", True).start()
    return ["its refusal of this Triton for wrong gradients on Hopper is lifted: the time counts, the gradients do not"]


def flash_attention_from_torch() -> list[str]:
    """Gives flash-linear-attention torch's attention where the package flash-attn is missing."""
    module = importlib.import_module("fla.layers.attn")
    if module.flash_attn_func is not None:
        return []

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lone = q.shape[2] == 1  # one token, which sees all before it
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal and not lone)
        return o.transpose(1, 2)

    mock.patch.object(module, "flash_attn_func", attention).start()
    return ["attention of torch (scaled_dot_product_attention) in the place of flash-attn, which is not installed"]


CONTENDERS: dict[str, Callable[..., Contender]] = {"flashmix": ours, "fla": fla, "transformers": transformers_llama}
