"""The launch of the backward of the output in the walk of the states (`walk.py`)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flashmix.gpu.launch import Kernel
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.structs import HopperNumbers, WalkMemory
from flashmix.ops.recurrence.triton_gpu.run import Run


def walk_backward(
    run: Run,
    kernel: Kernel,
    numbers: HopperNumbers,
    read: tuple[Tiles | None, ...],
    values: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    found: Gradients,
) -> None:
    """Makes the gradients of keys, beta and the decay, from the tiles that are `read`, of q, k, v, T and vectors (nu and None in place
    of v and T), and from dO, the gradients of states, the states that segments start from, and zeros for `counters`.
    """
    call, where, (do, dstates, starts, counters) = run.call, run.where, values
    tokens = partial(descriptors.tokens, width=128, packed=call.packed)
    tiles = (
        *read,
        tokens(do),
        tokens(found["v"]) if call.rule.corrected else None,  # dR
        descriptors.states(dstates, 128, 64),
        tokens(found["q"]),
        tokens(found["k"]),
    )
    made = found.get("beta"), found.get("log_decay")
    x = WalkMemory(where.cu_seqlens, where.offsets, call.initial_state, starts, counters, *made)
    kernel(run.rows * numbers.segments, *tiles, x, numbers)
