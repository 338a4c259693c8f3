"""A language model's head in plain PyTorch: logits a chunk of tokens at a time, gradients added up over chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

# Logits held at once: 2^23 are 32 MiB in float32, enough rows for an efficient matrix product at any usual vocabulary.
LOGITS_AT_ONCE = 2**23


def rows_at_once(chunk: int | None, vocabulary: int) -> int:
    """Tokens per chunk: the caller's, or as many as make 2^23 logits."""
    return chunk or max(1, LOGITS_AT_ONCE // vocabulary)


def chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


class PortableHead:
    """Logits `hidden weight^T + bias` of `hidden [N, D]`, computed in `dtype`, a chunk of `rows` tokens at a time."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> None:
        self.hidden, self.weight, self.bias, self.rows = hidden, weight, bias, rows
        self.wide_weight = weight.to(dtype)
        # One chunk's logits, used by one chunk after the other.
        self.logits = weight.new_empty(min(hidden.shape[0], rows), weight.shape[0], dtype=dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each chunk and their logits, which may be overwritten."""
        for part in chunks(self.hidden.shape[0], self.rows):
            hidden = self.hidden[part].to(self.wide_weight.dtype)
            z = torch.mm(hidden, self.wide_weight.T, out=self.logits[: hidden.shape[0]])
            yield part, z if self.bias is None else z.add_(self.bias)


class HeadGradients:
    """Gradients of the head's tensors named in `wanted`, added up over chunks in the dtype of the logits."""

    def __init__(self, head: PortableHead, wanted: Collection[str]) -> None:
        self.head, self.sums = head, {}
        given = {"hidden": head.hidden, "weight": head.weight, "bias": head.bias}
        self.given = {name: t for name, t in given.items() if t is not None and name in wanted}
        for name, t in self.given.items():
            dtype = t.dtype if name == "hidden" else head.wide_weight.dtype
            self.sums[name] = torch.zeros(t.shape, dtype=dtype, device=t.device)

    def add(self, part: slice, dz: Tensor) -> None:
        """Adds what the gradient `dz` of these rows' logits gives."""
        if "hidden" in self.sums:
            self.sums["hidden"][part] = dz @ self.head.wide_weight
        if "weight" in self.sums:
            self.sums["weight"].addmm_(dz.T, self.head.hidden[part].to(dz.dtype))
        if "bias" in self.sums:
            self.sums["bias"] += dz.sum(0)

    def results(self) -> dict[str, Tensor]:
        return {name: total.to(self.given[name].dtype) for name, total in self.sums.items()}
