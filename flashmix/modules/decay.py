"""Log decays `g <= 0` and write strengths `beta` as functions of projections of the input.

Decays are computed and returned in float32 (float64 for float64 inputs): they are summed over many tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from flashmix.op.checks import check_range
from flashmix.op.dtypes import at_least_float32
from flashmix.op.public import Public
from flashmix.op.softplus import softplus
from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength

RWKV7_STRONGEST = -math.exp(-0.5)  # -0.6065: no channel of RWKV-7 forgets more than 45 % per token


@torch.no_grad()
def draw_step_bias(bias: Tensor, step_range: tuple[float, float] = (1e-3, 0.1)) -> None:
    """Draws `bias` so that `softplus(bias)` is log-uniform in `step_range`."""
    low, high = (math.log(step) for step in step_range)
    step = torch.empty_like(bias, dtype=torch.float32).uniform_(low, high).exp_()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


class ExactParameters(Public, nn.Module):
    """A module whose parameters stay float32 where those of others are cast to 16 bits: rates of decays, which add up over tokens."""

    reads: tuple[str, ...] = ()  # methods that read them, besides `forward`


class MambaDecay(ExactParameters):
    """The decay of Mamba-2, Gated DeltaNet and (per channel) KDA: `g = -exp(A_log) softplus(x + dt_bias)`.

    Args:
        heads: number of heads, one `A_log` each.
        channels: None for one decay per head (`x` is `[..., H]`), else the channels of a head (`x` is `[..., H, K]`).
        step_range: the step `softplus(dt_bias)` is log-uniform between these at initialisation.
        rate_range: the rate `exp(A_log)` is uniform between these at initialisation.

    Source: Dao and Gu, arXiv:2405.21060, section 7; Kimi Linear, arXiv:2510.26692, section 4.

    Example:
        >>> import torch
        >>> MambaDecay(4)(torch.randn(2, 5, 4)).shape, MambaDecay(4, 8)(torch.randn(2, 5, 4, 8)).shape
        (torch.Size([2, 5, 4]), torch.Size([2, 5, 4, 8]))
    """

    reads = ("step_size", "rate")

    def __init__(
        self,
        heads: int,
        channels: int | None = None,
        *,
        step_range: tuple[float, float] = (1e-3, 0.1),
        rate_range: tuple[float, float] = (1.0, 16.0),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.step_range = step_range
        self.rate_range = rate_range
        shape = (heads,) if channels is None else (heads, channels)
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(size=shape, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(*self.rate_range).log_()
        draw_step_bias(self.dt_bias, self.step_range)

    def step_size(self, x: Tensor) -> Tensor:
        """`softplus(x + dt_bias)`, the `dt` of Mamba-2."""
        return softplus(at_least_float32(x) + self.dt_bias)

    def rate(self) -> Tensor:
        """`-exp(A_log)`, `[H]`, negative."""
        return -at_least_float32(self.A_log).exp()

    def forward(self, x: Tensor) -> Tensor:
        return softplus_decay(x, self.A_log, self.dt_bias)


class SelectiveDecay(ExactParameters):
    """The rates and the bias of the step sizes of Mamba-1: `A = -exp(A_log)`, `dt = softplus(x + dt_bias)`.

    Args:
        channels: of the selective scan.
        states: numbers of a channel's state; their rates start at 1, 2, ….

    Source: Gu and Dao, arXiv:2312.00752, section 3.6.

    Example:
        >>> A, dt_bias = SelectiveDecay(4, 3)()
        >>> A.shape, dt_bias.shape
        (torch.Size([4, 3]), torch.Size([4]))
    """

    def __init__(
        self, channels: int, states: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(channels, states, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).float().log())
        draw_step_bias(self.dt_bias)

    def forward(self) -> tuple[Tensor, Tensor]:
        """`A` `[channels, states]` and `dt_bias` `[channels]`."""
        return -at_least_float32(self.A_log).exp(), at_least_float32(self.dt_bias)


class DecayWeight(ExactParameters):
    """A weight of a decay, `weight` of any shape, which the caller fills.

    Example:
        >>> DecayWeight(2, 3)().shape
        torch.Size([2, 3])
    """

    def __init__(self, *shape: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """The weight, in float32 or float64."""
        return at_least_float32(
            self.weight
        ).clone()  # FSDP2 marks what a module returns, which is not to be its parameter


class BoundedDecay(ExactParameters):
    """A decay with a floor, per channel: `g = lower * sigmoid(exp(A_log) (x + dt_bias))`.

    Args:
        heads: number of heads, one `A_log` each.
        channels: None for one decay per head (`x` is `[..., H]`), else the channels of a head (`x` is `[..., H, K]`).
        lower: the strongest log decay, in [-5, 0).

    Raises:
        ValueError: `lower` is out of its range.

    Source: Kimi Linear, arXiv:2510.26692 (the bounded decay of the released models).

    Example:
        >>> import torch
        >>> g = BoundedDecay(4, 8)(100 * torch.randn(2, 5, 4, 8))
        >>> g.shape, bool(g.min() >= -5)
        (torch.Size([2, 5, 4, 8]), True)
    """

    def __init__(
        self,
        heads: int,
        channels: int | None = None,
        *,
        lower: float = -5.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("lower", lower, -5.0, -1e-6)
        self.lower = lower
        shape = (heads,) if channels is None else (heads, channels)
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(size=shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.A_log)
        nn.init.uniform_(self.dt_bias, -6.0, -2.0)  # memories of 1 / (5 sigmoid): about 2 to 80 tokens

    def forward(self, x: Tensor) -> Tensor:
        return bounded_decay(x, self.A_log, self.dt_bias, lower=self.lower)


class LogSigmoidDecay(Public, nn.Module):
    """The decay of GLA: `g = logsigmoid(x) / temperature`.

    Args:
        temperature: divides the log decay; a larger one forgets more slowly.

    Source: Yang et al., arXiv:2312.06635, section 4.4 (temperature 16).

    Example:
        >>> import torch
        >>> LogSigmoidDecay()(torch.zeros(1)).item()
        -0.043321698904037476
    """

    def __init__(self, temperature: float = 16.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        return logsigmoid(at_least_float32(x)) / self.temperature

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class RWKV7Decay(Public, nn.Module):
    """The decay of RWKV-7: `w = -e^{-1/2} sigmoid(x)`, between -0.6065 and 0.

    Source: Peng et al., arXiv:2503.14456, equation 11.

    Example:
        >>> import torch
        >>> round(RWKV7Decay()(torch.zeros(1)).item(), 4)
        -0.3033
    """

    def forward(self, x: Tensor) -> Tensor:
        return RWKV7_STRONGEST * torch.sigmoid(at_least_float32(x))


class RWKV6Decay(Public, nn.Module):
    """The decay of RWKV-6: `w = -e^x`, with `x` bounded at 8, where nothing is left of a state (`e^{-e^8} = 0` in float32).

    Source: Peng et al., arXiv:2404.05892, section 4 (Finch).

    Example:
        >>> import torch
        >>> RWKV6Decay()(torch.zeros(1)).item()
        -1.0
    """

    def forward(self, x: Tensor) -> Tensor:
        return -at_least_float32(x).clamp(max=8.0).exp()


class ForgetGate(Public, nn.Module):
    """The logarithm of HGRN-2's forget gate: `log(lower + (1 - lower) sigmoid(x))`.

    Args:
        lower: the least that is kept, in [0, 1); the paper's grows from layer to layer.

    Raises:
        ValueError: `lower` is out of its range.

    Source: Qin et al., arXiv:2404.07904, section 3.1; lower bounds: arXiv:2311.04823, section 3.2.

    Example:
        >>> import torch
        >>> round(ForgetGate(0.5)(torch.zeros(1)).exp().item(), 4)
        0.75
    """

    def __init__(self, lower: float = 0.0) -> None:
        super().__init__()
        check_range("lower", lower, 0.0, 1 - 1e-6)
        self.lower = lower

    def forward(self, x: Tensor, lower: Tensor | None = None) -> Tensor:
        """The log of the gate; `lower`, per channel, in place of the module's own."""
        x = at_least_float32(x)
        if lower is None and self.lower == 0:
            return logsigmoid(x)
        return torch.log1p(((self.lower if lower is None else lower) - 1) * torch.sigmoid(-x))

    def extra_repr(self) -> str:
        return f"lower={self.lower}"


class WriteStrength(Public, nn.Module):
    """The `beta` of a delta rule: `sigmoid(x)`, or `2 sigmoid(x)` where transitions may have negative eigenvalues.

    Args:
        negative_eigenvalues: whether `beta` reaches to 2 (reflections: the state can count modulo two) instead of 1.

    Source: Grazzi et al., arXiv:2411.12537, section 4.

    Example:
        >>> import torch
        >>> WriteStrength()(torch.zeros(1)).item(), WriteStrength(negative_eigenvalues=True)(torch.zeros(1)).item()
        (0.5, 1.0)
    """

    def __init__(self, negative_eigenvalues: bool = False) -> None:
        super().__init__()
        self.negative_eigenvalues = negative_eigenvalues

    def forward(self, x: Tensor) -> Tensor:
        return write_strength(x, negative_eigenvalues=self.negative_eigenvalues)

    def extra_repr(self) -> str:
        return f"negative_eigenvalues={self.negative_eigenvalues}"
