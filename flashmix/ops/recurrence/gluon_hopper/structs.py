"""The structs that the Hopper kernels take, and the tables of their shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple


class HopperSpec(NamedTuple):
    """Everything that a kernel is compiled for; what a kernel does not read keeps its default, so that calls share code."""

    HV: int  # value heads
    GROUP: int  # value heads that share a key head
    K: int
    V: int
    BK: int = 128  # channels of a tile of keys
    BV: int = 128  # of values
    PACKED: bool = False
    OUTPUT: bool = False  # the state pass writes o
    SAVE: bool = (
        False  # the state pass writes what the backward reads, or the backward's what the output's backward reads
    )
    KEEP: bool = False  # the state pass that writes o writes nu
    GIVEN: bool = False  # nu comes from memory, in the place of values
    DECAY: bool = True  # there is a decay
    PER_HEAD: bool = False  # the same for all tokens
    CORRECTED: bool = True  # values are corrected by what the state holds; else nu is V, and there is no T
    CHANNEL: bool = False  # of a decay per channel: the state passes read keys that are decayed already
    READS: int = (
        0  # tiles of pairs of a chunk that a state pass reads: T, and with CHANNEL A_qb where it is multiplied by that
    )
    MAKES: bool = False  # else a warpgroup beside those of the states makes A_qb
    WARPGROUPS: int = 2  # of a state pass, 64 channels of values each; the others are other programs'
    KEYS: int = 2  # stages of the ring of keys (and queries) with the vectors of a chunk
    VALUES: int = 3  # of values or their gradients; of DPLR and of 256 channels with the vectors
    PAIRS: int = (
        3  # of tiles of pairs that come from memory; without corrections with 256 channels of A_qb, which is made
    )
    STAGES: int = 1  # of the ring of tiles of a value head, output backward
    NUS: int = 2  # of that of nu
    SHARED: int = 1  # value heads that share a key head, where each has gradients of keys of its own (then GROUP is 1)
    EARLY: bool = False  # of a call in segments: kernels overlap (`hopper.overlap`)
    STAYS: bool = (
        False  # a state pass without A_qb has a program for each multiprocessor, which takes one segment after another
    )
    HEADS: tuple[int, ...] = ()  # of DPLR: heads of q, a, k and b (GROUP is 1)
    TILES: int = 2  # of pairs of a chunk in memory: A_qb and T, of DPLR A_qk, A_qb, T and A_ak


class HopperNumbers(NamedTuple):
    """Numbers that code is not specialised for."""

    scale: Any
    tokens: Any  # T
    chunks: Any  # of a sequence in a dense batch
    segments: Any
    items: Any  # chunks times key heads
    batch: Any  # B
    programs: Any = 0  # that a state pass with STAYS would have without


class StateMemory(NamedTuple):
    """What the state passes read and write at their ends, beside the tiles that TMA copies; forward, or of gradients backward."""

    cu_seqlens: Any  # [N + 1], of a packed batch
    offsets: Any  # [N + 1] int32: the first chunk of each sequence
    sequence_state: Any  # [N, HV, K, V]: initial state, backward the gradient of the final one
    starts: Any  # [N, HV, segments, V, K]: what each segment begins with
    result: Any  # [N, HV, K, V]: final state, backward the gradient of the initial one
    ends: Any  # what each segment ends with: maps [N, HV, segments, V + K (without corrections V + 1), K], backward [N, HV, segments, V, K]
    counters: Any = None  # [2 N HV segments + 1] int32: backward made 0, for `walk.py`
    map_parts: Any = None  # of maps for `join.py`, which have M^T alone in `ends`: N^T [N, HV, segments, V, K], M [N, HV, segments, K, K]


class OutputMemory(NamedTuple):
    """What the backward of the output writes beside the tiles that TMA copies."""

    spans: Any  # [chunks, 2] int64: first token and tokens of each chunk of a packed batch
    beta: Any  # [B, T, HV]
    decay: Any  # [B, T, HV] or None


class WalkMemory(NamedTuple):
    """What the backward of the output in the walk of the states reads and writes beside the tiles that TMA copies."""

    cu_seqlens: Any  # [N + 1], of a packed batch
    offsets: Any  # [N + 1] int32: the first chunk of each sequence
    sequence_state: Any  # [N, HV, K, V]: initial state
    starts: Any  # [N, HV, segments, V, K]: what each segment begins with
    counters: Any  # with several value heads a key head: programs that have begun; behind it the chunks that each program has added
    beta: Any  # [B, T, HV]
    decay: Any  # [B, T, HV] or None


class ScoresMemory(NamedTuple):
    """What the scores phase reads and writes beside the tiles that TMA copies."""

    spans: Any  # [chunks, 2] int64: first token and tokens of each chunk of a packed batch
    beta: Any  # [B, T, HV]
    decay: Any  # log decay [B, T, HV] or [HV], or None
    vectors: Any  # [chunks, HV, 4, 64]


class ChannelMemory(NamedTuple):
    """What the phases before the state pass read and write with a per-channel decay, beside the tiles that TMA copies."""

    spans: Any  # [chunks, 2] int64: first token and tokens of each chunk of a packed batch
    beta: Any  # [B, T, HV]
    decay: Any  # log decay [B, T, HV, K]
    total: Any  # [chunks, HV, K]
    sums: Any  # G, [B, T, HV, K]
    reach: Any  # [chunks, HV, blocks of channels, 64] int8
    far: Any  # [chunks, HV] int32: 2 if a row is out of range for one pass over the pairs, 1 if it is not for one without m (1.6)
    A: Any  # [chunks, HV, 2, 64, 64]; of DPLR [chunks, HV, 4, 64, 64]
    before: Any  # the same memory as float16: A_ab in the place of T


class FarNumbers(NamedTuple):
    """Numbers that code is not specialised for."""

    scale: Any
    tokens: Any  # T
    chunks: Any  # of a sequence in a dense batch
    programs: Any  # chunks times value heads


class Span(NamedTuple):
    """The tokens of a sequence or of a chunk."""

    sequence: Any
    first: Any  # token, of a packed batch
    length: Any


class Segment(NamedTuple):
    """The part of a sequence that a program of a state pass works on."""

    row: Any  # sequence times HV plus value head
    index: Any  # row times segments plus segment
    map: Any  # 1: from the identity and without values, 0: the pass itself
    head: Any  # value head
    channel: Any  # first channel of values
    span: Span
    chunk0: Any  # first chunk of the sequence
    begin: Any  # first chunk of the segment, counted from that
    count: Any  # chunks of the segment


class Chunk(NamedTuple):
    """The chunk and key head of an item."""

    index: Any  # of the chunk
    key_head: Any
    span: Span
    t: Any  # its first token, counted from the span's
    row: Any  # its first token, counted over the batch


class StateTiles(NamedTuple):
    """Shared memory of the state passes."""

    q: Any  # [KEYS, 64, BK]
    k: Any  # [KEYS, 64, BK]
    b: Any  # [KEYS, 64, BK]: what is written under, k itself but with CHANNEL
    v: Any  # [WARPGROUPS VALUES, 64, 64]: 64 channels for each warpgroup; backward dO
    vectors: (
        Any  # [4 KEYS, 64] (256 channels: VALUES for KEYS); with CHANNEL 2^(G_C) of each channel, [BK / 64 KEYS, 64]
    )
    A: Any  # from memory, [PAIRS, 128 or 64, 64]: T; with CHANNEL and the queries A_qb, T, without corrections A_qb
    made: Any  # [2, 64, 64]: A_qb but with CHANNEL
    states: Any  # [WARPGROUPS, 64, BK]: one a warpgroup, on its way to memory
    tokens: Any  # [1 or 2 WARPGROUPS, 64, 64]: o, nu or dR, likewise


class Ring(NamedTuple):
    """The barriers of a ring of buffers."""

    full: Any
    empty: Any


class StateBarriers(NamedTuple):
    """What says that tiles of a state pass's rings are full: keys and queries with vectors, values, pairs from memory and made here."""

    k: Any
    v: Any
    A: Any
    made: Any


