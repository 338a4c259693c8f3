"""The modules of fla.modules, with the parameters' names and shapes of the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.compat.causal_conv1d import activation_of
from flashmix.compat.fla.common import FLA, PACKED
from flashmix.compat.norms import ResidualNorm, ZGatedRMSNorm, normalise
from flashmix.compat.rotary import RotaryTable, rotate
from flashmix.compat.surface import refuse
from flashmix.ops.gated_product.op import swiglu
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.short_conv.op import short_conv
from flashmix.ops.token_shift.op import token_shift

_RESIDUAL = "residual=None eps=1e-05 prenorm=False residual_in_fp32=False"
_GATED = "x g weight bias activation='swish' residual=None prenorm=False residual_in_fp32=False eps=1e-06"


@FLA.function("layer_norm", f"x weight bias {_RESIDUAL} is_rms_norm=False")
@FLA.function("group_norm", f"x weight bias {_RESIDUAL} is_rms_norm=False num_groups=1")
def centred_norm(is_rms_norm: bool, num_groups: int = 1, **options: Any) -> Any:
    """`flashmix.group_norm`; `prenorm=True` returns the sum with the residual too."""
    return normalise(center=not is_rms_norm, groups=num_groups, **options)


@FLA.function("rms_norm", f"x weight bias {_RESIDUAL}")
def plain_rms_norm(**options: Any) -> Any:
    """`flashmix.rms_norm`; `prenorm=True` returns the sum with the residual too."""
    return normalise(center=False, **options)


@FLA.function("rms_norm_gated", _GATED)
def gated_rms_norm(g: Tensor, **options: Any) -> Any:
    """`flashmix.rms_norm(x, weight, gate=g)`, with a bias before the gate if there is one."""
    return normalise(center=False, gate=g, **options)


@FLA.function("layer_norm_gated", _GATED)
def gated_layer_norm(g: Tensor, **options: Any) -> Any:
    """`flashmix.layer_norm(x, weight, bias, gate=g)`."""
    return normalise(center=True, gate=g, **options)


class ResidualLayerNorm(ResidualNorm):
    """fla's `LayerNorm`: see `ResidualNorm`."""

    center = True


class ResidualGroupNorm(ResidualNorm):
    """fla's `GroupNorm`: groups of channels of each token.

    Args:
        num_groups: number of groups.
        hidden_size, elementwise_affine, bias, eps: those of `ResidualNorm`.
        is_rms_norm: whether the mean stays.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        **placement: Any,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, **placement)
        self.groups, self.center = num_groups, not is_rms_norm


class GatedResidualRMSNorm(ResidualNorm):
    """fla's `FusedRMSNormGated`: `norm(x) act(g)`, with `activation` "swish", "silu" or "sigmoid".

    Args:
        hidden_size, elementwise_affine, eps: those of `ResidualNorm`.
        activation: of the gate.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device=device, dtype=dtype)
        self.activation = activation

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return self.normalise(
            x, gate=g, activation=self.activation, residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32
        )


class SwishGatedRMSNorm(GatedResidualRMSNorm):
    """fla's `FusedRMSNormSwishGate`: `FusedRMSNormGated` with silu."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, *placement: Any) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, "swish", *placement)


class GatedResidualLayerNorm(GatedResidualRMSNorm):
    """fla's `FusedLayerNormGated`: `FusedRMSNormGated` that takes the mean off.

    Args:
        hidden_size, elementwise_affine, bias, eps: those of `ResidualNorm`.
        activation: of the gate.
    """

    center = True

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ResidualNorm.__init__(self, hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = activation


class SwishGatedLayerNorm(GatedResidualLayerNorm):
    """fla's `FusedLayerNormSwishGate`: `FusedLayerNormGated` with silu."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5, *placement: Any
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, "swish", eps, *placement)


class LateZGatedRMSNorm(ZGatedRMSNorm):
    """fla's `RMSNormGated`, whose gate multiplies before the norm by default."""

    gate_last = False


class UnitNorm(nn.Module):
    """fla's `L2Norm`.

    Args:
        eps: added to the sum of squares.
        output_dtype: of the result; default that of the input.
    """

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return unit_norm(x, self.eps, self.output_dtype)


@FLA.function("l2norm l2_norm", "x eps=1e-06 output_dtype=None")
def unit_norm(x: Tensor, eps: float, output_dtype: torch.dtype | None) -> Tensor:
    """`flashmix.l2_norm`."""
    return l2_norm(x if output_dtype is None else x.to(output_dtype), eps=eps)


@FLA.function("token_shift", "x cu_seqlens=None cache=None output_cache=False ~chunk_indices=None")
def shift_difference(x: Tensor, cu_seqlens: Tensor | None, cache: Tensor | None, output_cache: bool) -> Any:
    """`x_{t-1} - x_t` (`flashmix.token_shift` is `x_{t-1}`); the cache `[N, D]` holds the token before the first."""
    state = None if cache is None else cache.reshape(-1, 1, x.shape[-1])
    y, last = token_shift(x, initial_state=state, return_state=output_cache, cu_seqlens=cu_seqlens)
    return (y - x, last) if output_cache else y - x


