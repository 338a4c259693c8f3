"""Which hardware is here and what it can hold. Importing this module touches no GPU and needs neither CUDA nor triton."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata

import torch

# Shared memory that one block may take, in KiB, by compute capability (CUDA programming guide, "technical specifications").
_KIB = {64: [(7, 5)], 96: [(7, 0)], 99: [(8, 6), (8, 9), (12, 0)], 163: [(8, 0), (8, 7)], 227: [(9, 0), (10, 0)]}
SHARED_MEMORY_KIB = {capability: kib for kib, capabilities in _KIB.items() for capability in capabilities}


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: its name, compute capability, shared memory per block in bytes and number of multiprocessors."""

    index: int
    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


def gpus() -> list[Gpu]:
    """The CUDA devices of this machine; an empty list without a GPU or a driver. Called by `doctor`, never by an import."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        shared = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY_KIB.get(capability, 48) * 1024)
        found.append(Gpu(index, properties.name, capability, shared, properties.multi_processor_count))
    return found


def triton_version() -> str | None:
    """The version of the installed triton, or None; it is looked up, not imported."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model name, as the operating system gives it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
