"""The mixers of transformers that flashmix knows: by class name, and by signature, attributes and shapes of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from flashmix.hf import convolution, delta_net, lightning, scan, selective

Shapes = dict[str, tuple[int, ...]]
CACHED = ("hidden_states", "cache_params", "attention_mask", "kwargs")


@dataclass(frozen=True)
class Family:
    """Mixers that one `forward` of flashmix computes.

    Args:
        classes: names of their classes.
        forward: takes the place of theirs.
        arguments: of the class's own `forward`, after self, as each version of transformers has them.
        convolution: attribute of the convolution, or None.
        shapes: from an instance to the sizes that its parameters (or `(out_features, in_features)` of its projections) must have.
        norm: attribute of the gated norm whose parameters are read, or None.
        needs: other attributes that are read.
        limits: from an instance to the reason why its sizes are not served, or None.
    """

    classes: tuple[str, ...]
    forward: Callable[..., Any]
    shapes: Callable[[Any], Shapes]
    arguments: tuple[tuple[str, ...], ...] = (CACHED,)
    convolution: str | None = "conv1d"
    norm: str | None = None
    needs: tuple[str, ...] = ("layer_idx", "conv_kernel_size")
    limits: Callable[[Any], str | None] = lambda m: None

    def refuses(self, mixer: nn.Module) -> str | None:
        """None, or why this instance is left alone although its class has a known name."""
        arguments = tuple(inspect.signature(type(mixer).forward).parameters)[1:]
        if arguments not in self.arguments:
            known = " or ".join(", ".join(names) for names in self.arguments)
            return f"its forward takes {', '.join(arguments)}, known is {known}"
        try:
            for name, expected in {**self.shapes(mixer), **self._of_convolution(mixer)}.items():
                if (size := size_of(mixer, name)) != expected:
                    return f"{name} has the shape {list(size)}, known is {list(expected)}"
            missing = next((name for name in self.needs if not hasattr(mixer, name)), None)
            if missing is not None:
                return f"it has no {missing}"
            return self._by_activation(mixer) or self.limits(mixer)
        except AttributeError as error:
            return f"it has not all attributes of the known class: {error}"

    def _of_convolution(self, mixer: nn.Module) -> Shapes:
        if self.convolution is None:
            return {}
        convolution = mixer.get_submodule(self.convolution)
        if type(convolution) is not nn.Conv1d:
            raise AttributeError(f"{self.convolution} is a {type(convolution).__name__} in place of torch's Conv1d")
        channels, width = convolution.groups, mixer.conv_kernel_size
        return {f"{self.convolution}.weight": (channels, 1, int(width))}  # type: ignore[arg-type]

    def _by_activation(self, mixer: Any) -> str | None:
        activation = getattr(mixer, "activation", "silu")
        if activation not in ("silu", "swish"):
            return f"the activation of its convolution is {activation}, known is silu"
        if self.norm is not None:
            norm = getattr(mixer, self.norm)
            if norm.activation not in ("silu", "sigmoid"):
                return f"the activation of its gate is {norm.activation}, known are silu and sigmoid"
            float(norm.variance_epsilon)
        return None


def size_of(mixer: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of a parameter, or `(out_features, in_features)` of a projection, which may be wrapped (LoRA, quantised)."""
    value: Any = mixer
    for part in name.split("."):
        value = getattr(value, part)
    return tuple(value.shape) if isinstance(value, Tensor) else (value.out_features, value.in_features)


def sizes_of_gated(m: Any) -> Shapes:
    """What every Gated DeltaNet of transformers has in common."""
    channels = 2 * m.num_k_heads * m.head_k_dim + m.num_v_heads * m.head_v_dim
    return {"A_log": (m.num_v_heads,), "dt_bias": (m.num_v_heads,), "conv1d.weight": (channels, 1, m.conv_kernel_size)}


def sizes_of_qwen3_next(m: Any) -> Shapes:
    values, keys = m.num_v_heads * m.head_v_dim, m.num_k_heads * m.head_k_dim
    return sizes_of_gated(m) | {
        "in_proj_qkvz": (2 * keys + 2 * values, m.hidden_size),
        "in_proj_ba": (2 * m.num_v_heads, m.hidden_size),
        "norm.weight": (m.head_v_dim,),
        "out_proj": (m.hidden_size, values),
    }


def sizes_of_qwen3_5(m: Any) -> Shapes:
    values, keys = m.num_v_heads * m.head_v_dim, m.num_k_heads * m.head_k_dim
    return sizes_of_gated(m) | {
        "in_proj_qkv": (2 * keys + values, m.hidden_size),
        "in_proj_z": (values, m.hidden_size),
        "in_proj_a": (m.num_v_heads, m.hidden_size),
        "in_proj_b": (m.num_v_heads, m.hidden_size),
        "norm.weight": (m.head_v_dim,),
        "out_proj": (m.hidden_size, values),
    }


