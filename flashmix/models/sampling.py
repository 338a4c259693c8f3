"""Sampling of the next token from logits: temperature, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from flashmix.op.checks import check_range


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as options of the functions that generate."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None


@dataclass(frozen=True)
class Sampling:
    """The options of `generate` that determine how a token is drawn.

    Attributes:
        temperature: 0 for the likeliest token; else logits are divided by it and a token is drawn.
        top_k: draw from the `k` likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability, at least one.
        generator: of random numbers, on the model's device.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def check(self) -> None:
        """Raises ValueError for an option that is out of its range."""
        check_range("temperature", self.temperature, 0.0, float("inf"))
        if self.top_k is not None:
            check_range("top_k", self.top_k, 1, 2**31)
        if self.top_p is not None:
            check_range("top_p", self.top_p, 0.0, 1.0)

    def sample(self, logits: Tensor) -> Tensor:
        """One token `[B]` from each row of logits `[B, vocabulary]`."""
        return logits.argmax(dim=-1) if self.temperature == 0 else self.draw(self.probabilities(logits))

    def draw(self, chances: Tensor) -> Tensor:
        """One token `[B]` from each row of probabilities `[B, vocabulary]`."""
        if self.temperature == 0:
            return chances.argmax(dim=-1)
        return torch.multinomial(chances, 1, generator=self.generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities `[..., vocabulary]`, float32 (float64 for float64), that `sample` draws from."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(torch.float32)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        least_divisor = torch.finfo(logits.dtype).tiny  # below it the likeliest would be 0 / 0
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(self.temperature, least_divisor)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = chances.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered  # the probability of all likelier tokens
            ordered = ordered.masked_fill((before >= self.top_p) & (before > 0), 0.0)
            chances = torch.zeros_like(chances).scatter(-1, order, ordered)
            chances = chances / chances.sum(dim=-1, keepdim=True)
        return chances
