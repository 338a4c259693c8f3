"""The host's side of the backward on Hopper: launches for each kind of call, with dQ in a pass over the keys or in one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv, even_groups, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.memory import MemoryPart, is_plain, views
from flashmix.gpu.series import LaunchSeries
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.backward import (
    GroupNumbers,
    GroupSpec,
    group_sums_kernel,
    hopper_backward_kernel,
)
from flashmix.ops.attention.gluon_hopper.backward_keys import hopper_backward_keys_kernel
from flashmix.ops.attention.gluon_hopper.backward_queries import QueryWork, hopper_backward_queries_kernel
from flashmix.ops.attention.gluon_hopper.backward_stay import hopper_backward_stay_kernel
from flashmix.ops.attention.gluon_hopper.backward_sums import (
    QuerySums,
    piece_begin,
    piece_shape,
    pieces_of,
    query_gradient_kernel,
    roles_of,
)
from flashmix.ops.attention.gluon_hopper.backward_values import hopper_backward_values_kernel
from flashmix.ops.attention.gluon_hopper.backward_walk import BackwardWork
from flashmix.ops.attention.gluon_hopper.backward_wide import hopper_backward_wide_kernel
from flashmix.ops.attention.gluon_hopper.forward_host import row_statistics
from flashmix.ops.attention.gluon_hopper.plan import Plans
from flashmix.ops.attention.gluon_hopper.spec import hopper_spec, tiles
from flashmix.ops.attention.gluon_hopper.table import HEADS_OF_BOTH_WAYS, ROWS
from flashmix.ops.attention.triton_gpu.backward import RowInputs, RowResults, row_launch, summed_over_rows
from flashmix.ops.attention.triton_gpu.decay import running_sums, sums_of_gradients
from flashmix.ops.attention.triton_gpu.packed import blocks_of
from flashmix.ops.attention.triton_gpu.spec import AttentionSpec, numbers_of

MOST_CHANNELS_TOGETHER = 192  # of the larger head dim: above, dK and a piece of dQ do not fit into registers
SUMMED = 8  # tokens that a program adds up over a group of heads
CACHED_QUERIES = 16 << 20  # bytes of q, dO and dQ's sums that heads which take turns share through the L2 cache


def _both_sides(call: AttentionCall, d_o: Tensor, S: AttentionSpec, rows: int, keys: int) -> tuple[Tiles | None, ...]:
    """Both parts of q, dO, k and v in tiles of `rows` and `keys`."""
    return (
        *tiles(call.q, S, rows, S.QK),
        *tiles(d_o, S, rows, S.V),
        *tiles(call.k, S, keys, S.QK),
        *tiles(call.v, S, keys, S.V),
    )


class Flow(NamedTuple):
    """What a backward reads besides its call."""

    o: Tensor
    kept: Tensor  # see `row_statistics`
    d_lse: Tensor | None
    d_o: Tensor  # contiguous
    d_o_tiled: Tensor | None  # as TMA reads it, where that is another tensor

    @property
    def tiled(self) -> Tensor:
        return self.d_o if self.d_o_tiled is None else self.d_o_tiled


class Sums(NamedTuple):
    """What gates and slopes have besides: the gates' running sums, and sums of dS; tables of packed queries and keys. Absent ones None."""

    decay: Tensor | None = None
    decay_tiles: Tensor | None = None
    d_slopes: Tensor | None = None
    at_rows: Tensor | None = None
    at_keys: Tensor | None = None
    table: Tensor | None = None
    table_k: Tensor | None = None


