"""The structs that the kernels of MesaNet take."""

from __future__ import annotations

from typing import Any, NamedTuple


class MesaSpec(NamedTuple):
    """What kernels are compiled for; the tile functions of the recurrence read the same names."""

    C: int  # tokens of a chunk
    HV: int  # value heads
    H: int  # heads of queries and keys
    K: int
    V: int
    BK: int  # at least K
    BV: int  # rows of states at a time
    PACKED: bool
    EXACT: bool = False
    DECAY: str = "token"


class MesaInputs(NamedTuple):
    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    beta: Any  # [B, T, HV]
    decay: Any  # log decay [B, T, HV]
    ridge: Any  # [HV, K] float32
    R: Any  # [N, HV, K, K] or None
    S: Any  # [N, HV, K, V] or None
    do: Any  # [B, T, HV, V], backward only


class MesaResults(NamedTuple):
    o: Any  # [B, T, HV, V]
    x: Any  # the solution of the forward, [B, T, HV, K]; backward it is read
    R: Any  # [N, HV, K, K]
    S: Any  # [N, HV, K, V]
    states: Any  # R, and under it S^T, at the start of each chunk, [chunks, HV, K + V, K] float32
    adjoint: Any  # the solution of the backward, [B, T, HV, K]
    ridge: Any  # its gradient by chunk, [chunks, HV, K] float32


class MesaNumbers(NamedTuple):
    """Numbers that code is not specialised for."""

    scale: Any
    tokens: Any  # T
    chunks: Any  # of a sequence in a dense batch
    steps: Any  # of conjugate gradients


class MesaPlace(NamedTuple):
    """The chunk of a program: its index and value head, its first token (counted over the batch) and how many it has."""

    chunk: Any
    head: Any
    first: Any
    count: Any


class MesaTiles(NamedTuple):
    """Operands of products in shared memory, bfloat16; those with two are halves."""

    k: Any  # [C, BK]; for the output v
    state: Any  # R, or rows of S^T, [2, BK, BK]
    p: Any  # what R is multiplied by, [2, C, BK]
    pairs: Any  # [2, C, C]


class MesaFactors(NamedTuple):
    """What stays over all steps, in registers."""

    weight: Any  # beta_j e^{G_i - G_j} for j <= i, [C, C]
    past: Any  # e^{G_i}, [C]
    ridge: Any  # [BK]
