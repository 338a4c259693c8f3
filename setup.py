"""What pyproject.toml cannot say: two libraries in C, of the recurrence with the scans and of words, where there is a compiler; else none.

`FLASHMIX_PURE=1` leaves them out, for a wheel that any machine can install.
"""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PURE = os.environ.get("FLASHMIX_PURE", "") not in ("", "0")
NATIVE = "flashmix/ops/recurrence/native"
WORDS = "flashmix/train/native"
SCANS = (
    "scan/native/call",
    "scan/native/coupling",
    "scan/native/scan",
    "scan/native/complex",
    "selective_scan/native/call",
    "selective_scan/native/selective",
    "slstm/native/call",
    "slstm/native/slstm",
    "wkv/native/call",
    "wkv/native/wkv",
    "preconditioner/native/call",
    "preconditioner/native/preconditioner",
)
HEADERS = [f"{NATIVE}/{name}.h" for name in ("problem", "tiles", "pairs", "gradients", "correlated", "chunk")]
STRIPPED = ["-s"] if sys.platform == "linux" else []


class Library(build_ext):
    """A shared library for ctypes, under a name that Python does not take for a module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so.0"

    def build_extensions(self) -> None:
        """Links without the folders of the Python that builds: the C library is all that it needs, and a wheel names no machine's paths."""
        linker = self.compiler.linker_so
        self.compiler.linker_so = [flag for flag in linker if not flag.startswith(("-L", "-Wl,-rpath", "-Wl,-R"))]
        super().build_extensions()


class Wheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


recurrence = Extension(
    NATIVE.replace("/", ".") + ".librecurrence",
    [f"{NATIVE}/recurrence.c"],
    depends=[*HEADERS, *(f"flashmix/ops/{name}.h" for name in SCANS)],
    extra_compile_args=["-O3", "-pthread", "-Wno-psabi"],
    extra_link_args=["-pthread", "-lm", *STRIPPED],
    optional=True,
)
words = Extension(
    WORDS.replace("/", ".") + ".libwords",
    [f"{WORDS}/words.c"],
    extra_compile_args=["-O3"],
    extra_link_args=STRIPPED,
    optional=True,
)
setup(cmdclass={"build_ext": Library, "bdist_wheel": Wheel}, ext_modules=[] if PURE else [recurrence, words])
