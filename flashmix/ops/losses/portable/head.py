"""A language model's head in plain PyTorch: logits a chunk of tokens at a time, gradients added up over chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv

# Logits held at once: 2^23 are 32 MiB in float32, enough rows for an efficient matrix product at any usual vocabulary.
LOGITS_AT_ONCE = 2**23
# A CPU's matrix product gives a row other bits where it has other rows beside it: another number of rows takes another kernel, and the
# rows that a thread has left over from its kernel's (1 to 8 of them) yet another. So all products have one number of rows, the last
# one zeros for those it lacks, and each thread a multiple of 12.
ROWS_OF_A_THREAD = 12
ROWS, MOST_ROWS = (
    96,
    384,
)  # of a product: few, for those that the last one lacks cost time; more where they give fewer than 2^20 logits
LEAST_LOGITS = 2**20


def rows_at_once(chunk: int | None, vocabulary: int) -> int:
    """Tokens per chunk: the caller's, or as many as make 2^23 logits."""
    return chunk or max(1, LOGITS_AT_ONCE // vocabulary)


def rows_of_a_product(chunk: int | None, vocabulary: int) -> int:
    """The same for every batch."""
    rows = min(max(LEAST_LOGITS // vocabulary, ROWS), MOST_ROWS, rows_at_once(chunk, vocabulary))
    whole = ROWS_OF_A_THREAD * torch.get_num_threads()
    return cdiv(rows, whole) * whole


def chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def product(x: Tensor, matrix: Tensor, rows: int, out: Tensor) -> Tensor:
    """`x @ matrix` as products of so many rows each."""
    for part in chunks(x.shape[0], rows):
        torch.mm(x[part], matrix, out=out[part])
    return out[: x.shape[0]]


class PortableHead:
    """Logits `hidden weight^T + bias` of `hidden [N, D]`, computed in `dtype`, about `rows_at_once` tokens at a time: whole products."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk: int | None, heads: int = 1
    ) -> None:
        vocabulary = heads * weight.shape[0]
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.together = rows_of_a_product(chunk, vocabulary)
        self.rows = max(rows_at_once(chunk, vocabulary) // self.together, 1) * self.together
        self.wide_weight = weight.to(dtype).contiguous()
        # One chunk's logits, used by one chunk after the other.
        self.logits = self.room(weight.shape[0])

    def room(self, columns: int) -> Tensor:
        """Memory for the products of a chunk."""
        whole = cdiv(self.hidden.shape[0], self.together) * self.together
        return self.wide_weight.new_empty(min(whole, self.rows), columns)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each chunk and their logits, which may be overwritten."""
        for part in chunks(self.hidden.shape[0], self.rows):
            hidden = self.hidden[part].to(self.wide_weight.dtype).contiguous()
            z = product(self.whole(hidden), self.wide_weight.T, self.together, self.logits)[: hidden.shape[0]]
            yield part, z if self.bias is None else z.add_(self.bias)

    def whole(self, x: Tensor) -> Tensor:
        """Some tokens' rows, and zeros for those that the last product lacks: in the memory of the logits where x is there."""
        rows = cdiv(x.shape[0], self.together) * self.together
        if rows == x.shape[0]:
            return x
        if x.data_ptr() != self.logits.data_ptr():
            return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
        self.logits[x.shape[0] : rows] = 0
        return self.logits[:rows]


class HeadGradients:
    """Gradients of the head's tensors named in `wanted`, added up over chunks in the dtype of the logits."""

    def __init__(self, head: PortableHead, wanted: Collection[str]) -> None:
        self.head, self.sums = head, {}
        given = {"hidden": head.hidden, "weight": head.weight, "bias": head.bias}
        self.given = {name: t for name, t in given.items() if t is not None and name in wanted}
        for name, t in self.given.items():
            dtype = t.dtype if name == "hidden" else head.wide_weight.dtype
            self.sums[name] = torch.zeros(t.shape, dtype=dtype, device=t.device)
        self.to_hidden = head.room(head.hidden.shape[1]) if "hidden" in self.sums else None

    def add(self, part: slice, dz: Tensor) -> None:
        """Adds what the gradient `dz` of these rows' logits gives."""
        if self.to_hidden is not None:
            whole = self.head.whole(dz)
            found = product(whole, self.head.wide_weight, self.head.together, self.to_hidden)
            self.sums["hidden"][part] = found[: dz.shape[0]]
        if "weight" in self.sums:
            self.sums["weight"].addmm_(dz.T, self.head.hidden[part].to(dz.dtype))
        if "bias" in self.sums:
            self.sums["bias"] += dz.sum(0)

    def results(self) -> dict[str, Tensor]:
        return {name: total.to(self.given[name].dtype) for name, total in self.sums.items()}
