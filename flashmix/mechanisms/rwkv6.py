"""RWKV-6: data-dependent token shift, a per-channel decay, and a read before the write."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import Result, StateOptions, check_per_head, check_same_heads, engine_options
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.mechanisms.rwkv import RWKV
from flashmix.modules.decay import RWKV6Decay
from flashmix.modules.mlp import LowRank
from flashmix.modules.projection import head_size
from flashmix.op.checks import check_range, dims
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.token_shift.op import token_shift


@public
@engine_options
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    scale: float = 1.0,
    **options: Unpack[StateOptions],
) -> Result:
    """RWKV-6: the output reads the state before the write, and its own token with a learned weight.

        o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t;  S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

    Args:
        log_decay: `w`, at most 0, `[B, T, H, K]`.
        bonus: `u` `[H, K]`.

    Source: Peng et al. 2024 (arXiv 2404.05892), equation 19.

    Example:
        >>> r, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> rwkv6(r, k, v, -torch.rand(1, 10, 4, 16), torch.zeros(4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    check_same_heads(r, "r", v)
    check_operands(r, v, {"k": k}, None, log_decay, options.get("initial_state"), options.get("cu_seqlens"), {"q": "r"})
    check_per_head("bonus", bonus, "r", r, *r.shape[2:])
    o, state = linear_attention(r, k, v, log_decay, read_before=True, scale=scale, **options)
    own = (r * k * bonus).contiguous().sum(-1, keepdim=True)  # sums in one order however r lies in memory
    return (o + scale * own * v).to(o.dtype), state


class RWKV6(RWKV):
    """The time mixing of RWKV-6 (Finch): `o = (S + diag(u) k v^T)^T r`, then `S = diag(e^w) S + k v^T`, `w = -e^{W x}`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `head_dim`.
        shift_rank: of the projection that determines how much of the previous token each channel takes.
        decay_rank: of the decay's projection.
        eps: of the norm of each head's output.

    Source: Peng et al., arXiv:2404.05892, section 4.

    Example:
        >>> import torch
        >>> RWKV6(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        shift_rank: int = 32,
        decay_rank: int = 64,
        eps: float = 64e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("shift_rank", shift_rank, 1, 2**16)
        check_range("decay_rank", decay_rank, 1, 2**16)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, self.head_dim if value_dim is None else value_dim, "value_dim")
        self.eps = eps
        keys, values = heads * self.head_dim, heads * self.value_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size=shape, device=device, dtype=dtype))

        def linear(out: int) -> nn.Linear:
            return nn.Linear(width, out, bias=False, device=device, dtype=dtype)

        self.first_mix = parameter(width)
        self.shift_mix = parameter(5, width)
        self.shift_down = linear(5 * shift_rank)
        self.shift_up = parameter(5, shift_rank, width)
        self.receptance, self.key, self.value, self.gate = (linear(out) for out in (keys, keys, values, values))
        self.decay_projection = LowRank(
            width, decay_rank, keys, activation="tanh", bias=True, device=device, dtype=dtype
        )
        self.decay = RWKV6Decay()
        self.make_output(device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.first_mix)
        nn.init.uniform_(self.shift_mix)
        nn.init.uniform_(self.shift_up, -0.01, 0.01)
        nn.init.uniform_(self.bonus)
        self.reset_norm_and_decay(5.0)  # memories of about 3 to 400 tokens in each head

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        before, recent = token_shift(
            x, initial_state=None if cache is None else cache.recent, return_state=cache is not None, cu_seqlens=packing
        )
        x_r, x_w, x_k, x_v, x_g = self._mixed(x, before - x)
        r, k, v = (self.by_heads(part) for part in (self.receptance(x_r), self.key(x_k), self.value(x_v)))
        log_decay = self.by_heads(self.decay(self.decay_projection(x_w)))
        o = carried(rwkv6, r, k, v, log_decay, self.bonus, cache=cache, packing=packing)
        if cache is not None:
            cache.recent = recent
        return self.output(self.normalised(o) * silu(self.gate(x_g)))

    def _mixed(self, x: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """`x` mixed with the previous token, which is `x + step`, for the five projections: `x + step (mu + W_up tanh(W_down ...))`."""
        low = torch.tanh(self.shift_down(torch.addcmul(x, step, self.first_mix)))
        low = low.unflatten(-1, (5, -1)).movedim(-2, 0)  # [5, B, T, rank]
        amount = torch.einsum("nbtr,nrd->nbtd", low, self.shift_up.to(low.dtype)) + self.shift_mix[:, None, None]
        return torch.addcmul(x, step, amount).unbind(0)


def by_width(size: Size) -> list[Options]:
    """Ranks that grow with the width; the model's SwiGLU stands for RWKV-6's channel mixing."""
    ranks = {"shift_rank": max(4, size.width // 24), "decay_rank": max(4, size.width // 12)}
    return size.depth * [{"heads": size.heads, **ranks}]


register(
    Mechanism(
        title="RWKV-6",
        paper="2404.05892",
        function=rwkv6,
        call="r:BTHK k:BTHK v:BTHK log_decay:BTHK bonus:HK",
        wide=("bonus",),
        layer=RWKV6,
        preset=by_width,
    )
)
