"""What the losses over a language model's head share: logits a chunk of tokens at a time, gradients added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashmix._checks import (
    check_dtype,
    check_floating,
    check_like,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
)
from flashmix.ops._rowwise import compute_dtype

# Logits held at once: 2^23 are 32 MiB in float32, enough rows for an efficient matrix product at any usual vocabulary.
LOGITS_AT_ONCE = 2**23


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> int:
    """Checks `hidden [..., D]`, `weight [V, D]` and `bias [V]`, whose names begin with `prefix`; returns V."""
    names = [prefix + name for name in ("hidden", "weight", "bias")]
    check_tensor(names[0], hidden)
    check_floating(names[0], hidden)
    if hidden.dim() < 1:
        raise ValueError(f"{names[0]} must have shape [..., D], got []")
    vocabulary, _ = dims(names[1], weight, "V D")
    check_shape(names[1], weight, vocabulary, hidden.shape[-1])
    if vocabulary < 1:
        raise ValueError(f"{names[1]} must have shape [V, D] with V >= 1, got [0, {hidden.shape[-1]}]")
    check_floating(names[1], weight)
    check_like(names[1], weight, names[0], hidden, dtype=False)
    check_like(names[1], weight, names[0], hidden, dtype=_autocast_dtype(hidden) is None)
    if bias is not None:
        check_shape(names[2], bias, vocabulary)
        check_floating(names[2], bias)
        check_like(names[2], bias, names[0], hidden, dtype=False)
    return vocabulary


def check_target(
    target: Tensor, shape: Sequence[int], like_name: str, like: Tensor, vocabulary: int, ignore: int
) -> None:
    """Checks `target` to be int64 of this shape, below the vocabulary or `ignore`."""
    check_tensor("target", target)
    check_dtype("target", target, torch.int64)
    check_shape("target", target, *shape)
    check_like("target", target, like_name, like, dtype=False)
    if contents_are_checked(target):
        wrong = target[(target != ignore) & ((target < 0) | (target >= vocabulary))]
        if wrong.numel():
            raise ValueError(
                f"target must be below the vocabulary {vocabulary} and not negative, or ignore_index = {ignore}, "
                f"got {wrong[0].item()}"
            )


def check_positive(name: str, value: float | None) -> None:
    """Raises ValueError unless `value` is None or above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def head_inputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` as `[N, D]` and `weight`, under autocast both in its dtype."""
    dtype = _autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden.reshape(-1, hidden.shape[-1]) if hidden.shape[-1] else hidden.flatten(0, -2), weight


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants of `hidden`, or None: it is off, or unknown on this device, or passes float64 by."""
    kind = hidden.device.type
    if (
        hidden.dtype == torch.float64
        or not torch.amp.is_autocast_available(kind)
        or not torch.is_autocast_enabled(kind)
    ):
        return None
    return torch.get_autocast_dtype(kind)


def rows_at_once(chunk: int | None, vocabulary: int) -> int:
    """Tokens a chunk: the caller's, or as many as make 2^23 logits."""
    return chunk or max(1, LOGITS_AT_ONCE // vocabulary)


def chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def room_for_logits(tokens: int, chunk: int, weight: Tensor) -> Tensor:
    """Memory for the logits of one chunk, used by one after the other."""
    return weight.new_empty(min(tokens, chunk), weight.shape[0])


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor) -> Tensor:
    """The logits `hidden @ weight.T + bias`, written into the first rows of `room`."""
    z = torch.mm(hidden.to(weight.dtype), weight.T, out=room[: hidden.shape[0]])
    return z if bias is None else z.add_(bias)


class HeadGradients:
    """Gradients of `hidden`, `weight` and `bias`, added up over chunks; empty tensors unless in `needs`."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> None:
        self.needs, self.hidden, self.weight, self.bias = needs, hidden, weight, bias
        self.dtype = compute_dtype(hidden, weight, bias)
        sizes, dtypes = (hidden.shape, weight.shape, weight.shape[:1]), (hidden.dtype, self.dtype, self.dtype)
        self.d_hidden, self.d_weight, self.d_bias = (
            torch.zeros(size if need else (0,), dtype=dtype, device=hidden.device)
            for size, dtype, need in zip(sizes, dtypes, needs, strict=True)
        )

    def add(self, rows: slice, dz: Tensor, wide_weight: Tensor) -> None:
        """Adds what the gradient `dz` of these rows' logits gives; `wide_weight` is the weight in the dtype of `dz`."""
        if self.needs[0]:
            self.d_hidden[rows] = dz @ wide_weight
        if self.needs[1]:
            self.d_weight.addmm_(dz.T, self.hidden[rows].to(dz.dtype))
        if self.needs[2]:
            self.d_bias += dz.sum(0)

    def results(self) -> list[Tensor]:
        bias_dtype = self.dtype if self.bias is None else self.bias.dtype
        return [self.d_hidden, self.d_weight.to(self.weight.dtype), self.d_bias.to(bias_dtype)]
