"""Reads of shared memory that are still under way where a barrier tells others that they may write there, as code has them.

A read by `LDS` or `LDSM` has ended for code when an instruction waits for its scoreboard, or for that of a later one: they end in order.
Neither `BAR.SYNC` nor an arrival at a barrier, named or in memory, waits for one. A thread that writes behind such a barrier does so
behind the reads, but a copy by TMA may come before them: so the backward of `output` with 256 channels once was wrong in a quarter of
its calls.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FIRST_LINE = re.compile(r"\s*/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
SECOND_LINE = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
READ = re.compile(r"(@!?U?P\w+ )?(LDSM?)\b")
LEFT = re.compile(r"BAR\.ARV \w+, (0x[0-9a-f]+)")
ARRIVAL = re.compile(r"SYNCS\.ARRIVE.*\+(0x[0-9a-f]+)\]")
NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    text: str
    sets: int  # the scoreboard that tells when its result is there
    waits: int  # for these scoreboards, a bit each


def late_reads(cubin: bytes) -> list[tuple[str, int]]:
    """Arrivals at barriers in memory, by the offset of the barrier, and how many reads were under way at the `BAR.SYNC` before each."""
    found, passed = [], 0
    for text, under_way in _reads_under_way(cubin):
        if text.startswith("BAR.SYNC"):
            passed = len(under_way)
        if arrival := ARRIVAL.search(text):
            found.append((arrival[1], passed))
    return found


def reads_at_named_barriers(cubin: bytes) -> list[tuple[int, int, int]]:
    """Of each `BAR.ARV`, by which a thread leaves a tile without waiting for others, the threads of its barrier, and how many reads by
    `LDS` and by `LDSM` are under way.
    """
    found = [(LEFT.search(text), reads) for text, reads in _reads_under_way(cubin)]
    return [
        (int(left[1], 16), len(reads) - sum(matrix for _, _, matrix in reads), sum(matrix for _, _, matrix in reads))
        for left, reads in found
        if left
    ]


def _reads_under_way(cubin: bytes) -> Iterator[tuple[str, list[tuple[int, int, bool]]]]:
    """Each instruction, and the reads of shared memory before it that have not ended: number, scoreboard, and whether by `LDSM`."""
    under_way: list[tuple[int, int, bool]] = []
    for n, one in enumerate(instructions(cubin)):
        ended = [at for at, scoreboard, _ in under_way if scoreboard < NO_SCOREBOARD and one.waits >> scoreboard & 1]
        under_way = [read for read in under_way if read[0] > max(ended, default=-1)]
        yield one.text, under_way
        if read := READ.match(one.text):
            under_way = [*under_way, (n, one.sets, read[2] == "LDSM")]


def instructions(cubin: bytes) -> Iterator[Instruction]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True, check=True).stdout
    lines = iter(text.split("\n"))
    for line in lines:
        if first := FIRST_LINE.match(line):
            upper = SECOND_LINE.search(next(lines))
            assert upper is not None, line
            control = int(upper[1], 16) >> 41
            yield Instruction(first[1], control >> 5 & 7, control >> 11 & 63)
