"""The structs that the chunk kernels take: operands, results, the place of chunks, numbers and the compile-time spec.

    rule      rows X      columns Y    written W    pairs A (in this order in memory)
    LINEAR    q           k            v            qk
    TIED      q, -k       beta k       nu           qb, ab
    UNTIED    q, a        b            nu           qb, ab
    DPLR      q, a        k, b         v, nu        qk, qb, ab, ak

No kernel knows a rule: it loops over rows, columns and pairs. Of the pair ab the inverse (4.2) is kept. The one exception is a TIED
rule, whose a and b are made of the same k: kernels load it once.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class RowKind(NamedTuple):
    """How a row key reads: before the decay of its own token (exclusive), and its own token's write as well (diagonal)."""

    EXCLUSIVE: bool
    DIAGONAL: bool


class ChunkSpec(NamedTuple):
    """Everything that a kernel is compiled for; what a kernel does not read keeps its default, so that calls share code."""

    C: int  # tokens of a chunk
    HV: int  # value heads
    K: int
    V: int = 0
    PACKED: bool = False
    ROW_HEADS: tuple[int, ...] = ()  # heads of each row key
    COLUMN_HEADS: tuple[int, ...] = ()
    ROWS: tuple[RowKind, ...] = ()
    ROW: tuple[int, ...] = ()  # the row and the column that each tile of pairs multiplies
    COLUMN: tuple[int, ...] = ()
    TIED: bool = False  # a = -k and b = beta k
    DECAY: str = "none"  # "head", "token", "channel"
    EXACT: bool = False  # decays are summed in float64, for float32 inputs
    LEVELS: int = 0  # log2 C: levels of the inverse, and of passes over pairs with a per-channel decay
    LIMIT: int = 0  # a column factor is at most 2^LIMIT
    REACH: int = 0  # channels that share one reach
    ONE_PASS: int = (
        0  # rows that decay by up to 2^-ONE_PASS have their pairs made before those of `channel_far_rows.py`
    )
    OUTPUT: bool = False  # the state pass writes o
    SAVE: bool = False  # the state pass writes what the backward reads
    DIAGONAL: bool = False  # the maps of segments are diagonal
    FROM_END: bool = False  # products of maps reach to the end of the sequence, not from its start
    LONG: int = 0  # the state pass of corrected float32, without (1) or with (2) long rows of T (`correlated.py`)
    TRANSPOSED: bool = False  # the caller's states are [V, K], a decay of the value axis
    BK: int = 0
    BV: int = 0
    BN: int = 0
    STAGES: int = 1
    PRECISION: str = "ieee"
    INVERSE_PRECISION: str = "ieee"


class ChunkNumbers(NamedTuple):
    """Numbers that code is not specialised for."""

    scale: Any
    tokens: Any  # T
    chunks: Any  # of a sequence in a dense batch
    segments: Any


class ChunkTables(NamedTuple):
    """Where the chunks of a packed batch lie; None in a dense one."""

    cu_seqlens: Any = None  # [N + 1]
    offsets: Any = None  # [N + 1] int32: the first chunk of each sequence
    spans: Any = None  # [chunks, 2] int64: first token and tokens of each chunk


class Place(NamedTuple):
    """The chunk of a program: its index and value head, its first token (counted over the batch) and how many it has."""

    chunk: Any
    head: Any
    first: Any
    count: Any


class ChunkInputs(NamedTuple):
    """Keys, beta and decay of a call."""

    rows: Any  # (q,) or (q, a): [B, T, heads, K]; a of a TIED rule is k
    columns: Any  # (k,), (b,) or (k, b): [B, T, heads, K]; b of a TIED rule is k
    beta: Any  # [B, T, HV] or None
    decay: Any  # log decay [HV] or [B, T, HV]; of a per-channel decay its sums G [B, T, HV, K]; None
    reach: Any  # [chunks, HV, blocks of channels, C] int8, per-channel decay only


class DecayedKeys(NamedTuple):
    """What the sums of a decay are applied to where no pairs are made: one column key, its result, and the chunk's whole decay."""

    y: Any  # [B, T, HV, K]
    decayed: Any  # e^{G_C - G} y, [B, T, HV, K]
    total: Any  # [chunks, HV, K]


class ChunkScores(NamedTuple):
    """What the scores phase leaves to the state phase."""

    rows: Any  # as in ChunkInputs; with a per-channel decay e^G x, [B, T, HV, K]; None where no output is made of them
    columns: Any  # as in ChunkInputs; with a per-channel decay e^{G_C - G} y, [B, T, HV, K]
    A: Any  # [chunks, HV, pairs, C, C]
    factors: Any  # of rows, then of columns, [chunks, HV, rows + columns, C]; None with a per-channel decay
    total: Any  # the decay of the whole chunk, [chunks, HV] or [chunks, HV, K]
    low: Any = None  # of corrected float32: the rest of the long rows of T (`correlated.py`), [chunks, HV, C, C]
    long: Any = None  # which rows these are, a bit each, [chunks, HV] int32


class StateInputs(NamedTuple):
    v: Any  # [B, T, HV, V]
    initial_state: Any  # [N, HV, K, V] or None
    starts: Any  # the state that each segment starts from, [N, HV, segments, V, K], or None


class StateResults(NamedTuple):
    o: Any  # [B, T, HV, V]
    final_state: Any  # [N, HV, K, V]
    nu: Any  # [B, T, HV, V]
    states: Any  # S^T at the start of each chunk, [chunks, HV, V, K]
    maps: Any  # of segments, [N, HV, segments, V + K, K]; of a diagonal map [..., V + 1, K]


class StateGradients(NamedTuple):
    """Gradients that enter the state phase."""

    do: Any  # [B, T, HV, V]
    final_state: Any  # [N, HV, K, V] or None
    starts: Any  # the gradient that reaches the end of each segment, [N, HV, segments, V, K], or None


class StateGradientResults(NamedTuple):
    dstates: Any  # dS'^T at the end of each chunk, [chunks, HV, V, K]
    dr: Any  # [B, T, HV, V]
    dv: Any  # of a raw write, [B, T, HV, V]
    initial_state: Any  # [N, HV, K, V]
    ends: Any  # what each segment sends back, [N, HV, segments, V, K]


class ChunkValues(NamedTuple):
    """Both factors of dA = dZ W^T (6.1), and the saved states."""

    dz: Any  # (do,) or (do, dr): [B, T, HV, V], one for each row
    w: Any  # (v,), (nu,) or (v, nu): [B, T, HV, V], one for each column
    states: Any  # [chunks, HV, V, K]
    dstates: Any  # [chunks, HV, V, K]


class KeyGradients(NamedTuple):
    """Gradients of `ChunkInputs`, one head for each value head; of a TIED rule rows is (dq,) and columns (dk,)."""

    rows: Any  # None in the place of one that is not wanted
    columns: Any
    beta: Any
    decay: Any
    dA: Any  # scratch, like A
