"""The sLSTM of the compiled library, and its struct `Slstm`."""

from __future__ import annotations

import ctypes

from flashmix.gpu.device import constant_when_compiled
from flashmix.ops.recurrence.native import binding as recurrence

_NUMBERS = "sequences heads channels tokens threads"
_POINTERS = """
    starts write forget candidate output recurrent c n m y
    out last_c last_n last_m last_y logits states d_out d_c d_n d_y d_logits d_start_c d_start_n d_start_y
"""


class NativeSlstm(ctypes.Structure):
    """`Slstm` of `call.h`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is no sLSTM in C; None if there is one."""
    reason = recurrence.missing()
    if reason is None and not hasattr(recurrence.library(), "flashmix_slstm_backward"):
        return "its C was not compiled when flashmix was installed"
    return reason


def library() -> ctypes.CDLL:
    """The library, its sLSTM declared."""
    made = recurrence.library()
    for name in ("flashmix_slstm", "flashmix_slstm_backward"):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativeSlstm)]
    return made
