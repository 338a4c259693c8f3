"""Comba: a delta rule whose correction has its own key and reads the state before its decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, engine_options, unrounded
from flashmix.mechanisms.deltanet import DeltaNet, DeltaNetOptions
from flashmix.mechanisms.gated_deltanet import GatedDeltaNet
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.op.checks import dims
from flashmix.op.options import hands_on
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
@unrounded("q", "k", "p", "v")
def comba(
    q: Tensor, k: Tensor, p: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Unpack[EngineOptions]
) -> Result:
    """Comba: the correction has its own key and reads the state before its decay.

        u_t = beta_t (v_t - S_{t-1}^T p_t);  S_t = e^{g_t} S_{t-1} + k_t u_t^T;  o_t = scale S_t^T q_t

    The paper's `p` is `k` times a number per head, and its query is corrected before the call: `q - d p`.

    Args:
        p: the keys under which the correction reads the state, `[B, T, H, K]`.
        log_decay: `[B, T, HV]`.

    Source: Hu et al. 2025 (arXiv 2506.02475), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> comba(q, k / 4, k / 8, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    check_operands(q, v, {"k": k, "p": p}, beta, log_decay, options.get("initial_state"), options.get("cu_seqlens"))
    erase = beta.unsqueeze(-1) * p.repeat_interleave(v.shape[2] // p.shape[2], 2)
    return delta_rule(q, k, v, beta, log_decay, erase=erase.to(k.dtype), write=k, **options)


class Comba(GatedDeltaNet):
    """Gated DeltaNet whose correction reads with a weaker key, `p = sigmoid(c) k`, and whose query is corrected, `q - d p`.

    Args: those of `DeltaNet`, and
        normalise_last: whether queries and keys are normalised only after `p` and `q - d p` are made of them, and `p` too, as in
            flash-linear-attention, where the length of `p` then no longer depends on `c`.

    `c` and `d` are learned, one per head of keys.

    Source: Hu et al., arXiv:2506.02475, section 3.

    Example:
        >>> import torch
        >>> Comba(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    @hands_on(DeltaNet.__init__, first=True)
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        normalise_last: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[DeltaNetOptions],
    ) -> None:
        self.normalise_last = normalise_last
        super().__init__(width, heads, device=device, dtype=dtype, **options)

    def unit_channels(self) -> int:
        return 0 if self.normalise_last else super().unit_channels()

    def unit(self, x: Tensor) -> Tensor:
        return x if self.normalise_last else super().unit(x)

    def make_parameters(self, **placement: Any) -> None:
        super().make_parameters(**placement)
        self.closeness = nn.Parameter(torch.ones(self.heads, **placement))
        self.correction = nn.Parameter(torch.ones(self.heads, **placement))

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        p = k * torch.sigmoid(self.closeness).to(k.dtype)[:, None]
        q = q - self.correction.to(q.dtype)[:, None] * p
        if self.normalise_last:
            q, k, p = (DeltaNet.unit(self, part) for part in (q, k, p))
        return comba(q, k, p, v, *self.beta_and_decay(x), **options)


register(
    Mechanism(
        title="Comba",
        paper="2506.02475",
        function=comba,
        call="q:BTHK k:BTHK p:BTHK v:BTHK beta:BTH log_decay:BTH",
        layer=Comba,
        preset=by_heads,
    )
)
