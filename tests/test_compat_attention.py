"""flashmix.compat.flash_attn and .flash_attn_interface against the formula of attention, with their defaults and conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compat_loops as loops
import pytest
import torch
from budget import assert_within_budget
from torch import Tensor

from flashmix.compat import flash_attn as two
from flashmix.compat import flash_attn_interface as three
from flashmix.ops.rotary.op import rotary_table

B, TQ, TK, HQ, H, D = 2, 5, 8, 4, 2, 16
BOTH = pytest.mark.parametrize("library", [two, three], ids=["two", "three"])


def qkv(queries: int = TQ, keys: int = TK) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, queries, HQ, D), torch.randn(B, keys, H, D), torch.randn(B, keys, H, D)


def random_slopes(*shape: int) -> Tensor:
    """The same at each start, since they are part of a test's name."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def check(got: Tensor, loop: Callable[..., Any], *tensors: Tensor, lse: bool = False) -> None:
    wide, narrow = loop(*(x.double() for x in tensors)), loop(*tensors)
    place = 1 if lse else 0
    assert got.shape == wide[place].shape and got.dtype == torch.float32
    seen = wide[place].isfinite()
    assert torch.equal(got.isfinite(), seen)
    assert_within_budget("compat", got[seen], wide[place][seen], narrow[place][seen], steps=2)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 0)},
    {"window_size": (1, 2)},
    {"window_size": (-1, 1), "softmax_scale": 0.7},
    {"softcap": 1.5},
]


@BOTH
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_func(library: Any, options: dict[str, Any]) -> None:
    for queries, keys in ((TQ, TK), (TK, TQ)):  # with more queries than keys some see nothing
        q, k, v = qkv(queries, keys)
        names = {"window_size": "window", "softmax_scale": "scale"}
        given = {names.get(n, n): value for n, value in options.items()}
        check(library.flash_attn_func(q, k, v, **options), lambda *x, g=given: loops.attention(*x, **g), q, k, v)


@BOTH
def test_lse_of_a_query_that_sees_nothing(library: Any) -> None:
    q, k, v = qkv(TK, TQ)
    o, lse, *rest = library.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not o[:, : TK - TQ].any()
    assert (lse[..., : TK - TQ] == (torch.inf if library is two else -torch.inf)).all()
    assert rest == ([None] if library is two else [])
    check(lse.masked_fill(lse.isinf(), -torch.inf), lambda *x: loops.attention(*x, causal=True), q, k, v, lse=True)


@pytest.mark.parametrize("slopes", [random_slopes(HQ), random_slopes(B, HQ)], ids=["H", "BH"])
def test_alibi(slopes: Tensor) -> None:
    q, k, v = qkv()
    o, lse, _ = two.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    for got, is_lse in ((o, False), (lse, True)):
        check(got, lambda *x: loops.attention(*x, causal=True, slopes=slopes), q, k, v, lse=is_lse)
    cu_q, cu_k = torch.tensor([0, TQ, 2 * TQ]), torch.tensor([0, TK, 2 * TK])
    flat = (x.flatten(0, 1) for x in (q, k, v))
    packed = two.flash_attn_varlen_func(*flat, cu_q, cu_k, TQ, TK, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(packed.view_as(o), o)


def test_packed_layouts_are_the_same_call() -> None:
    x = torch.randn(B, TK, 3, H, D)
    q, k, v = x.unbind(2)
    for library in (two, three):
        o = library.flash_attn_func(q, k, v, causal=True)
        assert torch.equal(library.flash_attn_qkvpacked_func(x, causal=True), o)
    assert torch.equal(two.flash_attn_kvpacked_func(q, x[:, :, 1:], causal=True), o)
    grouped = torch.cat([torch.randn(B, TK, 2 * H, D), k, v], 2)
    got = three.flash_attn_qkvpacked_func(grouped, num_heads_q=2 * H)
    assert torch.equal(got, three.flash_attn_func(grouped[:, :, : 2 * H], k, v))
    cu = torch.tensor([0, 3, TK, 2 * TK], dtype=torch.int32)
    flat = x.flatten(0, 1)
    want = two.flash_attn_varlen_func(*flat.unbind(1), cu, cu, TK, TK)
    assert torch.equal(two.flash_attn_varlen_qkvpacked_func(flat, cu, TK), want)
    assert torch.equal(two.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, TK, TK), want)


