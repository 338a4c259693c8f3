"""Where the tiles of a sequence lie, and their copies by TMA.

Tokens are tiles of 64 of a sequence: in a dense batch of `[B, T, heads, channels]`, past whose end TMA reads 0 and writes nothing. A
packed batch is `[FAR, FAR, RAGGED, heads, channels]` to TMA, with strides that wrap around 2^64 (`descriptors.py`): from coordinates
(RAGGED, end, RAGGED - length + t) it comes to token `end - length + t`, and what lies past `end` is past the third dimension.
"""

from __future__ import annotations

import math

from flashmix.gpu.hopper import add_to_global, copy_to_global, copy_to_shared, gl, gluon, reinterpret
from flashmix.ops.recurrence.gluon_hopper.structs import Chunk, Segment, Span

RAGGED = gl.constexpr(1 << 30)
OUTSIDE = gl.constexpr(
    1 << 28
)  # a token past the end of any sequence: TMA copies nothing there (a negative one is an illegal instruction)


@gluon.jit
def sequence_span(cu, n, tokens):
    """First token and end of sequence n, both within [0, tokens] whatever `cu` holds."""
    first = gl.minimum(gl.maximum(gl.load(cu + n).to(gl.int64), 0), tokens)
    end = gl.minimum(gl.maximum(gl.load(cu + n + 1).to(gl.int64), first), tokens)
    return first.to(gl.int32), end.to(gl.int32)


@gluon.jit
def segment_of_program(x, n, MAPS: gl.constexpr, S: gl.constexpr):
    """The segment of this program."""
    return segment_of(gl.program_id(0), x, n, MAPS, S)


@gluon.jit
def own_segments(n):
    """How many segments fall to a program that stays, each of which would else have a program."""
    return (n.programs - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def segment_of_turn(turn, x, n, MAPS: gl.constexpr, S: gl.constexpr):
    """The segment that falls to this program, which stays, in a turn."""
    return segment_of(gl.program_id(0) + turn * gl.num_programs(0), x, n, MAPS, S)


@gluon.jit
def segment_of(program, x, n, MAPS: gl.constexpr, S: gl.constexpr):
    """The segment of program number `program`. With MAPS there are two for each, N and M of (7.1), and each of these as often as it takes
    programs for all values; M has the keys in their place, which may take another number.

    Without corrections M is a diagonal, which the program of N makes.
    """
    channel = 0
    identity = 0
    PARTS: gl.constexpr = S.BV // (S.WARPGROUPS * 64)
    if MAPS and S.CORRECTED and S.BK != S.BV:
        ALL: gl.constexpr = PARTS + S.BK // (S.WARPGROUPS * 64)
        part = program % ALL
        identity = gl.where(part < PARTS, 0, 1)
        channel = (part - identity * PARTS) * (S.WARPGROUPS * 64)
        program = program // ALL
    else:
        if PARTS > 1:
            channel = (program % PARTS) * (S.WARPGROUPS * 64)
            program = program // PARTS
        if MAPS:
            if S.CORRECTED:
                identity = program % 2
                program = program // 2
    segment = program % n.segments
    row = program // n.segments
    sequence = row // S.HV
    first = 0
    length = n.tokens
    chunk0 = sequence * n.chunks
    chunks = n.chunks
    if S.PACKED:
        first, end = sequence_span(x.cu_seqlens, sequence, n.tokens)
        length = end - first
        chunk0 = gl.load(x.offsets + sequence)
        chunks = gl.load(x.offsets + sequence + 1) - chunk0
    size = (chunks + n.segments - 1) // n.segments  # the last segments may be short or empty
    begin = gl.minimum(segment * size, chunks)
    count = gl.minimum(begin + size, chunks) - begin
    span = Span(sequence, first, length)
    return Segment(row, program, identity, row % S.HV, channel, span, chunk0, begin, count)


@gluon.jit
def chunk_of_item(item, x, n, S: gl.constexpr):
    """The chunk and key head of an item; it has no tokens where a packed batch has fewer chunks than it might have."""
    H: gl.constexpr = S.HV // S.GROUP
    index = item // H
    if S.PACKED:
        first = gl.load(x.spans + index * 2).to(gl.int32)
        count = gl.load(x.spans + index * 2 + 1).to(gl.int32)
        return Chunk(index, item % H, Span(index, first, count), item * 0, first.to(gl.int64))
    else:
        sequence = index // n.chunks
        t = (index % n.chunks) * 64
        count = gl.minimum(n.tokens - t, 64)
        return Chunk(index, item % H, Span(sequence, t, count), t, sequence.to(gl.int64) * n.tokens + t)


@gluon.jit
def kind_of_keys(span, number: gl.constexpr, n):
    """The same tokens of the `number`-th of the decayed keys, which lie behind one another: of queries, a and b, or of queries and b."""
    return Span(span.sequence + number * n.batch, span.first + number * n.tokens, span.length)


@gluon.jit
def item_count(n):
    """Items of this program."""
    return (n.items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def item_chunk(x, n, i, S: gl.constexpr):
    """The chunk and key head of item i of this program."""
    return chunk_of_item(gl.program_id(0) + i * gl.num_programs(0), x, n, S)


@gluon.constexpr_function
def same_size(block, shape):
    return math.prod(block) == math.prod(shape)


@gluon.jit
def block_of(d, tile):
    """A shared tile as the block of elements that a copy of the descriptor moves."""
    gl.static_assert(same_size(d.block_type.shape, tile.shape), "a copy is as large as the tile that it fills")
    return reinterpret(tile, d.dtype, d.block_type.shape, d.layout)


@gluon.jit
def fetch_tokens(d, span, t, head, channel, bar, tile, S: gl.constexpr):
    """Copies the tokens t to t + 63 of a span into a shared tile; past its end 0."""
    block = block_of(d, tile)
    if S.PACKED:
        end = span.first + span.length
        copy_to_shared(d, [RAGGED, end, RAGGED - span.length + t, head, channel], bar, block)
    else:
        copy_to_shared(d, [span.sequence, t, head, channel], bar, block)


@gluon.jit
def store_tokens(d, span, t, head, channel, tile, S: gl.constexpr):
    """Copies a shared tile to the tokens t to t + 63 of a span; past its end nothing."""
    block = block_of(d, tile)
    if S.PACKED:
        end = span.first + span.length
        copy_to_global(d, [RAGGED, end, RAGGED - span.length + t, head, channel], block)
    else:
        copy_to_global(d, [span.sequence, t, head, channel], block)


@gluon.jit
def add_tokens(d, span, t, head, channel, tile, S: gl.constexpr):
    """Adds a shared tile to the tokens t to t + 63 of a span, in their dtype; past its end nothing."""
    block = block_of(d, tile)
    if S.PACKED:
        end = span.first + span.length
        add_to_global(d, [RAGGED, end, RAGGED - span.length + t, head, channel], block)
    else:
        add_to_global(d, [span.sequence, t, head, channel], block)


@gluon.jit
def fetch_tile(d, coordinates, bar, tile):
    """Copies a block of a tensor into a shared tile."""
    copy_to_shared(d, coordinates, bar, block_of(d, tile))


@gluon.jit
def vector(vectors, index, LAYOUT: gl.constexpr):
    """Row `index` of shared vectors `[n, length]` of float32."""
    return vectors.index(index).load(LAYOUT)
