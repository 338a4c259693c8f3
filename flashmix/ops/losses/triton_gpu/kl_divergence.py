"""The divergence of two heads' distributions on a GPU; for a sum or mean the gradients are ready with the loss.

    z_q, z_p = scale (logits + bias) of student and teacher,    q = softmax(z_q), p = softmax(z_p)
    divergence = sum p (ln p - ln q),    d z_q = grad (q - p)
    REVERSE:     sum q (ln q - ln p),    d z_q = grad q (z_q - z_p - mean),    mean = sum q (z_q - z_p)

`level` is the largest score of a row and `whole = sum e^(z - level)`, so `ln q = z_q - level - ln whole`.
Tiles: `i` lines of `l` lanes of a row's columns (forward), `c` columns (backward).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import divided
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import KLDivergenceCall
from flashmix.ops.losses.head import row_weights
from flashmix.ops.losses.triton_gpu.head import (
    HeadSums,
    TritonHead,
    empty_sums,
    head_of,
    in_their_dtypes,
    rows_of,
    scaled_sums,
    statistics_of,
)
from flashmix.ops.losses.triton_gpu.rows import (
    RowGradient,
    columns_of,
    exp_to_one,
    lanes_of,
    logit_rows,
    over_lanes,
    running_max,
    scores,
)


class Divergences(NamedTuple):
    """Of each row, float32 `[N]`: the divergence, and what its gradient needs (REVERSE: `mean` in place of the teacher's level)."""

    divergence: Any
    level: Any
    whole: Any
    teacher_level: Any
    teacher_whole: Any

    def rows(self, part: slice) -> Divergences:
        return Divergences(*[t[part] for t in self])


class DivergenceTiles(NamedTuple):
    REVERSE: bool
    LINES: int  # i
    LANES: int  # l


class DivergenceColumns(NamedTuple):
    REVERSE: bool
    COLUMNS: int  # c


@triton.jit
def kl_forward_kernel(student, teacher, out, S: tl.constexpr):
    """The divergence of a row, and what its gradient needs."""
    PRECISE: tl.constexpr = student.z.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    q_row = student.z + row * student.stride
    p_row = teacher.z + row * teacher.stride
    lane = tl.arange(0, S.LINES)[:, None] * S.LANES + tl.arange(0, S.LANES)[None, :]  # [i, l]
    q_max, p_max = tl.full([S.LANES], float("-inf"), tl.float32), tl.full([S.LANES], float("-inf"), tl.float32)
    q_sum, p_sum = tl.full([S.LANES], 0.0, tl.float32), tl.full([S.LANES], 0.0, tl.float32)
    # Of each lane: sums of e^(z - max), and terms = sum e^(z_p - p_max) (z_p - z_q), REVERSE sum e^(z_q - q_max) (z_q - z_p).
    terms = tl.full([S.LANES], 0.0, tl.float32)
    for start in range(0, student.vocabulary, S.LINES * S.LANES):
        column = start + lane
        mask = column < student.vocabulary
        zq, _ = scores(q_row, student, column, mask)  # [i, l]
        zp, _ = scores(p_row, teacher, column, mask)  # [i, l]
        zq, zp = tl.where(mask, zq, float("-inf")), tl.where(mask, zp, float("-inf"))
        q_new, q_level = running_max(q_max, zq)
        p_new, p_level = running_max(p_max, zp)
        q, p = exp_to_one(zq - q_level[None, :], PRECISE), exp_to_one(zp - p_level[None, :], PRECISE)
        q_old, p_old = exp_to_one(q_max - q_level, PRECISE), exp_to_one(p_max - p_level, PRECISE)
        q_sum, p_sum = q_sum * q_old + tl.sum(q, axis=0), p_sum * p_old + tl.sum(p, axis=0)
        if S.REVERSE:
            terms = terms * q_old + tl.sum(tl.where(q == 0, 0.0, q * (zq - zp)), axis=0)
        else:
            terms = terms * p_old + tl.sum(tl.where(p == 0, 0.0, p * (zp - zq)), axis=0)
        q_max, p_max = q_new, p_new
    q_level, q_whole = over_lanes(q_max, q_sum, PRECISE)
    p_level, p_whole = over_lanes(p_max, p_sum, PRECISE)
    difference = (q_level - p_level) + tl.log(q_whole / p_whole)  # lse_q - lse_p
    if S.REVERSE:
        mean = tl.sum(terms * exp_to_one(q_max - q_level, PRECISE), axis=0) / q_whole
        value, p_level = mean - difference, mean
    else:
        value = tl.sum(terms * exp_to_one(p_max - p_level, PRECISE), axis=0) / p_whole + difference
    tl.store(out.divergence + row, value)
    tl.store(out.level + row, q_level)
    tl.store(out.whole + row, q_whole)
    tl.store(out.teacher_level + row, p_level)
    tl.store(out.teacher_whole + row, p_whole)


@triton.jit
def kl_backward_kernel(student, teacher, found, out, blocks, S: tl.constexpr):
    """A block of the gradient of a student's row for the gradient `out.grad` of its divergence; `out.dz` may be the logits."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * S.COLUMNS + tl.arange(0, S.COLUMNS)
    mask = column < student.vocabulary
    zq, _ = scores(student.z + row * student.stride, student, column, mask)  # [c]
    zp, _ = scores(teacher.z + row * teacher.stride, teacher, column, mask)  # [c]
    grad = tl.load(out.grad + row).to(tl.float32)
    PRECISE: tl.constexpr = student.z.dtype.element_ty == tl.float32
    q = divided(exp_to_one(zq - tl.load(found.level + row), PRECISE), tl.load(found.whole + row), PRECISE)
    level = tl.load(found.teacher_level + row)
    p = zp - tl.where(S.REVERSE, zp, level)  # REVERSE: p is not needed
    dz = q - divided(exp_to_one(p, PRECISE), tl.load(found.teacher_whole + row), PRECISE)
    if S.REVERSE:
        dz = tl.where(q == 0, 0.0, q * ((zq - zp) - level))
    dz = tl.where(grad == 0, 0.0, dz * (grad * student.scale))
    tl.store(out.dz + row * out.stride + column, dz.to(out.dz.dtype.element_ty), mask=mask)


def keeps(call: KLDivergenceCall) -> Outputs:
    """The gradients of the needed tensors for the reduced loss."""
    if call.reduction == "none":
        return ()
    return tuple(empty_sums(call, call.needs, rows_of(call, heads=2)).values())


def forward(call: KLDivergenceCall, save: bool) -> tuple[Outputs, Outputs]:
    if call.reduction == "none":
        return (run(call, None, {}).mul_(1 / call.scale**2),), ()
    rows = call.hidden.shape[:1]
    weights = row_weights(rows, call.device, call.mask, call.reduction) / call.scale**2
    sums = empty_sums(call, call.needs, rows_of(call, heads=2)) if save else {}
    divergence = run(call, weights, sums)
    return (weighted(divergence, weights).sum(0),), tuple(sums.values())


def backward(
    call: KLDivergenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    if call.reduction != "none":
        return scaled_sums(call, kept, grads, wanted)
    (grad,) = grads
    assert grad is not None
    sums = empty_sums(call, wanted, rows_of(call, heads=2))
    run(call, grad.to(torch.float32) / call.scale**2, sums)
    return in_their_dtypes(call, sums)


def run(call: KLDivergenceCall, grad: Tensor | None, sums: Mapping[str, Tensor]) -> Tensor:
    """The divergence of each row, without the factor T^2; fills `sums` for the gradient `grad [N]` of the divergences."""
    student = head_of(call, heads=2)
    teacher = TritonHead(call.teacher_hidden, call.teacher_weight, call.teacher_bias, student.rows)
    gradients = HeadSums(student, sums)
    out = Divergences(*statistics_of(call.hidden, 5))
    lines, lanes, warps = lanes_of(call.weight.shape[0])
    size, column_warps = columns_of(call.weight.shape[0])
    blocks = cdiv(call.weight.shape[0], size)
    forward_kernel = bound(kl_forward_kernel, DivergenceTiles(call.reverse, lines, lanes), num_warps=warps)
    backward_kernel = bound(kl_backward_kernel, DivergenceColumns(call.reverse, size), num_warps=column_warps)
    for (part, z), (_, z_teacher) in zip(student.chunks(), teacher.chunks(), strict=True):
        q, p = logit_rows(z, student.bias, call.scale), logit_rows(z_teacher, teacher.bias, call.scale)
        rows = out.rows(part)
        forward_kernel(z.shape[0], q, p, rows)
        if grad is not None and sums:
            backward_kernel(z.shape[0] * blocks, q, p, rows, RowGradient(grad[part], z, z.stride(0)), blocks)
            gradients.add(part, z)
    return out.divergence


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """`values * weights`; rows of weight 0 may hold anything."""
    return torch.where(weights == 0, 0.0, values * weights)
