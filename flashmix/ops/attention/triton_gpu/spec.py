"""The spec of the kernels of attention, the numbers they are launched with, and tensors as they take them."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import even_groups
from flashmix.gpu.tma import Tiles
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.table import AttentionConfig, config_for, parts

CACHED_KEYS = 16 << 20  # bytes of keys and values that programs running at the same time share through the L2 cache
UNBOUNDED = 1 << 30
LEAST_SCALE = 1e-20  # by which a bias of scores can be divided
UNITS_OF_E = math.log2(math.e)  # scores of half precision are in units of log 2


class Channels(NamedTuple):
    """A head dim, and the widths of the one or two tiles that hold it; SECOND is 0 where there is one."""

    ALL: int
    FIRST: int
    SECOND: int


class AttentionSpec(NamedTuple):
    """Compile-time facts of a kernel: head dims, tiles, and which features the call has."""

    QK: Channels
    V: Channels
    BM: int  # queries of a tile
    BN: int  # keys of a tile
    STAGES: int  # of the loop over whole tiles
    MASKED_STAGES: int
    UNIT: int  # strides are counted in this many elements, 16 bytes
    TMA: bool
    CAUSAL: bool
    LEFT: bool
    RIGHT: bool
    SOFTCAP: bool
    ALIBI: bool
    DECAY: bool
    DROPOUT: bool
    SINK: bool
    PACKED: bool
    RANGES: bool  # whether each sequence of the batch has keys of its own, see `KeyRanges`
    SCALED: bool  # half precision, and nothing comes between `q k^T` and what is added but the scale, which is positive
    EXACT: bool  # float32 throughout, scores in natural units
    INTERPRETED: bool
    FAST_TANH: bool
    PRECISION: str
    WITH_K: bool  # whether a pass over the keys makes dK, and dV
    WITH_V: bool
    DELTA: bool  # whether a pass over the queries makes delta, instead of dQ
    OWN_RESULTS: bool = False  # Hopper: results leave through shared memory of their own, not that of q
    FIRST_MAX: bool = False  # Hopper: the largest score of its first tile is what a row's scores are counted from
    HEADROOM: int = 0  # Hopper: so much above it, in units of log 2
    V_STAGES: int = 0  # Hopper: of a ring of values other than that of keys
    WITH_Q: bool = True  # Hopper: whether the pass over the keys adds to dQ
    BY_HEAD: bool = False  # Hopper: whether each query head has dK and dV of its own, to be added up by group
    TWO_WAYS: bool = False  # Hopper: whether the pass over the keys goes through every eighth head from its first keys
    STAYS: bool = False  # Hopper: whether its programs take one block of keys after another
    SLOPES_BY_SEQUENCE: bool = False  # ALiBi's slopes are [B, HQ]


class KeyRanges(NamedTuple):
    """`[B]` each, or None: the first key of each sequence, and the end of its keys."""

    starts: Any
    lengths: Any


class BackwardInputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    d_o: Any
    level: Any  # of rows, see `backward.RowResults`
    share: Any
    delta: Any
    alibi_slopes: Any
    decay: Any  # the gates' running sums, see `decay.running_sums`
    seed: Any
    table: Any  # of blocks, see `packed.blocks_of`, or `KeyRanges`


class AttentionNumbers(NamedTuple):
    """Run-time numbers: sizes, strides of (batch, token, head) in UNITs, and what scores are computed with."""

    tokens_q: Any
    tokens_k: Any
    heads_q: Any
    heads: Any
    group: Any  # query heads of a key head
    batches: Any
    blocks: Any  # programs of a head
    at_once: Any  # heads that take turns, see `tiles.find_head`
    q_at: Any
    k_at: Any
    v_at: Any
    d_o_at: Any  # backward
    scale: Any  # of `q k^T`, in the units of scores or of tanh
    softcap: Any  # factor of tanh
    left: Any
    right: Any
    threshold: Any  # dropout keeps hashes from here on
    keep_scale: Any  # 1 / (1 - dropout_p)
    d_scale: Any  # of dQ and dK


def channels(dim: int) -> Channels:
    return Channels(dim, *parts(dim))


def spec_of(
    call: AttentionCall, phase: str, config: AttentionConfig | None = None
) -> tuple[AttentionSpec, dict[str, int]]:
    """What the phase's kernel is compiled for, and its launch options; `config` in place of the table's row."""
    dim, dim_v = call.q.shape[3], call.v.shape[3]
    target, decay = gpu.target(call.device), call.log_decay is not None
    if config is None:
        config = config_for(phase, max(dim, dim_v), call.dtype, target, decay)
    exact = call.dtype == torch.float32
    spec = AttentionSpec(
        channels(dim),
        channels(dim_v),
        config.BM,
        config.BN,
        STAGES=config.stages,
        MASKED_STAGES=1 if exact or ((call.packed or call.ranged) and phase != "forward") else 2,
        UNIT=16 // call.q.element_size(),
        TMA=not exact and target.capability[0] >= 9 and call.v.numel() > 0 and call.q.numel() > 0,
        CAUSAL=call.right == 0,
        LEFT=call.left is not None,
        RIGHT=call.right is not None and call.right > 0,
        SOFTCAP=call.softcap is not None,
        ALIBI=call.alibi_slopes is not None,
        DECAY=decay,
        DROPOUT=call.seed is not None,
        SINK=call.sink is not None,
        PACKED=call.packed,
        RANGES=call.ranged,
        SCALED=not exact and call.softcap is None and call.scale > LEAST_SCALE,
        EXACT=exact,
        INTERPRETED=gpu.interpreted(),
        FAST_TANH=not exact and not gpu.interpreted(),
        PRECISION="ieee" if exact else "tf32",
        WITH_K=phase != "values",
        WITH_V=phase != "keys alone",
        DELTA=phase == "delta",
        SLOPES_BY_SEQUENCE=call.slopes_by_sequence,
    )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers is not None and (decay or call.alibi_slopes is not None):
        options["maxnreg"] = config.registers
    return spec, options


def factors(scale: float, softcap: float | None, exact: bool) -> tuple[float, float]:
    """Factors of `q k^T` and of tanh: scores are natural in float32 (`exact`), else in units of log 2."""
    unit = 1.0 if exact else UNITS_OF_E
    return (scale * unit, 1.0) if softcap is None else (scale / softcap, softcap * unit)


def bounded_window(bound: int | None) -> int:
    return UNBOUNDED if bound is None else min(bound, UNBOUNDED)


def numbers_of(call: AttentionCall, S: AttentionSpec, blocks: int, d_o: Tensor | None = None) -> AttentionNumbers:
    """The numbers of a launch with `blocks` programs a head of queries."""
    scale, softcap = factors(call.scale, call.softcap, S.EXACT)
    return AttentionNumbers(
        call.tokens_q,
        call.tokens_k,
        call.heads_q,
        call.heads,
        call.group,
        call.batch,
        blocks,
        _heads_at_once(call, S),
        q_at=strides(call.q, S.UNIT),
        k_at=strides(call.k, S.UNIT),
        v_at=strides(call.v, S.UNIT),
        d_o_at=None if d_o is None else strides(d_o, S.UNIT),
        scale=scale,
        softcap=softcap,
        left=bounded_window(call.left),
        right=bounded_window(call.right),
        threshold=int(call.dropout_p * 2**32) - 2**31,
        keep_scale=1 / (1 - call.dropout_p),
        d_scale=call.scale,
    )


def _heads_at_once(call: AttentionCall, S: AttentionSpec) -> int:
    """How many query heads take turns block by block: as many as keep their keys and values in the cache together, in even groups, as
    the heaviest blocks of a few heads that are left would run alone at the end."""
    tokens = call.tokens_k // max(0 if call.packing is None else call.packing.count, 1)
    size = tokens * (S.QK.ALL + S.V.ALL) * call.k.element_size()
    return call.group * even_groups(call.batch * call.heads, max(1, CACHED_KEYS // max(size, 1)))


def laid_out(call: AttentionCall) -> AttentionCall:
    """The call with tensors laid out as the kernels read them."""
    names = ("sink", "alibi_slopes", "seed", "key_starts", "key_lengths")
    small = {name: x.contiguous() for name in names if (x := getattr(call, name)) is not None}
    return call.but(q=aligned(call.q), k=aligned(call.k), v=aligned(call.v), **small)


def table_or_ranges(call: AttentionCall, table: Tensor | None) -> Any:
    """The table of packed blocks, or the ranges of keys of a batch, or None: what tells a program where it works."""
    return KeyRanges(call.key_starts, call.key_lengths) if call.ranged else table


def aligned(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` with contiguous channels and every row at a multiple of 16 bytes: x itself, or a copy of padded rows."""
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in steps):
        return x
    copy = x.new_empty(*x.shape[:3], -(-x.shape[3] // unit) * unit)[..., : x.shape[3]]
    return copy.copy_(x)


def steps_of(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, token and head; of an axis of one entry, which may have any, a harmless one."""
    unit = 16 // x.element_size()
    return tuple([stride if size > 1 else unit for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)])


def strides(x: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of batch, token and head in units of elements."""
    return tuple([step // unit for step in steps_of(x)])


def descriptors(x: Tensor, S: AttentionSpec, rows: int, width: Channels) -> tuple[Any, Any]:
    """Descriptors of x `[B, T, H, D]` for `[rows, .]` tiles of both parts of a head; None without TMA, and for a part that is not there."""
    if not S.TMA:
        return None, None
    batch, token, head = steps_of(x)
    shape, steps = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]], [batch, head, token, 1]
    first, second = (Tiles(x, shape, steps, (1, 1, rows, w or width.FIRST)) for w in width[1:])
    return first, second if width.SECOND else None
