"""The families of models whose weights are converted, by their `model_type`."""

from flashmix.checkpoints.families.attention import LLAMA, QWEN3
from flashmix.checkpoints.families.fla import FLA
from flashmix.checkpoints.families.gated_delta import OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from flashmix.checkpoints.families.jamba import JAMBA
from flashmix.checkpoints.families.kimi import KIMI_LINEAR
from flashmix.checkpoints.families.mamba import FALCON_MAMBA, MAMBA
from flashmix.checkpoints.families.recurrent_gemma import RECURRENT_GEMMA
from flashmix.checkpoints.families.rwkv import RWKV4, RWKV6, RWKV7
from flashmix.checkpoints.families.scan import BAMBA, MAMBA2
from flashmix.checkpoints.families.xlstm import XLSTM
from flashmix.checkpoints.family import ModelFamily

FAMILIES: dict[str, ModelFamily] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN3,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        OLMO_HYBRID,
        KIMI_LINEAR,
        MAMBA,
        FALCON_MAMBA,
        MAMBA2,
        BAMBA,
        JAMBA,
        RECURRENT_GEMMA,
        RWKV4,
        XLSTM,
        *FLA,
        RWKV6,
        RWKV7,
    )
}

__all__ = ["FAMILIES"]
