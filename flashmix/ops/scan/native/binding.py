"""The scan of the compiled library, and its struct `Scan`."""

from __future__ import annotations

import ctypes

from flashmix.gpu.device import constant_when_compiled
from flashmix.ops.recurrence.native import binding as recurrence

_NUMBERS = "sequences channels width block decay read_before maximum turning coupling threads"
_POINTERS = "starts x g initial_state h state d_h d_state dx dg d_initial_state"


class NativeScan(ctypes.Structure):
    """`Scan` of `scan.h`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is no scan in C; None if there is one."""
    reason = recurrence.missing()
    if reason is None:
        size = getattr(recurrence.library(), "flashmix_scan_bytes", None)
        if size is None or size() != ctypes.sizeof(NativeScan):
            return "its C was not compiled when this version of flashmix was installed"
    return reason


def library() -> ctypes.CDLL:
    """The library, its scan declared."""
    made = recurrence.library()
    for name in (f"flashmix_scan{kind}{way}" for kind in ("", "_complex") for way in ("", "_backward")):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativeScan)]
    return made
