"""IPLR, identity plus low rank: the generalised delta rule without decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.deltanet import DeltaNet
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.input_linear import InputLinear
from flashmix.op.public import public
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence import dplr


@public
@engine_options
def iplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """Identity plus low rank: the generalised delta rule without decay, with any `a` and `b`.

        S_t = (I + b_t a_t^T) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Args:
        a: the vector that reads the state, `[B, T, H or HV, K]`.
        b: the key under which the value that `a` read is written back, `[B, T, H or HV, K]`.

    Source: Peng et al. 2025 (arXiv 2503.14456), section 3, the generalised delta rule.

    Example:
        >>> import torch
        >>> q, k, v, a = torch.randn(4, 1, 10, 4, 16) / 4
        >>> iplr(q, k, v, -a, a)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    return dplr(q, k, v, a, b, **options)


class IPLR(DeltaNet):
    """Identity plus low rank: a separate removal key, `S = (I - beta r r^T) S + k v^T` with `r` of length 1.

    Args: those of `DeltaNet`; `negative_eigenvalues` lets `beta` reach 2.

    Source: Peng et al., arXiv:2503.14456, section 3 (the generalised delta rule).

    Example:
        >>> import torch
        >>> IPLR(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    def make_parameters(self, **placement: Any) -> None:
        super().make_parameters(**placement)
        removal = self.value_heads * self.head_dim
        self.removal = InputLinear(self.width, removal, **placement)

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        beta, _ = self.beta_and_decay(x)
        removal = l2_norm(self.removal(x).unflatten(-1, (self.value_heads, self.head_dim))).to(k.dtype)
        back = (beta.unsqueeze(-1) * removal).to(k.dtype)
        return iplr(q, k, v, -removal, back, **options)


register(
    Mechanism(
        title="IPLR",
        paper="2503.14456",
        function=iplr,
        call="q:BTHK k:BTHK v:BTHK a:BTHK b:BTHK",
        layer=IPLR,
        preset=by_heads,
    )
)