@FLA.function(
    "causal_conv1d",
    "x weight=None bias=None residual=None initial_state=None output_final_state=False activation=None ~backend='triton' "
    f"{PACKED} ~chunk_indices=None !cp_context=None",
)
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`flashmix.short_conv` of `[B, T, D]`; states are `[N, D, W]`, of which the oldest column is not read."""
    width = weight.shape[-1]
    state = None if initial_state is None else initial_state[..., 1:].mT.to(x.dtype)
    # one tap more, of weight 0, so that the state holds W inputs
    taps = torch.nn.functional.pad(weight, (1, 0)) if output_final_state else weight
    if output_final_state:
        if initial_state is None:
            rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            state = x.new_zeros(rows, width, x.shape[2])
        else:
            state = initial_state.mT.to(x.dtype)
    y, final = short_conv(
        x,
        taps,
        bias,
        activation=activation_of("fla.causal_conv1d", activation),
        residual=residual,
        initial_state=state,
        return_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return y, None if final is None else final.mT


class CausalConvolution(nn.Conv1d):
    """fla's `ShortConvolution`: weight `[D, 1, W]`, a cache `[N, D, W]`.

    Args:
        hidden_size: channels.
        kernel_size: tokens that an output sees.
        bias: whether there is a learned bias.
        activation: "silu", "swish" or None.
        backend: ignored.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, kernel_size - 1, groups=hidden_size, bias=bias)
        self.to(device=device, dtype=dtype)
        activation_of("fla.ShortConvolution", activation)
        self.hidden_size, self.activation = hidden_size, activation

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`(y, cache)`; without gradients a call of one token per sequence updates a given cache in place."""
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask and cu_seqlens must not be given together")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        step = cache is not None and not torch.is_grad_enabled() and x.shape[0] * x.shape[1] == rows
        y, state = convolve(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state or step,
            self.activation,
            cu_seqlens,
        )
        if step and cache is not None and state is not None:
            state = cache.copy_(state)
        return y, state


class PairRotary(RotaryTable):
    """fla's `RotaryEmbedding`: rotates `q` and `k` `[B, T, H, D]`, not in place.

    Args:
        dim: channels that are rotated, even.
        base: the longest wavelength is about `2 pi base` tokens.
        scale_base: only None.
        interleaved: the pairs are neighbours.
        pos_idx_in_fp32, device: not used; angles are exact and the table follows the inputs.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, base, interleaved, scale_base)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.table(q, seqlen_offset, max_seqlen)
        options: dict[str, Any] = {"seqlen_offsets": seqlen_offset, "cu_seqlens": cu_seqlens}
        return rotate(q, cos, sin, self.interleaved, **options), rotate(k, cos, sin, self.interleaved, **options)


@FLA.function(
    "rotary_embedding", "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None ~chunk_indices=None"
)
def rotary_embedding(**options: Any) -> Tensor:
    """`flashmix.rotary` of `[B, T, H, D]`; in place only where no gradient is wanted."""
    return rotate(**options)


class SeparateGatedMLP(nn.Module):
    """fla's `GatedMLP`: `down_proj(silu(gate_proj x) up_proj x)`.

    Args:
        hidden_size: channels in and out.
        hidden_ratio: the hidden channels are `2/3 hidden_size hidden_ratio`, rounded up to a multiple of 256; default 4.
        intermediate_size: the hidden channels, instead.
        hidden_act: only "swish".
        fuse_swiglu, powglu_power: not used.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        super().__init__()
        refuse("fla.GatedMLP", f"hidden_act {hidden_act!r}", hidden_act == "swish")
        if intermediate_size is None:
            intermediate_size = -(-int(hidden_size * (hidden_ratio or 4) * 2 / 3) // 256) * 256
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


MODULES = {
    "RMSNorm": ResidualNorm,
    "LayerNorm": ResidualLayerNorm,
    "GroupNorm": ResidualGroupNorm,
    "FusedRMSNormGated": GatedResidualRMSNorm,
    "FusedRMSNormSwishGate": SwishGatedRMSNorm,
    "FusedLayerNormGated": GatedResidualLayerNorm,
    "FusedLayerNormSwishGate": SwishGatedLayerNorm,
    "RMSNormGated": LateZGatedRMSNorm,
    "L2Norm": UnitNorm,
    "ShortConvolution": CausalConvolution,
    "RotaryEmbedding": PairRotary,
    "GatedMLP": SeparateGatedMLP,
}
LIMITS = {"RotaryEmbedding": "`scale_base`", "GatedMLP": '`hidden_act="powlu"`'}
for _name, _module in MODULES.items():
    FLA.add(_name, _module, LIMITS.get(_name, ""))
globals().update(MODULES)
__getattr__ = FLA.lookup
