"""sLSTM, the scalar memory of xLSTM: exponential gates, a normaliser, and gates that may see the output before."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.mechanisms.common import check_elementwise, check_per_head, check_states
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, check_whole
from flashmix.op.public import public
from flashmix.ops.slstm.call import SlstmCall
from flashmix.ops.slstm.op import slstm_cell

CellStates = tuple[Tensor, Tensor, Tensor, Tensor]


@public
def slstm(
    write: Tensor,
    forget: Tensor,
    candidate: Tensor,
    output: Tensor,
    recurrent: Tensor | None = None,
    *,
    initial_state: CellStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, CellStates | None]:
    """sLSTM: an LSTM with an exponential input gate and a normaliser; its gates may see the output before.

        i, f, z, o = (write, forget, candidate, output)_t + R y_{t-1}
        m_t = max(log sigmoid(f) + m_{t-1}, i);  f' = sigmoid(f) e^{m_{t-1} - m_t},  i' = e^{i - m_t}
        c_t = f' c_{t-1} + i' tanh(z);  n_t = f' n_{t-1} + i';  y_t = sigmoid(o) c_t / n_t

    The maximum `m` cancels: it only keeps numbers in range, and in gradients it is a constant. Without `recurrent` it is three scans; with
    it one token follows the other. Computed in float32 (float64 for float64 inputs).

    Args:
        write, forget, candidate, output: logits of the input gate, the forget gate, the candidate and the output gate, `[B, T, H, D]`,
            float32, bfloat16, float16 or float64.
        recurrent: `R` of the four in this order, `[4, H, D, D]` (to, from), any floating dtype; or None.
        initial_state: `(c, n, m, y)`, each `[N, H, D]`, float32 (float64 for float64 inputs); by default zeros, and -inf for `m`.

    Source: Beck et al. 2024 (arXiv 2405.04517), equations 8 to 18.

    Example:
        >>> import torch
        >>> i, f, z, o = torch.randn(4, 1, 10, 2, 8)
        >>> y, (c, n, m, last) = slstm(i, f, z, o, 0.1 * torch.randn(4, 2, 8, 8), return_state=True)
        >>> y.shape, torch.equal(y[:, -1], last)
        (torch.Size([1, 10, 2, 8]), True)
    """
    check_whole(cu_seqlens, "slstm")
    packing = check_elementwise(
        {"cu_seqlens": cu_seqlens}, write=write, forget=forget, candidate=candidate, output=output
    )
    if recurrent is not None:
        check_per_head("recurrent", recurrent, "write", write, 4, *write.shape[2:], write.shape[-1])
    shape = (write.shape[0] if packing is None else packing.count, *write.shape[2:])
    check_states(initial_state, write, shape, shape, shape, shape, like_name="write")
    wide = state_dtype(write.dtype)
    if initial_state is None:
        zeros = torch.zeros(shape, dtype=wide, device=write.device)
        initial_state = zeros, zeros, torch.full_like(zeros, -torch.inf), zeros
    i, f, z, o = (gate.to(wide) for gate in (write, forget, candidate, output))
    y, *after = slstm_cell(SlstmCall(i, f, z, o, recurrent, *initial_state, packing=packing), impl)
    state = after[0], after[1], after[2].detach(), after[3]
    return y.to(write.dtype), state if return_state else None


register(
    Mechanism(
        title="sLSTM",
        paper="2405.04517",
        function=slstm,
        call="write:BTHK forget:BTHK candidate:BTHK output:BTHK recurrent:GHKK",
        wide=("recurrent",),
    )
)
