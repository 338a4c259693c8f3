"""flashmix mixes tokens fast: one recurrence and one attention, and every published mechanism as a call of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashmix.mechanisms.registry import functions
from flashmix.op.checks import checks
from flashmix.op.choose import Explanation, explain
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength
from flashmix.ops.delta_net_step import delta_net_step
from flashmix.ops.gated_product.op import gated, swiglu
from flashmix.ops.losses.op import cross_entropy, linear_cross_entropy, linear_grpo, linear_kl_divergence
from flashmix.ops.norm.op import group_norm, l2_norm, layer_norm, rms_norm
from flashmix.ops.recurrence import (
    delta_rule,
    delta_rule_step,
    dplr,
    dplr_step,
    linear_attention,
    linear_attention_step,
)
from flashmix.ops.rotary.op import rotary, rotary_qk, rotary_table
from flashmix.ops.scan import scan, scan_max, scan_step
from flashmix.ops.selective_scan import selective_scan
from flashmix.ops.selective_scan.step import selective_scan_step
from flashmix.ops.short_conv.op import short_conv, short_conv_qkv
from flashmix.ops.token_shift.op import token_shift

if TYPE_CHECKING:
    from flashmix import hf as hf
    from flashmix.checkpoints import convert
    from flashmix.hf.accelerate import accelerate
    from flashmix.mechanisms import *  # noqa: F403

__version__ = "0.2.0"

globals().update(functions())  # every mechanism under its paper's name

__all__ = [
    "Explanation",
    "KVCache",
    "Packing",
    "accelerate",
    "attention_with_cache",
    "bounded_decay",
    "checks",
    "convert",
    "cross_entropy",
    "delta_net_step",
    "delta_rule",
    "delta_rule_step",
    "dplr",
    "dplr_step",
    "explain",
    "gated",
    "group_norm",
    "l2_norm",
    "layer_norm",
    "linear_attention",
    "linear_attention_step",
    "linear_cross_entropy",
    "linear_grpo",
    "linear_kl_divergence",
    "rms_norm",
    "rotary",
    "rotary_qk",
    "rotary_table",
    "scan",
    "scan_max",
    "scan_step",
    "selective_scan",
    "selective_scan_step",
    "short_conv",
    "short_conv_qkv",
    "softmax_attention",
    "softplus_decay",
    "swiglu",
    "token_shift",
    "write_strength",
    *functions(),
]


def __getattr__(name: str) -> Any:
    """`accelerate`, `hf` and `convert`, which are imported when they are first asked for."""
    if name == "convert":
        globals()[name] = import_module("flashmix.checkpoints").convert
        return globals()[name]
    if name not in ("accelerate", "hf"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    adapters = import_module("flashmix.hf")
    globals().update(hf=adapters, accelerate=adapters.accelerate)
    return globals()[name]
