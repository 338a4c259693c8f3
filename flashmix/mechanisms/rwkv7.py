"""RWKV-7: token shift, low-rank projections, and a state that is decayed, corrected and written in one step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.recurrent_state import carried_dplr
from flashmix.mechanisms.common import Result, StateOptions, engine_options, unrounded
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.mechanisms.rwkv import RWKV
from flashmix.modules.decay import RWKV7Decay
from flashmix.modules.mlp import LowRank
from flashmix.modules.projection import head_size
from flashmix.op.checks import check_shape, dims
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence import dplr
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.token_shift.op import token_shift


@public
@engine_options
@unrounded("r", "k", "v", "kk", "a")
def rwkv7(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    *,
    scale: float = 1.0,
    **options: Unpack[StateOptions],
) -> Result:
    """RWKV-7: a normalised removal key, a per-channel learning rate, and a raw write.

        S_t = (diag(e^{w_t}) - (kk_t * a_t) kk_t^T) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T r_t

    Args:
        r: receptance `[B, T, H, K]`.
        log_decay: `w`, at most 0, `[B, T, H, K]`.
        k: replacement keys `[B, T, H, K]`.
        kk: removal keys of unit length `[B, T, H, K]`.
        a: in-context learning rate in [0, 1], `[B, T, H, K]`.

    Source: Peng et al. 2025 (arXiv 2503.14456), equation 17.

    Example:
        >>> import torch
        >>> r, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> rwkv7(r, -torch.rand(1, 10, 4, 16), k, v, k / 16, torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    check_shape("kk", kk, *dims("k", k, "B T H K"))
    check_shape("a", a, *k.shape)
    check_operands(
        r,
        v,
        {"k": k, "kk": kk, "a": a},
        None,
        log_decay,
        options.get("initial_state"),
        options.get("cu_seqlens"),
        {"q": "r"},
    )
    return dplr(r, k, v, -kk, (kk * a).to(kk.dtype), log_decay, scale=scale, **options)


class RWKV7(RWKV):
    """The time mixing of RWKV-7: `S = diag(e^w) S - (a kk)(kk^T S) + k v^T`, `o = S^T r`.

    `kk` is the key divided by its length, `a` in (0, 1) the removed share of the value under it, `w` the per-channel log decay.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a head; default `width / heads`.
        ranks: of the projections for the decay, the removal `a`, the value residual and the output gate; by default
            they grow with the square root of `width`.
        value_residual: whether values are mixed with those of the model's first RWKV-7 layer, passed as `first_values`.
        eps: of the norm of each head's output; RWKV has `1e-5 head_dim`, as here for heads of 64 channels.

    Source: Peng et al., arXiv:2503.14456, section 4.1.

    Example:
        >>> import torch
        >>> RWKV7(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    shares = "value_residual"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        ranks: tuple[int, int, int, int] | None = None,
        value_residual: bool = False,
        eps: float = 64e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim, self.eps = self.head_dim, eps
        inner = heads * self.head_dim
        self.ranks = ranks or default_ranks(width)
        decay_rank, remove_rank, value_rank, gate_rank = self.ranks

        def low_rank(rank: int, activation: str | None = None, bias: bool = True) -> LowRank:
            return LowRank(width, rank, inner, activation=activation, bias=bias, device=device, dtype=dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size=shape, device=device, dtype=dtype))

        self.shift_mix = parameter(6, width)
        self.receptance = nn.Linear(width, inner, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(width, inner, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(width, inner, bias=False, device=device, dtype=dtype)
        self.decay_projection = low_rank(decay_rank, "tanh")
        self.decay = RWKV7Decay()
        self.remove = low_rank(remove_rank)
        self.value_mix = low_rank(value_rank) if value_residual else None
        self.gate = low_rank(gate_rank, "sigmoid", bias=False)
        self.removal_key = parameter(inner)
        self.key_keep = parameter(inner)
        self.make_output(device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.shift_mix)
        nn.init.constant_(self.removal_key, 0.85)
        nn.init.ones_(self.key_keep)
        nn.init.zeros_(self.bonus)
        self.reset_norm_and_decay(6.0)  # memories of about 3 to 700 tokens in each head

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        return self.mix_values(x, packing, cache, None)[0]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        cache: RecurrentCache | None = None,
        first_values: Tensor | None = None,
        return_values: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mixes the tokens of each sequence; see `Mixer.forward`.

        Args:
            x, cu_seqlens, attention_mask, cache: as in `Mixer.forward`.
            first_values: `[B, T, heads * head_dim]`, the values of the model's first RWKV-7 layer; needed with
                `value_residual`, without effect otherwise.
            return_values: also return this layer's values, which later layers take as `first_values`.

        Returns:
            `[B, T, width]`, with `return_values` the pair of it and the values `[B, T, heads * head_dim]`.
        """
        if self.value_mix is not None:
            if first_values is None:
                raise ValueError("first_values must be given to a layer with value_residual, got None")
            check_shape("first_values", first_values, *x.shape[:2], self.value.out_features)
        x, packing, padding = self.prepare(x, cu_seqlens, attention_mask, cache)
        if padding is not None and first_values is not None:
            first_values = padding.remove(first_values)
        y, values = self.mix_values(x, packing, cache, first_values)
        if padding is not None:
            y, values = padding.restore(y), padding.restore(values)
        return (y, values) if return_values else y

    def mix_values(
        self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer on checked inputs without padding: its output and its values."""
        before, recent = token_shift(
            x, initial_state=None if cache is None else cache.recent, return_state=cache is not None, cu_seqlens=packing
        )
        x_r, x_w, x_k, x_v, x_a, x_g = torch.addcmul(x, before - x, self.shift_mix[:, None, None]).unbind(0)
        r, k, values = self.receptance(x_r), self.key(x_k), self.value(x_v)
        v = values
        if self.value_mix is not None and first_values is not None:
            v = torch.lerp(values, first_values, torch.sigmoid(self.value_mix(x_v)))
        a = torch.sigmoid(self.remove(x_a))
        kk = l2_norm(
            self.by_heads(k * self.removal_key.to(k.dtype))
        )  # under autocast k is narrower than its parameters
        k = self.by_heads(torch.addcmul(k, k * (a - 1), self.key_keep.to(k.dtype)))
        r, v = self.by_heads(r), self.by_heads(v)
        b, log_decay = kk * self.by_heads(a), self.by_heads(self.decay(self.decay_projection(x_w)))
        o = carried_dplr(r, k, v, -kk, b, log_decay=log_decay, cache=cache, packing=packing, scale=1.0)
        if cache is not None:
            cache.recent = recent
        o = self.normalised(o) + ((r * k * self.bonus).sum(-1, keepdim=True) * v).flatten(2)
        return self.output(o * self.gate(x_g)), values


def default_ranks(width: int) -> tuple[int, int, int, int]:
    """Ranks for the decay, the removal, the value residual and the output gate at this width, multiples of 8."""

    def rank(factor: float, power: float) -> int:
        return max(8, round(factor * width**power / 8) * 8)

    return rank(1.8, 0.5), rank(1.8, 0.5), rank(1.3, 0.5), rank(0.6, 0.8)


def values_of_the_first(size: Size) -> list[Options]:
    """All layers but the first read its values; the model's SwiGLU stands for RWKV-7's channel mixing."""
    first = {"heads": size.heads}
    return [first, *(size.depth - 1) * [{**first, "value_residual": True}]]


register(
    Mechanism(
        title="RWKV-7",
        paper="2503.14456",
        function=rwkv7,
        call="r:BTHK log_decay:BTHK k:BTHK v:BTHK kk:BTHK a:BTHK",
        layer=RWKV7,
        preset=values_of_the_first,
    )
)
