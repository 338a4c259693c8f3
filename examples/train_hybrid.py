"""Train a hybrid of Gated DeltaNet and windowed attention on your text, and print a sample.

    python examples/train_hybrid.py --text my_notes.txt --steps 2000 --width 256

The defaults are tiny: a few seconds on a CPU, on the text of these examples. `flashmix train` does the same with checkpoints,
held-out documents and a tokenizer; here every line can be seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from flashmix import Packing
from flashmix.models import Decoder, DecoderConfig, LayerConfig, generate, parameter_groups
from flashmix.modules import next_token_targets

HERE = sorted(Path(__file__).parent.glob("*.py"))


def hybrid(width: int) -> Decoder:
    """Three layers that remember everything a little, and one that sees the last 64 tokens exactly."""
    delta = LayerConfig("gated_deltanet", {"heads": width // 32})
    near = LayerConfig("attention", {"heads": width // 32, "window": 64})
    return Decoder(DecoderConfig(vocab_size=256, width=width, layers=[delta, delta, delta, near]))


def batch(documents: list[torch.Tensor], tokens: int, device: str) -> tuple[torch.Tensor, Packing]:
    """Random pieces of documents, end to end in one row `[1, tokens]`; the packing keeps them apart, nothing is padded."""
    pieces, left = [], tokens
    while left:
        document = documents[int(torch.randint(len(documents), ()))]
        start = int(torch.randint(max(1, len(document) - 256), ()))
        pieces.append(document[start : start + min(256, left)])
        left -= len(pieces[-1])
    packing = Packing.from_lengths([len(piece) for piece in pieces], device=device)
    return torch.cat(pieces)[None].to(device), packing


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trains a hybrid on text files.")
    parser.add_argument("--text", nargs="+", type=Path, default=HERE, help="text files, each a document")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=384, help="in one step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    documents = [torch.tensor(list(path.read_bytes())) for path in options.text if path.stat().st_size]
    model = hybrid(options.width).to(options.device)
    optimiser = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=4e-3)

    losses = []
    for step in range(options.steps):
        row, packing = batch(documents, options.tokens, options.device)
        targets = next_token_targets(row, packing.cu_seqlens)  # the last token of a piece has no target
        loss = model(row, cu_seqlens=packing, targets=targets)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step}: {losses[-1] / 0.6931:.2f} bits per byte")

    prompt = torch.tensor([list(b"def ")], device=options.device)
    sample = generate(model.eval(), prompt, 40, temperature=0.8)
    print("def " + bytes(sample[0].tolist()).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
