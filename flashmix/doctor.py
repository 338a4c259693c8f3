"""`flashmix doctor`: what hardware and software is here, and which implementation each op would take on it, and why."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

import flashmix
from flashmix.capabilities import public_ops, tiny_call
from flashmix.gpu import arch
from flashmix.mechanisms.registry import functions
from flashmix.op.choose import AVOID, AVOIDED, Explanation, explain


def choices(device: torch.device | str) -> list[Explanation]:
    """What `explain` says of each public op that is no mechanism, for a float32 call of 16 tokens and heads of 32 channels.

    Example:
        >>> {choice.op: choice.choice for choice in choices("cpu")}["swiglu"]
        'portable'
    """
    sizes = {"K": 32, "R": 16, "D": 64, "M": 100, "C": 192}
    ops = {name: op for name, op in public_ops().items() if name not in functions()}
    return [explain(op, **tiny_call(name, device=device, tokens=16, sizes=sizes)) for name, op in ops.items()]


def hardware() -> Iterator[str]:
    """Line by line: versions, processor, each GPU with its shared memory per block, or why there is none."""
    yield f"flashmix {flashmix.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    triton = arch.triton_version()
    yield f"triton {triton}" if triton else "triton is not installed: no triton implementation can run"
    yield f"CPU: {arch.cpu_name()}, {torch.get_num_threads()} threads for torch"
    gpus = arch.gpus()
    for gpu in gpus:
        major, minor = gpu.capability
        yield (
            f"GPU {gpu.index}: {gpu.name}, compute capability {major}.{minor}, "
            f"{gpu.shared_memory // 1024} KiB shared memory per block, {gpu.multiprocessors} multiprocessors"
        )
    import torch.distributed as dist

    known = {"gloo": "is_gloo_available", "nccl": "is_nccl_available"} if dist.is_available() else {}
    backends = [name for name, has in known.items() if getattr(dist, has)()]
    yield f"several processes: {' and '.join(backends) or 'no backend of torch.distributed'}"
    if AVOIDED:
        yield f"{AVOID} leaves out: {', '.join(sorted(AVOIDED))}"
    if not gpus:
        built = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch with CUDA {torch.version.cuda} sees no device"
        )
        yield f"GPU: none ({built})"


def describe(choice: Explanation) -> str:
    """One line: the op, what it takes, and what is known of the other implementations."""
    others = {name: reason for name, reason in choice.reasons.items() if name != choice.choice}
    notes = "; ".join(f"{name}: {reason or 'could run this too'}" for name, reason in others.items())
    return f"  {choice.op:22}{choice.choice or 'nothing':10}{f'({notes})' if notes else ''}".rstrip()


def report() -> str:
    """The text that `flashmix doctor` prints."""
    lines = list(hardware())
    for device in ["cpu", *(f"cuda:{gpu.index}" for gpu in arch.gpus())]:
        lines += ["", f"what a small float32 call of each op takes on {device}:", *map(describe, choices(device))]
    return "\n".join(lines)
