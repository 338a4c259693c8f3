"""What came after Gated DeltaNet and KDA: other keys for correcting, gates by channel, preconditioned writes, several steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.layers.delta_net import KDA, DeltaNet, GatedDeltaNet
from flashmix.modules.decay import MambaDecay
from flashmix.op.checks import check_range
from flashmix.op.packing import Packing
from flashmix.ops.named import (
    comba,
    deltaproduct,
    gated_deltanet2,
    iplr,
    oja,
    preconditioned_gated_deltanet,
    preconditioned_kda,
)
from flashmix.ops.named.preconditioned import LOG_SCALE
from flashmix.ops.norm.op import l2_norm


class Comba(GatedDeltaNet):
    """Gated DeltaNet whose correction reads with a weaker key, `p = sigmoid(c) k`, and whose query is corrected, `q - d p`.

    Args: those of `DeltaNet`; `c` and `d` are learned, one a head of keys.

    Source: Hu et al., arXiv:2506.02475, section 3.

    Example:
        >>> import torch
        >>> Comba(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().make_gates(device, dtype)
        self.closeness = nn.Parameter(torch.ones(self.heads, device=device, dtype=dtype))
        self.correction = nn.Parameter(torch.ones(self.heads, device=device, dtype=dtype))

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, log_decay = self.gates(x)
        assert log_decay is not None
        p = k * torch.sigmoid(self.closeness).to(k.dtype)[:, None]
        q = q - self.correction.to(q.dtype)[:, None] * p
        return comba(q, k, p, v, beta, log_decay, initial_state=state, return_state=return_state, cu_seqlens=packing)


class GatedDeltaNet2(KDA):
    """KDA whose erasing and writing have gates of their own, by channel of the key and of the value.

    Args: those of `KDA`; `negative_eigenvalues` is of the erasing gate.

    Source: Gated DeltaNet-2, arXiv:2605.22791.

    Example:
        >>> import torch
        >>> GatedDeltaNet2(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().make_gates(device, dtype)
        del self.strength
        self.erase = nn.Linear(self.width, self.value_heads * self.head_dim, bias=False, device=device, dtype=dtype)
        self.write = nn.Linear(self.width, self.values, bias=False, device=device, dtype=dtype)

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        erase = self.write_strength(self.erase(x)).unflatten(-1, (self.value_heads, self.head_dim))
        write = torch.sigmoid(self.write(x)).view_as(v)
        decay = self.channel_decay(x)
        return gated_deltanet2(
            q, k, v, erase, write, decay, initial_state=state, return_state=return_state, cu_seqlens=packing
        )


class Curvature(nn.Module):
    """What the preconditioned delta rules need of the input: `beta'`, its log decay, and a learned `log_scale` a head."""

    def __init__(
        self, width: int, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 2 * heads, bias=False, device=device, dtype=dtype)
        self.decay = MambaDecay(heads, device=device, dtype=dtype)
        self.log_scale = nn.Parameter(torch.full((heads,), LOG_SCALE, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        strength, decay = self.projection(x).chunk(2, dim=-1)
        return torch.sigmoid(strength), self.decay(decay)


class PreconditionedGatedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet that writes less along channels which keys have used much of late.

    Args: those of `DeltaNet`; `negative_eigenvalues` must be false: the preconditioned rule needs `beta` up to `4 / 3`.

    Source: Preconditioned DeltaNet, arXiv:2604.21100.

    Example:
        >>> import torch
        >>> PreconditionedGatedDeltaNet(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        _check_strength(self)
        super().make_gates(device, dtype)
        self.curvature = Curvature(self.width, self.heads, device=device, dtype=dtype)

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, log_decay = self.gates(x)
        assert log_decay is not None
        return preconditioned_gated_deltanet(
            q, k, v, beta, log_decay, *self.curvature(x), log_scale=self.curvature.log_scale, initial_state=state,
            return_state=return_state, cu_seqlens=packing,
        )  # fmt: skip


class PreconditionedKDA(KDA):
    """KDA that writes less along channels which keys have used much of late.

    Args: those of `KDA`; `negative_eigenvalues` must be false: the preconditioned rule needs `beta` up to `4 / 3`.

    Source: Preconditioned DeltaNet, arXiv:2604.21100.

    Example:
        >>> import torch
        >>> PreconditionedKDA(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        _check_strength(self)
        super().make_gates(device, dtype)
        self.curvature = Curvature(self.width, self.heads, device=device, dtype=dtype)

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, log_decay = self.gates(x)
        assert log_decay is not None
        return preconditioned_kda(
            q, k, v, beta, log_decay, *self.curvature(x), log_scale=self.curvature.log_scale, initial_state=state,
            return_state=return_state, cu_seqlens=packing,
        )  # fmt: skip


class Oja(KDA):
    """Oja's rule with a decay of each channel of the values, which have length 1; gates and output are those of KDA.

    Args: those of `KDA`.

    Source: Irie, Faccio, Schmidhuber, arXiv:2206.01649 (the rule).

    Example:
        >>> import torch
        >>> Oja(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def decay_channels(self) -> int:
        return self.value_dim

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, log_decay = self.gates(x)
        return oja(
            q, k, l2_norm(v), beta, log_decay, initial_state=state, return_state=return_state, cu_seqlens=packing
        )


class IPLR(DeltaNet):
    """Identity plus low rank: a removal key of its own, `S = (I - beta r r^T) S + k v^T` with `r` of length 1.

    Args: those of `DeltaNet`; `negative_eigenvalues` lets `beta` reach 2.

    Source: Peng et al., arXiv:2503.14456, section 3 (the generalised delta rule).

    Example:
        >>> import torch
        >>> IPLR(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().make_gates(device, dtype)
        removal = self.value_heads * self.head_dim
        self.removal = nn.Linear(self.width, removal, bias=False, device=device, dtype=dtype)

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, _ = self.gates(x)
        removal = l2_norm(self.removal(x).unflatten(-1, (self.value_heads, self.head_dim))).to(k.dtype)
        back = (beta.unsqueeze(-1) * removal).to(k.dtype)
        return iplr(q, k, v, -removal, back, initial_state=state, return_state=return_state, cu_seqlens=packing)


class DeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct: Gated DeltaNet with several delta steps a token.

    Args: those of `DeltaNet`, and
        steps: keys, values and write strengths of a token.

    Source: Siems et al., arXiv:2502.10297, section 3.

    Example:
        >>> import torch
        >>> DeltaProduct(32, heads=2, steps=3)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_heads: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        steps: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_range("steps", steps, 1, 64)
        self.steps = steps
        super().__init__(
            width,
            heads,
            head_dim=head_dim,
            value_heads=value_heads,
            value_dim=value_dim,
            conv_width=conv_width,
            negative_eigenvalues=negative_eigenvalues,
            device=device,
            dtype=dtype,
        )

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().make_gates(device, dtype)
        gates = (self.steps + 1) * self.value_heads
        self.strength_and_decay = nn.Linear(self.width, gates, bias=False, device=device, dtype=dtype)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        strength, decay = self.strength_and_decay(x).split([self.steps * self.value_heads, self.value_heads], dim=-1)
        return self.write_strength(strength).unflatten(-1, (self.steps, self.value_heads)), self.decay(decay)

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        beta, log_decay = self.gates(x)
        k, v = k.unflatten(2, (self.steps, self.heads)), v.unflatten(2, (self.steps, self.value_heads))
        return deltaproduct(
            q, k, v, beta, log_decay, initial_state=state, return_state=return_state, cu_seqlens=packing
        )


def _check_strength(layer: DeltaNet) -> None:
    if layer.write_strength.negative_eigenvalues:
        raise ValueError("negative_eigenvalues must be false where writes are preconditioned, got true")