@BOTH
def test_varlen_is_each_sequence_alone(library: Any) -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    cu_q, cu_k = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 6, 16], dtype=torch.int32)
    options = {"causal": True, "window_size": (3, -1), "return_attn_probs": True}
    o, lse, *_ = library.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 10, **options)
    assert lse.shape == (HQ, 10)
    for n in range(3):
        rows, keys = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        parts = q[None, rows], k[None, keys], v[None, keys]
        check(o[None, rows], lambda *x: loops.attention(*x, causal=True, window=(3, -1)), *parts)


def paged(x: Tensor, size: int, generator: int) -> tuple[Tensor, Tensor]:
    """The rows `[B, T, H, D]` as pages in any order, and their table."""
    pages = x.unflatten(1, (-1, size)).flatten(0, 1)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(generator))
    stored = torch.empty_like(pages)
    stored[order] = pages
    return stored, order.view(x.shape[0], -1).to(torch.int32)


def test_varlen_reads_pages() -> None:
    q, k, v = qkv()
    (keys, table), (values, _) = paged(k, 4, 0), paged(v, 4, 0)
    lengths = torch.tensor([6, 3])
    cu_q, cu_k = torch.tensor([0, TQ, 2 * TQ]), torch.tensor([0, 6, 9])
    got = two.flash_attn_varlen_func(q.flatten(0, 1), keys, values, cu_q, cu_k, TQ, 6, block_table=table)
    packed = [torch.cat([x[n, : lengths[n]] for n in range(B)]) for x in (k, v)]
    assert torch.equal(got, two.flash_attn_varlen_func(q.flatten(0, 1), *packed, cu_q, cu_k, TQ, 6))


