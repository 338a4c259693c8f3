"""What pyproject.toml cannot say: the C of the recurrence and the scan, one library, where there is a compiler; else there is none."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE, SCAN = "flashmix/ops/recurrence/native", "flashmix/ops/scan/native"
HEADERS = [f"{NATIVE}/{name}.h" for name in ("problem", "tiles", "pairs", "gradients", "correlated", "chunk")]


class Library(build_ext):
    """A shared library for ctypes, under a name that Python does not take for a module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so.0"


setup(
    cmdclass={"build_ext": Library},
    ext_modules=[
        Extension(
            NATIVE.replace("/", ".") + ".librecurrence",
            [f"{NATIVE}/recurrence.c"],
            depends=[*HEADERS, f"{SCAN}/call.h", f"{SCAN}/scan.h"],
            extra_compile_args=["-O3", "-pthread", "-Wno-psabi"],
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ],
)
