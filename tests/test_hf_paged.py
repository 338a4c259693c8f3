"""flashmix's softmax attention under transformers' continuous batching: the same tokens as by plain `generate` of each prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_cases import error, tokens, transformers
from test_hf_attention import FAMILIES, SAME, tiny
from torch import Tensor
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

import flashmix
import flashmix.hf

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 10


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers measures the memory of accelerators alone, and takes a CPU to have none."""
    monkeypatch.setattr(paged_cache.PagedAttentionMemoryHandler, "get_available_memory", lambda _: 2**28)


def prompts() -> list[list[int]]:
    """Of many lengths, two with a prefix of two blocks in common."""
    row = tokens(1, 90, seed=7)[0]
    parts = [part.tolist() for part in row.split([5, 1, 40, 17, 27])]
    return [*parts, parts[2][:16] + parts[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching_agrees_with_generation_alone(family: str) -> None:
    model = tiny(family)
    alone = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = [model.generate(torch.tensor([prompt]), **alone) for prompt in prompts()]
    model.set_attn_implementation(f"paged|{flashmix.hf.register_attention()}")
    # prompts of over 32 tokens come in parts, and tokens of some requests beside prompts of others
    sizes = {"block_size": 8, "num_blocks": 48, "max_batch_tokens": 32, "return_logprobs": True}
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


class Paged:
    """Requests of a model with heads of the sizes of `tiny`, some tokens of each in a cache: one layer's calls."""

    LENGTHS = (13, 1, 8)  # of keys, the newest included
    HEADS, GROUP, CHANNELS = 2, 2, 8

    def __init__(self) -> None:
        config = tiny("llama").config
        options = {"block_size": 8, "num_blocks": 12, "max_batch_tokens": 32, "max_blocks_per_request": 2}
        batching = transformers.ContinuousBatchingConfig(**options)
        torch.manual_seed(3)
        self.cache = paged_cache.PagedAttentionCache(
            config, batching, "cpu", DistributedHelper(None, 10.0), {}, torch.float32
        )
        self.keys = [torch.randn(2, n, self.HEADS, self.CHANNELS) for n in self.LENGTHS]
        self.queries = torch.randn(len(self.LENGTHS), self.HEADS * self.GROUP, self.CHANNELS)
        self.module = torch.nn.Module()
        self.module.layer_idx = 1
        for i, n in enumerate(self.LENGTHS):
            state = RequestState(request_id=str(i), initial_tokens=[0] * n)
            assert self.cache.allocate_blocks(2, state.request_id, 0)
        self.place = self.cache.layer_index_to_group_indices[1][1]
        for x in (*self.cache.key_cache, *self.cache.value_cache):
            x[: self.cache.read_trash_index] = torch.nan  # what nobody wrote yet
        for i, (k, v) in enumerate(self.keys):
            write = torch.tensor(self.cache.group_cache_managers[0].get_write_indices(str(i), 0, len(k)))[:-1]
            self.cache.key_cache[self.place][write] = k[:-1]
            self.cache.value_cache[self.place][write] = v[:-1]

    def expected(self) -> Tensor:
        parts = [
            flashmix.softmax_attention(q[None, None], k[None], v[None])[0][0]
            for q, (k, v) in zip(self.queries, self.keys, strict=True)
        ]
        return torch.cat(parts)

    def call(self, padding: int, **told: Any) -> Tensor:
        """Attention of the newest token of each request and of `padding` tokens, whose own result is left away."""
        attend = transformers.AttentionInterface()[f"paged|{flashmix.hf.register_attention()}"]
        newest = torch.stack([x[:, -1] for x in self.keys], 2)  # [2, H, N, K]
        q, k, v = (
            torch.cat([x, torch.randn(x.shape[0], padding, x.shape[2])], 1)[None]
            for x in (self.queries.transpose(0, 1), *newest)
        )
        lengths = torch.tensor([*self.LENGTHS, *[0] * padding])
        told["cu_seq_lens_k"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        told["cu_seq_lens_q"] = torch.arange(len(lengths) + 1).clamp(max=len(self.LENGTHS)).int()
        return attend(self.module, q, k, v, None, cache=self.cache, **told)[0][0, : len(self.LENGTHS)]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
def test_a_block_table_in_place_of_indices(padding: int) -> None:
    paged = Paged()
    table = torch.full((1, len(paged.LENGTHS) + padding, 2), -1, dtype=torch.int32)
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
    read[0] += [paged.cache.read_trash_index] * 2 * padding
    write[0] += [paged.cache.write_trash_index] * padding
    told = {"read_index": [torch.tensor(read[0])], "write_index": [torch.tensor(write[0])]}
    assert error(paged.call(padding, **told), paged.expected()) <= SAME


def test_what_is_not_for_continuous_batching_raises() -> None:
    model = tiny("llama")
    model.set_attn_implementation(f"paged|{flashmix.hf.register_attention()}")
    with pytest.raises(ValueError, match=r"cache must be given .*continuous batching.* got None"):
        model(tokens(1, 5))
    attend = transformers.AttentionInterface()["paged|fmx"]
    q, module = torch.randn(1, 4, 5, 8), torch.nn.Module()
    with pytest.raises(ValueError, match="attention_mask must not be given to flashmix's paged attention"):
        attend(module, q, q, q, torch.ones(1, 1, 5, 5), cache=object())
    with pytest.raises(ValueError, match="dropout must not be given to flashmix's paged attention"):
        attend(module, q, q, q, None, cache=object(), dropout=0.1)
