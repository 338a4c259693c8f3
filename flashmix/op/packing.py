"""Packed batches: sequences of any lengths laid end to end in one row, told apart by `cu_seqlens`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from flashmix.gpu.ahead import gathering
from flashmix.op.checks import check_dtype, check_tensor, contents_are_checked, dims, is_mapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from flashmix.parallel.shard import Shard

Table = TypeVar("Table")


class Packing:
    """Where the sequences of a packed batch start and end, made once a batch and handed to every op as `cu_seqlens`.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, `cu_seqlens[n]` is the first token of sequence `n` and the last entry the
            number of tokens. Empty sequences are fine.
        total: number of tokens in the packed row.
        host: the boundaries as numbers, where they are known: `shard` needs them, and does not read them from a device.

    Raises:
        TypeError: `cu_seqlens` is not an int32 or int64 tensor.
        ValueError: it is not one-dimensional, does not start at 0, decreases, or does not end at `total` (contents are read
            on the CPU, and on a GPU after `flashmix.checks(True)`).

    Example:
        >>> packing = Packing.from_lengths([3, 0, 2])
        >>> packing.cu_seqlens.tolist(), packing.positions.tolist()
        ([0, 3, 3, 5], [0, 1, 2, 0, 1])
    """

    sharded: ClassVar[bool] = False  # whether it is a `Shard`, whose sequences go on at other ranks

    def __init__(self, cu_seqlens: Tensor, total: int, *, host: Sequence[int] | None = None) -> None:
        check_tensor("cu_seqlens", cu_seqlens)
        check_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
        if is_mapped(cu_seqlens):
            raise ValueError("cu_seqlens must be the same for all rows that vmap maps, got one for each")
        (entries,) = dims("cu_seqlens", cu_seqlens, "N+1")
        if entries < 1:
            raise ValueError("cu_seqlens must have shape [N+1], got [0]")
        self.cu_seqlens = cu_seqlens
        self.total = total
        # Computed when first asked for. Not cached_property: its lock (Python 3.10, 3.11) breaks torch.compile's graph.
        self._sequence: Tensor | None = None
        self._positions: Tensor | None = None
        self._tables: dict[Any, Any] = {}
        self._host: tuple[int, ...] | None = None  # the boundaries, where they were made of numbers on the host
        self._version = -1  # of the boundaries that were checked and that the tables were made of
        if not self._is_current() and contents_are_checked(cu_seqlens):
            check_boundaries(cu_seqlens.tolist(), total)
        if host is not None:
            check_boundaries(list(host), total)
            self._host = tuple(host)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Packing:
        """The packing of sequences of these lengths (tokens), on `device`."""
        counts = torch.as_tensor(lengths, device=device)
        if counts.numel() and (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool):
            raise TypeError(f"lengths must be integers, got {str(counts.dtype).removeprefix('torch.')}")
        counts = counts.to(torch.int64)
        if contents_are_checked(counts) and bool((counts < 0).any()):
            raise ValueError(f"lengths must be non-negative, got {counts.tolist()}")
        cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        packing = cls(cu_seqlens, int(cu_seqlens[-1]))
        if not isinstance(lengths, Tensor) or (lengths.is_cpu and not torch.compiler.is_compiling()):
            packing._host = (0, *accumulate(lengths.tolist() if isinstance(lengths, Tensor) else lengths))
        return packing

    @classmethod
    def unchecked(cls, cu_seqlens: Tensor, total: int) -> Packing:
        """The packing behind an operator's arguments, which were checked when it was called."""
        packing = object.__new__(cls)
        packing.cu_seqlens, packing.total = cu_seqlens, total
        packing._sequence = packing._positions = None
        packing._tables, packing._version, packing._host = {}, 0, None
        return packing

    def check(self) -> None:
        """Raises ValueError if the boundaries, where they may be read, were overwritten by ones that no packing has."""
        if not self._is_current() and contents_are_checked(self.cu_seqlens):
            check_boundaries(self.cu_seqlens.tolist(), self.total)

    def _is_current(self) -> bool:
        """Whether the boundaries are those of the last time; what was made of others is forgotten."""
        if torch.compiler.is_compiling():  # which checks no contents
            return True
        version = self.version
        if version == self._version:
            return True
        self._sequence = self._positions = self._host = None
        self._tables, self._version = {}, version
        return False

    @property
    def version(self) -> int:
        """How often the boundaries were overwritten; 0 where nobody counts: in compiled code, and of tensors of inference mode."""
        return 0 if torch.compiler.is_compiling() or self.cu_seqlens.is_inference() else self.cu_seqlens._version

    def table(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """`make()`, a table of the boundaries, made once a batch whichever ops ask for it, forward or backward.

        It is made again where the boundaries were overwritten, on another stream, and while a CUDA graph is captured, whose replays
        must see the boundaries of their own time. Kept is no table that was made while kernels, which may write it, are only gathered.
        """
        if gathering.wanted is not None:
            return make()
        cu_seqlens = self.cu_seqlens
        stream = 0
        if cu_seqlens.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return make()
            stream = torch._C._cuda_getCurrentRawStream(cu_seqlens.device.index)
        if cu_seqlens.is_inference():
            return make()
        self._is_current()
        found = self._tables.get((key, stream))
        if found is None:
            with torch.inference_mode(False):
                found = self._tables[key, stream] = make()
        return found

    @property
    def count(self) -> int:
        """The number of sequences, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """`[N]`: tokens in each sequence."""
        return self.cu_seqlens.diff()

    @property
    def elapsed(self) -> Tensor:
        """`[N]`: tokens of each sequence up to the last one here: its length, of a `Shard` with the tokens of other ranks before it."""
        return self.lengths

    @property
    def sequence(self) -> Tensor:
        """`[total]` int64: the sequence of each token; `N` for tokens past the last one."""
        if not self._is_current() or self._sequence is None:
            tokens = torch.arange(self.total, device=self.cu_seqlens.device)
            # Not searched in cu_seqlens[1:]: compiled by Inductor for a GPU (torch 2.11) that gave wrong numbers.
            after = torch.searchsorted(self.cu_seqlens.to(torch.int64), tokens, right=True)
            self._sequence = (after - 1).clamp(min=0)
        return self._sequence

    @property
    def positions(self) -> Tensor:
        """`[total]` int64: the place of each token in its own sequence, from 0."""
        if not self._is_current() or self._positions is None:
            tokens = torch.arange(self.total, device=self.cu_seqlens.device)
            self._positions = tokens - self.cu_seqlens.to(torch.int64)[self.sequence]
        return self._positions

    @property
    def reach(self) -> int:
        """All `positions` lie below it, as the host knows."""
        return self.total

    def on_host(self) -> list[int]:
        """The boundaries as numbers on the host. Raises ValueError where they are on a device only: reading them would wait for it."""
        if self.cu_seqlens.is_cpu:
            return self.cu_seqlens.tolist()
        if not self._is_current() or self._host is None:
            raise ValueError("lengths must be on the host (Packing.from_lengths of numbers), got a tensor on a device")
        return list(self._host)

    def repeat(self, n: int) -> Packing:
        """The packing of the same sequences with `n` tokens in place of each."""
        return Packing(self.cu_seqlens * n, self.total * n)

    def shard(
        self,
        group: ProcessGroup | DeviceMesh,
        *,
        order: str = "contiguous",
        ranges: Sequence[tuple[int, int, int]] | None = None,
    ) -> Shard:
        """This rank's tokens of the row, over which every op computes with the other ranks of `group`.

        Every rank calls it with the same arguments. `flashmix.checks(True)` compares them between the ranks.

        Args:
            group: a process group or a mesh of one dimension.
            order: "contiguous": one range a rank; "zigzag": two, so that causal attention is the same work for all.
            ranges: instead of `order`, `(owner, start, stop)` of the row's tokens, any number a rank, which cover the row once; a
                rank's tokens lie in the order of its ranges.

        Returns:
            A `Shard`, to be passed as `cu_seqlens`.

        Raises:
            TypeError: `group` is neither, or a range does not hold three integers.
            ValueError: the boundaries are on a device only, `order` is unknown, ranges overlap, leave a gap or name an owner that is
                not in the group, this rank is not in the group, or the packing is a `Shard` already.

        Example:
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> shard = Packing.from_lengths([3, 2]).shard(dist.group.WORLD, ranges=[(0, 4, 5), (0, 0, 4)])
            >>> shard, shard.positions.tolist(), shard.begins.tolist()
            (Shard(rank=0 of 1, sequences=3, tokens=5 of 5), [1, 0, 1, 2, 0], [False, True, True])
            >>> dist.destroy_process_group()
        """
        from flashmix.parallel.shard import shard_of

        return shard_of(self, group, order, ranges)

    def __repr__(self) -> str:
        return f"Packing(sequences={self.count}, tokens={self.total})"


def check_boundaries(cu_seqlens: list[int], total: int) -> None:
    """Raises ValueError unless the host-side boundaries start at 0, never decrease and end at `total`."""
    if cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {cu_seqlens[0]}")
    for before, after in pairwise(cu_seqlens):
        if after < before:
            raise ValueError(f"cu_seqlens must not decrease, got {before} followed by {after}")
    if cu_seqlens[-1] != total:
        raise ValueError(f"cu_seqlens must end at the token count {total}, got {cu_seqlens[-1]}")


def as_packing(cu_seqlens: Tensor | Packing | None, batch: int, tokens: int, device: torch.device) -> Packing | None:
    """The `Packing` behind an op's `cu_seqlens` argument, checked against the op's `[B, T, ...]` inputs.

    Raises ValueError: `B != 1`, another device than the inputs, or boundaries that do not fit `tokens`.
    """
    if cu_seqlens is None:
        return None
    if batch != 1:
        raise ValueError(f"cu_seqlens must come with inputs of batch size 1 (sequences end to end), got {batch}")
    if isinstance(cu_seqlens, Packing):
        packing = cu_seqlens
        packing.check()
    else:
        packing = Packing(cu_seqlens, tokens)
    if packing.sharded and packing.total != tokens:
        raise ValueError(f"tokens must be the shard's {packing.total} (shard.take of a whole row), got {tokens}")
    if packing.total != tokens:
        raise ValueError(f"cu_seqlens must end at the token count {tokens}, got {packing.total}")
    if packing.cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device} like the inputs, got {packing.cu_seqlens.device}")
    return packing


def check_whole(cu_seqlens: Tensor | Packing | None, op: str) -> None:
    """Raises ValueError for a `Shard`: `op` has no exchange with the other ranks."""
    if isinstance(cu_seqlens, Packing) and cu_seqlens.sharded:
        raise ValueError(
            f"cu_seqlens must hold whole sequences for {op}, which has no exchange between ranks, got a Shard"
        )
