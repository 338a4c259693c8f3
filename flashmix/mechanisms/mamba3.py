"""Mamba-3: a decay, a rotation and a trapezoidal write per token, with one or several keys, queries and values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import at_step, check_per_head, check_states, unrounded
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import DecayWeight, draw_step_bias
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.op.checks import check_multiple, check_range, check_shape, check_tensor, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.cumulative_rotary import CumulativeRotaryCall, cumulative_rotary
from flashmix.ops.gated_product.op import swiglu
from flashmix.ops.own_write import with_own_write
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.token_shift import shifted

Mamba3States = tuple[Tensor, Tensor, Tensor, Tensor]


@public
@unrounded("x", "B", "C")
def mamba3(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    trapezoid_gate: Tensor,
    B: Tensor,
    C: Tensor,
    angles: Tensor,
    *,
    D: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Mamba3States | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Mamba3States | None]:
    """Mamba-3: a state space with a complex decay, discretised by the trapezoidal rule.

        theta_t = theta_{t-1} + dt_t angles_t;  k_t = R(theta_t) B_t;  q_t = R(theta_t) C_t;  a_t = e^{g_t}
        S_t = a_t S_{t-1} + (1 - lambda_t) dt_t a_t k_{t-1} x_{t-1}^T + lambda_t dt_t k_t x_t^T;  y_t = scale S_t^T q_t + D x_t

    `R` rotates each of the first `M` pairs of neighbouring channels by its own angle. With an axis of ranks (MIMO) a token writes
    `sum_r k_r x_r^T` in place of `k x^T`, and each of its queries reads the state. The paper normalises `B` and `C` and adds a bias
    per head. The token before a sequence's first one is in the state, by default zeros.

    Args:
        x: inputs `[B, T, H, P]`, or `[B, T, R, H, P]` with R ranks.
        dt: step sizes, at least 0, after their softplus, `[B, T, H]`.
        log_decay: `g`, the decay rate times the step size, at most 0, `[B, T, H]`.
        trapezoid_gate: `lambda`, in [0, 1], `[B, T, H]`; 1 is Mamba-2's write.
        B, C: keys and queries `[B, T, G, N]` or `[B, T, R, G, N]`; `H` is a multiple of `G`.
        angles: radians per unit of the step size, `[B, T, H, M]`, `2 M <= N`; the paper's are `pi tanh(.)`.
        D: skip weight `[H]`, or None.
        initial_state: `theta`, `S`, and `k` and `x` of the last token, `([N, H, M], [N, H, N, P], [N, H, N], [N, H, P])`, with ranks the
            last two `[N, R, H, N]` and `[N, R, H, P]`; float32 (float64 for float64 inputs).

    Returns:
        Output like `x`, and the states or None.

    Source: Lahoti et al. 2026 (arXiv 2603.15569), section 3.

    Example:
        >>> x, dt, keys = torch.randn(1, 10, 4, 16), torch.rand(1, 10, 4), torch.randn(1, 10, 4, 32)
        >>> y, (theta, S, k, v) = mamba3(x, dt, -dt, torch.rand(1, 10, 4), keys, keys, torch.randn(1, 10, 4, 8), return_state=True)
        >>> y.shape, theta.shape, S.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 8]), torch.Size([1, 4, 32, 16]))
    """
    packing = _checked(x, dt, B, C, cu_seqlens)
    H, P = x.shape[-2:]
    batch, T, K = *x.shape[:2], C.shape[-1]
    for name, gate in (("log_decay", log_decay), ("trapezoid_gate", trapezoid_gate)):
        check_per_head(name, gate, "x", x, batch, T, H)
    M = dims("angles", angles, "B T H M")[3]
    check_per_head("angles", angles, "x", x, batch, T, H, min(M, K // 2))
    if D is not None:
        check_per_head("D", D, "x", x, H)
    N, ranks = batch if packing is None else packing.count, x.shape[2:-2]
    check_states(initial_state, x, (N, H, M), (N, H, K, P), (N, *ranks, H, K), (N, *ranks, H, P), like_name="x")
    turned, S, last_k, last_x = initial_state or (None, None, None, None)
    # S without the token's own write decays as a whole: a_t (S_{t-1} + (1 - lambda_t) dt_t k_{t-1} x_{t-1}^T)
    rotation = CumulativeRotaryCall(B, C, angles, dt, log_decay, trapezoid_gate, turned, last_k, packing)
    q, late_k, turned, last_k, last_own = cumulative_rotary(rotation, impl)
    x_before, last_x = shifted(x, last_x, packing)
    own = trapezoid_gate.to(last_own.dtype) * dt.to(last_own.dtype)
    options: dict[str, Any] = {"initial_state": S, "return_state": return_state, "impl": impl, "scale": scale}
    if ranks:
        y, S = _of_ranks(q, late_k, x_before, log_decay, packing, options)
        y = _with_own_ranks(y, B, C, x, scale * own, D)
    else:
        y, S = linear_attention(q, late_k, x_before, log_decay, cu_seqlens=packing, **options)
        y = with_own_write(y, x, B, C, own, D, scale, impl)
    if S is None:
        return y, None
    written = (_per_head(last_own, last_k) * last_k).unsqueeze(-1) * last_x.unsqueeze(-2)
    written = written.sum(1) if ranks else written
    return y, (turned, S + written, last_k, last_x)


def _checked(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor | Packing | None) -> Packing | None:
    """Raises unless inputs, keys and queries fit one another; returns the packing."""
    check_tensor("C", C)
    if C.dim() == 5:
        R = C.shape[2]
        if R < 1:
            raise ValueError(f"C must have shape [B, T, R, G, N] with R >= 1, got {list(C.shape)}")
        sizes = dims("x", x, "B T R H P")
        check_shape("x", x, *sizes[:2], R, *sizes[3:])
        check_shape("B", B, *C.shape)
        x, B, C = x[:, :, 0], B[:, :, 0], C[:, :, 0]
    names = {"q": "C", "k": "B", "v": "x", "beta": "dt"}
    return check_operands(C, x, {"k": B}, dt, None, None, cu_seqlens, names)


def _per_head(weight: Tensor, like: Tensor) -> Tensor:
    """`weight` `[..., H]` beside `like` `[..., H, K]` or `[..., R, H, K]`."""
    return (weight if weight.dim() == like.dim() - 1 else weight.unsqueeze(-2)).unsqueeze(-1)


def _with_own_ranks(y: Tensor, B: Tensor, C: Tensor, x: Tensor, own: Tensor, D: Tensor | None) -> Tensor:
    """`with_own_write` of tokens with ranks, each of which reads the writes of all; `own` `[B, T, H]`."""
    H, wide = x.shape[-2], own.dtype
    scores = (
        torch.einsum("btahk,btchk->bthac", *(repeat_heads(t, H, -2).to(wide).contiguous() for t in (C, B)))
        * own[..., None, None]
    )
    read = torch.einsum("bthac,btchp->btahp", scores, x.to(wide))
    return (y + (read if D is None else read + D[:, None] * x)).to(y.dtype)


def _of_ranks(
    q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor, packing: Packing | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` whose tokens write and read once a rank: the ranks are tokens, and the writes of later ranks are added."""
    T, R = x.shape[1:3]
    flat_q, flat_k, flat_x = (t.flatten(1, 2) for t in (q, k, x))
    packing = None if packing is None else packing.repeat(R)
    y, S = linear_attention(flat_q, flat_k, flat_x, at_step(log_decay, R, 0), cu_seqlens=packing, **options)
    wide = state_dtype(x.dtype)
    later = torch.einsum("btahk,btchk->bthac", q.to(wide), k.to(wide)).triu(1)
    y = y.unflatten(1, (T, R)) + options["scale"] * torch.einsum("bthac,btchp->btahp", later, x.to(wide))
    return y.to(x.dtype), S


