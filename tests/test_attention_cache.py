"""attention_with_cache equals softmax attention over the whole sequence, however the tokens arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashmix import Packing, explain
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache, op
from flashmix.ops.attention_cache.call import AttentionCacheCall
from flashmix.ops.attention_cache.op import ATTENTION_CACHE
from flashmix.ops.rotary.op import rotary, rotary_table

pytestmark = pytest.mark.usefixtures("one_thread", "deterministic_only")
BATCH, TOKENS, HEADS_Q, HEADS, DIM, DIM_V = 3, 40, 4, 2, 8, 6
TABLE = rotary_table(64, DIM, dtype=torch.float64)
FEATURES = {
    "plain": {},
    "window": {"window": (9, 0)},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.linspace(-1, 1, HEADS_Q, dtype=torch.float64)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS_Q, dtype=torch.float64)},
    "own scale and narrow window": {"scale": 0.9, "window": (0, None)},
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS_Q, DIM), (HEADS, DIM), (HEADS, DIM_V))
    q, k, v = (torch.randn(BATCH, TOKENS, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def new_cache(kind: str, dtype: torch.dtype = torch.float64) -> KVCache:
    if kind == "contiguous":
        return KVCache.contiguous(BATCH, 48, HEADS, DIM, DIM_V, dtype=dtype)
    table = torch.randperm(30, generator=torch.Generator().manual_seed(1)).view(BATCH, 10)
    return KVCache.paged(30, 5, table.to(torch.int32), HEADS, DIM, DIM_V, dtype=dtype)


def whole(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, lse = softmax_attention(rotary(q, *TABLE), rotary(k, *TABLE), v, causal=True, return_lse=True, **options)
    assert lse is not None
    return o, lse


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_arriving_in_pieces_is_the_whole_sequence(kind: str, options: dict[str, Any]) -> None:
    q, k, v = inputs()
    wanted, wanted_lse = whole(q, k, v, **options)
    cache, start, found = new_cache(kind), 0, []
    for count in (7, 1, 1, 0, 3, 20, 8):
        new = slice(start, start + count)
        found.append(
            attention_with_cache(q[:, new], cache, k[:, new], v[:, new], rotary=TABLE, return_lse=start > 5, **options)
        )
        start += count
        assert cache.lengths.tolist() == [start] * BATCH
    torch.testing.assert_close(torch.cat([o for o, _ in found], 1), wanted)
    torch.testing.assert_close(torch.cat([lse for _, lse in found if lse is not None], 2), wanted_lse[:, :, 7:])
    again, _ = attention_with_cache(q[:, -4:], cache, rotary=TABLE, **options)
    torch.testing.assert_close(again, wanted[:, -4:])
    assert cache.lengths.tolist() == [TOKENS] * BATCH


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_every_sequence_has_its_own_length(kind: str) -> None:
    """Ragged steps: each call gives the sequences different numbers of new tokens, some none."""
    q, k, v = inputs()
    wanted, wanted_lse = whole(q, k, v, window=(12, 0))
    cache = new_cache(kind)
    for counts in ((5, 0, 1), (0, 0, 0), (1, 1, 1), (20, 3, 0), (1, 30, 2)):
        before = cache.lengths.tolist()
        now = [slice(n, n + count) for n, count in zip(before, counts, strict=True)]
        new = [torch.cat([x[n, where] for n, where in enumerate(now)])[None] for x in (q, k, v)]
        o, lse = attention_with_cache(
            new[0],
            cache,
            *new[1:],
            rotary=TABLE,
            window=(12, 0),
            cu_seqlens=Packing.from_lengths(counts),
            return_lse=True,
        )
        torch.testing.assert_close(o[0], torch.cat([wanted[n, where] for n, where in enumerate(now)]))
        torch.testing.assert_close(lse, torch.cat([wanted_lse[n, :, where] for n, where in enumerate(now)], 1))
        assert cache.lengths.tolist() == [b + count for b, count in zip(before, counts, strict=True)]


def test_a_sequence_does_not_depend_on_the_batch() -> None:
    q, k, v = (x.float() for x in inputs())
    cache = new_cache("contiguous", torch.float32)
    batched = [
        attention_with_cache(q[:, t], cache, k[:, t], v[:, t], softcap=3.0)[0] for t in (slice(0, 30), slice(30, 31))
    ]
    for n in range(BATCH):
        cache = KVCache.contiguous(1, 40, HEADS, DIM, DIM_V)
        for t, together in zip((slice(0, 30), slice(30, 31)), batched, strict=True):
            one, _ = attention_with_cache(q[n : n + 1, t], cache, k[n : n + 1, t], v[n : n + 1, t], softcap=3.0)
            assert torch.equal(one, together[n : n + 1])


def test_sequences_share_the_pages_of_a_common_prefix() -> None:
    q, k, v = inputs()
    first = slice(0, 1)
    cache = KVCache.paged(8, 5, torch.tensor([[0, 1, 2, 3]]), HEADS, DIM, DIM_V, dtype=torch.float64)
    attention_with_cache(q[first, :10], cache, k[first, :10], v[first, :10])
    forked = KVCache(cache.keys, cache.values, torch.tensor([[0, 1, 4, 5], [0, 1, 6, 7]]), cache.lengths.repeat(2))
    rest = [torch.stack([x[0, 10:17], -x[0, 10:17]]) for x in (q, k, v)]
    o, _ = attention_with_cache(rest[0], forked, *rest[1:])
    for n in range(2):
        one = [torch.cat([x[0, :10], new[n]])[None] for x, new in zip((q, k, v), rest, strict=True)]
        torch.testing.assert_close(o[n : n + 1], softmax_attention(*one, causal=True)[0][:, 10:])


def test_lowering_the_lengths_rolls_back() -> None:
    q, k, v = inputs()
    cache = new_cache("paged")
    attention_with_cache(q[:, :20], cache, k[:, :20], v[:, :20], rotary=TABLE)
    attention_with_cache(-q[:, :6], cache, -k[:, :6], -v[:, :6], rotary=TABLE)
    cache.lengths -= 6
    o, _ = attention_with_cache(q[:, 20:], cache, k[:, 20:], v[:, 20:], rotary=TABLE)
    torch.testing.assert_close(o, whole(q, k, v)[0][:, 20:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs())
    o, lse = attention_with_cache(q, new_cache("paged", dtype), k, v, return_lse=True)
    wanted, wanted_lse = softmax_attention(q, k, v, causal=True, return_lse=True)
    assert o.dtype == dtype and torch.equal(o, wanted) and lse is not None and torch.equal(lse, wanted_lse)


BAD = {
    "more tokens than room": (
        lambda q, k, v, cache: attention_with_cache(
            q.repeat(1, 2, 1, 1), cache, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        ),
        ValueError,
        "the cache must have room for 80 tokens in sequence 0, got 48",
    ),
    "fewer tokens than queries": (
        lambda q, k, v, cache: attention_with_cache(q, cache),
        ValueError,
        "the cache must hold the 40 tokens of q in sequence 0, got 0",
    ),
    "k without v": (
        lambda q, k, v, cache: attention_with_cache(q, cache, k),
        ValueError,
        "k and v must be given together, got only k",
    ),
    "another batch": (
        lambda q, k, v, cache: attention_with_cache(q[:2], cache, k[:2], v[:2]),
        ValueError,
        "q must have one row a sequence of the cache, which has 3, got 2",
    ),
    "another dtype": (
        lambda q, k, v, cache: attention_with_cache(q.float(), cache, k.float(), v.float()),
        TypeError,
        "cache.keys must have dtype float32 like q, got float64",
    ),
    "heads that do not divide": (
        lambda q, k, v, cache: attention_with_cache(q[:, :, :3], cache, k, v),
        ValueError,
        "the number of heads of q must be a positive multiple of that of the cache = 2, got 3",
    ),
    "another head dim": (
        lambda q, k, v, cache: attention_with_cache(q[..., :4], cache, k, v),
        ValueError,
        "cache.keys must have shape [3, 48, 2, 4], got [3, 48, 2, 8]",
    ),
    "shape of k": (
        lambda q, k, v, cache: attention_with_cache(q, cache, k[:, :5], v),
        ValueError,
        "k must have shape [3, 40, 2, 8], got [3, 5, 2, 8]",
    ),
    "window": (
        lambda q, k, v, cache: attention_with_cache(q, cache, k, v, window=(-1, 0)),
        ValueError,
        "window left must be a non-negative int or None (unbounded), got -1",
    ),
    "position past the table": (
        lambda q, k, v, cache: attention_with_cache(q, cache, k, v, rotary=rotary_table(16, 8)),
        ValueError,
        "positions must be below the table's length 16, got 39",
    ),
    "a gradient": (
        lambda q, k, v, cache: attention_with_cache(q.requires_grad_(), cache, k, v),
        RuntimeError,
        "attention_with_cache has no gradient: call it under torch.no_grad(), or softmax_attention",
    ),
}


@pytest.mark.parametrize("call, error, text", BAD.values(), ids=BAD.keys())
def test_errors_leave_the_cache_as_it_was(call: Any, error: type[Exception], text: str) -> None:
    cache = new_cache("contiguous")
    with pytest.raises(error) as raised:
        call(*inputs(), cache)
    assert str(raised.value) == text
    assert cache.lengths.tolist() == [0] * BATCH and not cache.keys.any()


def test_a_page_that_does_not_exist_is_an_error() -> None:
    q, k, v = inputs()
    cache = new_cache("paged")
    cache.page_table[1, 2] = 30
    with pytest.raises(ValueError, match=r"cache.page_table must name pages between 0 and 29"):
        attention_with_cache(q, cache, k, v)
    attention_with_cache(q[:, :10], cache, k[:, :10], v[:, :10])  # which does not need it


@pytest.mark.parametrize("apart", [lambda x: x[..., :1].expand(x.shape), lambda x: x.mT.contiguous().mT])
def test_kernels_refuse_a_cache_whose_channels_lie_apart(apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They used it where it lay, as if they did not: wrong results from memory beyond it."""
    monkeypatch.setattr(op, "triton_refuses_first", lambda call: None)
    cache = KVCache.contiguous(2, 8, 2, 16)
    cache.values = apart(cache.values)
    taken = explain(attention_with_cache, torch.randn(2, 1, 4, 16), cache)
    assert taken.choice == "portable" and "channels" in str(taken.reasons["triton"])


def test_opcheck_and_explain() -> None:
    q, k, v = inputs()
    cache = new_cache("paged")
    assert explain(attention_with_cache, q, cache, k, v).choice == "portable"
    assert (
        explain(attention_with_cache, q, cache, k, v, rotary=TABLE).op == "attention_with_cache"
    )  # not of its rotation
    held = (cache.keys, cache.values, cache.page_table, cache.lengths)
    call = AttentionCacheCall(
        q, k, v, *held, sink=None, alibi_slopes=None, packing=None, scale=0.3, left=5, softcap=None, return_lse=True
    )
    torch.library.opcheck(ATTENTION_CACHE.operator, (*ATTENTION_CACHE.flat(call), False, "portable"))


def test_compiled_is_eager() -> None:
    q, k, v = inputs()
    found, wanted = new_cache("paged"), new_cache("paged")

    def step(q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Tensor:
        return attention_with_cache(q, cache, k, v, rotary=TABLE)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (slice(0, 9), slice(9, 10)):
        new = [x[:, tokens] for x in (q, k, v)]
        torch.testing.assert_close(compiled(*new, found), step(*new, wanted))
    torch.testing.assert_close(found.keys, wanted.keys)
    assert torch.equal(found.lengths, wanted.lengths)
