"""flashmix's softmax attention under transformers' continuous batching: the same tokens as by plain `generate` of each prompt."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hf_cases import error, tokens, transformers
from samples import sample
from test_hf_attention import FAMILIES, SAME, TWO, tiny
from torch import Tensor
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

import flashmix
import flashmix.hf

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 10
ATTENTION = flashmix.hf.register_attention()
# transformers 5.17 calls a page a block
PAGE = next(f.name for f in fields(transformers.ContinuousBatchingConfig) if f.name in ("page_size", "block_size"))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers measures the memory of accelerators alone, and takes a CPU to have none."""
    monkeypatch.setattr(paged_cache.PagedAttentionMemoryHandler, "get_available_memory", lambda _: 2**28)


def prompts() -> list[list[int]]:
    """Of many lengths, two with a prefix of two blocks in common."""
    row = tokens(1, 90, seed=7)[0]
    parts = [part.tolist() for part in row.split([5, 1, 40, 17, 27])]
    return [*parts, parts[2][:16] + parts[0]]


# one that does not tell its attention of the window
MORE = {"phimoe": ("PhimoeConfig", "PhimoeForCausalLM", TWO | {"sliding_window": 9, "num_local_experts": 4})}
# by the name that transformers 5.17 gives the same attention under continuous batching
PREFIXED = ["paged|llama"] if "paged|sdpa" in transformers.AttentionInterface() else []


# A plain one and one with a sink and a window.
CHOSEN = ("llama", "gpt_oss")
EVERY = (*FAMILIES, *MORE, *PREFIXED)


@pytest.mark.parametrize("family", sample(EVERY, CHOSEN))
def test_continuous_batching_agrees_with_generation_alone(family: str) -> None:
    prefix, _, family = family.rpartition("|")
    name = f"{prefix}|{ATTENTION}" if prefix else ATTENTION
    model = tiny(family, FAMILIES | MORE)
    alone = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = [model.generate(torch.tensor([prompt]), **alone) for prompt in prompts()]
    model.set_attn_implementation(name)
    # prompts of over 32 tokens come in parts, and tokens of some requests beside prompts of others
    sizes = {PAGE: 8, "num_blocks": 48, "max_batch_tokens": 32, "return_logprobs": True}
    found = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    assert len(found) == len(expected)
    for prompt, output, one in zip(prompts(), found.values(), expected, strict=True):
        assert output.error is None
        assert output.generated_tokens == one.sequences[0, len(prompt) :].tolist()
        logprobs = torch.cat(one.logits).log_softmax(1).amax(1)
        assert error(torch.tensor(output.logprobs), logprobs) <= 2 * SAME  # of numbers near 1


@pytest.mark.parametrize("name", ["eager", ATTENTION])
def test_the_manager_lets_our_name_through_alone(name: str) -> None:
    model = tiny("llama")
    model.set_attn_implementation(name)
    sizes = {PAGE: 8, "num_blocks": 12, "max_batch_tokens": 32}
    model.init_continuous_batching(continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes))
    assert model.config._attn_implementation == ("paged|eager" if name == "eager" else name)
    if not PREFIXED:  # names that transformers does not know are refused as before
        model.set_attn_implementation("flex_attention")
        with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
            model.init_continuous_batching(continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes))


