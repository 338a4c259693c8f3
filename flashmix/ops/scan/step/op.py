"""The scan a token at a time, for generation: states are updated in place, in a batch or in a pool of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import check_dtype, check_like, check_range, check_shape, check_tensor, check_written
from flashmix.op.public import public
from flashmix.ops.recurrence.step.call import MOST_TOKENS, check_indices
from flashmix.ops.scan.call import check_decays, check_scanned, scan_dtype
from flashmix.ops.scan.step.call import ScanStepCall

IMPLEMENTATIONS = implementations("scan.step")[1:]
SCAN_STEP = Op("scan_step", ScanStepCall, IMPLEMENTATIONS, outputs=1)


@public
def scan_step(
    x: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    read_before: bool = False,
    coupling: str | None = None,
    state_indices: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`scan` of one token (or a few) of each sequence; the state is updated in place.

        h <- e^{g_t} h + x_t

    Args:
        x: `[B, T, D]` or `[B, T, H, D]` with T from 1 to 16, of the dtypes that `scan` takes.
        log_decay: `g`, at most 0, of the shapes that `scan` takes.
        state: `h`, `[B, D]` or `[B, H, D]`, or with `state_indices` a pool `[P, D]` or `[P, H, D]`; float32 or bfloat16 (float64 for
            float64, and of complex `x` its own dtype). Written. It is computed in float32 whatever it is kept in.
        read_before: the output is what the token finds.
        coupling: as in `scan`.
        state_indices: `[B]` int32 or int64, the slot of each sequence in the pool, each at most once. A sequence with -1, or any number
            that is no slot, is idle: its output is 0 and no state is touched.
        impl: implementation; "auto" takes the first that supports the call.

    Returns:
        `h` after each token, of the shape and dtype of `x`.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices do not fit, T is not 1 to 16, a decay is above 0 (where contents are checked), `impl` cannot run this.
        RuntimeError: a gradient is wanted; there is none through a state that is overwritten.

    Source: Martin and Cundy (arXiv 1709.04057), section 2.

    Example:
        >>> import torch
        >>> pool, slots = torch.ones(3, 2), torch.tensor([2, -1])
        >>> h = scan_step(torch.ones(2, 1, 2), torch.tensor([0.0, -torch.inf]), pool, state_indices=slots)
        >>> h.flatten(1).tolist(), pool.tolist()
        ([[2.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    """
    batch, tokens, *rest = check_scanned(x, log_decay, coupling)
    check_tensor("state", state)
    slots = batch if state_indices is None or not state.dim() else state.shape[0]
    check_shape("state", state, slots, *rest)
    wide = scan_dtype(x.dtype)
    check_dtype("state", state, *((torch.float32, torch.bfloat16) if wide == torch.float32 else (wide,)))
    check_like("state", state, "x", x, dtype=False)
    check_written("state", state)
    if state_indices is not None and slots < 1:
        raise ValueError("state must have at least one slot, got 0")
    check_indices(state_indices, x, batch, slots, "x")
    check_range("the number of tokens", tokens, 1, MOST_TOKENS)
    check_decays(log_decay, coupling)
    call = ScanStepCall(x, log_decay, state, state_indices, read_before, coupling)
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
        raise RuntimeError("scan_step has no gradient, it writes its state in place: call it under torch.no_grad()")
    return SCAN_STEP(call, impl)[0]
