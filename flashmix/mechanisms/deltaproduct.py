"""DeltaProduct: several delta steps per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, at_step, engine_options
from flashmix.mechanisms.deltanet import DeltaNet, DeltaNetOptions
from flashmix.mechanisms.gated_deltanet import GatedDeltaNet
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.projection import HeadProjection
from flashmix.op.checks import check_range, check_shape, dims
from flashmix.op.options import hands_on
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
def deltaproduct(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, **options: Unpack[EngineOptions]
) -> Result:
    """(Gated) DeltaProduct: `n` delta steps per token, so that a token's transition is a product of `n` Householder-like matrices.

        S <- e^{g_t} S;  then for j = 1 ... n:  S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T;  o_t = scale S^T q_t

    The steps run as `n` interleaved tokens; the first has the decay and the last has the query.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys of the steps `[B, T, n, H, K]`.
        v: values of the steps `[B, T, n, HV, V]`.
        beta: write strengths `[B, T, n, HV]`.
        log_decay: `[B, T, HV]`, or None for DeltaProduct without decay.

    Source: Siems et al. 2025 (arXiv 2502.10297), equation 3.

    Example:
        >>> q, k, v = torch.randn(1, 10, 4, 16), torch.randn(1, 10, 2, 4, 16) / 4, torch.randn(1, 10, 2, 4, 16)
        >>> deltaproduct(q, k, v, torch.rand(1, 10, 2, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    B, T, H, K = dims("q", q, "B T H K")
    n = dims("k", k, "B T n H K")[2]
    HV, V = dims("v", v, "B T n HV V")[3:]
    check_shape("k", k, B, T, n, H, K)
    check_shape("v", v, B, T, n, HV, V)
    check_shape("beta", beta, B, T, n, HV)
    if n < 1:
        raise ValueError(f"k must have shape [B, T, n, H, K] with n >= 1, got {list(k.shape)}")
    if log_decay is not None:
        check_shape("log_decay", log_decay, B, T, HV)
    first_k, first_v, first_beta = (x[:, :, 0] for x in (k, v, beta))
    state, packing = options.get("initial_state"), options.get("cu_seqlens")
    packing = check_operands(q, first_v, {"k": first_k}, first_beta, log_decay, state, packing)
    options["cu_seqlens"] = None if packing is None else packing.repeat(n)
    log_decay = None if log_decay is None else at_step(log_decay, n, 0)
    q, (k, v, beta) = at_step(q, n, n - 1), (x.flatten(1, 2) for x in (k, v, beta))
    o, state = delta_rule(q, k, v, beta, log_decay, **options)
    return o.unflatten(1, (T, n))[:, :, -1], state


class DeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct: Gated DeltaNet with several delta steps per token.

    Args: those of `DeltaNet`, and
        steps: keys, values and write strengths per token.
        forget: whether the state decays.

    Source: Siems et al., arXiv:2502.10297, section 3.

    Example:
        >>> import torch
        >>> DeltaProduct(32, heads=2, steps=3)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    @hands_on(DeltaNet.__init__, first=True)
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        steps: int = 2,
        forget: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[DeltaNetOptions],
    ) -> None:
        check_range("steps", steps, 1, 64)
        self.steps, self.forget = steps, forget
        super().__init__(width, heads, device=device, dtype=dtype, **options)

    def make_parameters(self, **placement: Any) -> None:
        super().make_parameters(**placement)
        strength, decay = (self.steps, self.value_heads), (self.value_heads,) if self.forget else None
        self.strength_and_decay = HeadProjection(self.width, strength=strength, decay=decay, **placement)
        if not self.forget:
            del self.decay

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Any]:
        strength, decay = self.strength_and_decay(x)
        return self.write_strength(strength), self.decay(decay) if self.forget else None

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        k, v = k.unflatten(2, (self.steps, self.heads)), v.unflatten(2, (self.steps, self.value_heads))
        return deltaproduct(q, k, v, *self.beta_and_decay(x), **options)


def two_steps(size: Size) -> list[Options]:
    """Two steps per token, with negative eigenvalues."""
    return size.depth * [{"heads": size.heads, "steps": 2, "negative_eigenvalues": True}]


register(
    Mechanism(
        title="DeltaProduct",
        paper="2502.10297",
        function=deltaproduct,
        call="q:BTHK k:BTnHK v:BTnHK beta:BTnH",
        layer=DeltaProduct,
        preset=two_steps,
    )
)