def sizes_of_olmo_hybrid(m: Any) -> Shapes:
    values, keys = m.num_v_heads * m.head_v_dim, m.num_k_heads * m.head_k_dim
    outputs = {"q": keys, "k": keys, "v": values, "g": values, "a": m.num_v_heads, "b": m.num_v_heads}
    return sizes_of_gated(m) | {
        **{f"{name}_proj": (size, m.hidden_size) for name, size in outputs.items()},
        "o_norm.weight": (m.head_v_dim,),
        "o_proj": (m.hidden_size, values),
    }


def sizes_of_kda(m: Any) -> Shapes:
    """What every Kimi Delta Attention of transformers has in common."""
    inner, heads = m.num_heads * m.head_dim, m.forget_gate.A_log.numel()
    return {
        **{f"{name}_proj": (inner, m.hidden_size) for name in ("q", "k", "v")},
        "b_proj": (m.num_heads, m.hidden_size),
        "forget_gate.dt_bias": (inner,),
        "forget_gate.A_log": (1, 1, m.num_heads, 1) if m.forget_gate.A_log.dim() == 4 else (m.num_heads,),
        "conv1d.weight": (3 * inner, 1, m.conv_kernel_size),
        "o_norm.weight": (m.head_dim,),
        "o_proj": (m.hidden_size, heads * m.head_dim),
    }


def sizes_of_kimi(m: Any) -> Shapes:
    down, up = (m.head_dim, m.hidden_size), (m.num_heads * m.head_dim, m.head_dim)
    low_rank = {"g_a_proj": down, "g_b_proj": up, "forget_gate.f_a_proj": down, "forget_gate.f_b_proj": up}
    return sizes_of_kda(m) | low_rank


def sizes_of_bailing(m: Any) -> Shapes:
    whole = (m.num_heads * m.head_dim, m.hidden_size)
    return sizes_of_kda(m) | {"g_proj": whole, "forget_gate.f_proj": whole}


def sizes_of_scan(m: Any) -> Shapes:
    channels = m.intermediate_size + 2 * m.n_groups * m.ssm_state_size
    float(m.time_step_limit[0]), float(m.time_step_limit[1])
    return {
        "in_proj": (m.intermediate_size + channels + m.num_heads, m.hidden_size),
        "conv1d.weight": (channels, 1, m.conv_kernel_size),
        "A_log": (m.num_heads,),
        "dt_bias": (m.num_heads,),
        "D": (m.num_heads,),
        "out_proj": (m.hidden_size, m.num_heads * m.head_dim),
    }


def sizes_of_selective(m: Any) -> Shapes:
    inner, norms = m.intermediate_size, ("dt_layernorm", "b_layernorm", "c_layernorm")
    if any(hasattr(m, name) for name in norms) and not all(hasattr(m, name) for name in norms):
        raise AttributeError("it has some of dt_layernorm, b_layernorm and c_layernorm")
    return {
        "in_proj": (2 * inner, m.hidden_size),
        "conv1d.weight": (inner, 1, m.conv_kernel_size),
        "x_proj": (m.time_step_rank + 2 * m.ssm_state_size, inner),
        "dt_proj": (inner, m.time_step_rank),
        "dt_proj.bias": (inner,),
        "A_log": (inner, m.ssm_state_size),
        "D": (inner,),
        "out_proj": (m.hidden_size, inner),
    }


def sizes_of_zamba(m: Any) -> Shapes:
    inner, heads, rank = m.intermediate_size, m.n_mamba_heads, m.time_step_rank
    return {
        "in_proj": (2 * inner, m.hidden_size),
        "conv1d.weight": (inner, 1, m.conv_kernel_size),
        "x_proj_weight": (heads, rank + 2 * m.ssm_state_size, m.mamba_head_dim),
        "dt_proj_weight": (heads, m.mamba_head_dim, rank),
        "dt_proj_bias": (heads, m.mamba_head_dim),
        "A_log": (heads, m.mamba_head_dim, m.ssm_state_size),
        "D": (heads, m.mamba_head_dim),
        "out_proj": (m.hidden_size, inner),
    }


def limits_of_selective(m: Any) -> str | None:
    kind = type(m.dt_proj)
    if kind is nn.Linear:
        return None
    return f"its dt_proj is a {kind.__module__}.{kind.__qualname__} in place of torch's Linear"