class Paged:
    """Requests of a model with heads of the sizes of `tiny`, some tokens of each in a cache: one layer's calls."""

    LENGTHS = (13, 1, 8)  # of keys, the newest included
    HEADS, GROUP, CHANNELS, LAYER = 2, 2, 8, 1

    def __init__(self) -> None:
        options = {PAGE: 8, "num_blocks": 12, "max_batch_tokens": 32, "max_blocks_per_request": 2}
        batching = transformers.ContinuousBatchingConfig(**options)
        torch.manual_seed(3)
        helper, more = DistributedHelper(None, 10.0), {"dtype": torch.float32}
        self.older = not hasattr(paged_cache.PagedAttentionCache, "can_store_request_tokens")  # transformers 5.17
        more |= {"tp_plan": {}} if self.older else {}
        self.cache = paged_cache.PagedAttentionCache(tiny("llama").config, batching, "cpu", helper, **more)
        self.keys = [torch.randn(2, n, self.HEADS, self.CHANNELS) for n in self.LENGTHS]
        self.queries = torch.randn(len(self.LENGTHS), self.HEADS * self.GROUP, self.CHANNELS)
        self.module = torch.nn.Module()
        self.module.layer_idx = self.LAYER
        self.trash = self.cache if self.older else self.cache.layer_to_allocator[self.LAYER]
        self.allocate()
        for i, (k, v) in enumerate(self.keys):
            self.write(i, k[:-1], v[:-1])

    def allocate(self) -> None:
        """Pages for each request, with NaN where nobody wrote yet."""
        for i, n in enumerate(self.LENGTHS):
            state = RequestState(request_id=str(i), initial_tokens=[0] * n)
            if self.older:
                assert self.cache.allocate_blocks(2, state.request_id, 0)
            else:
                assert self.cache.can_store_request_tokens(state, 16)
        if self.older:
            for x in (*self.cache.key_cache, *self.cache.value_cache):
                x[: self.cache.read_trash_index] = torch.nan
        else:
            rows = self.trash.cache_tensor.view(-1, self.HEADS, self.CHANNELS)
            rows[self.trash.write_trash_index :] = torch.nan

    def write(self, request: int, k: Tensor, v: Tensor) -> None:
        """Puts the first tokens of a request into the cache, `[T, heads, channels]`."""
        places: list[list[int]] = [[]]
        if not len(k):
            return
        self.cache.extend_read_and_write_indices(str(request), 0, len(k), [[]], places)
        new = [x.transpose(0, 1)[None] for x in (k, v)]
        index = {"read_index": [torch.tensor([], dtype=torch.int64)], "write_index": [torch.tensor(places[0])]}
        if self.older:
            self.cache.update(*new, self.LAYER, **index)
        else:
            kinds = {
                "cu_seq_lens_k": {"full_attention": torch.tensor([0, len(k)])},
                "max_length_k": {"full_attention": len(k)},
            }
            self.cache.update(*new, self.LAYER, index | kinds)

    def expected(self) -> Tensor:
        parts = [
            flashmix.softmax_attention(q[None, None], k[None], v[None])[0][0]
            for q, (k, v) in zip(self.queries, self.keys, strict=True)
        ]
        return torch.cat(parts)

    def call(self, padding: int, **told: Any) -> Tensor:
        """Attention of the newest token of each request and of `padding` tokens, whose own result is left away."""
        attend = transformers.AttentionInterface()[ATTENTION]
        newest = torch.stack([x[:, -1] for x in self.keys], 2)  # [2, H, N, K]
        q, k, v = (
            torch.cat([x, torch.randn(x.shape[0], padding, x.shape[2])], 1)[None]
            for x in (self.queries.transpose(0, 1), *newest)
        )
        lengths = torch.tensor([*self.LENGTHS, *[0] * padding])
        boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        told["cu_seq_lens_k"] = boundaries if self.older else {"full_attention": boundaries}
        told["max_length_k"] = max(self.LENGTHS) if self.older else {"full_attention": max(self.LENGTHS)}
        told["cu_seq_lens_q"] = torch.arange(len(lengths) + 1).clamp(max=len(self.LENGTHS)).int()
        return attend(self.module, q, k, v, None, cache=self.cache, **told)[0][0, : len(self.LENGTHS)]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
def test_a_block_table_in_place_of_indices(padding: int) -> None:
    paged = Paged()
    table = torch.full((1, len(paged.LENGTHS) + padding, 2), -1, dtype=torch.int32)  # padding has no pages
    for i, n in enumerate(paged.LENGTHS):
        paged.cache.fill_block_table(str(i), n - 1, 1, table[:, i])
    assert error(paged.call(padding, block_table=table), paged.expected()) <= SAME
    assert error(paged.call(padding, block_table=table), paged.expected()) <= SAME  # the same token, written again


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
def test_indices_of_a_batch_that_is_padded(padding: int) -> None:
    paged = Paged()
    read: list[list[int]] = [[]]
    write: list[list[int]] = [[]]
    for i, n in enumerate(paged.LENGTHS):
        paged.cache.extend_read_and_write_indices(str(i), n - 1, 1, read, write)
    read[0] += [paged.trash.read_trash_index] * 2 * padding
    write[0] += [paged.trash.write_trash_index] * padding
    told = {"read_index": [torch.tensor(read[0])], "write_index": [torch.tensor(write[0])]}
    assert error(paged.call(padding, **told), paged.expected()) <= SAME


def test_what_continuous_batching_does_not_ask_for_raises() -> None:
    attend, paged = transformers.AttentionInterface()[ATTENTION], Paged()
    q, module = torch.randn(1, 4, 5, 8), torch.nn.Module()
    module.layer_idx = 1
    with pytest.raises(ValueError, match="attention_mask must not be given with a paged cache"):
        attend(module, q, q, q, torch.ones(1, 1, 5, 5), cache=paged.cache)
    with pytest.raises(ValueError, match="dropout must not be given with a paged cache"):
        attend(module, q, q, q, None, cache=paged.cache, dropout=0.1)