class JoinSpec(NamedTuple):
    """What the join of segments (`join.py`) is compiled for."""

    K: int
    V: int
    BACK: bool
    BV: int = 16  # channels of values of a program
    STAGES: int = 3  # of the ring of maps


class JoinTiles(NamedTuple):
    """Its shared memory."""

    maps: Any  # [STAGES, 128, 128]: M, backward M^T
    own: Any  # [2, BV, 128]: N^T, backward dN^T
    states: Any  # [2, BV, 128]: S^T or dS^T


class JoinBarriers(NamedTuple):
    """The rings of what TMA fills."""

    maps: Ring
    own: Ring


class WideBarriers(NamedTuple):
    """The rings of a state pass with 256 channels; `states` and `tokens` only with outputs, a buffer for each warpgroup."""

    k: Ring
    q: Ring
    v: Ring
    A: Ring  # of T
    made: Ring  # of A_qb, backward
    states: Ring  # S in 16 bits, for the warpgroup of the outputs
    tokens: Ring  # nu, likewise
    vectors: Ring  # that of v, or with two stages of queries one of its own


class LinearTiles(NamedTuple):
    """Shared memory of a state pass without corrections with 256 channels (`wide_linear.py`)."""

    reader: Any  # [1, 64, BK]: what multiplies the state, forward queries, backward keys
    writer: Any  # [KEYS, 64, BK]: the other, which is written under
    v: Any  # [WARPGROUPS VALUES, 64, 64]: 64 channels for each warpgroup; backward dO
    vectors: Any  # [4 VALUES, 64]
    made: Any  # [PAIRS, 64, 64]: A_qb
    states: Any  # [WARPGROUPS, 64, BK]: the state in 16 bits
    tokens: Any  # [WARPGROUPS, 64, 64]: o or dV, on its way to memory


