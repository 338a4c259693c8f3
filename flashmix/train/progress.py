"""The progress of a command: a bar on a terminal, elsewhere a line from time to time, with the time that is left."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

from tqdm import tqdm

INTERVAL = 30.0  # seconds between two lines


def has_room_for_a_bar() -> bool:
    """Whether stderr is a terminal with columns; some (in containers) say that they have none."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False


class Progress:
    """Steps done of `total`, on stderr; what is worth keeping goes through `say`, on stdout.

    Of several ranks one is `shown`. Without a terminal a thread prints a line every `INTERVAL` seconds, however long a single step takes.
    """

    def __init__(self, total: int, done: int = 0, shown: bool = True) -> None:
        self.shown = shown
        self.total, self.done, self.begun_at = total, done, done
        self.label = ""
        self.details: dict[str, str] = {}
        self.start = time.monotonic()
        self.bar = None
        if shown and has_room_for_a_bar():
            self.bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Progress:
        if self.bar is None and self.shown:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            self._lines.join()

    def update(self) -> None:
        """One step more. Raises OSError: a line could not be printed."""
        self.done += 1
        if self._error is not None:
            raise self._error
        if self.bar is not None:
            self.bar.update()

    def show(self, label: str | None = None, details: dict[str, str] | None = None) -> None:
        """What the bar or the next lines show beside the steps."""
        self.label = self.label if label is None else label
        self.details = self.details if details is None else details
        if self.bar is not None:
            self.bar.set_description(self.label or None)
            self.bar.set_postfix(self.details)

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        if self.bar is not None:
            self.bar.write(line)
        elif self.shown:
            print(line, flush=True)

    def line(self) -> str:
        """The state as a line: steps, details, the time left at the speed so far."""
        spent, made = time.monotonic() - self.start, self.done - self.begun_at
        left = "time left not known yet"
        if made:
            left = f"{duration(spent / made * (self.total - self.done))} left"
        details = "".join(f", {name} {value}" for name, value in self.details.items())
        return f"{self.label + ': ' if self.label else ''}step {self.done} of {self.total}{details}, {left}"

    def _print_lines(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                print(self.line(), file=sys.stderr, flush=True)
            except OSError as error:  # a closed pipe: the next step raises it
                self._error = error
                return


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3725)
        ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
