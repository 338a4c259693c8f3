"""Lightning attention: a fixed decay per head that weakens with depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.norm import GatedRMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.op.checks import check_range, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention


@public
@engine_options
def lightning(q: Tensor, k: Tensor, v: Tensor, *, layer: int, layers: int, **options: Unpack[EngineOptions]) -> Result:
    """Lightning attention: a fixed decay per head that weakens with depth.

        S_t = e^{g_h} S_{t-1} + k_t v_t^T,  g_h = -(8 / H) (1 - layer / layers) h,  h = 0 ... H-1;  o_t = scale S_t^T q_t

    Args:
        layer: place of this layer in the model, from 0.
        layers: number of layers.

    Source: Qin et al. 2024 (arXiv 2401.04658), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> lightning(q, k, v, layer=0, layers=12)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    check_range("layer", layer, 0, layers)
    H = dims("v", v, "B T HV V")[2]
    decay = torch.arange(H, device=v.device, dtype=state_dtype(v.dtype)) * (-8 / H * (1 - layer / layers))
    return linear_attention(q, k, v, decay, **options)


class Lightning(Mixer[RecurrentCache]):
    """Lightning attention: silu of queries, keys and values, a fixed decay per head that weakens with depth, a sigmoid output gate.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        layer: place of this layer in the model, from 0.
        layers: number of layers of the model.
        head_dim: channels of a head; default `width / heads`.
        eps: of the norm of the output.

    Source: Qin et al., arXiv:2401.04658, section 3.

    Example:
        >>> import torch
        >>> Lightning(32, heads=2, layer=0, layers=12)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        layer: int = 0,
        layers: int = 1,
        head_dim: int | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        if not 0 <= layer < layers:
            raise ValueError(f"layer must be between 0 and layers - 1 = {layers - 1}, got {layer}")
        self.layer, self.layers = layer, layers
        head = (heads, self.head_dim)
        self.qkvg = HeadProjection(width, q=head, k=head, v=head, gate=head, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(self.head_dim, eps, activation="sigmoid", device=device, dtype=dtype)
        self.output = nn.Linear(heads * self.head_dim, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, gate = self.qkvg(x)
        q, k, v = silu(q), silu(k), silu(v)
        o = carried(lightning, q, k, v, cache=cache, packing=packing, layer=self.layer, layers=self.layers)
        return self.output(self.norm(o, gate).flatten(2))


def by_depth(size: Size) -> list[Options]:
    """The decays weaken from layer to layer."""
    return [{"heads": size.heads, "layer": index, "layers": size.depth} for index in range(size.depth)]


register(
    Mechanism(
        title="Lightning attention",
        paper="2401.04658",
        function=lightning,
        call="q:BTHK k:BTHK v:BTHK",
        options={"layer": 0, "layers": 2},
        layer=Lightning,
        preset=by_depth,
    )
)
