"""A language model's head on a GPU, a chunk of tokens at a time: logits by a matrix product, losses and gradients in place.

Logits are rounded to the dtype of `hidden`, as is their gradient; sums over chunks to that dtype too where it is bfloat16
and the chunks are few (each adds one rounding), else they are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from torch import Tensor

from flashmix.op.rowwise import Tensors
from flashmix.ops.cross_entropy.triton_gpu import rows as kernels

CHUNK_BYTES = 2**29  # of logits at once: 2048 tokens of a vocabulary of 128,256 in bfloat16
FEW_CHUNKS = 16


def rows_at_once(chunk: int | None, vocabulary: int, dtype: torch.dtype, tokens: int) -> int:
    """Tokens a chunk: the caller's, or as many as fill CHUNK_BYTES, whole tiles of a matrix product."""
    rows = chunk or max(1, CHUNK_BYTES // (vocabulary * dtype.itemsize))
    if chunk is None and rows > 128:
        rows -= rows % 128
    return max(1, min(rows, tokens))


def accumulator_dtype(dtype: torch.dtype, tokens: int, rows: int) -> torch.dtype:
    """What a weight's gradient is added up in."""
    return dtype if dtype == torch.bfloat16 and tokens <= FEW_CHUNKS * rows else torch.float32


def shape(vocabulary: int) -> dict[str, int]:
    """Lanes of a row's program, lines of them at once, and warps."""
    lanes = min(1024, triton.next_power_of_2(vocabulary))
    lines = min(4, triton.next_power_of_2(triton.cdiv(vocabulary, lanes)))
    return {"LINES": lines, "LANES": lanes, "num_warps": max(1, lanes // 256)}


def block(vocabulary: int) -> tuple[int, int]:
    """Columns of a gradient's program, and warps."""
    size = min(4096, triton.next_power_of_2(vocabulary))
    return size, max(1, min(8, size // 512))


def rows_of(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def rows_forward(
    z: Tensor, bias: Tensor | None, target: Tensor, loss: Tensor | None, kept: Sequence[Tensor], expected: Tensor | None,
    options: Sequence[float], total: int | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Fills level and whole, and the losses or what lse less the loss is, of rows `z [N, V]`; `total`: all vocabulary."""
    ignore_index, smoothing, z_loss, softcap = options
    rows, vocabulary = z.shape
    if rows == 0:
        return
    kernels.cross_entropy_forward_kernel[(rows,)](
        z, z if bias is None else bias, target, loss, kept[0], kept[1], expected, z.stride(0), vocabulary, total or vocabulary,
        int(ignore_index), smoothing, z_loss, softcap or 1.0, scale,
        HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, SMOOTH=smoothing > 0, **shape(vocabulary),
    )  # fmt: skip


def rows_backward(
    z: Tensor, bias: Tensor | None, gradient: Tensor, target: Tensor, kept: Sequence[Tensor], grad: Tensor,
    options: Sequence[float], total: int | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Fills the gradient of rows, which may be the rows themselves, for that of their losses (0 where they are ignored)."""
    _, smoothing, z_loss, softcap = options
    rows, vocabulary = z.shape
    if rows == 0:
        return
    size, warps = block(vocabulary)
    blocks = triton.cdiv(vocabulary, size)
    kernels.cross_entropy_backward_kernel[(rows * blocks,)](
        z, z if bias is None else bias, gradient, target, kept[0], kept[1], grad, z.stride(0), gradient.stride(0), vocabulary,
        total or vocabulary, blocks, smoothing, z_loss, softcap or 1.0, scale,
        HAS_BIAS=bias is not None, SOFTCAP=softcap > 0, BLOCK=size, num_warps=warps,
    )  # fmt: skip


class Head:
    """Chunks of logits of `hidden [N, D]` under `weight [V, D]`, and the gradients that they lead to."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.hidden, self.weight, self.rows = hidden, weight, rows
        self.bias = None if bias is None else bias.contiguous()
        vocabulary = weight.shape[0]
        width = vocabulary if vocabulary < 64 else -(-vocabulary // 64) * 64  # rows begin where vectors may
        self.room = hidden.new_empty(min(rows, hidden.shape[0]), width)[:, :vocabulary]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their logits without the bias, which the next chunk overwrites."""
        for start in range(0, self.hidden.shape[0], self.rows):
            part = slice(start, start + self.rows)
            hidden = self.hidden[part]
            yield part, torch.mm(hidden, self.weight.T, out=self.room[: hidden.shape[0]])

    def add(self, part: slice, dz: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor) -> None:
        """Adds the gradients of a chunk to those that are not empty."""
        if d_hidden.numel():
            torch.mm(dz, self.weight, out=d_hidden[part])
        if d_weight.numel():
            accumulate(d_weight, dz.T, self.hidden[part])
        if d_bias.numel():
            d_bias += dz.sum(0, dtype=torch.float32)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, whatever the dtypes."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += torch.mm(a, b)


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], rows: int
) -> list[Tensor]:
    """Room for the gradients of hidden, weight and bias that are added up over chunks; empty unless in `needs`."""
    dtypes = hidden.dtype, accumulator_dtype(weight.dtype, hidden.shape[0], rows), torch.float32
    return [
        torch.empty(t.shape if needed and t is not None else (0,), dtype=dtype, device=hidden.device)
        for t, needed, dtype in zip((hidden, weight, bias), needs, dtypes, strict=True)
    ]


RowGradient = Callable[[slice, Tensor], None]


def add_up(head: Head, gradients: Sequence[Tensor], row_gradient: RowGradient) -> None:
    """Fills `gradients`; `row_gradient(rows, z)` overwrites a chunk's logits by their gradient."""
    for total in gradients[1:]:
        total.zero_()
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part, z in head.chunks():
            row_gradient(part, z)
            if any(total.numel() for total in gradients):
                head.add(part, z, *gradients)


def hand_over(gradients: Sequence[Tensor | None], found: Tensors, grad: Tensor) -> None:
    """What was added up forward, times the gradient of the loss, as the gradients that autograd wants."""
    for gradient, total in zip(gradients, found, strict=False):
        if gradient is not None and total is not None:
            torch.mul(total, grad, out=gradient)
