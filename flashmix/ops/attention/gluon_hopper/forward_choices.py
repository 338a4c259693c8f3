"""How the forward of softmax attention on Hopper works, by head dims, tile and features; each choice was measured (docs/lab_notes.md)."""

# mypy: allow-untyped-defs
from __future__ import annotations

from flashmix.gpu.hopper import gluon


@gluon.constexpr_function
def take_turns(rows, channels):
    """Whether groups issue their products in turns, so that the softmax of one runs beside the products of others. Two groups do where the
    products of a tile are short and in two parts; with more channels they find their turns by themselves."""
    return rows == 192 or 64 < channels <= 80


@gluon.constexpr_function
def holds_queries(columns, channels, causal):
    """Whether groups hold q in registers: with narrow tiles of keys, `columns`, and from 97 channels on but causal ones up to 128, whose
    masks take its place."""
    return channels <= 192 and (columns == 64 or channels > 128 or (channels > 96 and not causal))


@gluon.constexpr_function
def holds_half(first, biased):
    """Whether groups hold half of q's channels in registers: where all have no room, and none of them beside gates or slopes."""
    return first == 256 and not biased


@gluon.constexpr_function
def quarter_first(channels, featured, running):
    """Whether a quarter of a tile's exponentials, not half of them, is made before `p v` is waited for, and the turn passed on before
    `p v` is issued. With 65 to 80 channels, 81 to 96 where the maximum is a `running` one, more than 128, and from 65 on with gates or a
    softcap (`featured`) that gains nothing."""
    return channels <= 64 or ((96 if running else 80) < channels <= 128 and not featured)


@gluon.constexpr_function
def masked_raw(channels, scaled, capped, biased):
    """Whether masks come before the factor of all scores, so that one instruction takes it and the maximum: where that is their scale, or
    with up to 64 channels their softcap. With more channels a softcap is slower so."""
    return (scaled or (capped and channels <= 64)) and not biased


@gluon.constexpr_function
def in_words(channels, biased, first_max, left):
    """Whether loops carry p in words (`as_words`): where there are several, with gates, slopes (`biased`) or, counted from the first
    maximum, with a left window, and up to 64 channels. One loop of more is slower."""
    return channels <= 64 or biased or (first_max and left)


@gluon.constexpr_function
def late(channels):
    """Whether a is multiplied by 2^(m - m') under the scores of the next tile: with so many channels tiles have 64 keys, whose exponentials
    are too short."""
    return channels > 128
