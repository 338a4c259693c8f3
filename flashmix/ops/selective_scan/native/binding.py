"""The selective scan of the compiled library, and its struct `Selective`."""

from __future__ import annotations

import ctypes

from flashmix.gpu.device import constant_when_compiled
from flashmix.ops.recurrence.native import binding as recurrence

_NUMBERS = "sequences channels states groups block threads scratch_numbers"
_POINTERS = """
    starts chunk_starts u dt A B C initial_state y state kept d_y d_state du ddt dA dB dC d_initial_state scratch
"""


class NativeSelectiveScan(ctypes.Structure):
    """`Selective` of `call.h`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is no selective scan in C; None if there is one."""
    reason = recurrence.missing()
    if reason is None and not hasattr(recurrence.library(), "flashmix_selective"):
        return "its C was not compiled when flashmix was installed"
    return reason


def library() -> ctypes.CDLL:
    """The library, its selective scan declared."""
    made = recurrence.library()
    for name in ("flashmix_selective", "flashmix_selective_backward"):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativeSelectiveScan)]
    return made
