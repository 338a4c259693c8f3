"""A new mechanism in twenty lines: a delta rule that forgets a fraction of what it writes, as a function and as a layer.

    S_t = (1 - f beta_t) S_{t-1} + beta_t k_t (v_t - (1 - f beta_t) S_{t-1}^T k_t)^T

It is Gated DeltaNet with the decay tied to the write strength, so it is a call of what is there: chunks, kernels, gradients, packed
sequences, states and caches come with it. docs/adding.md says how a mechanism becomes part of the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import flashmix
from flashmix.layers import DeltaNet
from flashmix.models import Decoder, DecoderConfig, LayerConfig, generate
from flashmix.models.config import MIXERS


# The twenty lines.
def tied_delta(q: Any, k: Any, v: Any, beta: Any, fraction: float = 0.5, **options: Any) -> Any:
    """The function: any option of `delta_rule` is handed on."""
    return flashmix.delta_rule(q, k, v, beta, torch.log1p(-fraction * beta), **options)


class TiedDelta(DeltaNet):
    """The layer: projections, convolution, norm and cache are DeltaNet's."""

    has_step = False  # one token at a time through `recurrence`, too

    def __init__(self, width: int, heads: int, *, fraction: float = 0.5, device: Any = None, dtype: Any = None) -> None:
        super().__init__(width, heads, device=device, dtype=dtype)
        self.fraction = fraction

    def recurrence(self, x: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        beta, _ = self.beta_and_decay(x)
        return tied_delta(q, k, v, beta, self.fraction, **options)


MIXERS["tied_delta"] = TiedDelta  # its name in a model's configuration


def by_the_formula(q: Any, k: Any, v: Any, beta: Any, fraction: float) -> torch.Tensor:
    """One sequence and one head, `[T, D]`, one token at a time."""
    S, outputs = torch.zeros(k.shape[-1], v.shape[-1], dtype=q.dtype), []
    for t in range(len(q)):
        S = (1 - fraction * beta[t]) * S
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        outputs.append(k.shape[-1] ** -0.5 * S.T @ q[t])
    return torch.stack(outputs)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Checks and trains a mechanism of your own.")
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 1, 8, dtype=torch.float64)
    k, beta = flashmix.l2_norm(k), torch.rand(1, 40, 1, dtype=torch.float64)
    found, _ = tied_delta(q, k, v, beta, options.fraction)
    wanted = by_the_formula(q[0, :, 0], k[0, :, 0], v[0, :, 0], beta[0, :, 0], options.fraction)
    error = float((found[0, :, 0] - wanted).abs().max())
    print(f"largest difference from the formula, float64: {error:.1e}")

    layer = LayerConfig("tied_delta", {"heads": 2, "fraction": options.fraction})
    model = Decoder(DecoderConfig(vocab_size=16, width=32, layers=[layer, layer]))
    tokens = torch.arange(48).remainder(6)[None]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(options.steps):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"loss {loss.item():.2f}; 0 1 2 3 4 5 goes on with {generate(model, tokens[:, :30], 6)[0].tolist()}")
    return error


if __name__ == "__main__":
    main()
