"""The launches of the op that runs on this thread, to be made once more: its kernels are found by that and compiled side by side.

While they are found nothing is launched, so that memory which kernels write holds anything: nobody may keep it for a later call.
Importing this module touches no GPU and no triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Running(threading.local):
    """`again()` makes the launches of an op and those of its backward; None where there is no op, or none that may run twice."""

    again: Callable[[], object] | None = None


class Gathering(threading.local):
    """While launches are gathered on this thread none is made: the kinds of arguments that there is no code for yet, by kernel."""

    wanted: dict[tuple[Any, tuple[Any, ...]], list[Any]] | None = None


running = Running()
gathering = Gathering()
