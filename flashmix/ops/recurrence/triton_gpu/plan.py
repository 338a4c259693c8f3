"""The plan of calls of one kind: their tiles, and each kernel with its spec."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.launch import Kernel
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule
from flashmix.ops.recurrence.triton_gpu.channel_pairs import channel_pairs_backward_kernel
from flashmix.ops.recurrence.triton_gpu.correlated import long_rows_kernel
from flashmix.ops.recurrence.triton_gpu.decay import decay_sums_kernel
from flashmix.ops.recurrence.triton_gpu.output import output_backward_kernel
from flashmix.ops.recurrence.triton_gpu.scores import scores_forward_kernel
from flashmix.ops.recurrence.triton_gpu.segments import (
    enter_segments_kernel,
    segments_backward_kernel,
    segments_forward_kernel,
)
from flashmix.ops.recurrence.triton_gpu.state import state_backward_kernel, state_forward_kernel
from flashmix.ops.recurrence.triton_gpu.structs import ChunkSpec, RowKind
from flashmix.ops.recurrence.triton_gpu.table import ChunkTiles, Kind, Tile, kind_of, padded, segments_of, tiles
from flashmix.ops.recurrence.triton_gpu.value_output import value_output_kernel

DECAYS = {Decay.NONE: "none", Decay.HEAD: "head", Decay.TOKEN: "token", Decay.CHANNEL: "channel"}
# By rule: the rows and the columns of its pairs, in the order of the tiles in memory and of all sums over them.
PAIRS: dict[Rule, dict[str, Any]] = {
    Rule.LINEAR: {"ROW": (0,), "COLUMN": (0,)},
    Rule.TIED: {"ROW": (0, 1), "COLUMN": (0, 0)},
    Rule.UNTIED: {"ROW": (0, 1), "COLUMN": (0, 0)},
    Rule.DPLR: {"ROW": (0, 0, 1, 1), "COLUMN": (0, 1, 1, 0)},
}
# A column factor of a per-channel decay is at most 2 to this; float16 has no room for factors above 1.
FACTOR_LIMIT = {torch.float32: 80, torch.bfloat16: 80, torch.float16: 0}


class InTurn(NamedTuple):
    """Kernels that share a pass: each takes the programs that the others leave out."""

    kernels: tuple[Kernel, ...]

    def __call__(self, *args: Any) -> None:
        for kernel in self.kernels:
            kernel(*args)


def has_long_rows(rule: Rule, dtype: torch.dtype) -> bool:
    """Whether rows of T may need more digits than the tiles of pairs have (`correlated.py`)."""
    return rule.corrected and dtype == torch.float32


def row_keys(call: RecurrenceCall) -> tuple[Tensor, ...]:
    """q, and the key that the correction reads with; a TIED rule reads with -k."""
    if call.rule is Rule.LINEAR:
        return (call.q,)
    return _given(call.q, call.k if call.rule is Rule.TIED else call.a)


def column_keys(call: RecurrenceCall) -> tuple[Tensor, ...]:
    """The keys that values (k) and corrected values (b) are written with; a TIED rule writes with beta k."""
    return _given(call.k, call.b)


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple([t for t in tensors if t is not None])


class Plan(NamedTuple):
    """Tiles and kernels. `state_output` writes the output, `state_save` what the backward reads, `state_both` both, `state_maps` the
    maps of segments, `state_ends` the gradients that segments send back; `values` is the output of a decay of the value axis.
    """

    tiles: ChunkTiles
    decay: Kernel
    scores: Kernel
    long_rows: Kernel
    state_output: InTurn
    state_save: InTurn
    state_both: InTurn
    state_maps: InTurn
    state_backward: InTurn
    state_ends: InTurn
    join_forward: Kernel
    join_backward: Kernel
    enter_forward: Kernel
    enter_backward: Kernel
    output: Kernel
    pairs: Kernel
    values: Kernel


class Sizes(NamedTuple):
    """What kernels are compiled for besides what tiles are chosen by."""

    value_heads: int
    row_heads: tuple[int, ...]
    column_heads: tuple[int, ...]
    packed: bool
    read_before: bool
    transposed: bool  # states


def plan(call: RecurrenceCall, transposed: bool = False) -> Plan:
    """The plan of a call; lengths and batches share one, as far as they are cut alike. The caller's states may be `transposed`.

    `int` fixes what a compiler left open.
    """
    kind = kind_of(call)
    rows, columns = (tuple([int(t.shape[2]) for t in keys]) for keys in (row_keys(call), column_keys(call)))
    sizes = Sizes(int(call.value_heads), rows, columns, call.packed, call.read_before, transposed)
    return cached_plan(kind, sizes, segments_of(call, kind), torch.get_float32_matmul_precision())


@lru_cache(maxsize=1024)
def cached_plan(kind: Kind, sizes: Sizes, segments: int, float32_precision: str) -> Plan:
    """What a plan depends on is its key."""
    own = tiles(kind, segments, float32_precision)
    channel, tied = kind.decay is Decay.CHANNEL, kind.rule is Rule.TIED
    rows, columns, HV = sizes.row_heads, sizes.column_heads, sizes.value_heads
    basic = ChunkSpec(own.C, HV, kind.K, PACKED=sizes.packed)
    query = RowKind(EXCLUSIVE=sizes.read_before, DIAGONAL=not sizes.read_before)
    levels = own.C.bit_length() - 1
    passes: dict[str, Any] = {"LEVELS": levels, "LIMIT": FACTOR_LIMIT[kind.dtype], "REACH": own.decay.BK}
    pairs = basic._replace(  # what the phases of pairs know
        ROW_HEADS=rows, COLUMN_HEADS=columns, ROWS=(query, RowKind(EXCLUSIVE=not tied, DIAGONAL=False))[: len(rows)],
        TIED=tied, DECAY=DECAYS[kind.decay], EXACT=kind.dtype == torch.float32,
        PRECISION=own.precision, **PAIRS[kind.rule], **(passes if channel else {}),
    )  # fmt: skip
    of_values = pairs._replace(V=kind.V)
    state = basic._replace(  # the state phase reads keys that are decayed, or have factors
        V=kind.V, ROW_HEADS=(HV,) * len(rows) if channel else rows, COLUMN_HEADS=(HV,) * len(columns) if channel else columns,
        **PAIRS[kind.rule], TIED=tied and not channel, DECAY="channel" if channel else "none",
        DIAGONAL=kind.rule is Rule.LINEAR, TRANSPOSED=sizes.transposed, PRECISION=own.precision,
        LONG=int(has_long_rows(kind.rule, kind.dtype)),
    )  # fmt: skip
    join = ChunkSpec(
        0, 0, kind.K, kind.V, DIAGONAL=kind.rule is Rule.LINEAR, TRANSPOSED=sizes.transposed,
        PRECISION=own.segment_precision, BK=padded(kind.K), BN=own.join.BK, BV=own.join.BV,
        STAGES=own.join.stages,
    )  # fmt: skip
    enter = join._replace(BN=own.enter.BK, BV=own.enter.BV)
    return Plan(
        tiles=own,
        decay=_kernel(decay_sums_kernel, basic._replace(EXACT=pairs.EXACT, **passes), own.decay),
        scores=_kernel(
            scores_forward_kernel,
            pairs._replace(LEVELS=levels, INVERSE_PRECISION=own.inverse_precision),
            own.scores,
            num_stages=1,
        ),
        long_rows=_kernel(
            long_rows_kernel, pairs._replace(LEVELS=levels, INVERSE_PRECISION="ieee"), own.scores, num_stages=1
        ),
        state_output=_in_turn(state_forward_kernel, state._replace(OUTPUT=True), own.state),
        state_save=_in_turn(state_forward_kernel, state._replace(SAVE=True), own.state),
        state_both=_in_turn(state_forward_kernel, state._replace(OUTPUT=True, SAVE=True), own.state),
        state_maps=_in_turn(state_forward_kernel, state, own.maps),
        state_backward=_in_turn(state_backward_kernel, state._replace(SAVE=True), own.state_backward),
        state_ends=_in_turn(state_backward_kernel, state, own.state_backward),
        join_forward=Kernel(segments_forward_kernel, join, num_warps=own.join.warps),
        join_backward=Kernel(segments_backward_kernel, join, num_warps=own.join.warps),
        enter_forward=Kernel(enter_segments_kernel, enter, num_warps=own.enter.warps),
        enter_backward=Kernel(enter_segments_kernel, enter._replace(FROM_END=True), num_warps=own.enter.warps),
        output=_kernel(output_backward_kernel, of_values, own.output),
        pairs=_kernel(channel_pairs_backward_kernel, of_values, own.pairs),
        values=_kernel(value_output_kernel, of_values, own.values),
    )


def _in_turn(kernel: Any, spec: ChunkSpec, tile: Tile) -> InTurn:
    """A kernel of the state pass; where rows of T may be long one for the sequences without them, and one for those with them."""
    return InTurn(tuple([_kernel(kernel, spec._replace(LONG=long), tile) for long in ((1, 2) if spec.LONG else (0,))]))


def _kernel(kernel: Any, spec: ChunkSpec, tile: Tile, **options: Any) -> Kernel:
    """A kernel with its tile and launch options."""
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    spec = spec._replace(BK=tile.BK, BV=tile.BV, STAGES=tile.stages)
    return Kernel(kernel, spec, num_warps=tile.warps, **options)
