"""A language model's head on a GPU, a chunk of tokens at a time: logits by a matrix product, losses and gradients in place.

Logits are rounded to the dtype of `hidden`, as is their gradient; sums over chunks to that dtype too where it is bfloat16
and the chunks are few (each adds one rounding), else they are float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import HeadCall

CHUNK_BYTES = 2**29  # of logits at once: 2048 tokens of a vocabulary of 128,256 in bfloat16
FEW_CHUNKS = 16


def rows_at_once(chunk: int | None, vocabulary: int, dtype: torch.dtype, tokens: int) -> int:
    """Tokens per chunk: the caller's, or as many as fill CHUNK_BYTES, whole tiles of a matrix product."""
    rows = chunk or max(1, CHUNK_BYTES // (vocabulary * dtype.itemsize))
    if chunk is None and rows > 128:
        rows -= rows % 128
    return max(1, min(rows, tokens))


def accumulator_dtype(dtype: torch.dtype, tokens: int, rows: int) -> torch.dtype:
    """The dtype in which a weight's gradient is added up."""
    return dtype if dtype == torch.bfloat16 and tokens <= FEW_CHUNKS * rows else torch.float32


class TritonHead:
    """Chunks of logits of `hidden [N, D]` under `weight [V, D]`, of so many `rows` at a time."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.hidden, self.weight, self.rows = hidden, weight, rows
        self.bias = None if bias is None else bias.contiguous()
        vocabulary = weight.shape[0]
        width = vocabulary if vocabulary < 64 else -(-vocabulary // 64) * 64  # rows begin at aligned addresses
        self.logits = hidden.new_empty(min(rows, hidden.shape[0]), width)[:, :vocabulary]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each chunk and their logits without the bias, which the next chunk overwrites."""
        for start in range(0, self.hidden.shape[0], self.rows):
            part = slice(start, start + self.rows)
            hidden = self.hidden[part]
            yield part, torch.mm(hidden, self.weight.T, out=self.logits[: hidden.shape[0]])


def rows_of(call: HeadCall, heads: int = 1) -> int:
    """Tokens per chunk of a call that holds the logits of so many heads."""
    return rows_at_once(call.chunk, heads * call.weight.shape[0], call.hidden.dtype, call.hidden.shape[0])


def head_of(call: HeadCall, heads: int = 1) -> TritonHead:
    return TritonHead(call.hidden, call.weight, call.bias, rows_of(call, heads))


def statistics_of(rows: Tensor, count: int) -> list[Tensor]:
    """Empty numbers, one per row of `rows [N, ...]`, float32."""
    return [torch.empty(rows.shape[:1], dtype=torch.float32, device=rows.device) for _ in range(count)]


def empty_sums(call: HeadCall, names: Collection[str], rows: int) -> dict[str, Tensor]:
    """Room for the gradients of these tensors of the head, which are added up over chunks of so many rows."""
    dtypes = {
        "hidden": call.hidden.dtype,
        "weight": accumulator_dtype(call.weight.dtype, call.hidden.shape[0], rows),
        "bias": torch.float32,
    }
    given = {name: getattr(call, name) for name in dtypes if name in names}
    return {name: torch.empty(size=t.shape, dtype=dtypes[name], device=t.device) for name, t in given.items()}


class HeadSums:
    """Adds up the gradients of a head's tensors over chunks."""

    def __init__(self, head: TritonHead, sums: Mapping[str, Tensor]) -> None:
        self.head, self.sums = head, sums
        for name in ("weight", "bias"):
            if name in sums:
                sums[name].zero_()

    def add(self, part: slice, dz: Tensor) -> None:
        """Adds what the gradient `dz` of a chunk's logits gives."""
        if "hidden" in self.sums:
            torch.mm(dz, self.head.weight, out=self.sums["hidden"][part])
        if "weight" in self.sums:
            accumulate(self.sums["weight"], dz.T, self.head.hidden[part])
        if "bias" in self.sums:
            self.sums["bias"].add_(dz.sum(0, dtype=torch.float32))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, whatever the dtypes."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += torch.mm(a, b)


def in_their_dtypes(call: HeadCall, sums: Mapping[str, Tensor]) -> Gradients:
    """The sums as the gradients of the call's fields."""
    return {name: total.to(getattr(call, name).dtype) for name, total in sums.items()}


def scaled_sums(call: HeadCall, sums: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of the fields `wanted`: the sums of the fields that the call needs, kept by the forward, times the loss's gradient."""
    (grad,) = grads
    assert grad is not None
    found: Gradients = {}
    for name, total in zip(call.needs, sums, strict=True):
        if name in wanted:
            found[name] = torch.empty(size=total.shape, dtype=getattr(call, name).dtype, device=total.device)
            torch.mul(total, grad, out=found[name])
    return found
