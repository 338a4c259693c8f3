"""The rotary kernel as operators: one whose backward is itself turned the other way, and one that overwrites its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.operator import bump_versions, only_data
from flashmix.op.rowwise import Operator, Options, Tensors

TENSORS = "Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens"
OPTIONS = "SymInt start, int[] axes, bool interleaved, bool inverse"


def _turned_back(grads: Tensors, inputs: Tensors, options: Options) -> Tensors:
    start, axes, interleaved, inverse = options
    first, *second = (grad for grad in grads if grad is not None)
    options = (start, axes, interleaved, not inverse)
    found = iter(ROTARY(first, second[0] if second else None, *inputs[2:], options=options))
    d_q, d_k = (None if grad is None else next(found) for grad in (*grads, None)[:2])
    return d_q, d_k, None, None, None, None


ROTARY = Operator(
    "rotary", "flashmix.ops.rotary.triton_gpu.Rotary", TENSORS, OPTIONS, adjoint=_turned_back, forgets=("q", "k")
)


def _overwrite(q: Tensor, *rest: Any) -> None:
    from flashmix.ops.rotary import triton_gpu as rotary_triton

    with gpu.on(q.device):
        rotary_triton.rotate_in_place((q, *rest[:5]), rest[5:])


IN_PLACE = torch.library.custom_op(
    "flashmix::rotary_in_place",
    _overwrite,
    mutates_args=("q", "k"),
    schema=f"({TENSORS.replace('Tensor q', 'Tensor(a!) q').replace('Tensor? k', 'Tensor(b!)? k')}, {OPTIONS}) -> ()",
)


@IN_PLACE.register_fake
def _(*arguments: Any) -> None:
    return None


def rotate_in_place(inputs: Tensors, options: Options) -> None:
    if torch.compiler.is_compiling() or not only_data(inputs):
        torch.ops.flashmix.rotary_in_place(*inputs, *options)
    else:  # the operator's first call imports all of torch's compiler
        q, *rest = inputs
        assert q is not None
        _overwrite(q, *rest, *options)
        bump_versions(*inputs[:2])
