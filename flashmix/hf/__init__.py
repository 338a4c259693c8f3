"""Adapters to Hugging Face transformers; nothing here imports it before it is needed."""

from flashmix.hf.accelerate import Accelerated, accelerate
from flashmix.hf.attention import register_attention

__all__ = ["Accelerated", "accelerate", "register_attention"]
