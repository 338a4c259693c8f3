"""Oja's rule: the delta rule on the transposed state, then a read on the other axis."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, check_per_head, engine_options
from flashmix.mechanisms.kda import KDA
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.op.checks import dims
from flashmix.op.choose import choose
from flashmix.op.dtypes import at_least_float32, autocast, autocast_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence import delta_rule, linear_attention
from flashmix.ops.recurrence.call import RecurrenceCall, check_operands
from flashmix.ops.recurrence.op import IMPLEMENTATIONS


@public
@engine_options
def oja(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, **options: Unpack[EngineOptions]
) -> Result:
    """Oja's rule: each token writes the part of its key that the state does not return for its value yet.

        S = S_{t-1} diag(e^{g_t});  k~_t = beta_t (k_t - S v_t);  S_t = S + k~_t v_t^T;  o_t = scale S_t^T q_t

    It is stable for `|v| <= 1` (`flashmix.l2_norm`). With `S^T` for the state it is the delta rule with key `v` and value `k`,
    whose corrected values `k~` are the keys of a linear attention. The state is that of the delta rule, which corrects what it
    rounds; the linear attention sums its rounding, so that 16-bit operands are multiplied in float32 on every device.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; `HV` is a multiple of `H`.
        beta: write strength `[B, T, HV]`.
        log_decay: `g`, at most 0, for each channel of the values, `[B, T, HV, V]`; None: no decay.

    Source: Oja 1982 (Journal of Mathematical Biology 15); as a fast weight rule: Irie, Faccio, Schmidhuber 2022
    (arXiv 2206.01649).

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> oja(q, k, v / 4, torch.rand(1, 10, 4), -torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    if log_decay is not None:
        check_per_head("log_decay", log_decay, "q", q, *_values_shape(q, v))
    state = options.get("initial_state")
    packing = options["cu_seqlens"] = check_operands(q, v, {"k": k}, beta, None, state, options.get("cu_seqlens"))
    rounded = autocast_dtype(q)
    q, k, v = autocast(q, k, v)
    dtype = v.dtype
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    with nullcontext() if rounded is None else torch.autocast(q.device.type, enabled=False):
        o, state = _two_passes(q, k, v, beta, log_decay, packing, options)
    return o.to(dtype), state


def _two_passes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    packing: Packing | None,
    options: EngineOptions,
) -> Result:
    """The corrected keys `k~` and the state from the delta rule on `S^T`, the outputs from a linear attention with those keys."""
    state, impl = options.get("initial_state"), options.get("impl", "auto")
    group = v.shape[2] // q.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    second = RecurrenceCall(q, k, v, log_decay=log_decay, packing=packing, value_decay=log_decay is not None)
    choose("oja", IMPLEMENTATIONS, second, impl)  # both passes must run, and this one asks for more
    reader = v if log_decay is None else v * log_decay.to(v.dtype).exp()
    first: EngineOptions = {"scale": 1.0, "cu_seqlens": packing, "impl": impl, "return_state": True}
    first |= {"initial_state": None if state is None else state.mT.contiguous()}
    recalled, last = delta_rule(reader, v, k, beta, log_decay, read_before=True, **first)
    new = beta.to(k.dtype).unsqueeze(-1) * (k - recalled)
    wanted = options.pop("return_state", False)
    o, _ = linear_attention(q, new, v, value_log_decay=log_decay, **options)
    assert last is not None
    return o, last.mT.contiguous() if wanted else None


def _values_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    dims("q", q, "B T H K")
    return dims("v", v, "B T HV V")


class Oja(KDA):
    """Oja's rule with a decay per channel of the values, which have length 1; the rest is as in KDA.

    Args: those of `KDA`.

    Source: Irie, Faccio, Schmidhuber, arXiv:2206.01649 (the rule).

    Example:
        >>> import torch
        >>> Oja(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    def decay_channels(self) -> int:
        return self.value_dim

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        return oja(q, k, l2_norm(v), *self.beta_and_decay(x), **options)


register(
    Mechanism(
        title="Oja's rule",
        paper="2206.01649",
        function=oja,
        call="q:BTHK k:BTHK v:BTHK beta:BTH",
        layer=Oja,
        preset=by_heads,
    )
)
