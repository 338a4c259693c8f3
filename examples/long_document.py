"""Read a document of any length in parts: the state is carried from part to part, and memory does not grow with the length.

    python examples/long_document.py --text book.txt --part 65536 --device cuda

The bits per byte are those of the document in one piece: a state is exact, nothing is forgotten at the borders.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from flashmix.models import Decoder, DecoderConfig, LayerConfig, ModelCache, generate


@torch.no_grad()
def read(model: Decoder, tokens: torch.Tensor, part: int) -> tuple[float, ModelCache]:
    """Bits per byte of a document `[1, T]`, and the cache after it."""
    cache, total = model.new_cache(), 0.0
    for start in range(0, tokens.shape[1] - 1, part):
        piece = tokens[:, start : start + part]
        logits = model(piece, cache=cache)  # updates the cache: states, and the last tokens of the windowed attention
        targets = tokens[:, start + 1 : start + part + 1]
        total += float(cross_entropy(logits[0, : targets.shape[1]], targets[0], reduction="sum"))
    return total / (tokens.shape[1] - 1) / math.log(2), cache


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description="Reads a long document in parts.")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="the document")
    parser.add_argument("--part", type=int, default=500, help="tokens that are read at a time")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    delta = LayerConfig("gated_deltanet", {"heads": 2})
    near = LayerConfig("attention", {"heads": 2, "window": 32})
    model = Decoder(DecoderConfig(vocab_size=256, width=32, layers=[delta, near])).to(options.device).eval()
    tokens = torch.tensor([list(options.text.read_bytes())], device=options.device)

    whole, _ = read(model, tokens, tokens.shape[1])
    parts, cache = read(model, tokens, options.part)
    print(f"{tokens.shape[1]} tokens: {whole:.6f} bits per byte in one piece, {parts:.6f} in parts of {options.part}")

    # Whoever has read the document can go on from there, as often as wanted: a snapshot is small and stays as it is.
    snapshot = cache.snapshot()
    for question in (b"\n# In short: ", b"\n# It says: "):
        cache.restore(snapshot)
        asked = torch.tensor([list(question)], device=options.device)
        answer = generate(model, asked, 8, cache=cache)
        print(f"{question.decode().strip()} -> {len(answer[0])} bytes (of an untrained model)")
    return whole, parts


if __name__ == "__main__":
    main()
