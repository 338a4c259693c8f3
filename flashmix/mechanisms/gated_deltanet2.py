"""Gated DeltaNet-2: separate per-channel gates for erasing and writing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, check_per_head, engine_options, unrounded
from flashmix.mechanisms.kda import KDA
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.input_linear import InputLinear
from flashmix.op.checks import dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
@unrounded("q", "k", "v")
def gated_deltanet2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase_gate: Tensor,
    write_gate: Tensor,
    log_decay: Tensor,
    **options: Unpack[EngineOptions],
) -> Result:
    """Gated DeltaNet-2: erasing and writing have separate per-channel gates.

        S = diag(e^{g_t}) S_{t-1};  S_t = S + k_t (w_t * v_t - S^T (b_t * k_t))^T;  o_t = scale S_t^T q_t

    With `b = w = beta` it is `kda`.

    Args:
        erase_gate: `b`, in [0, 1] (or 2), `[B, T, HV, K]`.
        write_gate: `w`, in [0, 1], `[B, T, HV, V]`.
        log_decay: `[B, T, HV, K]`.

    Source: Gated DeltaNet-2, 2026 (arXiv 2605.22791).

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 10, 4, 16)
        >>> gated_deltanet2(q, k / 4, v, torch.sigmoid(g), torch.sigmoid(v), -g.square())[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    check_operands(q, v, {"k": k}, None, log_decay, options.get("initial_state"), options.get("cu_seqlens"))
    check_per_head("erase_gate", erase_gate, "q", q, *log_decay.shape)
    check_per_head("write_gate", write_gate, "q", q, *v.shape)
    wide = state_dtype(k.dtype)
    erase = (log_decay.to(wide).exp() * erase_gate) * k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    one = torch.ones(v.shape[:3], dtype=wide, device=v.device)
    return delta_rule(q, k, (v * write_gate).to(v.dtype), one, log_decay, erase=erase.to(k.dtype), write=k, **options)


class GatedDeltaNet2(KDA):
    """KDA with separate gates for erasing (per key channel) and writing (per value channel).

    Args: those of `KDA`; `negative_eigenvalues` lets the erasing gate reach 2.

    Source: Gated DeltaNet-2, arXiv:2605.22791.

    Example:
        >>> import torch
        >>> GatedDeltaNet2(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    def make_parameters(self, **placement: Any) -> None:
        super().make_parameters(**placement)
        del self.strength
        self.erase = InputLinear(self.width, self.value_heads * self.head_dim, **placement)
        self.write = InputLinear(self.width, self.values, **placement)

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        erase = self.write_strength(self.erase(x)).unflatten(-1, (self.value_heads, self.head_dim))
        write = torch.sigmoid(self.write(x)).view_as(v)
        decay = self.channel_decay(x)
        return gated_deltanet2(q, k, v, erase, write, decay, **options)


register(
    Mechanism(
        title="Gated DeltaNet-2",
        paper="2605.22791",
        function=gated_deltanet2,
        call="q:BTHK k:BTHK v:BTHK erase_gate:BTHK write_gate:BTHK log_decay:BTHK",
        wide=("erase_gate", "write_gate"),
        layer=GatedDeltaNet2,
        preset=by_heads,
    )
)
