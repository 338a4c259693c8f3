"""Rotations by angles that add up, in plain PyTorch, which autograd differentiates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashmix.op.call import Outputs, has_tangent
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.ops.cumulative_rotary.call import CumulativeRotaryCall
from flashmix.ops.scan.op import scan
from flashmix.ops.token_shift import shifted
from flashmix.parallel.joined import of_sequences, sums_before

TURN = 2 * math.pi


def formula(call: CumulativeRotaryCall) -> Outputs:
    packing, wide, gate, dt = call.packing, call.state_dtype, call.trapezoid_gate, call.dt
    theta, last_theta = _angles(call.angles, dt, call.theta, packing, wide)
    cos, sin = theta.cos().unsqueeze(-1), theta.sin().unsqueeze(-1)
    q, k = (_rotated(repeat_heads(t, call.heads, -2), cos, sin) for t in (call.C, call.B))
    own = gate.to(wide) * dt.to(wide)
    k_before, last_k = shifted(k, call.last_k, packing)
    own_before, last_own = shifted(own, None, packing)
    late = call.log_decay.to(wide).exp() * (own_before + (1 - gate.to(wide)) * dt.to(wide))
    late = late if k.dim() == 4 else late.unsqueeze(2)
    return q, (late.unsqueeze(-1) * k_before).to(call.dtype), last_theta, last_k, last_own


def _angles(
    angles: Tensor, dt: Tensor, start: Tensor | None, packing: Packing | None, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The angle of each token `[B, T, H, M]` and after the last one, within a turn.

    Whole numbers of 2^-62 turns are summed: that is exact, whatever the length and whatever comes before a sequence. The gradient is
    that of a scan.
    """
    turns = angles.detach().double() * (dt.detach().double() / TURN).unsqueeze(-1)
    theta = _fixed(turns).movedim(1, -1).contiguous().cumsum(-1).movedim(-1, 1)
    none = theta.new_zeros(theta.shape[0], 1, *theta.shape[2:])
    if packing is None:
        last, row = (theta if theta.shape[1] else none)[:, -1], None
        lengths = torch.full_like(last[:, :1, :1], angles.shape[1])
    else:
        row, lengths = packing.sequence, packing.lengths[:, None, None]
        bounds = torch.cat([none, theta], 1)[0][packing.cu_seqlens.long()]
        theta, last = theta - bounds[row], bounds.diff(dim=0)
    own = None if start is None else _fixed(start.detach().double() / TURN)
    if packing is not None and packing.sharded:
        own = torch.zeros_like(last) if own is None else of_sequences(packing, own)
        own = own + sums_before(packing, last)
    if own is not None:
        theta, last = theta + (own.unsqueeze(1) if row is None else own[row]), last + own
    within = (theta << 2).to(wide) * (TURN / 2.0**64)  # of a turn, from -1/2 to 1/2: two bits more would be whole turns
    end = ((last & (2**62 - 1)).double() * (TURN / 2**62)).to(wide)
    end = torch.where(lengths > 0, end, torch.zeros_like(end) if start is None else start.detach())
    inputs = [t for t in (angles, dt, start) if t is not None]
    if has_tangent(inputs) or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        steps = angles.to(wide) * dt.to(wide).unsqueeze(-1)
        constant = torch.zeros(angles.shape[2], device=angles.device)
        flow, flow_end = scan(steps, constant, initial_state=start, return_state=True, cu_seqlens=packing)
        assert flow_end is not None
        within, end = within + (flow - flow.detach()), end + (flow_end - flow_end.detach())
    return within, end


def _fixed(turns: Tensor) -> Tensor:
    """Turns as whole numbers of 2^-62 turns, less than one of them; sums beyond 2^63 wrap by four turns."""
    return (turns.frac() * 2.0**62).to(torch.int64)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first pairs of neighbouring channels of `x` `[B, T, H, K]` or `[B, T, R, H, K]` rotated, `cos`, `sin` `[B, T, H, M, 1]`."""
    cos, sin = (cos, sin) if x.dim() == 4 else (cos.unsqueeze(2), sin.unsqueeze(2))
    M = cos.shape[-2]
    pairs = x[..., : 2 * M].unflatten(-1, (M, 2))
    across = torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
    turned = torch.addcmul(pairs * cos, across, sin).flatten(-2).to(x.dtype)
    return torch.cat([turned, x[..., 2 * M :]], -1)