class Together:
    """dQ, dK and, up to 128 channels, dV by one pass over the keys; above, dV by another."""

    def __init__(self, call: AttentionCall) -> None:
        self.spec, options = hopper_spec(call, "backward")
        spec = self.spec
        count = 0 if call.packing is None else call.packing.count + 1
        self.blocks_q, _ = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
        self.sums_q = call.tokens_q // spec.BM + count if call.packed else self.blocks_q  # blocks of dQ of a head
        self.sums = self.sums_q * call.batch * call.heads_q
        self.blocks_k, _ = blocks_of(call.packing_k, call.tokens_k, spec.BN, call.packing)
        with_v = hopper_backward_stay_kernel if spec.STAYS else hopper_backward_kernel
        self.keys = bound(with_v if spec.WITH_V else hopper_backward_keys_kernel, spec, **options)
        self.queries = bound(query_gradient_kernel, spec, num_warps=4)
        if not spec.WITH_V:
            self.spec_v, options = hopper_spec(call, "values")
            self.values = bound(hopper_backward_values_kernel, self.spec_v, **options)
        # sums of dQ's blocks; dK and dV by query head; counters
        self.by_head = ("k", "v")[: 1 + spec.WITH_V] if spec.BY_HEAD else ()
        of_q, self.pieces = spec.QK[1:], pieces_of(*spec.QK[1:])
        self.shapes = [piece_shape(piece, *of_q) for piece in (0, self.pieces - 1)]
        self.memory = [MemoryPart(torch.float32, (self.sums * piece_begin(self.pieces, *of_q),))]
        for name in self.by_head:
            shape = call.batch, call.heads_q, *getattr(call, name).shape[1::2]
            self.memory.append(MemoryPart(torch.float32, shape))
        self.counters = self.sums + 1
        self.tables = (spec.BM, spec.BN)

    def launch(
        self, call: AttentionCall, flow: Flow, rows: RowResults, more: Sums, memory: list[Tensor], found: Gradients
    ) -> None:
        spec, (sums, *by_head) = self.spec, memory
        parts = dict(zip(self.by_head, by_head, strict=True))
        made = found | parts
        n = numbers_of(call, spec, self.blocks_k)
        at_once, at_once_back = heads_in_turns(call, spec, self.blocks_k, n.at_once)
        n = n._replace(at_once=at_once)
        programs = self.blocks_k * call.batch * call.heads_q
        self.keys(
            min(programs, gpu.target(call.device).multiprocessors) if spec.STAYS else programs,
            BackwardWork(
                *(more.table_k, rows.level, rows.delta, made["k"], made["v"], rows.counters),
                alibi_slopes=None,
                decay=None,
                at_keys=None,
                n=n,
                blocks_q=self.sums_q,
                at_once_back=at_once_back,
            ),
            *_both_sides(call, flow.tiled, spec, spec.BM, spec.BN // roles_of(spec.QK.FIRST)),
            *[in_pieces(sums, shape) for shape in self.shapes],
        )
        self.queries(
            self.blocks_q * call.batch * call.heads_q,
            QuerySums(found["q"], sums, rows.counters, self.sums_q, more.table),
            numbers_of(call, spec, self.blocks_q),
        )
        for name, summands in parts.items():
            numbers, width = GroupNumbers(call.tokens_k, call.heads, call.group), found[name].shape[3]
            kernel = bound(group_sums_kernel, GroupSpec(width, power_of_two(width), SUMMED), num_warps=4)
            kernel(cdiv(call.tokens_k, SUMMED) * call.batch * call.heads, summands, found[name], numbers)
        if not spec.WITH_V:
            self.values(
                self.blocks_k * call.batch * call.heads,
                BackwardWork(
                    *(more.table_k, rows.level, None, None, found["v"], None),
                    alibi_slopes=None,
                    decay=None,
                    at_keys=None,
                    n=numbers_of(call, self.spec_v, self.blocks_k),
                    blocks_q=None,
                    at_once_back=None,
                ),
                *_both_sides(call, flow.tiled, self.spec_v, self.spec_v.BM, ROWS),
            )


def heads_in_turns(call: AttentionCall, S: AttentionSpec, blocks: int, cached: int) -> tuple[int, int | None]:
    """How many query heads take turns in the pass over the keys, of `blocks` programs each, and of heads that go from their first keys.

    Heads in turns share the cache with their dQ, those of a group too; `cached`: as many as share their keys. With TWO_WAYS groups of
    one size have q, dO and dQ's sums of CACHED_QUERIES bytes. The heads that come last are one group where they have twice as many
    bytes, and in each as many programs as a card has multiprocessors twice: of fewer the heaviest run alone at the end all the same.
    """
    if not S.TWO_WAYS:
        return max(1, cached // call.group), None
    tokens = call.tokens_q // max(0 if call.packing is None else call.packing.count, 1)
    row = (S.QK.ALL + S.V.ALL) * call.q.element_size() + 4 * S.QK.ALL
    most = cdiv(CACHED_QUERIES, max(tokens * row, 1))
    back = call.batch * (call.heads_q // HEADS_OF_BOTH_WAYS)
    least_back = cdiv(2 * gpu.target(call.device).multiprocessors, blocks)
    return even_groups(call.batch * call.heads_q - back, most), even_groups(back, max(2 * most, least_back))


def in_pieces(sums: Tensor, shape: tuple[int, int]) -> Tiles:
    """dQ's sums in tiles of a piece of a block."""
    return Tiles(sums, (sums.numel() // shape[1], shape[1]), (shape[1], 1), shape, swizzle=0)


class Apart:
    """dK and dV by a pass over the keys, dQ by one over the queries, and with them the gradients of slopes and gates."""

    def __init__(self, call: AttentionCall) -> None:
        self.spec, options = hopper_spec(call, "queries")
        self.queries = bound(hopper_backward_queries_kernel, self.spec, **options)
        self.spec_k, options = hopper_spec(call, "wide")
        self.keys = bound(hopper_backward_wide_kernel, self.spec_k, **options)
        self.blocks_q, _ = blocks_of(call.packing, call.tokens_q, self.spec.BM, call.packing_k)
        self.blocks_k, _ = blocks_of(call.packing_k, call.tokens_k, self.spec_k.BN, call.packing)
        self.memory: list[MemoryPart] = []
        self.counters = 0
        self.tables = (self.spec.BM, self.spec_k.BN)

    def launch(
        self, call: AttentionCall, flow: Flow, rows: RowResults, more: Sums, memory: list[Tensor], found: Gradients
    ) -> None:
        spec, biases = self.spec, (call.alibi_slopes, more.decay)
        n = numbers_of(call, spec, self.blocks_q)
        self.queries(
            self.blocks_q * call.batch * call.heads_q,
            QueryWork(
                more.table,
                *biases,
                more.decay_tiles,
                rows.level,
                rows.delta,
                found["q"],
                more.d_slopes,
                more.at_rows,
                n,
            ),
            *_both_sides(call, flow.tiled, spec, ROWS, spec.BN),
        )
        spec = self.spec_k
        n = numbers_of(call, spec, self.blocks_k)
        self.keys(
            self.blocks_k * call.batch * call.heads,
            BackwardWork(
                *(more.table_k, rows.level, rows.delta, found["k"], found["v"], None, *biases, more.at_keys, n),
                blocks_q=None,
                at_once_back=None,
            ),
            *_both_sides(call, flow.tiled, spec, spec.BM, ROWS),
        )


def one_pass(call: AttentionCall) -> bool:
    """Whether one pass over the keys makes dQ too: dims fit, and no gate or slope takes registers."""
    dims = max(call.q.shape[3], call.v.shape[3])
    return dims <= MOST_CHANNELS_TOGETHER and call.log_decay is None and call.alibi_slopes is None


class BackwardPlan:
    """The launches for calls of one kind."""

    def __init__(self, call: AttentionCall) -> None:
        self.gradients = (Together if one_pass(call) else Apart)(call)
        self.series, self.plain = LaunchSeries(), all(is_plain(x) for x in (call.q, call.k, call.v))
        self.row_parts = row_parts(call, self.gradients.counters)
        parts = (*self.gradients.memory, *self.row_parts)
        self.bytes = sum(part.bytes for part in parts)

    def sums(self, call: AttentionCall) -> Sums:
        """What the passes read and write besides, allocated."""
        found, device = Sums(), call.q.device
        if call.packing is not None:
            own, other = self.gradients.tables
            _, table = blocks_of(call.packing, call.tokens_q, own, call.packing_k)
            _, table_k = blocks_of(call.packing_k, call.tokens_k, other, call.packing)
            found = found._replace(table=table, table_k=table_k)
        if call.alibi_slopes is not None:
            found = found._replace(d_slopes=torch.empty(size=call.rows, dtype=torch.float32, device=device))
        if call.log_decay is not None:
            decay, decay_tiles = running_sums(call, self.gradients.spec._replace(SCALED=False))
            at_rows = torch.empty(size=call.rows, dtype=torch.float32, device=device)
            at_keys = torch.zeros(call.batch, call.heads_q, call.tokens_k, dtype=torch.float32, device=device)
            found = found._replace(decay=decay, decay_tiles=decay_tiles, at_rows=at_rows, at_keys=at_keys)
        return found

    def launch(self, call: AttentionCall, flow: Flow, memory: Tensor, more: Sums, found: Gradients) -> None:
        """All launches of a call, which work in `memory`."""
        own = len(self.gradients.memory)
        parts = views(memory, (*self.gradients.memory, *self.row_parts))
        rows = rows_in(call, parts[own:])
        top, total, _ = row_statistics(call, flow.kept)
        kernel, programs, n = row_launch(call, False, self.gradients.counters)
        kernel(programs, RowInputs(flow.o, flow.d_o, flow.d_lse, top, total, call.sink), rows, n)
        self.gradients.launch(call, flow, rows, more, parts[:own], found)


def row_parts(call: AttentionCall, counters: int) -> tuple[MemoryPart, ...]:
    """The memory of `rows_in`."""
    rows = MemoryPart(torch.float32, (*call.rows[:2], cdiv(call.tokens_q, 4) * 4))
    d_sink = MemoryPart(torch.float32, call.rows if call.sink is not None else (0,))
    return rows, rows, d_sink, MemoryPart(torch.int32, (counters,))


def rows_in(call: AttentionCall, parts: Sequence[Tensor]) -> RowResults:
    """What the rows of scores need, in memory of `row_parts`."""
    level, delta, d_sink, counters = parts
    return RowResults(level, None, delta, *[x if x.numel() else None for x in (d_sink, counters)])


def new_like(x: Tensor) -> Tensor:
    """Memory for a contiguous tensor of the same sizes."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


PLANS = Plans(BackwardPlan)


def attention_backward(
    call: AttentionCall, o: Tensor, kept: Tensor, d_o: Tensor | None, d_lse: Tensor | None
) -> Gradients:
    """The gradients of q, k, v, and of sink, slopes and decay where given."""
    d_o = torch.zeros_like(o) if d_o is None else d_o.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    plan, call, tiled = PLANS.of(call, d_o)
    q, k, v, device = call.q, call.k, call.v, call.q.device
    make_like = torch.empty_like if plan.plain else new_like
    found = {"q": make_like(q), "k": make_like(k), "v": make_like(v)}
    memory = torch.empty(plan.bytes, dtype=torch.uint8, device=device)
    more, flow = plan.sums(call), Flow(o, kept, d_lse, d_o, None if tiled is d_o else tiled)
    given = q, k, v, call.sink, call.alibi_slopes, *flow, memory, *more, found["q"], found["k"], found["v"]
    plan.series(device, given, lambda: plan.launch(call, flow, memory, more, found))
    if call.sink is not None:
        parts = views(memory, (*plan.gradients.memory, *plan.row_parts))
        found["sink"] = summed_over_rows(rows_in(call, parts[len(plan.gradients.memory) :]).d_sink, call.sink)
    if more.d_slopes is not None and call.alibi_slopes is not None:
        found["alibi_slopes"] = summed_over_rows(more.d_slopes, call.alibi_slopes)
    if more.at_rows is not None and more.at_keys is not None:
        found["log_decay"] = sums_of_gradients(call, more.at_rows, more.at_keys)
    return found
