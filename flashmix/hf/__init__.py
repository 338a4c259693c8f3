"""Adapters to Hugging Face transformers; nothing here imports it before it is needed.

`flashmix.hf.FlashmixForCausalLM` and `FlashmixConfig` do: asking for one of them also registers both with `AutoConfig` and
`AutoModelForCausalLM`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashmix.hf.accelerate import Accelerated, accelerate
from flashmix.hf.attention import register_attention

if TYPE_CHECKING:
    from flashmix.hf.decoder import FlashmixCache, FlashmixConfig, FlashmixForCausalLM
    from flashmix.hf.kernels import kernel_mapping

_LATER = dict.fromkeys(("FlashmixCache", "FlashmixConfig", "FlashmixForCausalLM"), "decoder") | {
    "kernel_mapping": "kernels"
}
__all__ = ["Accelerated", "FlashmixCache", "FlashmixConfig", "FlashmixForCausalLM", "accelerate", "kernel_mapping"]
__all__ += ["register_attention"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"flashmix.hf.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
