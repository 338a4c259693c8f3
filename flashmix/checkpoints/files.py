"""Files of weights: safetensors, read through a memory map and written one tensor after the other."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmix.checkpoints.rules import ConversionError
from flashmix.train.folder import write_json, written_whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 2**30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """A weight as a file's header has it; `start` is the first byte of its numbers in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class WeightFiles:
    """The weights of a folder, by name. Nothing is read but headers until `tensor` is called, and then only that tensor.

    Raises:
        ConversionError: the folder has no safetensors file, one is cut off or no such file, or a name comes twice.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if (folder / INDEX).exists():
            paths = sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
        if not paths:
            raise ConversionError(f"{folder} must hold safetensors files, got none")
        self.entries: dict[str, Entry] = {}
        for path in paths:
            for name, entry in _header(path).items():
                if name in self.entries:
                    raise ConversionError(f"{name} must be in one file of {folder}, got {path.name} and another")
                self.entries[name] = entry
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, name: str) -> Tensor:
        """The weight, a view of the mapped file."""
        entry = self.entries[name]
        if entry.path not in self._maps:
            with entry.path.open("rb") as file:
                self._maps[entry.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(self._maps[entry.path], dtype=entry.dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)


def _header(path: Path) -> dict[str, Entry]:
    """The entries of one file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            total = os.fstat(file.fileno()).st_size
            if not 2 <= length <= total - 8:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        entries: dict[str, Entry] = {}
        for name, value in header.items():
            if name == "__metadata__":
                continue
            dtype, (start, end) = DTYPES[value["dtype"]], value["data_offsets"]
            entry = Entry(path, dtype, tuple(value["shape"]), 8 + length + start)
            if end - start != prod(entry.shape) * dtype.itemsize or 8 + length + end > total:
                raise ValueError(f"{name} is cut off")
            entries[name] = entry
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{path} must be a whole safetensors file: {type(error).__name__}: {error}") from error
    return entries


@dataclass(frozen=True)
class Planned:
    """A weight to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_weights(folder: Path, groups: list[list[Planned]], make: Callable[[int], list[Tensor]]) -> None:
    """Writes `groups` of weights, each as `make(index of the group)` returns it, into as few files as `SHARD_BYTES` allows.

    A group is in memory only while it is written. Every file has its name only when it is whole; the index comes last.
    """
    shards: list[list[int]] = [[]]
    size = 0
    for index, group in enumerate(groups):
        bytes_ = sum(planned.bytes for planned in group)
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(index)
        size += bytes_
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, groups, shard, make)
    if len(shards) > 1:
        where = {p.name: name for name, shard in zip(names, shards, strict=True) for i in shard for p in groups[i]}
        total = sum(planned.bytes for group in groups for planned in group)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_file(path: Path, groups: list[list[Planned]], shard: list[int], make: Callable[[int], list[Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in (planned for index in shard for planned in groups[index]):
        span = [offset, offset + planned.bytes]
        header[planned.name] = {"dtype": NAMES[planned.dtype], "shape": list(planned.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index in shard:
            for planned, tensor in zip(groups[index], make(index), strict=True):
                assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, planned.name
                tensor = tensor.contiguous()
                if tensor.numel():
                    file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
