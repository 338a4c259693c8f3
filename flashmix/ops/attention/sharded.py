"""Softmax attention over a shard: the keys and values that its queries see come from the ranks that have them.

A piece's queries are its newest keys, so the local call is the op's own with `cu_seqlens_k` of the keys that each piece sees.
"""

from __future__ import annotations

from itertools import accumulate

from flashmix.op.call import Outputs
from flashmix.op.packing import Packing
from flashmix.ops.attention import op
from flashmix.ops.attention.call import AttentionCall
from flashmix.parallel.exchange import Wants, fetch
from flashmix.parallel.shard import Shard, ShardPiece


def run(call: AttentionCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packings are a `Shard`."""
    shard, causal = call.packing, call.right == 0
    if not isinstance(shard, Shard) or call.packing_k is not shard:
        raise ValueError("cu_seqlens_k must be the Shard of cu_seqlens, or None, got another packing")
    if not causal and (call.left is not None or call.right is not None):
        raise ValueError(f"window must come with causal=True over a Shard, got {(call.left, call.right)}")
    if not causal and call.alibi_slopes is not None:
        raise ValueError("alibi_slopes must come with causal=True over a Shard, got causal=False")
    if call.dropout_p > 0:
        raise ValueError(f"dropout_p must be 0 over a Shard (what is dropped would depend on it), got {call.dropout_p}")
    if not shard.chains:
        return op.ATTENTION(call.but(packing=shard.local, packing_k=shard.local), impl, asked)

    seen = call.left, causal
    keys = [x for x in (call.k, call.v, call.log_decay) if x is not None]
    found = fetch(shard, ("keys", *seen), lambda: wants(shard, *seen), *(x[0].flatten(1) for x in keys))
    k, v, *decay = (x.view(1, x.shape[0], *like.shape[2:]) for x, like in zip(found, keys, strict=True))
    packing_k = shard.made(("packing of keys", *seen), lambda: packing_of_keys(shard, *seen))
    local = call.but(k=k, v=v, log_decay=decay[0] if decay else None, packing=shard.local, packing_k=packing_k)
    return op.ATTENTION(local, impl, asked)


def visible(shard: Shard, piece: ShardPiece, left: int | None, causal: bool) -> tuple[int, int]:
    """The tokens of the whole row that the queries of a piece see, `start` to `stop`."""
    begin, end = shard.boundaries[piece.sequence : piece.sequence + 2]
    if not causal:
        return begin, end if piece.start < piece.stop else begin
    return begin if left is None else max(begin, piece.start - left), piece.stop


def wants(shard: Shard, left: int | None, causal: bool) -> Wants:
    """The keys of every rank's pieces."""
    return [[s for p in own for s in shard.spans(*visible(shard, p, left, causal))] for own in shard.pieces]


def packing_of_keys(shard: Shard, left: int | None, causal: bool) -> Packing:
    """Where the keys of each of this rank's pieces start and end."""
    spans = (visible(shard, p, left, causal) for p in shard.pieces[shard.rank])
    ends = [0, *accumulate(stop - start for start, stop in spans)]
    return Packing(shard.tensor(ends, shard.cu_seqlens.dtype), ends[-1])
