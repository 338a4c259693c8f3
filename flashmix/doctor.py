"""`flashmix doctor`: what hardware and software is here, and which implementation each op would take on it, and why."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import flashmix
from flashmix.gpu import arch
from flashmix.op.choose import Explanation, explain


def _small_calls(device: torch.device | str) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each public op and the arguments of a small float32 call: batch 1, 16 tokens, 2 heads of 32 channels."""
    zeros = partial(torch.zeros, device=device)
    x, gate, tokens, table = zeros(1, 16, 2, 32), zeros(1, 16, 2), zeros(1, 16, 64), zeros(16, 16)
    head, target = zeros(100, 64), zeros(1, 16, dtype=torch.int64)
    state = zeros(1, 2, 32, 32)
    cache = flashmix.KVCache.contiguous(1, 16, heads=2, dim_qk=32, device=device)
    return [
        (flashmix.linear_attention, (x, x, x, gate)),
        (flashmix.delta_rule, (x, x, x, gate, gate)),
        (flashmix.dplr, (x, x, x, x, x, x)),
        (flashmix.delta_net_step, (zeros(1, 192), zeros(1, 2), state, zeros(1, 3, 192), zeros(192, 4), 2)),
        (flashmix.linear_attention_step, (x, x, x, state, gate)),
        (flashmix.delta_rule_step, (x, x, x, gate, state, gate)),
        (flashmix.dplr_step, (x, x, x, x, x, state, x)),
        (flashmix.softmax_attention, (x, x, x)),
        (flashmix.attention_with_cache, (x, cache, x, x)),
        (flashmix.rotary, (x, table, table)),
        (flashmix.rotary_qk, (x, x, table, table)),
        (flashmix.short_conv, (tokens, zeros(64, 4))),
        (flashmix.short_conv_qkv, (*[tokens] * 3, *[zeros(64, 4)] * 3)),
        (flashmix.token_shift, (tokens,)),
        (flashmix.rms_norm, (tokens,)),
        (flashmix.layer_norm, (tokens,)),
        (flashmix.group_norm, (tokens, 2)),
        (flashmix.l2_norm, (tokens,)),
        (flashmix.gated, (tokens, tokens)),
        (flashmix.swiglu, (tokens, tokens)),
        (flashmix.softplus_decay, (gate, zeros(2), zeros(2))),
        (flashmix.bounded_decay, (x, zeros(2), zeros(2, 32))),
        (flashmix.write_strength, (gate,)),
        (flashmix.cross_entropy, (zeros(1, 16, 100), target)),
        (flashmix.linear_cross_entropy, (tokens, head, target)),
        (flashmix.linear_kl_divergence, (tokens, head, tokens, head)),
        (flashmix.linear_grpo, (tokens, head, target, zeros(1))),
    ]


def choices(device: torch.device | str) -> list[Explanation]:
    """What `explain` says of each public op on `device`, for a small float32 call.

    Example:
        >>> {choice.op: choice.choice for choice in choices("cpu")}["swiglu"]
        'portable'
    """
    return [explain(op, *arguments) for op, arguments in _small_calls(device)]


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
