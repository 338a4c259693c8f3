"""sLSTM as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import H, K, Mechanism, T, rows, zeros
from torch import Tensor


def slstm(
    write: Tensor,
    forget: Tensor,
    candidate: Tensor,
    output: Tensor,
    recurrent: Tensor | None = None,
    *,
    S: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """2405.04517, equations 8 to 14 with a sigmoid forget gate: c_t = f_t c_{t-1} + i_t z_t, n_t = f_t n_{t-1} + i_t, h_t = o_t c_t / n_t.
    The state is divided by e^m, equation 15, which is a constant of the gradient."""
    if not len(write):
        past = torch.exp(S[2] - S[2].detach())
        return rows([], write), (past * S[0], past * S[1], S[2].detach(), S[3])
    c, n, m, y = torch.exp(S[2]) * S[0], torch.exp(S[2]) * S[1], S[2].detach(), S[3]
    R = torch.zeros(4, write.shape[1], write.shape[1], dtype=write.dtype) if recurrent is None else recurrent
    found = []
    for t in range(len(write)):
        i, f = torch.exp(write[t] + R[0] @ y), torch.sigmoid(forget[t] + R[1] @ y)
        m = torch.maximum(torch.log(f) + m, write[t] + R[0] @ y).detach()
        c = f * c + i * torch.tanh(candidate[t] + R[2] @ y)
        n = f * n + i
        y = torch.sigmoid(output[t] + R[3] @ y) * c / n
        found.append(y)
    return rows(found, write), (torch.exp(-m) * c, torch.exp(-m) * n, m, y)


UNIT, STATE = "B T HV V", "N HV V"
CASES = {
    "slstm": Mechanism(
        slstm,
        {"write": UNIT, "forget": UNIT, "candidate": UNIT, "output": UNIT, "recurrent": "M HV V V"},
        ("recurrent",),
        scale=1.0,
        grouped=False,
        states=(STATE, STATE, STATE, STATE),
        logarithms=(2,),
        positive=("initial_state1",),
        draw={"recurrent": 0.5},
        slots=4,
        errors=[
            ({"forget": zeros(1, T, H, 4)}, ValueError, "forget must have shape [1, 6, 2, 8], got [1, 6, 2, 4]"),
            ({"recurrent": zeros(4, H, K)}, ValueError, "recurrent must have shape [4, 2, 8, 8], got [4, 2, 8]"),
        ],
    )
}
