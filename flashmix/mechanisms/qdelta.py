"""Q-Delta: a delta rule that corrects a mixture of the readouts under the key and the query."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, check_per_head, engine_options, unrounded
from flashmix.mechanisms.gated_deltanet import GatedDeltaNet
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.input_linear import InputLinear
from flashmix.op.checks import dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule
from flashmix.ops.recurrence.call import check_operands

FEEDBACK_BIAS = -0.9  # of the layer's lambda, so that initially about a third of the query is mixed in


@public
@engine_options
@unrounded("q", "k", "v")
def qdelta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    feedback_gate: Tensor,
    **options: Unpack[EngineOptions],
) -> Result:
    """Q-Delta: the correction reads the state under the key and, weighted, under the query.

        S = e^{g_t} S_{t-1};  S_t = S + beta_t k_t (v_t - S^T (k_t + lambda_t q_t))^T;  o_t = scale S_t^T q_t

    With `lambda = 0` it is `gated_deltanet`. Keys and queries have length 1 in the paper (`flashmix.l2_norm`); `scale` is not applied to
    the query in the correction.

    Args:
        log_decay: `g`, at most 0, `[B, T, HV]`.
        feedback_gate: `lambda`, in [0, 1] (or 2), `[B, T, HV]`.

    Source: Park, Kim, Park 2026 (arXiv 2606.08804), section 3.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> qdelta(q / 4, k / 4, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4), torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    check_operands(q, v, {"k": k}, beta, log_decay, options.get("initial_state"), options.get("cu_seqlens"))
    check_per_head("feedback_gate", feedback_gate, "q", q, *v.shape[:3])
    group, wide = v.shape[2] // q.shape[2], state_dtype(q.dtype)
    per_head_q, per_head_k = (x.repeat_interleave(group, 2) for x in (q, k))
    strength = (beta.to(wide) * log_decay.to(wide).exp()).unsqueeze(-1)
    erase = strength * (per_head_k + feedback_gate.to(wide).unsqueeze(-1) * per_head_q)
    return delta_rule(q, k, v, beta, log_decay, erase=erase.to(k.dtype), write=k, **options)


class QDelta(GatedDeltaNet):
    """Gated DeltaNet with query feedback: `lambda = sigmoid(W x - 0.9)` per token and head of values.

    Args: those of `DeltaNet`; `negative_eigenvalues` lets `lambda` reach 2 like `beta`.

    Source: Park, Kim, Park, arXiv:2606.08804, section 3 and appendix B.

    Example:
        >>> import torch
        >>> QDelta(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    has_step = False

    def make_parameters(self, **placement: Any) -> None:
        super().make_parameters(**placement)
        self.feedback = InputLinear(self.width, self.value_heads, **placement)

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        return qdelta(
            q, k, v, *self.beta_and_decay(x), self.write_strength(self.feedback(x) + FEEDBACK_BIAS), **options
        )


register(
    Mechanism(
        title="Q-Delta",
        paper="2606.08804",
        function=qdelta,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH feedback_gate:BTH",
        wide=("feedback_gate",),
        layer=QDelta,
        preset=by_heads,
    )
)