def rotated(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first 8 channels of `x` `[B, T, H, D]` turned by the angles of `positions` `[B, T]`."""
    angle = positions[..., None].to(x.dtype) * 10000.0 ** -(torch.arange(0, 8, 2).to(x.dtype) / 8)
    cos, sin = (f(angle).unsqueeze(2) for f in (torch.cos, torch.sin))
    pairs = x[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2)
    return torch.cat([turned.flatten(-2), x[..., 8:]], -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("interleaved", [None, False])
@pytest.mark.parametrize("library", [two, three], ids=["two", "three"])
def test_kvcache_appends_and_attends(library: Any, causal: bool, pages: bool, interleaved: bool | None) -> None:
    """New keys are rotated at `cache_seqlens + i` and written there; queries too if causal, else all at `cache_seqlens`."""
    torch.manual_seed(0)
    rows = 4
    k_all, v_all = torch.randn(rows, 12, H, D), torch.randn(rows, 12, H, D)
    q, k, v = torch.randn(B, 3, HQ, D), torch.randn(B, 3, H, D), torch.randn(B, 3, H, D)
    lengths, chosen = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    cos, sin = rotary_table(20, 8)
    options: dict[str, Any] = {"causal": causal, "return_softmax_lse": True, "rotary_cos": cos, "rotary_sin": sin}
    options |= {} if interleaved is None else {"rotary_interleaved": interleaved}
    places = lengths[:, None] + torch.arange(3)
    seen_k, seen_v = k_all[chosen.long()].clone(), v_all[chosen.long()].clone()
    for n in range(B):
        seen_k[n, places[n].long()] = rotated(k, places, interleaved is None)[n]
        seen_v[n, places[n].long()] = v[n]
    if pages:
        (k_cache, table), (v_cache, _) = paged(k_all, 4, 1), paged(v_all, 4, 1)
        options["block_table" if library is two else "page_table"] = table[chosen.long()]
    else:
        k_cache, v_cache = k_all.clone(), v_all.clone()
        options["cache_batch_idx"] = chosen
    before = lengths.clone()
    o, lse = library.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **options)
    assert torch.equal(lengths, before)
    turned = rotated(q, places if causal else lengths[:, None].expand(B, 3), interleaved is None)
    for n in range(B):
        end = int(lengths[n]) + 3
        parts = turned[n : n + 1], seen_k[n : n + 1, :end], seen_v[n : n + 1, :end]
        check(o[n : n + 1], lambda *x: loops.attention(*x, causal=causal), *parts)
        check(lse[n : n + 1], lambda *x: loops.attention(*x, causal=causal), *parts, lse=True)
        row = int(chosen[n])
        stored = k_cache[table[row].long()].flatten(0, 1) if pages else k_cache[row]
        torch.testing.assert_close(stored[:end], seen_k[n, :end])


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"window_size": (2, 1)},
        {"causal": True, "window_size": (3, 0), "softcap": 2.0},
        {"causal": True, "alibi_slopes": random_slopes(B, HQ)},
        {"causal": True, "alibi_slopes": random_slopes(HQ)},
    ],
    ids=str,
)
@pytest.mark.parametrize("leftpad", [None, torch.tensor([2, 1], dtype=torch.int32)], ids=["full", "leftpad"])
def test_kvcache_without_new_tokens(options: dict[str, Any], leftpad: Tensor | None) -> None:
    q, k, v = qkv(2)
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    o = two.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, **options)
    names = {"window_size": "window", "alibi_slopes": "slopes"}
    given = {names.get(n, n): value for n, value in options.items()}
    for n in range(B):
        start = 0 if leftpad is None else int(leftpad[n])
        row = given | ({"slopes": given["slopes"][n]} if "slopes" in given and given["slopes"].dim() == 2 else {})
        parts = q[n : n + 1], k[n : n + 1, start : lengths[n]], v[n : n + 1, start : lengths[n]]
        check(o[n : n + 1], lambda *x, row=row: loops.attention(*x, **row), *parts)


@pytest.mark.parametrize("causal", [True, False])
def test_kvcache_leaves_lengths_to_the_caller(causal: bool) -> None:
    q, k, v = qkv(1)
    lengths = torch.tensor([3, 5])
    two.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=lengths, causal=causal)
    assert lengths.tolist() == [3, 5]


def test_kvcache_of_one_length_and_of_none() -> None:
    q, k, v = qkv(1)
    assert torch.equal(two.flash_attn_with_kvcache(q, k, v), two.flash_attn_with_kvcache(q, k, v, cache_seqlens=TK))
    short = two.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, causal=True)
    check(short, lambda q, k, v: loops.attention(q, k[:, :3], v[:, :3], causal=True), q, k, v)


def test_kvcache_of_generation_three_takes_packed_queries() -> None:
    _, k, v = qkv(3)
    lengths, cu = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    new = torch.randn(4, H, D), torch.randn(4, H, D)
    packed = torch.randn(4, HQ, D)
    caches = k.clone(), v.clone()
    options = {"cache_seqlens": lengths, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3, "causal": True}
    o = three.flash_attn_with_kvcache(packed, *caches, *new, **options)
    for n, (a, b) in enumerate(((0, 1), (1, 4))):
        end = int(lengths[n])
        parts = [torch.cat([x[n, :end], y[a:b]])[None] for x, y in zip((k, v), new, strict=True)]
        check(o[None, a:b], lambda *x: loops.attention(*x, causal=True), packed[None, a:b], *parts)
        torch.testing.assert_close(caches[0][n, : end + b - a], parts[0][0])


def test_gradients_and_dropout() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    o, lse, _ = two.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    (o.sum() + lse.sum()).backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in (q, k, v))
    torch.manual_seed(1)
    dropped = two.flash_attn_func(q, k, v, 0.5)
    assert not torch.equal(dropped, two.flash_attn_func(q, k, v))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda *x: two.flash_attn_func(*x, dropout_p=0.1, return_attn_probs=True), NotImplementedError, "dropout"),
        (lambda *x: two.flash_attn_func(*x, qv=1), TypeError, "qv"),
        (lambda *x: three.flash_attn_func(*x, dropout_p=0.1), TypeError, "dropout_p"),
        (lambda *x: three.flash_attn_func(*x, q_descale=torch.ones(1)), NotImplementedError, "q_descale"),
        (lambda *x: three.flash_attn_func(*x, attention_chunk=4), NotImplementedError, "attention_chunk"),
        (lambda *x: two.flash_attn_with_kvcache(*x, rotary_cos=x[0], rotary_sin=x[0]), ValueError, "rotary_cos"),
        (lambda *x: two.flash_attn_with_kvcache(*x, x[1], x[2]), ValueError, "cache_seqlens"),
        (lambda *x: three.flash_attn_combine, AttributeError, "flash_attn_combine"),
    ],
)
def test_what_is_not_there_raises_by_name(call: Callable[..., Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(*qkv())


def test_hints_change_nothing() -> None:
    q, k, v = qkv()
    o = three.flash_attn_func(q, k, v)
    assert torch.equal(o, three.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, deterministic=True, sm_margin=8))
    assert torch.equal(o, two.flash_attn_func(q, k, v, deterministic=True))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    q, *_ = qkv()
    cos, sin = rotary_table(20, 8)
    offsets = torch.tensor([3, 7])

    def check_turned(got: Tensor, positions: Tensor) -> None:
        check(got, lambda x: (rotated(x, positions, interleaved),), q)

    steps = torch.arange(TQ).expand(B, TQ)
    check_turned(two.apply_rotary_emb(q, cos, sin, interleaved), steps)
    check_turned(two.apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=4), steps + 4)
    check_turned(two.apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=offsets), steps + offsets[:, None])
    cu = torch.tensor([0, TQ, 2 * TQ])
    flat = q.flatten(0, 1)
    for given, first in ((0, 0), (offsets, offsets[:, None])):
        got = two.apply_rotary_emb(flat, cos, sin, interleaved, seqlen_offsets=given, cu_seqlens=cu, max_seqlen=TQ)
        check_turned(got.view_as(q), steps + first)
    kept = q.clone()
    assert two.apply_rotary_emb(kept, cos, sin, interleaved, True) is kept
    check_turned(kept, steps)


@pytest.mark.parametrize("gradient", [False, True])
def test_rotary_of_packed_projections(gradient: bool) -> None:
    cos, sin = rotary_table(20, 8)
    places = torch.arange(TQ).expand(B, TQ) + 2
    x = torch.randn(B, TQ, 3, H, D)
    want = torch.stack([rotated(x[:, :, 0], places, False), rotated(x[:, :, 1], places, False), x[:, :, 2]], 2)
    given = x.clone().requires_grad_(gradient)
    got = two.apply_rotary_emb_qkv_(given, cos, sin, seqlen_offsets=2)
    torch.testing.assert_close(got, want)
    assert (got is given) is not gradient
    flat = torch.cat([x[:, :, 0], x[:, :, 0], x[:, :, 1], x[:, :, 2]], 2)
    turned = two.apply_rotary_emb_qkv_(flat, cos, sin, seqlen_offsets=2, num_heads_q=2 * H)
    torch.testing.assert_close(turned, torch.cat([want[:, :, 0], want[:, :, 0], want[:, :, 1], want[:, :, 2]], 2))
    kv = two.apply_rotary_emb_kv_(x[:, :, 1:].clone(), cos, sin, seqlen_offsets=2)
    torch.testing.assert_close(kv, want[:, :, 1:])
    layer = two.RotaryEmbedding(8)
    torch.testing.assert_close(layer(x.clone(), seqlen_offset=2), want)
    q, kv = layer(x[:, :, 0].clone(), x[:, :, 1:].clone(), seqlen_offset=torch.tensor([2, 2]), max_seqlen=9)
    torch.testing.assert_close(torch.cat([q.unsqueeze(2), kv], 2), want)
    with pytest.raises(NotImplementedError, match="scale_base"):
        two.RotaryEmbedding(8, scale_base=512)


def test_padding() -> None:
    x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    tokens, indices, cu, longest, used = two.unpad_input(x, mask)
    assert torch.equal(tokens, torch.cat([x[0, :2], x[1, 1:]])) and indices.tolist() == [0, 1, 5, 6, 7]
    assert cu.tolist() == [0, 2, 5] and cu.dtype == torch.int32 and longest == 3 and used.tolist() == [2, 3]
    assert torch.equal(two.pad_input(tokens, indices, 2, 4), x * mask[..., None])
    _, _, cu, longest, used = two.unpad_input(x, mask, torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]]))
    assert cu.tolist() == [0, 3, 6] and longest == 3 and used.tolist() == [2, 3]
    flat = x.flatten(0, 1)
    assert torch.equal(two.index_first_axis(flat, indices), tokens)
    assert torch.equal(two.index_put_first_axis(tokens, indices, 8).view_as(x), x * mask[..., None])
