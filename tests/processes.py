"""Processes that are ranks of a test, forked from one that has imported what they need: that takes seconds a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

PRELOADED = ["torch.distributed", "flashmix.models", "flashmix.train.session", "shard_extras"]


def together(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Runs `work(rank, *arguments)` in so many processes, and raises what one of them raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(work, arguments, count, start_method="forkserver")
