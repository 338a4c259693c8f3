"""`flashmix doctor`: what hardware and software is here, and which implementation each op would take on it, and why."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import flashmix
from flashmix import _arch
from flashmix._dispatch import Explanation, explain

Call = Callable[[torch.device], Explanation]


def _random(*shape: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, device=device)


def _calls() -> dict[str, Call]:
    """Each public op, asked about a small float32 call of it: batch 1, 16 tokens, 2 heads of 32 channels."""
    heads, scalar, row = _random(1, 16, 2, 32), _random(1, 16, 2), _random(16, 32)
    target = lambda device: torch.zeros(16, dtype=torch.int64, device=device)  # noqa: E731
    inputs: dict[str, tuple[Callable[[torch.device], Tensor], ...]] = {
        "linear_attention": (heads, heads, heads, scalar),
        "delta_rule": (heads, heads, heads, scalar, scalar),
        "dplr": (heads, heads, heads, heads, heads, heads),
        "softmax_attention": (heads, heads, heads),
        "rotary": (heads, _random(16, 16), _random(16, 16)),
        "rms_norm": (row,),
        "l2_norm": (row,),
        "short_conv": (_random(1, 16, 32), _random(32, 4)),
        "swiglu": (row, row),
        "linear_cross_entropy": (row, _random(64, 32), target),
    }

    def ask(name: str, makers: tuple[Callable[[torch.device], Tensor], ...]) -> Call:
        return lambda device: explain(getattr(flashmix, name), *(make(device) for make in makers))

    return {name: ask(name, makers) for name, makers in inputs.items()}


def choices(device: torch.device | str) -> list[Explanation]:
    """What `explain` says of each public op on `device`, for a small float32 call.

    Example:
        >>> {choice.op: choice.choice for choice in choices("cpu")}["delta_rule"]
        'portable'
    """
    return [ask(torch.device(device)) for ask in _calls().values()]


def hardware() -> Iterator[str]:
    """Line by line: versions, processor, each GPU with its shared memory per block, or why there is none."""
    yield f"flashmix {flashmix.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    triton = _arch.triton_version()
    yield f"triton {triton}" if triton else "triton is not installed: no triton implementation can run"
    yield f"CPU: {_arch.cpu_name()}, {torch.get_num_threads()} threads for torch"
    gpus = _arch.gpus()
    for gpu in gpus:
        major, minor = gpu.capability
        yield (
            f"GPU {gpu.index}: {gpu.name}, compute capability {major}.{minor}, "
            f"{gpu.shared_memory // 1024} KiB shared memory per block, {gpu.multiprocessors} multiprocessors"
        )
    if not gpus:
        built = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch with CUDA {torch.version.cuda} sees no device"
        )
        yield f"GPU: none ({built})"


def report() -> str:
    """The text that `flashmix doctor` prints."""
    lines = list(hardware())
    for device in ["cpu", *(f"cuda:{gpu.index}" for gpu in _arch.gpus())]:
        lines += ["", f"on {device}, a small float32 call of each op takes"]
        lines += [f"  {line}" for choice in choices(device) for line in str(choice).splitlines()]
    return "\n".join(lines)
