"""A mapping for the package `kernels`: the functions of transformers that flashmix computes, for people who kernelize themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flashmix.compat import causal_conv1d, fla, mamba_ssm

Result = tuple[Tensor, Tensor | None]
DEVICES = ("cpu", "cuda")
# Each is a `forward` with the parameters of the function that it stands in for; self is stateless.


def _delta_chunks(function: Callable[..., Result]) -> Callable[..., Result]:
    def forward(
        self: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        return function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=kwargs.get("cu_seqlens", kwargs.get("cu_seq_lens_q")),
        )

    return forward


def _delta_tokens(function: Callable[..., Result]) -> Callable[..., Result]:
    chunks = _delta_chunks(function)

    def forward(
        self: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        return chunks(self, query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)

    return forward


def _scan(
    self: nn.Module,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states, "dt_softplus": dt_softplus}
    options |= {"dt_limit": dt_limit, "return_final_states": return_final_states}
    options |= {name: kwargs.get(name) for name in ("z", "seq_idx")}
    return mamba_ssm.mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, **options)


def _convolution(
    self: nn.Module,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    options = {"activation": activation, "seq_idx": kwargs.get("seq_idx")}
    y: Tensor = causal_conv1d.causal_conv1d_fn(hidden_states.to(weight.dtype), weight, bias, **options)
    return y.to(hidden_states.dtype)


def _convolution_step(
    self: nn.Module,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    x = hidden_states.to(weight.dtype)
    y: Tensor = causal_conv1d.causal_conv1d_update(x, conv_state, weight, bias, activation)
    return y.to(hidden_states.dtype)


FORWARDS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _delta_chunks(fla.chunk_gated_delta_rule),
    "fused_recurrent_gated_delta_rule": _delta_tokens(fla.fused_recurrent_gated_delta_rule),
    "chunk_kda": _delta_chunks(fla.chunk_kda),
    "fused_recurrent_kda": _delta_tokens(fla.fused_recurrent_kda),
    "mamba_chunk_scan_combined": _scan,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
}


class KernelLayer:
    """What `kernels` calls a repository: an object whose `load` gives the class of a stateless layer. Nothing is read from a hub."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> type[nn.Module]:
        members = {"forward": FORWARDS[self.name], "has_backward": True, "can_torch_compile": True}
        return type(self.name, (nn.Module,), members)

    def __repr__(self) -> str:
        return f"flashmix.hf {self.name}"


LAYERS = {name: KernelLayer(name) for name in FORWARDS}  # `kernels` remembers each for good


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """The mapping of `kernels.use_kernel_mapping`: gated delta rules, KDA, Mamba-2's chunked scan and short convolutions.

        with kernels.use_kernel_mapping(flashmix.hf.kernel_mapping(), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")

    For those who kernelize their models; `flashmix.accelerate` replaces whole mixers, is faster, and changes one model alone: what
    `kernels` replaces are functions of a file of transformers, so that all models of that file change, for good.
    One token of Mamba-2 (`selective_state_update`) stays with transformers.

    Returns:
        By name of the function and device ("cpu", "cuda") an object with `load()`.

    Example:
        >>> sorted(kernel_mapping()["chunk_kda"])
        ['cpu', 'cuda']
    """
    return {name: dict.fromkeys(DEVICES, layer) for name, layer in LAYERS.items()}