class LinearBarriers(NamedTuple):
    """Its rings; `v` has the vectors too."""

    reader: Ring
    writer: Ring
    v: Ring
    made: Ring


class OutputTiles(NamedTuple):
    """Shared memory of the output's backward."""

    q: Any  # [KEYS, 64, BK]
    k: Any  # [KEYS, 64, BK]
    slots: Any  # [STAGES TILES, 64, BV]: see `output_slots.py`
    nu: Any  # [NUS, 64, BV]: held from the first to the last product of a value head, so in a ring of its own
    pairs: Any  # [2 or 3, 64, 64]: q k^T and -k k^T, then N_q and N_a; see `pairs_tile`
    vectors: Any  # [4 VALUES, 64]
    sums: Any  # [24, 64] float32: see `finisher`


class OutputBarriers(NamedTuple):
    """The rings of the output's backward; pairs and sums are filled by warpgroups, and `gradients` tells that dq and dk lie in the keys."""

    slots: Ring
    nu: Ring
    keys: Ring
    v: Ring
    pairs: Ring
    sums: Ring
    gradients: Any


class WideOutputTiles(NamedTuple):
    """Shared memory of the output's backward with 256 channels, as in `OutputTiles`."""

    q: Any  # [1, 64, BK]
    k: Any  # [1, 64, BK]
    slots: Any  # [2, 64, BV]: dO, dR
    nu: Any  # [1, 64, BV]
    pairs: Any  # [2, 64, 64]
    vectors: Any
    sums: Any
    states: Any  # [5, 64, 64]: tiles of S and dS'


class WideOutputBarriers(NamedTuple):
    """The rings of `OutputBarriers`, and that of tiles of states."""

    slots: Ring
    nu: Ring
    keys: Ring
    v: Ring
    pairs: Ring
    sums: Ring
    gradients: Any
    states: Ring


