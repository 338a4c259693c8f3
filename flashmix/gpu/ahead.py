"""The launches of the op that runs on this thread, to be made once more: its kernels are found by that and compiled side by side.

Importing this module touches no GPU and no triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Running(threading.local):
    """`again()` makes the launches of an op and those of its backward; None where there is no op, or none that may run twice."""

    again: Callable[[], object] | None = None


running = Running()
