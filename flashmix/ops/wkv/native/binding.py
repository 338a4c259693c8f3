"""RWKV-4's averages in the compiled library, and its struct `Wkv`."""

from __future__ import annotations

import ctypes

from flashmix.gpu.device import constant_when_compiled
from flashmix.ops.recurrence.native import binding as recurrence

_NUMBERS = "sequences channels tokens block threads"
_POINTERS = """
    starts k v w u a b m out last_a last_b last_m kept d_out d_a d_b dk dv dw du d_start_a d_start_b
"""


class NativeWkv(ctypes.Structure):
    """`Wkv` of `call.h`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is none in C; None if there is."""
    reason = recurrence.missing()
    if reason is None and not hasattr(recurrence.library(), "flashmix_wkv_backward"):
        return "its C was not compiled when flashmix was installed"
    return reason


def library() -> ctypes.CDLL:
    """The library, these functions declared."""
    made = recurrence.library()
    for name in ("flashmix_wkv", "flashmix_wkv_backward"):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativeWkv)]
    return made
