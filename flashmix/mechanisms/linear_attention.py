"""The first linear attention, with its normaliser."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import check_states, normaliser
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands

NormalisedStates = tuple[Tensor, Tensor]


class NormalisedOptions(TypedDict, total=False):
    """The options of a normalised linear attention beside `eps`."""

    initial_state: NormalisedStates | None
    return_state: bool
    cu_seqlens: Tensor | Packing | None
    impl: str


@public
def normalised_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    eps: float = 0.0,
    initial_state: NormalisedStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, NormalisedStates | None]:
    """The first linear attention: the output is an average of the values, its weights divided by their sum.

        S_t = S_{t-1} + k_t v_t^T;  z_t = z_{t-1} + k_t;  o_t = S_t^T q_t / (q_t . z_t + eps)

    Queries and keys are features, positive so that no sum is 0 (the paper's are `elu(x) + 1`); a scale would cancel. Where all features
    of a query may be 0, as with relu, a positive `eps` gives 0 and not NaN.

    Args:
        q, k: features of queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        eps: added to the sum of the weights.
        initial_state: `(S, z)`, `([N, HV, K, V], [N, H, K])`, float32 (float64 for float64 inputs).

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 10 to 12.

    Example:
        >>> q, k, v = torch.rand(3, 1, 10, 4, 16)
        >>> o, (S, z) = normalised_linear_attention(q, k, v, return_state=True)
        >>> o.shape, z.shape
        (torch.Size([1, 10, 4, 16]), torch.Size([1, 4, 16]))
    """
    packing = check_operands(q, v, {"k": k}, None, None, None, cu_seqlens)
    N = q.shape[0] if packing is None else packing.count
    check_states(initial_state, q, (N, v.shape[2], q.shape[3], v.shape[3]), (N, *q.shape[2:]))
    S, z = (None, None) if initial_state is None else initial_state
    given: dict[str, Any] = {"scale": 1.0, "return_state": return_state, "cu_seqlens": packing, "impl": impl}
    weight, z = normaliser(q, k, initial_state=z, **given)  # first, as in `mlstm`
    o, S = linear_attention(q, k, v, initial_state=S, **given)
    if eps:
        weight = weight + eps
    o = o / weight.repeat_interleave(v.shape[2] // q.shape[2], 2)
    return o, None if S is None or z is None else (S, z)


class LinearAttention(Mixer[RecurrentCache]):
    """The first linear attention: features `elu(x) + 1`, and the output divided by the sum of its weights.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `width / heads`.

    Source: Katharopoulos et al., arXiv:2006.16236, equations 7 and 10 to 12.

    Example:
        >>> import torch
        >>> LinearAttention(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        k, v = (heads, self.head_dim), (heads, self.value_dim)
        self.qkv = HeadProjection(width, q=k, k=k, v=v, device=device, dtype=dtype)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v = self.qkv(x)
        o = carried(normalised_linear_attention, elu(q) + 1, elu(k) + 1, v, cache=cache, packing=packing)
        return self.output(o.flatten(2))


register(
    Mechanism(
        title="Linear attention",
        paper="2006.16236",
        function=normalised_linear_attention,
        call="q:BTHK k:BTHK v:BTHK",
        positive=("q", "k"),
        layer=LinearAttention,
        mixer="linear_attention",
        preset=by_heads,
    )
)
