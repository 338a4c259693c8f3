"""Adapters to Hugging Face transformers; nothing here imports it before it is needed."""

from flashmix.hf.accelerate import Accelerated, accelerate

__all__ = ["Accelerated", "accelerate"]
