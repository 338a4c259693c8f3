"""Continuous batching of transformers with flashmix's attention (`fmx`) beside its own (`sdpa`, in 5.17 `paged|sdpa`).

`python benchmarks/continuous_batching.py [--write [FOLDER]] [--tiny]`. First a check: the tokens of a tiny Llama in float32 are those
of plain `generate`. Then a Llama of 8 layers (hidden size 2048, 32 heads of 64, 8 of keys, bfloat16, random weights), 64 prompts of 100
to 1000 tokens, 64 new tokens each: generated tokens a second, the best of three calls of `generate_batch`, which take turns.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import flashmix

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
LARGE = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 5632}


def model_of(sizes: dict[str, int], layers: int, dtype: torch.dtype, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=25344, num_hidden_layers=layers, pad_token_id=0, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(longest // 10, longest, count).int().tolist()
    return [torch.randint(1, 25344, (length,), generator=generator).tolist() for length in lengths]


def generate(model: Any, attention: str, rows: list[list[int]], new: int, blocks: int) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation(attention)
    options = {"generation_config": GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)}
    known = {
        field.name for field in fields(ContinuousBatchingConfig)
    }  # 5.17 calls a page a block, and asks no flash kernel before sdpa
    sizes = {"page_size" if "page_size" in known else "block_size": 64, "num_blocks": blocks, "max_batch_tokens": 2048}
    sizes |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}
    batching = ContinuousBatchingConfig(**sizes)
    found = model.generate_batch(rows, continuous_batching_config=batching, progress_bar=False, **options)
    outputs = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
    if len(outputs) != len(rows) or any(one.error for one in outputs):
        raise SystemExit(f"{attention}: {[one.error for one in outputs]}")
    return [one.generated_tokens for one in outputs]


def check(device: str) -> None:
    model, rows = model_of(SMALL, 2, torch.float32, device), prompts(5, 90)
    model.set_attn_implementation("eager")
    expected = [model.generate(torch.tensor([r], device=device), max_new_tokens=9, do_sample=False) for r in rows]
    plain = [one[0, len(r) :].tolist() for one, r in zip(expected, rows, strict=True)]
    if generate(model, "fmx", rows, 9, 16) != plain:
        raise SystemExit("fmx: other tokens than by generate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try this program")
    options = parser.parse_args()
    from transformers import AttentionInterface

    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

        PagedAttentionMemoryHandler.get_available_memory = lambda self: 2**30
    flashmix.hf.register_attention()
    check(device)
    print("the tokens of fmx are those of generate", flush=True)
    theirs = "paged|sdpa" if "paged|sdpa" in AttentionInterface() else "sdpa"
    model = model_of(SMALL if options.tiny else LARGE, 2 if options.tiny else 8, torch.bfloat16, device)
    count, longest, new, blocks = (6, 100, 4, 24) if options.tiny else (64, 1000, 64, 1200)
    best: dict[str, float] = {}
    for _ in range(3):
        for attention in ("fmx", theirs):
            start = time.perf_counter()
            generate(model, attention, prompts(count, longest), new, blocks)
            rate = count * new / (time.perf_counter() - start)
            best[attention] = max(best.get(attention, 0.0), rate)
            print(f"{attention} {rate:.0f} tokens/s", flush=True)
    if options.write is not None:
        import timing

        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        rows = [{"attention": name, "tokens_per_second": rate} for name, rate in best.items()]
        where = Path(options.write) if options.write else None
        print(timing.write_results(f"continuous_batching_{timing.card()}", rows, where, {"card": card}))


if __name__ == "__main__":
    main()
