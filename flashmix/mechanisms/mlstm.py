"""mLSTM, the matrix memory of xLSTM: exponential gates, kept in range by their running maximum, and a normaliser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import check_states, normaliser, scan_beside, unrounded
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.op.checks import check_choice, check_floating, check_like, check_range, check_shape
from flashmix.op.choose import preparing
from flashmix.op.dtypes import at_least_float32, state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.norm.op import group_norm
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands
from flashmix.ops.scaled_rows.op import IMPLEMENTATIONS, scaled_rows
from flashmix.ops.scan.op import finite, scan_max

LARGEST_HEAD = 256  # channels of a value that kernels hold; larger values are several heads on one key
MemoryStates = tuple[Tensor, Tensor, Tensor]


@public
@unrounded("q", "k", "v")
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_write: Tensor,
    log_forget: Tensor,
    *,
    scale: float | None = None,
    eps: float = 0.0,
    initial_state: MemoryStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MemoryStates | None]:
    """mLSTM: linear attention with an exponential input gate, divided by what its normaliser `n` reads, or by 1 where that is less.

        m_t = max(log f_t + m_{t-1}, log i_t);  f' = f_t e^{m_{t-1} - m_t},  i' = i_t e^{-m_t}
        C_t = f' C_{t-1} + i' k_t v_t^T;  n_t = f' n_{t-1} + i' k_t
        o_t = scale C_t^T q_t / (max(|scale n_t . q_t|, e^{-m_t}) + eps)

    Without `eps` the maximum `m` cancels: it only keeps numbers in range. In gradients it is a constant, of the last state as well.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]` of any `V`; `HV` is a multiple of `H`.
        log_write: `log i` `[B, T, H]`, any floating dtype: the logit of an exponential gate, `logsigmoid` of that of a sigmoid one.
        log_forget: `log f`, at most 0, like `log_write`: `logsigmoid` of the gate's logit.
        eps: added to the divisor; the released models have 1e-6.
        initial_state: `(C, n, m)`, `([N, HV, K, V], [N, H, K], [N, H])`, float32 (float64 for float64 inputs); default zeros.

    Source: Beck et al. 2024 (arXiv 2405.04517), equations 19 to 27; the sigmoid input gate: arXiv 2503.14376.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> o, (C, n, m) = mlstm(q, k, v, torch.randn(1, 10, 4), -torch.rand(1, 10, 4), return_state=True)
        >>> o.shape, n.shape, m.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]), torch.Size([1, 4]))
    """
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    for name, gate in (("log_write", log_write), ("log_forget", log_forget)):
        check_shape(name, gate, *q.shape[:3])
        check_floating(name, gate)
        check_like(name, gate, "q", q, dtype=False)
    N, H, K = q.shape[0] if packing is None else packing.count, *q.shape[2:]
    check_states(initial_state, q, (N, *v.shape[2:3], K, v.shape[3]), (N, H, K), (N, H))
    wide = state_dtype(q.dtype)
    if initial_state is None:
        C, n, m = None, None, q.new_zeros(N, H, dtype=wide)
    else:
        C, n, m = initial_state
        past = torch.exp(m - finite(m.detach())).unsqueeze(-1)  # 1, through which the gradient of m_0 passes
        C, n = C * past.repeat_interleave(v.shape[2] // H, 1).unsqueeze(-1), n * past
    write, decay, m_t, m = stabilised(log_write.to(wide), log_forget.to(wide), m, packing, impl)
    k = scaled(k, write, impl)
    given: dict[str, Any] = {"return_state": return_state, "cu_seqlens": packing, "impl": impl}
    # First the normaliser, whose backward is then the later: its gradients of q and k are not there at the peak of the other's.
    weight, n = normaliser(q, k, decay, initial_state=n, scale=scale, **given)
    o, C = large_values(q, k, v, decay, initial_state=C, scale=scale, **given)
    divisor = torch.maximum(weight.abs(), torch.exp(-m_t).unsqueeze(-1)) + eps
    divisor = divisor.repeat_interleave(v.shape[2] // H, 2)
    o = scaled(o, 1 / divisor.squeeze(-1), impl)
    return o, None if C is None or n is None else (C, n, m)


def scaled(x: Tensor, factor: Tensor, impl: str) -> Tensor:
    """`factor x` of `x [B, T, H, D]`, a factor `[B, T, H]`, in the dtype of `x`."""
    with preparing():
        return scaled_rows(x, factor, impl if impl in [one.name for one in IMPLEMENTATIONS] else "auto")


def stabilised(
    log_write: Tensor, log_forget: Tensor, m: Tensor, packing: Packing | None, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`i'`, `log f'` and `m_t` of each token `[B, T, H]`, and the last `m` `[N, H]`, from that before the first token."""
    write, forget = log_write.detach(), log_forget.detach()
    before, last = scan_beside(
        write, forget, op=scan_max, initial_state=m.detach(), packing=packing, read_before=True, impl=impl
    )
    m_t = torch.maximum(before + forget, write)
    base = finite(m_t)
    return torch.exp(log_write - base), log_forget + before - base, m_t, last


def large_values(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, initial_state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` with a decay per key head `[B, T, H]`, values of any width: those above `LARGEST_HEAD` as several heads."""
    HV, V = v.shape[2:]
    least = -(-V // LARGEST_HEAD)
    parts = next((n for n in range(least, 4 * least) if V % n == 0), 1)
    decay = log_decay.repeat_interleave(parts * HV // log_decay.shape[2], 2)
    if parts == 1:
        return linear_attention(q, k, v, decay, initial_state=initial_state, **options)
    if initial_state is not None:
        initial_state = initial_state.unflatten(-1, (parts, -1)).transpose(2, 3).flatten(1, 2)
    o, state = linear_attention(
        q, k, v.unflatten(-1, (parts, -1)).flatten(2, 3), decay, initial_state=initial_state, **options
    )
    if state is not None:
        state = state.unflatten(1, (HV, parts)).transpose(2, 3).flatten(3)
    return o.unflatten(2, (HV, parts)).flatten(3), state


class MLSTM(Mixer[RecurrentCache]):
    """The mLSTM layer of xLSTM-7B: capped gates, a layer norm of each head's output, and a sigmoid gate.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default half of `width / heads`.
        value_dim: channels of a value; default `width / heads`.
        input_gate: "exponential" or "sigmoid".
        gate_cap: logits of both gates are kept between `-gate_cap` and it, by a tanh.
        eps: of the norm.
        divisor_eps: added to what the normaliser gives.

    Source: Beck et al., arXiv:2503.13427, section 3; the sigmoid input gate: arXiv:2503.14376.

    Example:
        >>> import torch
        >>> MLSTM(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        input_gate: str = "exponential",
        gate_cap: float = 15.0,
        eps: float = 1e-6,
        divisor_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_choice("input_gate", input_gate, "exponential", "sigmoid")
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.head_dim = heads, head_size(width // 2, heads, head_dim)
        self.value_dim = 2 * head_size(width // 2, heads, None) if value_dim is None else value_dim
        check_range("value_dim", self.value_dim, 1, 65536)
        self.input_gate, self.gate_cap, self.eps, self.divisor_eps = input_gate, gate_cap, eps, divisor_eps
        key, value = (heads, self.head_dim), (heads, self.value_dim)
        self.qkvg = HeadProjection(width, q=key, k=key, v=value, gate=value, **placement)
        self.gates = nn.Linear(width, 2 * heads, **placement)
        self.norm_weight = nn.Parameter(torch.empty(heads * self.value_dim, **placement))
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, **placement)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Input gates that begin nearly closed and forget gates that begin nearly open, as in the released code."""
        nn.init.ones_(self.norm_weight)
        start = torch.full((2, self.heads), -10.0)
        start[1] = torch.linspace(3.0, 6.0, self.heads)
        self.gates.bias.copy_(start.flatten())

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, gate = self.qkvg(x)
        logits = self.gate_cap * torch.tanh(at_least_float32(self.gates(x)) / self.gate_cap)
        write, forget = logits.chunk(2, dim=-1)
        write = logsigmoid(write) if self.input_gate == "sigmoid" else write
        o = carried(mlstm, q, k, v, write, logsigmoid(forget), eps=self.divisor_eps, cache=cache, packing=packing)
        o = group_norm(
            o.flatten(2), self.heads, self.norm_weight, eps=self.eps, gate=gate.flatten(2), gate_activation="sigmoid"
        )
        return self.output(o)


def by_width(size: Size) -> list[Options]:
    """Heads of which the values have the size's channels, and the keys half of them."""
    return size.depth * [{"heads": size.heads}]


register(
    Mechanism(
        title="mLSTM",
        paper="2405.04517",
        function=mlstm,
        call="q:BTHK k:BTHK v:BTHK log_write:BTH log_forget:BTH",
        wide=("log_write", "log_forget"),
        layer=MLSTM,
        preset=by_width,
    )
)
