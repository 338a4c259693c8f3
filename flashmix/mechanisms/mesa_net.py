"""MesaNet: at each token the least squares solution over the whole past, by conjugate gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried, convolved
from flashmix.mechanisms.common import check_per_head, check_states
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.norm import output_norm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.call import has_tangent
from flashmix.op.checks import check_range, dims
from flashmix.op.dtypes import at_least_float32
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.mesa.call import MesaCall
from flashmix.ops.mesa.op import mesa
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence.call import check_operands

MesaStates = tuple[Tensor, Tensor]


@public
def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    *,
    steps: int = 30,
    scale: float = 1.0,
    initial_state: MesaStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MesaStates | None]:
    """MesaNet: the output is what the linear map that fits all values up to now best makes of the query.

        R_t = e^{g_t} R_{t-1} + beta_t k_t k_t^T;  S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T
        x_t = (R_t + diag(ridge))^{-1} q_t;  o_t = scale S_t^T x_t

    `x` comes from conjugate gradients for all tokens at once, in float32 (float64 for float64 inputs) whatever comes in; on Hopper, of
    bfloat16 inputs, products have operands of 16 digits. Its gradient is that of the exact solution: a solve of the same kind in the
    backward, which keeps `x` alone.
    Keys and queries have length 1 in the paper (`flashmix.l2_norm`).

    Args:
        beta: write strengths, at least 0, `[B, T, HV]`.
        log_decay: `g`, at most 0, `[B, T, HV]`.
        ridge: what is added to the diagonal, positive, `[HV, K]`, any floating dtype; the paper's is at least 0.25.
        steps: of conjugate gradients, at least 1; after `K` of them the solution is exact but for rounding.
        initial_state: `(R, S)`, `([N, HV, K, K], [N, HV, K, V])`, float32 (float64 for float64 inputs), `R` symmetric.

    Source: von Oswald et al. 2025 (arXiv 2506.05233), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4)
        >>> mesa_net(q / 4, k / 4, v, beta, decay, torch.ones(4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    check_range("steps", steps, 1, 1000)
    dims("log_decay", log_decay, "B T HV")
    packing = check_operands(q, v, {"k": k}, beta, log_decay, None, cu_seqlens)
    (B, _, _, K), (HV, V) = q.shape, v.shape[2:]
    check_per_head("ridge", ridge, "q", q, HV, K)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, K, K), (N, HV, K, V))
    if has_tangent([q, k, v, beta, log_decay, ridge, *(initial_state or ())]):
        raise NotImplementedError("mesa_net has no forward-mode derivative")
    R, S = initial_state or (None, None)
    call = MesaCall(q, k, v, beta, log_decay, ridge, R=R, S=S, packing=packing, steps=steps, scale=float(scale))
    o, R, S = mesa(call, impl)
    return o, (R, S) if return_state else None


class MesaNet(Mixer[RecurrentCache]):
    """MesaNet: convolved queries and keys of length 1, strengths `sigmoid(W x + b)`, log decays `logsigmoid(W x + b)`, a learned ridge.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `head_dim`.
        conv_width: tokens that the short convolution of queries and keys sees; 0: there is none.
        conv_bias: whether it has a bias.
        output_gate: activation of the gate on the output, "silu" or "sigmoid", or "none".
        lower: the least ridge; at first it is 1.
        steps: of conjugate gradients.
        eps: of the norm of the output.

    Source: von Oswald et al., arXiv:2506.05233, section 3.

    Example:
        >>> MesaNet(32, heads=2, steps=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        conv_bias: bool = False,
        output_gate: str = "none",
        lower: float = 0.25,
        steps: int = 30,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("steps", steps, 1, 1000)
        check_range("lower", lower, 0.0, 1.0)
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_dim = head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, self.head_dim if value_dim is None else value_dim, "value_dim")
        self.lower, self.steps = lower, steps
        key, value = (heads, self.head_dim), (heads, self.value_dim)
        gate = value if output_gate != "none" else None
        self.qkvg = HeadProjection(width, q=key, k=key, v=value, gate=gate, **placement)
        self.strength_and_decay = nn.Linear(width, 2 * heads, **placement)
        self.ridge = nn.Parameter(torch.full(key, math.log(math.expm1(1 - min(lower, 0.999))), **placement))
        self.convolution = maybe_convolution(2 * heads * self.head_dim, conv_width, bias=conv_bias, **placement)
        self.norm = output_norm(self.value_dim, eps, output_gate, **placement)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        *qk, v, gate = self.qkvg(x)
        q, k = (l2_norm(part) for part in convolved(self.convolution, qk, packing, cache))
        strength, decay = at_least_float32(self.strength_and_decay(x)).chunk(2, dim=-1)
        gates = torch.sigmoid(strength), logsigmoid(decay), softplus(at_least_float32(self.ridge)) + self.lower
        o = carried(mesa_net, q, k, v, *gates, cache=cache, packing=packing, steps=self.steps)
        return self.output((self.norm(o) if gate is None else self.norm(o, gate)).flatten(2))


register(
    Mechanism(
        title="MesaNet",
        paper="2506.05233",
        function=mesa_net,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH ridge:HK",
        options={"steps": 12},
        positive=("ridge",),
        wide=("ridge",),
        layer=MesaNet,
        preset=by_heads,
    )
)