class Mamba3(Mixer[RecurrentCache]):
    """The Mamba-3 block: normalised keys and queries with a bias per head, decays, angles and write weights from the input, a silu gate.

        dt = softplus(W x + b);  g = -dt max(floor, a + 1 if a >= 0, else 1 / (1 - a));  lambda = sigmoid(.);  angles = pi tanh(.)

    Args:
        width: channels of the input and output.
        heads: number of heads; the inner width is `heads * head_dim`.
        head_dim: channels of a head's `x`; default `2 width / heads`.
        state_dim: channels of `B` and `C`.
        groups: heads of `B` and `C` before their bias; each serves `heads / groups` heads of `x`.
        ranks: keys, queries and values per token (MIMO); 1: one each (SISO), without the weights that make several.
        angles: pairs of channels of `B` and `C` that are rotated; default `state_dim / 4`, half of the channels.
        floor: the least decay rate.
        eps: of the norms of `B` and `C`.

    Source: Lahoti et al., arXiv:2603.15569, section 3.

    Example:
        >>> Mamba3(32, heads=4, state_dim=16, ranks=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        ranks: int = 1,
        angles: int | None = None,
        floor: float = 1e-4,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_multiple("heads", heads, "groups", groups)
        check_range("state_dim", state_dim, 1, 256)
        check_range("ranks", ranks, 1, 64)
        angles = state_dim // 4 if angles is None else angles
        check_range("angles", angles, 0, state_dim // 2)
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.head_dim, self.floor = heads, head_size(2 * width, heads, head_dim), floor
        value, key = (heads, self.head_dim), (ranks, groups, state_dim)
        by_head = (heads,)
        gates = {"step": by_head, "rate": by_head, "trapezoid": by_head, "angles": (angles,)}
        self.input = HeadProjection(width, x=value, gate=value, B=key, C=key, device=device, dtype=dtype, **gates)
        self.key_norm, self.query_norm = (RMSNorm(state_dim, eps, **placement) for _ in range(2))
        self.key_bias, self.query_bias = (
            nn.Parameter(torch.ones(ranks, heads, state_dim, **placement)) for _ in range(2)
        )
        self.step_bias, self.skip = DecayWeight(heads, **placement), nn.Parameter(torch.ones(heads, **placement))
        draw_step_bias(self.step_bias.weight)
        self.rank_weights = nn.Parameter(torch.ones(3, ranks, *value, **placement)) if ranks > 1 else None
        if self.rank_weights is not None:  # of x, the gate and the output
            with torch.no_grad():
                self.rank_weights[::2] /= ranks
        self.output = nn.Linear(heads * self.head_dim, width, bias=False, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        values, gate, B, C, step, rate, trapezoid, angles = self.input(x)
        B = self._per_head(self.key_norm(B), self.key_bias, values)
        C = self._per_head(self.query_norm(C), self.query_bias, values)
        if self.rank_weights is not None:
            weights = self.rank_weights.to(values.dtype)
            values, gate = (t.unsqueeze(2) * weight for t, weight in zip((values, gate), weights, strict=False))
        wide = state_dtype(values.dtype)
        dt = softplus(step.to(wide) + self.step_bias())
        rate, angles = rate.to(wide), math.pi * torch.tanh(angles.to(wide))
        rate = (rate.clamp(min=0) + 1 / (1 - rate.clamp(max=0))).clamp(min=self.floor)
        angles = angles.unsqueeze(2).expand(*step.shape, angles.shape[-1])
        gates = (-rate * dt, torch.sigmoid(trapezoid.to(wide)))
        y = carried(mamba3, values, dt, *gates, B, C, angles, cache=cache, packing=packing, D=self.skip)
        y = swiglu(gate, y)
        return self.output((y if self.rank_weights is None else (y * weights[2]).sum(2)).flatten(2))

    def _per_head(self, key: Tensor, bias: Tensor, like: Tensor) -> Tensor:
        """Keys or queries `[B, T, R, G, N]` with their bias per head, without the axis of ranks where there is one rank."""
        key = (key.repeat_interleave(self.heads // key.shape[3], 3) + bias).to(like.dtype)
        return key.squeeze(2) if self.rank_weights is None else key


def state_of_twice_the_heads(size: Size) -> list[Options]:
    """Twice as many heads as attention would have, and a state of twice their channels, as for Mamba-2."""
    return size.depth * [{"heads": 2 * size.heads, "state_dim": 2 * size.head_dim}]


register(
    Mechanism(
        title="Mamba-3",
        paper="2603.15569",
        function=mamba3,
        call="x:BTHK dt:BTH log_decay:BTH trapezoid_gate:BTH B:BTHK C:BTHK angles:BTHR",
        positive=("trapezoid_gate",),
        wide=("trapezoid_gate", "angles"),
        layer=Mamba3,
        preset=state_of_twice_the_heads,
    )
)
