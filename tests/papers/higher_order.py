"""Higher-order linear attention as its paper writes it: the masked product."""

from __future__ import annotations

from paper_cases import QKV, Mechanism
from torch import Tensor


def higher_order(
    q: Tensor, k: Tensor, v: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2510.27258, section 3: ((W W^T) * L) V with W = (Q K^T) * L and the mask L; what came before is in the state."""
    A, memory = S
    W = (q @ k.T).tril()
    o = scale * (q @ memory + (W @ W.T + q @ A.T @ q.T).tril() @ v)
    return o, (A + k.T @ k, memory + (q @ A + W @ k).T @ v)


CASES = {"higher_order": Mechanism(higher_order, QKV, rare=True, scale=1.0, states=("N H K K", "N HV K V"))}
