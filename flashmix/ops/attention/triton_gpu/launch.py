"""What every launch of attention needs: the call's sizes and flags, descriptors, and which block belongs to which sequence."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmix.gpu import device as gpu
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.table import parts, tiles_for
from flashmix.ops.attention.triton_gpu.tiles import bounded

LOG2_E = math.log2(math.e)
CACHED_KEYS = 16 << 20  # bytes of keys and values that programs running at the same time share through the L2 cache
UNBOUNDED = 1 << 30
LEAST_SCALE = 1e-20  # by which a bias of scores can be divided
Sums = tuple[Tensor | None, Tensor | None]  # of the gates, see `decay.running_sums`
Stats = tuple[Tensor, Tensor | None, Tensor]  # what is taken off a row's scores; 1 / l and dlse (float32); delta


class Form(NamedTuple):
    """What a kernel is compiled for. Head dims with their two padded parts, tiles, and which features are there."""

    D: int
    D1: int
    D2: int
    DV: int
    V1: int
    V2: int
    BM: int
    BN: int
    STAGES: int
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
    SCALED: bool  # half precision, and nothing comes between `q k^T` and what is added but the scale, which is positive
    EXACT: bool  # float32 throughout, scores in natural units
    INTERPRETED: bool
    FAST_TANH: bool
    PRECISION: str
    WITH_K: bool  # whether a pass over the keys makes dK, and dV
    WITH_V: bool
    DELTA: bool  # whether a pass over the queries makes delta, instead of dQ


@dataclass(frozen=True)
class Call:
    """The tensors and options of one call, as the kernels take them; make one by `Call.of`."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    slopes: Tensor | None
    seed: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    score: AttentionCall
    target: gpu.Target

    @classmethod
    def of(cls, call: AttentionCall) -> Call:
        q, k, v = (aligned(x) for x in (call.q, call.k, call.v))
        sink, slopes, seed = (None if x is None else x.contiguous() for x in (call.sink, call.alibi_slopes, call.seed))
        cu_q, cu_k = (None if p is None else p.cu_seqlens.contiguous() for p in (call.packing, call.packing_k))
        return cls(q, k, v, sink, slopes, seed, cu_q, cu_k, call, gpu.target(q.device))

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens_q(self) -> int:
        return self.q.shape[1]

    @property
    def tokens_k(self) -> int:
        return self.k.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[2]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.heads_q // self.heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of what there is once a row of scores."""
        return self.batch, self.heads_q, self.tokens_q

    @property
    def count(self) -> int:
        """How many packed sequences."""
        return 0 if self.cu_q is None else self.cu_q.shape[0] - 1

    def form(self, phase: str, decay: bool) -> tuple[Form, dict[str, int]]:
        """What the phase's kernel is compiled for, and how it is launched."""
        q, score = self.q, self.score
        dim, dim_v = q.shape[3], self.v.shape[3]
        tiles = tiles_for(phase, max(dim, dim_v), q.dtype, self.target, decay)
        exact = q.dtype == torch.float32
        form = Form(
            dim, *parts(dim), dim_v, *parts(dim_v), tiles.BM, tiles.BN,
            STAGES=tiles.stages,
            MASKED_STAGES=1 if exact or (self.cu_q is not None and phase != "forward") else 2,
            UNIT=16 // q.element_size(),
            TMA=not exact and self.target.capability[0] >= 9 and self.v.numel() > 0 and q.numel() > 0,
            CAUSAL=score.right == 0,
            LEFT=score.left is not None,
            RIGHT=score.right is not None and score.right > 0,
            SOFTCAP=score.softcap is not None,
            ALIBI=self.slopes is not None,
            DECAY=decay,
            DROPOUT=self.seed is not None,
            SINK=self.sink is not None,
            PACKED=self.cu_q is not None,
            SCALED=not exact and score.softcap is None and score.scale > LEAST_SCALE,
            EXACT=exact,
            INTERPRETED=gpu.interpreted(),
            FAST_TANH=not exact and not gpu.interpreted(),
            PRECISION="ieee" if exact else "tf32",
            WITH_K=phase != "values",
            WITH_V=phase != "keys alone",
            DELTA=phase == "delta",
        )  # fmt: skip
        launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        if tiles.registers is not None and (decay or self.slopes is not None):
            launch["maxnreg"] = tiles.registers
        return form, launch

    def at_once(self, form: Form) -> int:
        """How many query heads take turns block by block: as many as keep their keys and values in the cache together."""
        tokens = self.tokens_k // max(self.count, 1)
        size = tokens * (form.D + form.DV) * self.k.element_size()
        return min(self.group * max(1, CACHED_KEYS // max(size, 1)), self.batch * self.heads_q)

    def strides(self, form: Form, *tensors: Tensor) -> list[int]:
        """Strides of batch, token and head of each tensor, in units of the form."""
        return [stride // form.UNIT for x in tensors for stride in steps_of(x)]

    def numbers(self, form: Form) -> tuple[float | int, ...]:
        """Factor of `q k^T` and of tanh, the window, dropout's threshold and the factor of what it keeps."""
        score = self.score
        bounds = (UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in (score.left, score.right))
        unit = 1.0 if form.EXACT else LOG2_E
        factors = (
            (score.scale * unit, 1.0) if score.softcap is None else (score.scale / score.softcap, score.softcap * unit)
        )
        return *factors, *bounds, int(score.dropout_p * 2**32) - 2**31, 1 / (1 - score.dropout_p)


def aligned(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` with contiguous channels and every row at a multiple of 16 bytes: x itself, or a copy of padded rows."""
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in steps):
        return x
    copy = x.new_empty(*x.shape[:3], -(-x.shape[3] // unit) * unit)[..., : x.shape[3]]
    return copy.copy_(x)


def steps_of(x: Tensor) -> list[int]:
    """Strides of batch, token and head; of an axis of one entry, which may have any, a harmless one."""
    unit = 16 // x.element_size()
    return [stride if size > 1 else unit for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]


def descriptors(x: Tensor, form: Form, rows: int, first: int, second: int) -> tuple[Any, Any]:
    """Descriptors of x `[B, T, H, D]` that read `[rows, first]` and `[rows, second]` tiles of a head; None without TMA."""
    if not form.TMA:
        return None, None
    batch, token, head = steps_of(x)
    shape, strides = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]], [batch, head, token, 1]
    tiles = [TensorDescriptor(x, shape, strides, [1, 1, rows, width or first]) for width in (first, second)]
    return tiles[0], tiles[1] if second else None


@triton.jit
def _sequence(n, cu_own, cu_other, count, tokens_own, tokens_other):
    """`(start, tokens, start of the other side, tokens there)` of sequence n; of sequence `count` what is left."""
    start = bounded(cu_own, n, 0, tokens_own)
    last = tl.minimum(n + 1, count)
    end = tl.where(n < count, bounded(cu_own, last, start, tokens_own), tokens_own)
    other = bounded(cu_other, n, 0, tokens_other)
    other_end = tl.where(n < count, bounded(cu_other, last, other, tokens_other), other)
    return start, end - start, other, other_end - other


@triton.jit(do_not_specialize=["tokens_own", "tokens_other", "count", "slots"])
def block_table_kernel(
    cu_own, cu_other, table, tokens_own, tokens_other, count, slots, BLOCK: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """Writes the slots of sequence n (see `find_sequence`), behind those of all longer sequences; what is left comes last."""
    n = tl.program_id(0)
    start, tokens, other, tokens_there = _sequence(n, cu_own, cu_other, count, tokens_own, tokens_other)
    blocks = tl.cdiv(tokens, BLOCK)
    first = tl.zeros([1], tl.int64)
    for some in range(0, count, MANY):
        each = tl.minimum(some + tl.arange(0, MANY), count - 1)
        begin = tl.minimum(tl.maximum(tl.load(cu_own + each).to(tl.int32), 0), tokens_own)
        end = tl.minimum(tl.maximum(tl.load(cu_own + each + 1).to(tl.int32), begin), tokens_own)
        theirs = tl.cdiv(end - begin, BLOCK)
        before = (theirs > blocks) | ((theirs == blocks) & (each < n)) | (n == count)
        before = before & (some + tl.arange(0, MANY) < count)
        first += tl.sum(tl.where(before, theirs, 0).to(tl.int64), 0)
    begin = tl.sum(tl.minimum(first, slots), 0).to(tl.int32)
    last = tl.where(n < count, tl.minimum(begin + blocks, slots), slots)
    for slot in range(begin, last, MANY):
        at = slot + tl.arange(0, MANY)
        row = table + at.to(tl.int64) * 8
        block = at - begin
        tl.store(row, tl.zeros_like(at) + n, mask=at < last)
        tl.store(row + 1, tl.zeros_like(at) + start, mask=at < last)
        tl.store(row + 2, tl.where(block < blocks, tokens, 0), mask=at < last)
        tl.store(row + 3, tl.zeros_like(at) + other, mask=at < last)
        tl.store(row + 4, tl.zeros_like(at) + tokens_there, mask=at < last)
        tl.store(row + 5, block, mask=at < last)


def packed_blocks(
    cu_own: Tensor | None, tokens: int, block: int, cu_other: Tensor | None = None, tokens_other: int | None = None
) -> tuple[int, Tensor | None]:
    """How many blocks of `block` tokens there may be, known to the host, and (packed) which part of which sequence each is.

    Sequences lie in the order of their lengths, the longest first: they take the longest, and nothing waits for them at the
    end. The other side of attention has its own boundaries; by default the same.
    """
    if cu_own is None:
        return -(-tokens // block), None
    count = cu_own.shape[0] - 1
    slots = tokens // block + count + 1
    table = torch.empty(slots, 8, dtype=torch.int32, device=cu_own.device)
    cu_other = cu_own if cu_other is None else cu_other
    tokens_other = tokens if tokens_other is None else tokens_other
    block_table_kernel[(count + 1,)](
        cu_own, cu_other, table, tokens, tokens_other, count, slots, block, 128, num_warps=1
    )
    return slots, table
