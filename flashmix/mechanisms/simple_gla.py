"""Simple gated linear attention: one decay per token and head."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.checks import dims
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention


@public
@engine_options
def simple_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """Simple gated linear attention: one decay per token and head, `[B, T, HV]`; `mamba2` without its step size.

        S_t = e^{g_t} S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Source: Dao and Gu 2024 (arXiv 2405.21060), equation 1.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> simple_gla(q, k, v, -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    return linear_attention(q, k, v, log_decay, **options)


register(
    Mechanism(title="Simple GLA", paper="2405.21060", function=simple_gla, call="q:BTHK k:BTHK v:BTHK log_decay:BTH")
)
