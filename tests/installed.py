"""Whether built wheels work where nothing else is: each in a new virtual environment, in an empty folder.

    python tests/installed.py dist/*.whl [--sources dist/*.tar.gz] [--torch torch==2.6.0 torch==2.15.0] [--python python3.12 python3.13]

Installs torch and the wheel, imports flashmix, and runs `flashmix --version`, `flashmix doctor` and `flashmix doctor --check`: each wheel
with each torch by each Python. Before that, no library in a wheel may name folders of the machine that built it (takes pyelftools, which
auditwheel brings), and the sources must have every file of the repository, the tests too.
`make dist` runs it.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from itertools import product
from pathlib import Path

PROGRAM = """
import importlib.metadata, flashmix
assert importlib.metadata.version("flashmix") == flashmix.__version__
from flashmix.ops.recurrence.native import binding as recurrence
print("library in C:", recurrence.missing() or "there")
"""


def try_wheel(wheel: Path, torch: str, python: str) -> None:
    """Raises CalledProcessError where a step fails; what a step prints is shown."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([python, "-m", "venv", place / "venv"], check=True)
        empty = place / "empty"
        empty.mkdir()

        def run(*command: str) -> None:
            print("$", *command, flush=True)
            subprocess.run([place / "venv" / "bin" / command[0], *command[1:]], cwd=empty, check=True)

        run("python", "-m", "pip", "install", "--quiet", torch)
        run("python", "-m", "pip", "install", "--quiet", str(wheel.resolve()))
        run("python", "-c", PROGRAM)
        run("flashmix", "--version")
        run("flashmix", "doctor")
        run("flashmix", "doctor", "--check")


def search_paths(library: bytes) -> list[str]:
    """The folders in which a shared library has the libraries that it needs looked for (RPATH, RUNPATH)."""
    from elftools.elf.elffile import ELFFile

    tags = ELFFile(io.BytesIO(library)).get_section_by_name(".dynamic").iter_tags()
    return [tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath for tag in tags if "PATH" in tag.entry.d_tag]


def check_libraries(wheel: Path) -> None:
    """Raises SystemExit where a library of the wheel names folders of the machine that built it."""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith(".so.0") and (found := search_paths(files.read(name))):
                raise SystemExit(f"{wheel.name}: {name} looks for libraries in {', '.join(found)}")


def check_sources(archive: Path) -> None:
    """Raises SystemExit where the sources lack a file that git knows; what is written but not yet known is not asked for."""
    known = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    with tarfile.open(archive) as files:
        found = {name.partition("/")[2] for name in files.getnames()}
    if missing := set(known.strip("\0").split("\0")) - found - {".gitignore"}:
        raise SystemExit(f"{archive.name} lacks {', '.join(sorted(missing))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--sources", type=Path, metavar="ARCHIVE")
    parser.add_argument("--torch", nargs="+", default=["torch"], metavar="REQUIREMENT")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="COMMAND")
    given = parser.parse_args()
    for wheel in given.wheels:
        check_libraries(wheel)
    if given.sources:
        check_sources(given.sources)
    for torch, python, wheel in product(given.torch, given.python, given.wheels):
        print(f"== {wheel.name} with {torch}, {python}", flush=True)
        try_wheel(wheel, torch, python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
