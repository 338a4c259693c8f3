"""Each published mechanism under its paper's name: a call of an engine, nothing more.

Shapes are `[B, T, H, D]`; `scale`, `initial_state`, `return_state`, `cu_seqlens` and `impl` are those of the engine's op
(`linear_attention`, `delta_rule`, `dplr`), and so are the returned pair and the errors. Where a paper scales nothing, `scale` is 1.
A mechanism with several states takes and returns them as a tuple.
"""

from flashmix.ops.named.delta import comba, deltanet, deltaproduct, gated_deltanet, gated_deltanet2, kda
from flashmix.ops.named.low_rank import iplr, rwkv7
from flashmix.ops.named.oja import oja
from flashmix.ops.named.preconditioned import preconditioned_gated_deltanet, preconditioned_kda
from flashmix.ops.named.raw import (
    gla,
    hgrn2,
    lightning,
    mamba2,
    normalised_linear_attention,
    retnet,
    rwkv6,
    simple_gla,
)
from flashmix.ops.named.slots import abc, gsa

__all__ = [
    "abc",
    "comba",
    "deltanet",
    "deltaproduct",
    "gated_deltanet",
    "gated_deltanet2",
    "gla",
    "gsa",
    "hgrn2",
    "iplr",
    "kda",
    "lightning",
    "mamba2",
    "normalised_linear_attention",
    "oja",
    "preconditioned_gated_deltanet",
    "preconditioned_kda",
    "retnet",
    "rwkv6",
    "rwkv7",
    "simple_gla",
]
