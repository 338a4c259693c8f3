"""Let flashmix compute the recurrent layers of a transformers model: one call, the same answers, and back again.

    python examples/accelerate_transformers.py --model path/to/Qwen3-Next --device cuda --tokens 4096

Without --model it makes a tiny Qwen3-Next with random weights. Needs `pip install "flashmix[hf]"`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

import flashmix


def tiny() -> PreTrainedModel:
    """Three layers of Gated DeltaNet to one of attention would be the whole model; here it is one of each."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    keys = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=256, **sizes, **heads, **keys, **layers, pad_token_id=0))


def timed(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits, and the seconds of the second of two calls."""
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        if tokens.is_cuda:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
    return logits, taken


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Accelerates a transformers model.")
    parser.add_argument("--model", help="a name or path for from_pretrained; default: a tiny one with random weights")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny()
    model = model.to(options.device).eval()
    tokens = torch.randint(1, model.config.vocab_size, (1, options.tokens), device=options.device)

    before, slow = timed(model, tokens)
    with flashmix.accelerate(model) as accelerated:  # prints what it replaced, and names what it left
        after, fast = timed(model, tokens)
        continued = model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False)
    print(f"replaced: {len(accelerated.replaced)} layers, {1000 * slow:.1f} -> {1000 * fast:.1f} ms")
    print(f"continued to {continued.shape[1]} tokens")

    difference = float((after - before).abs().max() / before.abs().max())
    print(f"largest difference of the logits: {difference:.1e} of the largest logit")
    return difference


if __name__ == "__main__":
    main()
