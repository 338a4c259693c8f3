"""The preconditioner of keys in the compiled library, and its struct `Preconditioner`."""

from __future__ import annotations

import ctypes

from flashmix.gpu.device import constant_when_compiled
from flashmix.ops.recurrence.native import binding as recurrence

_NUMBERS = "sequences heads width block threads"
_POINTERS = "starts k weight g log_scale start out last kept d_out d_last dk dweight dg dscale d_start"


class NativePreconditioner(ctypes.Structure):
    """`Preconditioner` of `call.h`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_double) for name in ("power", "eps")),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is none in C; None if there is."""
    reason = recurrence.missing()
    if reason is None and not hasattr(recurrence.library(), "flashmix_preconditioner_backward"):
        return "its C was not compiled when flashmix was installed"
    return reason


def library() -> ctypes.CDLL:
    """The library, these functions declared."""
    made = recurrence.library()
    for name in ("flashmix_preconditioner", "flashmix_preconditioner_backward"):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativePreconditioner)]
    return made
