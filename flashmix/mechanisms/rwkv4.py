"""RWKV-4: an average over the past whose weights decay by channel, the own token with a weight of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import check_elementwise, check_per_head, check_states
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import DecayWeight
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.scan.call import check_decays
from flashmix.ops.token_shift.op import token_shift
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.op import wkv

AverageStates = tuple[Tensor, Tensor, Tensor]


@public
def rwkv4(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    initial_state: AverageStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, AverageStates | None]:
    """RWKV-4: in each channel an average of the values so far, by their keys and their age; the own token has a bonus instead of an age.

        o_t = (a_{t-1} + e^{u + k_t} v_t) / (b_{t-1} + e^{u + k_t})
        a_t = e^w a_{t-1} + e^{k_t} v_t;  b_t = e^w b_{t-1} + e^{k_t}

    The state holds both sums divided by `e^m` with `m_t = max(m_{t-1} + w, k_t)`, which is a constant in gradients. Computed in float32
    (float64 for float64 inputs).

    Args:
        k, v: keys and values `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        log_decay: `w`, at most 0, `[D]` or `[H, D]`, any floating dtype: `-e^{time_decay}` of the released models.
        bonus: `u`, like `log_decay`.
        initial_state: `(a e^{-m}, b e^{-m}, m)`, each `[N, D]` or `[N, H, D]`, float32 (float64 for float64 inputs); by default zeros,
            zeros and -inf.

    Source: Peng et al. 2023 (arXiv 2305.13048), equation 16, and appendix D for `m`.

    Example:
        >>> import torch
        >>> k, v = torch.randn(2, 1, 10, 32)
        >>> o, (a, b, m) = rwkv4(k, v, -torch.rand(32), torch.zeros(32), return_state=True)
        >>> o.shape, m.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32]))
    """
    packing = check_elementwise({"cu_seqlens": cu_seqlens}, k=k, v=v)
    check_per_head("log_decay", log_decay, "k", k, *k.shape[2:])
    check_per_head("bonus", bonus, "k", k, *k.shape[2:])
    shape = (k.shape[0] if packing is None else packing.count, *k.shape[2:])
    check_states(initial_state, k, shape, shape, shape, like_name="k")
    check_decays(log_decay)
    wide = state_dtype(k.dtype)
    if initial_state is None:
        zeros = torch.zeros(shape, dtype=wide, device=k.device)
        initial_state = zeros, zeros, torch.full_like(zeros, -torch.inf)
    w, u = log_decay.to(wide), bonus.to(wide)
    o, a, b, m = wkv(WkvCall(k, v, w, u, *initial_state, packing=packing), impl)
    return o, (a, b, m.detach()) if return_state else None


class RWKV4(Mixer[RecurrentCache]):
    """The time mixing of RWKV-4: each projection sees a mix of the token and the one before; a sigmoid gate on the average.

    Args:
        width: channels of the input and output.
        inner: channels of keys and values; default `width`.

    Source: Peng et al., arXiv:2305.13048, section 3.1.

    Example:
        >>> import torch
        >>> RWKV4(32)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        *,
        inner: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        placement: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.inner = width if inner is None else inner

        def parameter(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype))

        self.key_mix, self.value_mix, self.receptance_mix = (parameter(width) for _ in range(3))
        self.decay, self.bonus = DecayWeight(self.inner, device=device, dtype=dtype), parameter(self.inner)
        self.key, self.value, self.receptance = (nn.Linear(width, self.inner, **placement) for _ in range(3))
        self.output = nn.Linear(self.inner, width, **placement)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Memories of a tenth of a token to 150 tokens, and bonuses around the logarithm of 0.3 (appendix E)."""
        for mix in (self.key_mix, self.value_mix, self.receptance_mix):
            mix.copy_(torch.linspace(0.0, 1.0, self.width))
        self.decay.weight.copy_(8.0 * torch.linspace(0.0, 1.0, self.inner) ** 1.3 - 5.0)
        self.bonus.copy_(-1.2 + 0.5 * ((torch.arange(self.inner) + 1) % 3 - 1))

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        before, recent = token_shift(
            x, initial_state=None if cache is None else cache.recent, return_state=cache is not None, cu_seqlens=packing
        )
        step = x - before
        r, k, v = (
            project(torch.addcmul(before, step, mix.to(x.dtype)))
            for project, mix in (
                (self.receptance, self.receptance_mix),
                (self.key, self.key_mix),
                (self.value, self.value_mix),
            )
        )
        o = carried(rwkv4, k, v, -self.decay().exp(), self.bonus, cache=cache, packing=packing)
        if cache is not None:
            cache.recent = recent
        return self.output(torch.sigmoid(r) * o)


def by_width(size: Size) -> list[Options]:
    """No options; the model's SwiGLU stands for RWKV's channel mixing."""
    return [{} for _ in range(size.depth)]


register(
    Mechanism(
        title="RWKV-4",
        paper="2305.13048",
        function=rwkv4,
        call="k:BTHK v:BTHK log_decay:HK bonus:HK",
        wide=("bonus",),
        layer=RWKV4,
        preset=by_width,
    )
)
