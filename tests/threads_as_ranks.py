"""Ranks as threads of one process, of which one runs at a time: for code that a process can run once only, as Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@dataclass
class Group:
    """A process group as a `Shard` sees it, of one rank."""

    rank: int

    @property
    def group_name(self) -> str:
        return f"thread {self.rank}"


class Meeting:
    """Where the ranks exchange: `sent[rank]` are its rows, and how many go to each rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, [(Tensor(), [0])] * ranks
        self.barrier, self.turn = threading.Barrier(ranks), threading.Lock()

    def wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait(timeout=300)
        finally:
            self.turn.acquire()

    def all_to_all(self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Group) -> None:
        self.sent[group.rank] = rows, sent
        self.wait()
        parts = [its.split(counts)[group.rank] for its, counts in self.sent]
        assert [len(part) for part in parts] == received
        for to, part in zip(output.split(received), parts, strict=True):
            to.copy_(part)
        self.wait()


def run(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work(group)` of each rank."""
    meeting, found, errors = Meeting(ranks), [None] * ranks, []

    def of_rank(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = work(Group(rank))
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    with (
        mock.patch.object(dist, "get_rank", lambda group: group.rank),
        mock.patch.object(dist, "get_world_size", lambda group: ranks),
        mock.patch.object(dist, "all_to_all_single", meeting.all_to_all),
    ):
        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found
