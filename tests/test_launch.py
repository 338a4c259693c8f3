"""The launcher without a GPU: what it hands the driver is, byte for byte, what Triton's own launcher does, in each release of Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashmix.gpu import device as gpu

triton = pytest.importorskip("triton")

COMPILERS = Path(__file__).parent / "compilers"


def test_the_driver_is_given_what_triton_gives_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", library]
    subprocess.run([*command, COMPILERS / "recording_driver.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-W", "error:TRITON_:UserWarning", COMPILERS / "launches.py", library],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1] == "4"


@pytest.mark.parametrize("version", [(3, 6), (3, 9), (3, 10)])
@pytest.mark.parametrize("asked", [False, True])
def test_gluon_on_a_card_with_other_releases(
    version: tuple[int, int], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken where it has run, on request where it compiles, nowhere else."""
    monkeypatch.setattr(gpu, "_triton", lambda: version)
    monkeypatch.setattr(gpu, "TRY_GLUON", asked)
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "target", lambda device: gpu.Target((9, 0), 227 * 1024, 132))
    found = gpu._hopper_refusal.__wrapped__(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,))
    if version == (3, 10):
        assert found is not None and "triton 3.6 or 3.7 or 3.8 or 3.9, whose Gluon" in found
    else:
        assert found is None if asked or version == (3, 6) else "FLASHMIX_GLUON=1" in (found or "")
