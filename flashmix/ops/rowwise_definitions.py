"""What the row-wise ops mean: plain formulas, read and run in float64. Only tests and docs import this."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def relu2(x: Tensor) -> Tensor:
    return relu(x) ** 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": torch.sigmoid,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    y = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, center: bool = True, eps: float = 1e-5) -> Tensor:
    norm = layer_norm if center else rms_norm
    return torch.cat([norm(block, eps=eps) for block in x.chunk(groups, dim=-1)], dim=-1) * weight + bias


def rms_norm(x: Tensor, weight: Tensor | None = None, gate: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if gate is None else y * silu(gate)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotates the pairs `(i, i + R/2)` of the first R channels of `x [B, T, H, D]`; `positions [B, T]`."""
    half = cos.shape[-1]
    c, s = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = act(sum_i weight[:, W-1-i] x_{t-i} + bias) + residual_t` for `x [B, T, D]`, and the last W - 1 inputs."""
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    past = x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state
    past = torch.cat([past, x], dim=1)
    rows = [(past[:, t : t + width] * weight.T).sum(1) for t in range(tokens)]
    y = torch.stack(rows, dim=1) if rows else x
    y = y if bias is None else y + bias
    y = y if activation is None else ACTIVATIONS[activation](y)
    return (y if residual is None else y + residual), past[:, tokens:]


def short_conv_qkv(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, ...]:
    """`short_conv` of q, k and v, each with its own weight; the state is that of their channels side by side."""
    sizes = [x.shape[2] for x in inputs]
    states = (None, None, None) if initial_state is None else initial_state.split(sizes, dim=2)
    parts = zip(inputs, weights, biases or (None, None, None), states, strict=True)
    found = [short_conv(*part, activation) for part in parts]
    return *(y for y, _ in found), torch.cat([state for _, state in found], dim=2)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The loss of each token: `(1 - e) (lse - z_target) + e (lse - mean z) + z_loss lse^2`, or 0 if it is ignored."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse = torch.log(torch.exp(z - z.amax(-1, keepdim=True)).sum(-1)) + z.amax(-1)
    z_target = z.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = (1 - label_smoothing) * (lse - z_target) + label_smoothing * (lse - z.mean(-1)) + z_loss * lse**2
    return torch.where(target == ignore_index, torch.zeros_like(loss), loss)


def token_shift(x: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y_t = x_{t-1}` for `x [B, T, D]`, and the last token."""
    past = x.new_zeros(x.shape[0], 1, x.shape[2]) if initial_state is None else initial_state
    past = torch.cat([past, x], dim=1)
    return past[:, :-1], past[:, -1:]


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0, reverse: bool = False) -> Tensor:
    """Of each token of logits `[..., V]`: `T^2 sum p ln(p / q)` for a student q and a teacher p, reversed `q ln(q / p)`."""
    log_q, log_p = (torch.log_softmax(z / temperature, dim=-1) for z in (student, teacher))
    upper, lower = (log_q, log_p) if reverse else (log_p, log_q)
    return temperature**2 * (upper.exp() * (upper - lower)).sum(-1)


def grpo(
    log_probs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, low: float, high: float, kl_weight: float
) -> Tensor:
    """The loss of each sampled token of `[B, T]`, advantages `[B, 1]` or `[B, T]`."""
    ratio = torch.exp(log_probs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -gain + kl_weight * (torch.exp(reference - log_probs) - (reference - log_probs) - 1)


def softplus_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`g = -e^{A_log} log(1 + e^{x + dt_bias})` for `x [..., H]` or, with `dt_bias [H, K]`, `[..., H, K]`."""
    rate = A_log if dt_bias.dim() == 1 else A_log[:, None]
    z = x + dt_bias
    return -torch.exp(rate) * torch.logaddexp(z, torch.zeros_like(z))


def bounded_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower: float = -5.0) -> Tensor:
    """`g = lower / (1 + e^{-e^{A_log} (x + dt_bias)})`."""
    sharpness = torch.exp(A_log if dt_bias.dim() == 1 else A_log[:, None])
    return lower * torch.sigmoid(sharpness * (x + dt_bias))


def write_strength(x: Tensor, negative_eigenvalues: bool = False) -> Tensor:
    return (2 if negative_eigenvalues else 1) * torch.sigmoid(x)
