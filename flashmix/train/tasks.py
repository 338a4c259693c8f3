"""Small synthetic tasks that tell mixers apart: recall, counting, permutations, a needle in a haystack.

A task draws sequences of any size: `tokens` `[B, T]` and `targets` `[B, T]`, -100 where no answer is wanted. A model trains on some
sizes and is scored on larger ones too, which separates a learnt rule from a memorised one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

IGNORED = -100
KEYS, VALUES, FILLERS = 64, 16, 16
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A task: its sequences, the sizes to train on and the sizes to score on.

    Attributes:
        title: one line about it.
        unit: what a size counts.
        draw: `(size, batch, generator) -> (tokens, targets)`.
        tokens_per_unit: tokens of a sequence per unit of its size.
        vocab_size: number of tokens.
        chance: accuracy of a guess.
        train: sizes to train on, from easy to hard.
        test: sizes to score on.
        running: whether every token has a target; then only the second half of a sequence is scored, because its first half is a
            sequence of half the size.
        steps, lr: training steps and the highest learning rate, by default.
        place: `tokens -> [B, T]`, where in its sequence what a token asks for stands, from 0 to 1; None where that has no meaning.
    """

    title: str
    unit: str
    draw: Callable[[int, int, torch.Generator], Batch]
    tokens_per_unit: int
    vocab_size: int
    chance: float
    train: tuple[int, ...]
    test: tuple[int, ...]
    running: bool
    steps: int
    lr: float
    place: Callable[[Tensor], Tensor] | None = None

    def batch(self, size: int, batch_tokens: int, generator: torch.Generator) -> Batch:
        """As many sequences as `batch_tokens` hold, at least one and at most 256: more short ones cost time and teach little."""
        rows = batch_tokens // (size * self.tokens_per_unit)
        return self.draw(size, min(max(1, rows), 256), generator)

    def scored(self, targets: Tensor) -> Tensor:
        """A mask `[B, T]` of the targets that count for the score."""
        asked = targets != IGNORED
        return asked & (torch.arange(targets.shape[1]) >= targets.shape[1] // 2) if self.running else asked


def recall(size: int, batch: int, generator: torch.Generator) -> Batch:
    """Multi-query associative recall: `size` pairs of key and value, then each key once more in another order, its value as target.

    Keys (tokens 0 to 63) are distinct within a sequence; values are tokens 64 to 79.

    Source: Arora et al., arXiv:2312.04927, section 3.

    Example:
        >>> tokens, targets = recall(2, 1, torch.Generator().manual_seed(0))
        >>> key, value, other_key, other_value, *asked = tokens[0].tolist()
        >>> {key: value, other_key: other_value} == dict(zip(asked, targets[0, 4:].tolist()))
        True
    """
    keys = _orders(batch, KEYS, generator)[:, :size]
    values = KEYS + torch.randint(VALUES, (batch, size), generator=generator)
    asked = _orders(batch, size, generator)
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    tokens = torch.cat([pairs, keys.gather(1, asked)], dim=1)
    targets = torch.cat([torch.full_like(pairs, IGNORED), values.gather(1, asked)], dim=1)
    return tokens, targets


def needle(size: int, batch: int, generator: torch.Generator) -> Batch:
    """A haystack of `size` tokens: up to eight pairs of key and value in random filler; at the end each key again, its value as target.

    Keys are tokens 0 to 63, values 64 to 79, filler 80 to 95. There is a pair for each 4 tokens, at least one and at most eight.
    `size` is at least 3.

    Example:
        >>> tokens, targets = needle(8, 1, torch.Generator().manual_seed(0))
        >>> place = tokens[0].tolist().index(tokens[0, -1])
        >>> tokens[0, place + 1] == targets[0, -1], int((targets != IGNORED).sum())
        (tensor(True), 2)
    """
    pairs = min(8, max(1, size // 4))
    hay = size - pairs  # before the questions
    tokens = KEYS + VALUES + torch.randint(FILLERS, (batch, hay), generator=generator)
    keys = _orders(batch, KEYS, generator)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (batch, pairs), generator=generator)
    # Distinct places as if each pair were one token, then one further for each pair before it.
    places = _orders(batch, hay - pairs, generator)[:, :pairs].sort(dim=1).values + torch.arange(pairs)
    tokens.scatter_(1, places, keys).scatter_(1, places + 1, values)
    asked = _orders(batch, pairs, generator)
    targets = torch.cat([torch.full_like(tokens, IGNORED), values.gather(1, asked)], dim=1)
    return torch.cat([tokens, keys.gather(1, asked)], dim=1), targets


def needle_place(tokens: Tensor) -> Tensor:
    """`[B, T]`: for each token the first place of the same token in its row, as a fraction of the row.

    Example:
        >>> needle_place(torch.tensor([[85, 3, 70, 3]]))
        tensor([[0.0000, 0.2500, 0.5000, 0.2500]])
    """
    length = tokens.shape[1]
    order = tokens.sort(dim=1, stable=True)
    starts = torch.ones_like(order.values, dtype=torch.bool)
    starts[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    runs = (
        torch.where(starts, torch.arange(length), 0).cummax(dim=1).values
    )  # of each token in order: where its run begins
    first = order.indices.gather(1, runs)
    return torch.empty_like(first).scatter_(1, order.indices, first) / length


def parity(size: int, batch: int, generator: torch.Generator) -> Batch:
    """Random bits; the target after each of them is the parity of the ones so far.

    Source: Grazzi et al., arXiv:2411.12537, section 5.1.

    Example:
        >>> tokens, targets = parity(4, 1, torch.Generator().manual_seed(0))
        >>> [sum(tokens[0].tolist()[: t + 1]) % 2 for t in range(4)] == targets[0].tolist()
        True
    """
    bits = torch.randint(2, (batch, size), generator=generator)
    return bits, bits.cumsum(1) % 2


def compose(size: int, batch: int, generator: torch.Generator) -> Batch:
    """Swaps of neighbours among five things; the target after each of them is the number of their product among the 120 permutations.

    The four swaps (tokens 0 to 3) generate the group S5, whose word problem is complete for NC1.

    Source: Merrill et al., arXiv:2404.08819, section 5; swaps as in Grazzi et al., arXiv:2411.12537, section 5.2.

    Example:
        >>> tokens, targets = compose(3, 1, torch.Generator().manual_seed(0))
        >>> bool((swaps()[tokens[0, 0]] == targets[0, 0]) & (targets < 120).all())
        True
    """
    tokens = torch.randint(4, (batch, size), generator=generator)
    steps = permutations()[swaps()[tokens]]  # [B, T, 5]
    digits = torch.tensor([625, 125, 25, 5, 1])
    numbers = torch.zeros(3125, dtype=torch.int64)
    numbers[(permutations() * digits).sum(1)] = torch.arange(120)
    made, targets = torch.arange(5).expand(batch, 5), torch.empty_like(tokens)
    for t in range(size):
        made = made.gather(1, steps[:, t])
        targets[:, t] = numbers[(made * digits).sum(1)]
    return tokens, targets


@lru_cache(maxsize=1)
def permutations() -> Tensor:
    """`[120, 5]`: the permutations of five things, in lexicographic order."""
    return torch.tensor(list(itertools.permutations(range(5))))


@lru_cache(maxsize=1)
def swaps() -> Tensor:
    """`[4]`: the indices of the permutations that exchange two neighbours and leave the others."""
    moved = permutations() != torch.arange(5)
    return ((moved.sum(1) == 2) & (moved[:, 1:] & moved[:, :-1]).any(1)).nonzero().squeeze(1)


def _orders(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """`[batch, count]`: a random permutation for each sequence."""
    return torch.rand(batch, count, generator=generator).argsort(dim=1)


TASKS = {
    "recall": Task(
        title="associative recall: the values of all keys",
        unit="keys",
        draw=recall,
        tokens_per_unit=3,
        vocab_size=KEYS + VALUES,
        chance=1 / VALUES,
        train=(1, 2, 4, 8, 16, 32),
        test=(4, 8, 16, 32, 64),
        running=False,
        steps=800,
        lr=3e-3,
    ),
    "parity": Task(
        title="parity: is the number of ones odd?",
        unit="tokens",
        draw=parity,
        tokens_per_unit=1,
        vocab_size=2,
        chance=1 / 2,
        train=(4, 8, 16, 32),
        test=(16, 32, 64, 128, 256),
        running=True,
        steps=300,
        lr=5e-3,
    ),
    "s5": Task(
        title="S5: which permutation have the swaps made?",
        unit="tokens",
        draw=compose,
        tokens_per_unit=1,
        vocab_size=120,
        chance=1 / 120,
        train=(4, 8, 16),
        test=(8, 16, 32, 64, 128),
        running=True,
        steps=800,
        lr=5e-3,
    ),
    "needle": Task(
        title="needle in a haystack: up to eight facts in noise",
        unit="tokens",
        draw=needle,
        tokens_per_unit=1,
        vocab_size=KEYS + VALUES + FILLERS,
        chance=1 / VALUES,
        train=(4, 8, 16, 32, 64),
        test=(32, 64, 128, 256, 512, 1024),
        running=False,
        steps=800,
        lr=2e-3,
        place=needle_place,
    ),
}
