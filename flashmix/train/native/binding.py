"""The compiled library of `words.c`, and its table of words."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

MOST_WORDS, MOST_BYTES = 1 << 20, 1 << 28  # what a table may hold before it is emptied
AT_ONCE = 1 << 16  # words

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "new": (_POINTER, ()),
    "free": (None, (_POINTER,)),
    "clear": (None, (_POINTER,)),
    "count": (_NUMBER, (_POINTER,)),
    "memory": (_NUMBER, (_POINTER,)),
    "cut": (_NUMBER, (_POINTER, ctypes.c_char_p, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER)),
    "bytes": (_POINTER, (_POINTER, _NUMBER, _POINTER)),
    "learn": (ctypes.c_int, (_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER)),
    "write": (_NUMBER, (_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _POINTER)),
}


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
    path = Path(__file__).with_name("libwords.so.0")
    if not path.exists():
        raise OSError("its C was not compiled when flashmix was installed")
    made = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(made, f"flashmix_words_{name}")
        function.restype, function.argtypes = result, arguments
    return made


class WordTable:
    """Words of GPT-2's pattern and their tokens.

    Args:
        dtype: of the tokens: "uint16" or "uint32".
        encoded: the tokens of words that are new.
    """

    def __init__(self, dtype: str, encoded: Callable[[list[str]], list[list[int]]]) -> None:
        self.call = library()
        self.dtype, self.encoded = np.dtype(dtype), encoded
        self.table = self.call.flashmix_words_new()
        self.found = np.empty(AT_ONCE, dtype=np.uint32)
        self.learned = 0  # words of the table that have their tokens
        if not self.table:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "table", None):
            self.call.flashmix_words_free(self.table)

    def encode(self, text: bytes) -> np.ndarray | None:
        """The tokens of text in UTF-8 without spaces outside ASCII; None where they are more than its bytes."""
        call, found, out = self.call, self.found.ctypes.data, np.empty(len(text), dtype=self.dtype)
        place, made, target = _NUMBER(0), 0, out.ctypes.data
        if call.flashmix_words_count(self.table) > MOST_WORDS or call.flashmix_words_memory(self.table) > MOST_BYTES:
            call.flashmix_words_clear(self.table)
            self.learned = 0
        while place.value < len(text):
            count = call.flashmix_words_cut(
                self.table, text, place.value, len(text), AT_ONCE, found, ctypes.byref(place)
            )
            if count < 0:
                raise MemoryError
            self._learn()
            made = call.flashmix_words_write(self.table, found, count, self.dtype.itemsize, made, len(out), target)
            if made < 0:
                return None
        return out[:made]

    def _learn(self) -> None:
        """Gives new words their tokens."""
        new = range(self.learned, self.call.flashmix_words_count(self.table))
        if not new:
            return
        size = _NUMBER(0)
        words = []
        for number in new:
            start = self.call.flashmix_words_bytes(self.table, number, ctypes.byref(size))
            words.append(ctypes.string_at(start, size.value).decode())
        ids = self.encoded(words)
        ends = np.fromiter(accumulate(map(len, ids)), dtype=np.int64, count=len(ids))
        numbers = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=int(ends[-1]))
        if not self.call.flashmix_words_learn(
            self.table, self.learned, len(ids), ends.ctypes.data, numbers.ctypes.data
        ):
            raise MemoryError
        self.learned = new.stop
