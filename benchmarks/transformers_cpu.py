"""Models of transformers on one thread of a CPU, without `flashmix.accelerate` and with it: CPU seconds.

`python benchmarks/transformers_cpu.py [--only FAMILY ...] [--kinds train generate] [--write [FOLDER]]`: hidden size 512, 4 linear layers
and 1 full one (Mamba-2: 5 linear ones).

- train: forward, loss and backward of one row of 2048 tokens.
- generate: 33 greedy tokens after 64, 4 rows. Both sides take turns; the best of each is kept, as other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch

import flashmix

COMMON = {"hidden_size": 512, "vocab_size": 97, "pad_token_id": 0, "eos_token_id": None, "intermediate_size": 1024}
COMMON |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 5}
TYPES = {"layer_types": ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2}
DELTA = {f"linear_{name}": size for name, size in (("key_head_dim", 64), ("value_head_dim", 64))}
DELTA |= {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "head_dim": 64}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 64, "qk_nope_head_dim": 48}
KIMI = {"linear_head_dim": 64, "linear_num_heads": 8, "mlp_layer_types": ["dense"] * 5} | LATENT
SCAN = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_expand": 2}
# class of the configuration and of the model, options
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", DELTA | TYPES | {"mlp_only_layers": list(range(5))}),
    "kimi_linear": ("KimiLinear", KIMI | TYPES),
    "olmo_hybrid": ("OlmoHybrid", DELTA | TYPES),
    "bamba": ("Bamba", SCAN | {"attn_layer_indices": [2]}),
    "mamba2": ("Mamba2", {"num_heads": 16, "head_dim": 64, "n_groups": 1, "state_size": 64, "expand": 2}),
    "minimax": ("MiniMax", TYPES | {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 64}),
}


def model_of(family: str) -> Any:
    import transformers

    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(COMMON | options))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def train(model: Any) -> None:
    row = torch.randint(1, 97, (1, 2048), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    model.train()(row, labels=row, use_cache=False).loss.backward()


def generate(model: Any) -> None:
    rows = torch.randint(1, 97, (4, 64), generator=torch.Generator().manual_seed(1))
    model.eval().generate(rows, max_new_tokens=33, do_sample=False)


def seconds(run: Callable[[Any], None], model: Any) -> float:
    start = time.process_time()
    run(model)
    return time.process_time() - start


def compared(run: Callable[[Any], None], model: Any, turns: int) -> dict[str, float]:
    """CPU seconds without and with; a first call of over 15 s is the only one."""
    plain: list[float] = []
    ours: list[float] = []
    for turn in range(turns):
        if turn == 0 or plain[0] < 15:
            plain.append(seconds(run, model))
        with flashmix.accelerate(model, strict=True, quiet=True):
            ours.append(seconds(run, model))
    return {"without": min(plain), "with": min(ours), "ratio": min(plain) / min(ours)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--kinds", nargs="*", choices=("train", "generate"), default=("train", "generate"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in options.only:
        model = model_of(family)
        row: dict[str, Any] = {"family": family}
        for run in (train, generate):
            if run.__name__ in options.kinds:
                row[run.__name__] = compared(run, model, options.turns)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.write is not None:
        print(timing.write_results("transformers_cpu", rows, Path(options.write) if options.write else None))


if __name__ == "__main__":
    main()
