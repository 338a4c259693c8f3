"""Swap the mixer of a model and compare how well it recalls: pairs of keys and values are shown, then each key is asked for.

    python examples/swap_the_mixer.py --mixers gla deltanet kda rwkv7 attention --pairs 16 --steps 1000

Only the name of the layer changes. `flashmix eval` runs this task and three others, with seeds, tables and plots.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from flashmix.models import Decoder, DecoderConfig, LayerConfig

KEYS, VALUES = 16, 8


def recall(pairs: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[B, 3 pairs]`: key, value, key, value, ..., then the keys again in another order; and the values asked for."""
    keys = torch.rand(batch, KEYS).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (batch, pairs))
    asked = torch.rand(batch, pairs).argsort(1)
    shown = torch.stack([keys, KEYS + values], dim=2).flatten(1)
    return torch.cat([shown, keys.gather(1, asked)], dim=1), values.gather(1, asked)


def accuracy_after_training(mixer: str, pairs: int, steps: int, width: int) -> float:
    torch.manual_seed(0)  # every mixer sees the same sequences
    layers = [LayerConfig(mixer, {"heads": 2})] * 2
    model = Decoder(DecoderConfig(vocab_size=KEYS + VALUES, width=width, layers=layers))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens, wanted = recall(pairs, 64)
        logits = model(tokens)[:, 2 * pairs :, KEYS:]  # of the values, where a key is asked for
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokens, wanted = recall(pairs, 256)
    with torch.no_grad():
        answers = model(tokens)[:, 2 * pairs :, KEYS:].argmax(-1)
    return float((answers == wanted).float().mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Compares mixers on associative recall.")
    parser.add_argument("--mixers", nargs="+", default=["linear_attention", "deltanet"])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args(arguments)

    found = {}
    for mixer in options.mixers:
        found[mixer] = accuracy_after_training(mixer, options.pairs, options.steps, options.width)
        print(f"{mixer:>20}: {found[mixer]:.2f} of the values recalled (a guess: {1 / VALUES:.2f})")
    return found


if __name__ == "__main__":
    main()
