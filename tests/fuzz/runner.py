"""Runs cases in several processes until time is up, counts them by op and kind, and prints every defect with its replay command."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections import Counter
from typing import Any

import torch

from .cases import STRUCTURES, Outcome, Space, run_case

GRACE = 40.0  # seconds after the end in which a worker finishes its case
SHOWN = 200  # defects that are printed
REPORTED = 15.0  # seconds between two lines of how far a run of several processes is


def prepared() -> None:
    """One thread, and memory that is NaN where nothing was written."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def indices(space: Space, start: int, worker: int, workers: int) -> Any:
    """The indices of one worker, without end: on a GPU those of its own structures, so that each kernel is compiled by one process."""
    index = start + worker
    if space.device == "cpu" and not space.few:
        while True:
            yield index
            index += workers
    own = [slot for slot in range(space.slots) if slot % workers == worker]
    round_ = start // space.slots
    while own:
        yield from (round_ * space.slots + slot for slot in own)
        round_ += 1


def work(space: Space, worker: int, plan: tuple[int, int, int | None, float], at: Any, found: Any) -> None:
    """One process: cases until the deadline, or until its share of calls is done."""
    start, workers, calls, deadline = plan
    prepared()
    share = None if calls is None else len(range(worker, calls, workers))
    for done, index in enumerate(indices(space, start, worker, workers)):
        if time.time() >= deadline or (share is not None and done >= share):
            break
        at.value = index
        outcome = run_case(space, index)
        found.put(
            (
                index,
                outcome.op,
                outcome.kind,
                [(f.impl, f.text) for f in outcome.findings],
                outcome.text if outcome.findings else "",
            )
        )
    at.value = -1
    found.put(None)


def replay(space: Space, index: int) -> str:
    """The command that runs one case again."""
    more = "" if space.device == "cpu" else f" --device {space.device}"
    more += (" --few" if space.few else "") + (" --correlated" if space.correlated else "")
    more += f" --structures {space.structures}" if space.structures != STRUCTURES else ""
    more += f" --impl {space.impl}" if space.impl else ""
    more += f" --ops {','.join(space.only)}" if space.only else ""
    return f"python -m fuzz --seed {space.seed} --index {index}{more}"


class Tally:
    """Counts by op and kind, and the defects."""

    def __init__(self, space: Space) -> None:
        self.space, self.start = space, time.time()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.defects: list[str] = []

    def add(self, index: int, op: str, kind: str, findings: list[tuple[str, str]], text: str) -> None:
        self.counts[op, kind.split(":")[0]] += 1
        self.counts["", kind] += 1
        for impl, what in findings:
            self.defect(index, f"{op}, {kind}, {impl}: {what}", text)

    def defect(self, index: int, what: str, text: str = "") -> None:
        self.defects.append(what)
        if len(self.defects) <= SHOWN:
            print(f"DEFECT {what}\n    {replay(self.space, index)}" + (f"\n    {text}" if text else ""), flush=True)

    def progress(self) -> None:
        spoilt = sum(n for (name, kind), n in self.counts.items() if name and kind == "wrong")
        total = sum(n for (name, _), n in self.counts.items() if name)
        print(
            f"{time.time() - self.start:.0f} s: {total - spoilt} valid and {spoilt} wrong calls, {len(self.defects)} defects",
            flush=True,
        )

    def table(self) -> None:
        """Cases by op, then by kind."""
        print(f"{'op':32}{'differential':>14}{'laws':>8}{'wrong':>8}")
        for op in self.space.names:
            own = {kind: n for (name, kind), n in self.counts.items() if name == op}
            same = own.pop("differential", 0)
            spoilt = own.pop("wrong", 0)
            print(f"{op:32}{same:>14}{sum(own.values()):>8}{spoilt:>8}")
        kinds = {kind: n for (name, kind), n in self.counts.items() if not name}
        print(", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
        spoilt = sum(n for kind, n in kinds.items() if kind.startswith("wrong"))
        total = sum(kinds.values())
        seconds = time.time() - self.start
        print(
            f"seed {self.space.seed}, {self.space.device}: {total - spoilt} valid and {spoilt} wrong calls in {seconds:.0f} s, "
            f"{len(self.defects)} defects"
        )


def run(space: Space, seconds: float | None, calls: int | None, start: int, workers: int) -> int:
    """Exit status 1 if there is a defect; a worker that dies or hangs is one."""
    tally = Tally(space)
    deadline = time.time() + (seconds if seconds is not None else 10**6)
    if workers == 1:
        prepared()
        for done, index in enumerate(indices(space, start, 0, 1)):
            if time.time() >= deadline or (calls is not None and done >= calls):
                break
            outcome: Outcome = run_case(space, index)
            tally.add(index, outcome.op, outcome.kind, [(f.impl, f.text) for f in outcome.findings], outcome.text)
    else:
        together(space, tally, (start, workers, calls, deadline))
    tally.table()
    return bool(tally.defects)


def together(space: Space, tally: Tally, plan: tuple[int, int, int | None, float]) -> None:
    """All workers, until each has said that it is done."""
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    places = [context.Value("q", -1) for _ in range(plan[1])]
    processes = [
        context.Process(target=work, args=(space, worker, plan, places[worker], found), daemon=True)
        for worker in range(plan[1])
    ]
    for process in processes:
        process.start()
    running = set(range(plan[1]))
    done, told = 0, time.time()
    while done < len(processes) and running:
        if time.time() > told + REPORTED:
            tally.progress()
            told = time.time()
        try:
            one = found.get(timeout=2.0)
        except queue.Empty:
            for worker in sorted(running):
                if not processes[worker].is_alive():
                    running.discard(worker)
                    if places[worker].value >= 0:
                        tally.defect(places[worker].value, f"the process died with status {processes[worker].exitcode}")
            if time.time() > plan[3] + GRACE:
                for worker in sorted(running):
                    if places[worker].value >= 0:
                        tally.defect(places[worker].value, "the case does not end")
                    processes[worker].terminate()
                break
            continue
        if one is None:
            done += 1
        else:
            tally.add(*one)
    for process in processes:
        process.join(timeout=5.0)
