"""Tiny random models of transformers, one a family, for the tests of the adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashmix.selftest.budget import relative_errors

transformers = pytest.importorskip("transformers", reason="needs the extra `hf`: transformers is not installed")

VOCABULARY = 97
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TYPES = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SCAN = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}

# family: class of the configuration, class of the model, options, mixers
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        ATTENTION | TYPES | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
        2,
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", ATTENTION | TYPES | DELTA, 2),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        ATTENTION | TYPES | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
        2,
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", ATTENTION | TYPES | DELTA, 2),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        TYPES
        | MLA
        | EXPERTS
        | {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_experts_per_token": 2,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        2,
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16, "num_hidden_layers": 2},
        2,
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 2}, 2),
    "falcon_mamba": (
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 2, "expand": 2},
        2,
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        ATTENTION
        | {
            "num_hidden_layers": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "use_mamba_kernels": False,
        },
        2,
    ),
    "zamba": (
        "ZambaConfig",
        "ZambaForCausalLM",
        {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        4,
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        ATTENTION | SCAN | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
        2,
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        ATTENTION | SCAN | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
        2,
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        ATTENTION | SCAN | TYPES | {"num_local_experts": 4, "shared_intermediate_size": 16},
        2,
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        ATTENTION
        | {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
        },
        2,
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "mamba_headdim": 8,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
        3,
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        2,
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        EXPERTS
        | {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        2,
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        ATTENTION | TYPES | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
        2,
    ),
    "inkling": (
        "InklingTextConfig",
        "InklingForCausalLM",
        ATTENTION
        | {
            "num_hidden_layers": 2,
            "local_layer_ids": [0],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 20,
            "d_rel": 4,
            "rel_extent": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        8,
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        ATTENTION
        | DELTA
        | EXPERTS
        | {
            "shared_expert_intermediate_size": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 128,
            "indexer_compress_ratio": 4,
        },
        2,
    ),
}


# what newer versions of transformers have
NEWER: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        TYPES
        | MLA
        | EXPERTS
        | {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_local_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
        2,
    ),
    "lfm3": (
        "Lfm3Config",
        "Lfm3ForCausalLM",
        ATTENTION
        | {
            "num_hidden_layers": 4,
            "conv_L_cache": 5,
            "conv_bias": True,
            "sliding_window": 20,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
        2,
    ),
    "inkling2": (
        "Inkling2TextConfig",
        "Inkling2ForCausalLM",
        ATTENTION
        | {
            "num_hidden_layers": 2,
            "layer_types": ["hybrid_sliding", "hybrid_sliding"],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 20,
            "d_rel": 4,
            "rel_extent": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "unpadded_vocab_size": VOCABULARY,
        },
        8,
    ),
}
FAMILIES |= {name: case for name, case in NEWER.items() if hasattr(transformers, case[0])}


def tiny(family: str, seed: int = 0) -> Any:
    """A model of the family in float32 with random weights, in evaluation mode."""
    config_class, model_class, options, _ = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(COMMON | options))
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
            if name.endswith("A_log"):  # a memory of many tokens, whose gradients are not lost in rounding
                parameter.uniform_(-3, 0)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random tokens `[B, T]`, none of them the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    assert torch.isfinite(got).all()
    return relative_errors(got, expected)[1]