class WalkTiles(NamedTuple):
    """Shared memory of the backward of the output in the walk of the states (`walk.py`)."""

    q: Any  # [KEYS, 64, BK]
    k: Any  # [KEYS, 64, BK]
    tokens: Any  # [2, 64, 64]: V, 64 channels each
    T: Any  # [1, 64, 64]
    dO: Any  # [STAGES, 64, BV]
    dR: Any  # [1, 64, BV]
    dstate: Any  # [1, BV, BK]: dS'
    state: Any  # [1, BV, BK]: S in 16 bits
    nu: Any  # [NUS, 64, BV]
    pairs: Any  # [2, 64, 64]: N_q and N_a
    vectors: Any  # [4 VALUES, 64]
    sums: Any  # [24, 64] float32: see `finisher`


class WalkBarriers(NamedTuple):
    """Its rings; `v` is that of the vectors. `gradients` tells that dq and dk lie there."""

    keys: Ring
    v: Ring
    tokens: Ring  # of V
    T: Ring
    dO: Ring
    dR: Ring
    dstate: Ring
    state: Ring
    nu: Ring
    pairs_q: Ring
    pairs_a: Ring
    sums: Ring
    gradients: Any


class ChannelOutputMemory(NamedTuple):
    """What the backward of the output reads and writes with a per-channel decay, beside the tiles that TMA copies."""

    spans: Any  # [chunks, 2] int64: first token and tokens of each chunk of a packed batch
    beta: Any  # [B, T, HV]
    dbeta: Any  # [B, T, HV]
    far: Any  # [chunks, HV] int32: 2 if a row is out of range for one pass over the pairs, 1 if it is not for one without m (1.6)
    reach: Any  # [chunks, HV, blocks of channels, 64] int8, the same in all blocks as far as a row reaches the chunk's start


class ChannelTiles(NamedTuple):
    """Shared memory of the output's backward with a per-channel decay."""

    slots: Any  # [SLOTS, 64, 128]: nu, dO, dR, dS', S, q, k and, in float32, G
    pairs: Any  # [2, 64, 64]: dA_q, dA_a
    triangle: Any  # [64, 64]: 1 on and below the diagonal
    beta: Any  # [2, 64] float32
    sums: Any  # [8, 64] float32: dbeta of each consumer's four warps


class ChannelBarriers(NamedTuple):
    """A ring of one stage for each slot and for the pairs; `beta` and `gradients` are left to the finisher."""

    slots: Ring
    pairs: Ring
    beta: Any
    gradients: Any


class DplrTiles(NamedTuple):
    """Shared memory of the output's backward of DPLR with a per-channel decay."""

    slots: Any  # [SLOTS, 64, 128]: V or nu, dO, dR, dS', S, ~q, ~a, k, b and, in float32, G or that of the token before
    pairs: Any  # [2, 64, 64]: dA of q and of a with one column; triangles of ones


class DplrBarriers(NamedTuple):
    """A ring of one stage for each slot and for the pairs; `gradients` tells that dk, db, dq with da, and dg lie in their places."""

    slots: Ring
    pairs: Ring
    gradients: Any


class DplrStateTiles(NamedTuple):
    """Shared memory of the state pass of DPLR with a per-channel decay."""

    keys: Any  # [4 or 3 KEYS, 64, BK]: q with the output, a, k, b, decayed
    v: Any  # [WARPGROUPS VALUES, 64, 64]
    vectors: Any  # [BK / 64 VALUES, 64]: 2^(G_C) of each channel
    A: Any  # [PAIRS, 128, 64]: T, A_ak
    of_q: Any  # [1, 128, 64]: A_qk, A_qb
    states: Any  # [WARPGROUPS, 64, BK]: on their way to memory
    tokens: Any  # [WARPGROUPS, 64, 64]: o or nu, likewise
