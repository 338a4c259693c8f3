"""Segments of a scan that are read once: each takes a ticket, finds the product of its factors and its end from zero, and waits for the
state before it.

Work goes by tickets, so that what a segment waits for has begun. A segment's word is its product and its end; that of the last segment of
a window is the state after it. A segment joins the state after the window before its own and the words of its own, in their order, so that
bits do not depend on who was first. A word is written at once, 64 bits that are not MISSING: it needs no flag and no fence.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon
from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.gluon_hopper.tokens import channels, full

MISSING = gl.constexpr(-1)  # in both halves of a word: bits of a NaN that `bits_of` does not give


@gluon.jit
def bits_of(x):
    """Those of a float32 number, which are never MISSING."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits == MISSING, 0x7FFFFFFF, bits)


@gluon.jit
def number_at(bits):
    return bits.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def is_there(word):
    """1 where both halves [c] of a word are there, else 0."""
    return gl.where((word.to(gl.int32) != MISSING) & ((word >> 32).to(gl.int32) != MISSING), 1, 0)


@gluon.jit
def ticket_of(words):
    """The next piece of work, of those that tickets before the words count."""
    return (gl.atomic_add(words, 1) + 1).to(gl.int32)


@gluon.jit
def place_of(words, order, span, S: gl.constexpr):
    """Where the word [c] of a slot lies; that of a channel past the last one is the last one's."""
    c = gl.minimum(span.column + gl.arange(0, S.BLOCK, layout=channels(S.BLOCK)), S.WIDTH - 1)
    return words + 2 + order.to(gl.int64) * S.WIDTH + c


@gluon.jit
def put_word(words, span, low, high, S: gl.constexpr):
    word = (bits_of(high).to(gl.int64) << 32) | (bits_of(low).to(gl.int64) & 0xFFFFFFFF)
    c = span.column + gl.arange(0, S.BLOCK, layout=channels(S.BLOCK))
    gl.store(place_of(words, span.order, span, S), word, mask=c < S.WIDTH)


@gluon.jit
def words_at(words, first, count, span, S: gl.constexpr):
    """JOINED words [c] of the `count` slots before this one, from `first` on, and whether all are there."""
    found, there = (), gl.full([S.BLOCK], 1, gl.int32, layout=channels(S.BLOCK))
    JOINED_: gl.constexpr = S.JOINED
    for i in gl.static_range(JOINED_):
        order = span.order - count + gl.minimum(first + i, count - 1)
        word = gl.load(place_of(words, order, span, S), volatile=True)  # [c]
        found = append(found, word)
        there = there & is_there(word)
    return found, gl.min(there, 0)


@gluon.jit
def state_before(words, h, span, S: gl.constexpr):
    """The state [c] before a segment; `h` is that before the first."""
    window, count = span.place // S.WINDOW, span.place % S.WINDOW
    if window > 0:
        at = place_of(words, span.order - count - 1, span, S)
        word = gl.load(at, volatile=True)
        while gl.min(is_there(word), 0) == 0:
            word = gl.load(at, volatile=True)
        h = number_at(word)
    for first in range(0, count, S.JOINED):
        found, there = words_at(words, first, count, span, S)
        while there == 0:
            found, there = words_at(words, first, count, span, S)
        JOINED_: gl.constexpr = S.JOINED
        for i in gl.static_range(JOINED_):
            after = number_at(found[i]) * h + number_at(found[i] >> 32)
            h = gl.where(first + i < count, after, h)
    return h


@gluon.jit
def joined(words, total, end, h, span, S: gl.constexpr):
    """The state [c] before a segment with this product of factors and this end, whose word is written; `h` is that before the first."""
    is_last = span.place % S.WINDOW == S.WINDOW - 1
    if not is_last:
        put_word(words, span, total, end, S)
    before = state_before(words, h, span, S)
    if is_last:
        after = total * before + end
        put_word(words, span, after, full(0.0, S), S)
    return before