def sizes_of_convolution(m: Any) -> Shapes:
    width = m.conv.weight.shape[0]
    return {"in_proj": (3 * width, width), "out_proj": (width, width)}


def sizes_of_lightning(m: Any) -> Shapes:
    inner, width = m.num_attention_heads * m.head_dim, m.out_proj.out_features
    made = {"qkv_proj": (3 * inner, width), "output_gate": (inner, width), "out_proj": (width, inner)}
    return made | {"slope_rate": (m.num_attention_heads, 1, 1)}


def limits_of_lightning(m: Any) -> str | None:
    return "its head dimension is over 256" if m.head_dim > 256 else None


def limits_of_gated(m: Any) -> str | None:
    """Head dimensions past 256 run in plain PyTorch only."""
    return "its head dimensions are over 256" if max(m.head_k_dim, m.head_v_dim) > 256 else None


def limits_of_kda(m: Any) -> str | None:
    lower = delta_net.floor_of(m.forget_gate)
    if lower is not None and not -5.0 <= lower <= -1e-6:
        return f"the floor of its decay is {lower}, known are -5 to 0"
    return "its head dimension is over 256" if m.head_dim > 256 else None


def limits_of_scan(m: Any) -> str | None:
    return "its head dimensions are over 256" if max(m.head_dim, m.ssm_state_size) > 256 else None


FAMILIES = (
    Family(
        ("Qwen3NextGatedDeltaNet",),
        partial(delta_net.forward, delta_net.qwen3_next),
        sizes_of_qwen3_next,
        norm="norm",
        needs=("layer_idx", "conv_kernel_size", "fix_query_key_value_ordering"),
        limits=limits_of_gated,
    ),
    Family(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"),
        partial(delta_net.forward, delta_net.qwen3_5),
        sizes_of_qwen3_5,
        norm="norm",
        limits=limits_of_gated,
    ),
    Family(
        ("OlmoHybridGatedDeltaNet",),
        partial(delta_net.forward, delta_net.olmo_hybrid),
        sizes_of_olmo_hybrid,
        norm="o_norm",
        needs=("layer_idx", "conv_kernel_size", "allow_neg_eigval"),
        limits=limits_of_gated,
    ),
    Family(
        ("KimiLinearDeltaAttention", "Glm5NextTextLinearAttention"),
        partial(delta_net.forward, delta_net.kimi_linear),
        sizes_of_kimi,
        norm="o_norm",
        limits=limits_of_kda,
    ),
    Family(
        ("BailingHybridDeltaAttention",),
        partial(delta_net.forward, delta_net.bailing_hybrid),
        sizes_of_bailing,
        norm="o_norm",
        limits=limits_of_kda,
    ),
    Family(
        (
            "Mamba2Mixer",
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        scan.forward,
        sizes_of_scan,
        limits=limits_of_scan,
    ),
    Family(
        ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"),
        selective.forward,
        sizes_of_selective,
        needs=("layer_idx", "conv_kernel_size", "time_step_rank", "ssm_state_size"),
        limits=limits_of_selective,
    ),
    Family(("ZambaMambaMixer",), selective.forward, sizes_of_zamba, needs=("layer_idx", "conv_kernel_size")),
    Family(
        ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"),
        convolution.forward,
        sizes_of_convolution,
        arguments=tuple(("hidden_states", "past_key_values", "attention_mask", last) for last in ("seq_idx", "kwargs")),
        convolution="conv",
    ),
    *(
        Family(
            (name,),
            forward,
            lambda m: {},
            arguments=(("hidden_states", "past_key_values", "conv_mask", "kwargs"),),
            needs=("layer_idx", "conv_idx", "conv_kernel_size"),
        )
        for name, forward in (
            ("InklingShortConvolution", convolution.inkling),
            ("Inkling2ShortConvolution", convolution.inkling2),
        )
    ),
    Family(
        ("MiniMaxLightningAttention",),
        lightning.forward,
        sizes_of_lightning,
        arguments=(("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"),),
        convolution=None,
        needs=("layer_idx", "act_fn", "norm"),
        limits=limits_of_lightning,
    ),
)

KNOWN = {name: family for family in FAMILIES for name in family.classes}


def looks_like_a_mixer(module: nn.Module) -> bool:
    """Whether an unknown module mixes tokens by a recurrence or a short convolution, as far as its parts tell.

    It owns a parameter `A_log`, or a depthwise convolution, or its name says lightning attention or short convolution.
    """
    named = type(module).__name__.endswith(("LightningAttention", "ShortConvolution"))
    if "A_log" in module._parameters or named:
        return True
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    return any(c.groups == c.in_channels > 1 for c in convolutions)
