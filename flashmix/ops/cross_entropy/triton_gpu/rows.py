"""Kernels of losses over rows of logits. A row is one program's forward; its gradient may overwrite it.

    z = scale (logits + bias)                       (softcapped: c tanh(z / c))
    lse = ln sum_v e^z_v
    d logits = scale slope g (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / total),    p = e^(z - level) / whole

From lse alone p would have its rounding, so the largest z of a row, `level`, and `whole = sum e^(z - level)` are kept. Running
maxima and sums are a lane's own until the row ends. A target outside the row's vocabulary is none of it: so does a shard of
a vocabulary see the others' targets.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import divided, exp_of_minus


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """`e^x` of `x <= 0`."""
    return exp_of_minus(-x, PRECISE)


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    """tanh and its slope, to float32's precision near 0 too, where (1 - t) / (1 + t) has lost it."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    t = _exp(-2 * tl.abs(x), PRECISE)
    large = divided(1 - t, 1 + t, PRECISE)
    y = tl.where(tl.abs(x) < 0.3, small, tl.where(x < 0, -large, large))
    return y, tl.where(tl.abs(y) < 0.7, 1 - y * y, divided(4 * t, (1 + t) * (1 + t), PRECISE))


@triton.jit
def _scores(logits, bias, column, there, scale, softcap, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The scores z at these columns of a row, float32, and the slope of the cap; anything where there are none."""
    z = tl.load(logits + column, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    z *= scale
    slope = 1.0
    if SOFTCAP:
        PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
        share, slope = _tanh(divided(z, softcap, PRECISE), PRECISE)
        z = softcap * share
    return z, slope


@triton.jit
def _grown(largest, tile):
    """The running maximum with a tile's, and the same where it can be subtracted (0 for minus infinity)."""
    new = tl.maximum(largest, tl.max(tile, axis=0))
    return new, tl.where(new == float("-inf"), 0.0, new)


@triton.jit
def _whole(largest, total, PRECISE: tl.constexpr):
    """Maximum, and sum relative to it, over the lanes."""
    most = tl.max(largest, axis=0)
    level = tl.where(most == float("-inf"), 0.0, most)
    return level, tl.sum(total * _exp(largest - level, PRECISE), axis=0)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_forward_kernel(
    logits, bias, target, loss, level_of, whole_of, expected, stride, vocabulary, total, ignore_index, smoothing, z_loss, softcap, scale,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, LINES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Level, whole, `expected = (1 - e) z_target + e sum(z) / total` and, if `loss` is there, the loss of a row."""
    PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    scores = tl.zeros([LANES], tl.float32)
    for start in range(0, vocabulary, LINES * LANES):
        column = start + lane
        there = column < vocabulary
        z, _ = _scores(logits, bias, column, there, scale, softcap, HAS_BIAS, SOFTCAP)  # [LINES, LANES]
        if SMOOTH:
            scores += tl.sum(tl.where(there, z, 0.0), axis=0)
        z = tl.where(there, z, float("-inf"))
        new, level = _grown(largest, z)
        sums = sums * _exp(largest - level, PRECISE) + tl.sum(_exp(z - level[None, :], PRECISE), axis=0)
        largest = new
    level, whole = _whole(largest, sums, PRECISE)
    wanted = tl.load(target + row)
    here = (wanted >= 0) & (wanted < vocabulary)
    chosen, _ = _scores(logits, bias, wanted, here, scale, softcap, HAS_BIAS, SOFTCAP)
    share = tl.where(here, (1 - smoothing) * chosen, 0.0)
    less = (1 - smoothing) * (level - chosen)
    if SMOOTH:
        average = tl.sum(scores, axis=0) / total
        share += smoothing * average
        less += smoothing * (level - average)
    tl.store(level_of + row, level)
    tl.store(whole_of + row, whole)
    if expected is not None:
        tl.store(expected + row, share)
    if loss is not None:
        lse = level + tl.log(whole)
        value = less + tl.log(whole) + z_loss * lse * lse
        tl.store(loss + row, tl.where(wanted == ignore_index, 0.0, value))


@triton.jit
def cross_entropy_backward_kernel(
    logits, bias, gradient, target, level_of, whole_of, grad, stride, out_stride, vocabulary, total, blocks,
    smoothing, z_loss, softcap, scale,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of a row for the gradient `grad` of its loss; `gradient` may be `logits`."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = column < vocabulary
    flow, wanted = tl.load(grad + row).to(tl.float32), tl.load(target + row)
    level, whole = tl.load(level_of + row), tl.load(whole_of + row)
    z, slope = _scores(logits + row * stride, bias, column, there, scale, softcap, HAS_BIAS, SOFTCAP)  # [BLOCK]
    PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
    p = _exp(z - level, PRECISE)
    p = divided(p, whole, PRECISE)
    dz = (
        p * (1 + 2 * z_loss * (level + tl.log(whole)))
        - tl.where(column == wanted, 1 - smoothing, 0.0)
        - smoothing / total
    )
    if SOFTCAP:
        dz *= slope
    dz = tl.where(flow == 0, 0.0, dz * (flow * scale))
    tl.store(gradient + row * out_stride + column, dz.to(gradient.dtype.element_ty), mask=there)


@triton.jit
def kl_forward_kernel(
    logits, bias, teacher, teacher_bias, divergence, level_of, whole_of, teacher_level, teacher_whole,
    stride, teacher_stride, vocabulary, scale,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, REVERSE: tl.constexpr,
    LINES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`sum p (ln p - ln q)` of a row for a student q and a teacher p, REVERSE `sum q (ln q - ln p)`, and what the gradient needs.

    That is levels and wholes; REVERSE it is `sum q (z_q - z_p)` in place of the teacher's level.
    """
    PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    teacher += row * teacher_stride
    lane = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    q_max, p_max = tl.full([LANES], float("-inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
    q_sum, p_sum = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    terms = tl.zeros([LANES], tl.float32)  # of the one whose mean it is, relative to that one's maximum
    for start in range(0, vocabulary, LINES * LANES):
        column = start + lane
        there = column < vocabulary
        zq, _ = _scores(logits, bias, column, there, scale, 1.0, HAS_BIAS, False)  # [LINES, LANES]
        zp, _ = _scores(teacher, teacher_bias, column, there, scale, 1.0, HAS_TEACHER_BIAS, False)  # [LINES, LANES]
        zq, zp = tl.where(there, zq, float("-inf")), tl.where(there, zp, float("-inf"))
        q_new, q_level = _grown(q_max, zq)
        p_new, p_level = _grown(p_max, zp)
        q, p = _exp(zq - q_level[None, :], PRECISE), _exp(zp - p_level[None, :], PRECISE)
        q_old, p_old = _exp(q_max - q_level, PRECISE), _exp(p_max - p_level, PRECISE)
        q_sum, p_sum = q_sum * q_old + tl.sum(q, axis=0), p_sum * p_old + tl.sum(p, axis=0)
        if REVERSE:
            terms = terms * q_old + tl.sum(tl.where(q == 0, 0.0, q * (zq - zp)), axis=0)
        else:
            terms = terms * p_old + tl.sum(tl.where(p == 0, 0.0, p * (zp - zq)), axis=0)
        q_max, p_max = q_new, p_new
    q_level, q_whole = _whole(q_max, q_sum, PRECISE)
    p_level, p_whole = _whole(p_max, p_sum, PRECISE)
    difference = (q_level - p_level) + tl.log(q_whole / p_whole)  # of the two lse
    if REVERSE:
        mean = tl.sum(terms * _exp(q_max - q_level, PRECISE), axis=0) / q_whole
        value, p_level = mean - difference, mean
    else:
        value = tl.sum(terms * _exp(p_max - p_level, PRECISE), axis=0) / p_whole + difference
    tl.store(divergence + row, value)
    tl.store(level_of + row, q_level)
    tl.store(whole_of + row, q_whole)
    tl.store(teacher_level + row, p_level)
    tl.store(teacher_whole + row, p_whole)


@triton.jit
def kl_backward_kernel(
    logits, bias, teacher, teacher_bias, gradient, level_of, whole_of, teacher_level, teacher_whole, grad,
    stride, teacher_stride, out_stride, vocabulary, blocks, scale,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of a student's row, `scale grad (q - p)`, REVERSE `scale grad q (z_q - z_p - sum q (z_q - z_p))`."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = column < vocabulary
    zq, _ = _scores(logits + row * stride, bias, column, there, scale, 1.0, HAS_BIAS, False)  # [BLOCK]
    zp, _ = _scores(teacher + row * teacher_stride, teacher_bias, column, there, scale, 1.0, HAS_TEACHER_BIAS, False)
    flow = tl.load(grad + row).to(tl.float32)
    PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
    q = divided(_exp(zq - tl.load(level_of + row), PRECISE), tl.load(whole_of + row), PRECISE)
    level = tl.load(teacher_level + row)
    p = zp - tl.where(REVERSE, zp, level)  # REVERSE: p is not needed
    dz = q - divided(_exp(p, PRECISE), tl.load(teacher_whole + row), PRECISE)
    if REVERSE:
        dz = tl.where(q == 0, 0.0, q * ((zq - zp) - level))
    dz = tl.where(flow == 0, 0.0, dz * (flow * scale))
    tl.store(gradient + row * out_stride + column, dz.to(gradient.dtype.element_ty), mask=there)
