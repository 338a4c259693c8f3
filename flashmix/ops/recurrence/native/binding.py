"""The compiled library of `recurrence.c`, and its struct `Call`."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from flashmix.gpu.device import constant_when_compiled

_NUMBERS = "sequences value_heads K V threads scratch_numbers q_heads k_heads a_heads b_heads decay read_before"
_POINTERS = """
    starts chunk_starts q k v beta a b g initial_state o state states nu
    d_o d_state dq dk dv dbeta da db dg d_initial_state scratch
"""


class NativeCall(ctypes.Structure):
    """`Call` of `recurrence.c`: numbers and pointers that are not given are 0 or null."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        ("scale", ctypes.c_double),
    ]


@constant_when_compiled
def missing() -> str | None:
    """Why there is no library; None if there is one."""
    try:
        library()
    except OSError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """Raises OSError: it was not built, or this machine cannot load it."""
    path = Path(__file__).with_name("librecurrence.so.0")
    if not path.exists():
        raise OSError("its C was not compiled when flashmix was installed")
    made = ctypes.CDLL(str(path))
    made.flashmix_scratch.restype = ctypes.c_int64
    made.flashmix_scratch.argtypes = [ctypes.c_int64, ctypes.c_int64]
    made.flashmix_instructions.restype = ctypes.c_int
    made.flashmix_instructions.argtypes = [ctypes.c_int]
    for name in ("flashmix_forward", "flashmix_backward"):
        getattr(made, name).restype = None
        getattr(made, name).argtypes = [ctypes.POINTER(NativeCall)]
    return made
