"""The rotation by summed angles on a GPU: Triton kernels, three each way, of which one is over sums of blocks alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.gpu.rows import contiguous, strided
from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing
from flashmix.ops.cumulative_rotary.call import CumulativeRotaryCall
from flashmix.ops.cumulative_rotary.triton_gpu.backward import (
    RotaryGateGradients,
    RotaryGrads,
    RotaryKeyGradients,
    RotaryParts,
    gates_backward_kernel,
    rotary_backward_kernel,
    suffixes_backward_kernel,
)
from flashmix.ops.cumulative_rotary.triton_gpu.forward import (
    RotaryInputs,
    RotaryOutputs,
    offsets_forward_kernel,
    rotary_forward_kernel,
    turns_forward_kernel,
)
from flashmix.ops.cumulative_rotary.triton_gpu.tiles import Gates, Places, RotaryNumbers, RotarySpec

__all__ = ["backward", "forward", "keeps"]

ELEMENTS = 2048  # of keys in a block of tokens, 32 tokens at most
STAGES = 3  # heads whose gradients the backward has on the way or in use
SUMS = 2048  # numbers that a sum over blocks takes at a time


class RotaryPlan(NamedTuple):
    """What all kernels of a call share."""

    spec: RotarySpec
    places: Places
    n: RotaryNumbers
    blocks: int
    sequences: int

    def kernel(self, kernel: object, warps: int = 4) -> Kernel:
        # Products that fuse with a sum in one kernel and not in another would give two angles of one token.
        return bound(kernel, self.spec, num_warps=warps, enable_fp_fusion=False)


def forward(call: CumulativeRotaryCall, save: bool) -> tuple[Outputs, Outputs]:
    q, late_k, theta, last_k, last_own = outputs = call.results()
    kept = keeps(call)
    if call.count == 0:
        return outputs, kept if save else ()
    plan, inputs = _plan(call), _inputs(call, kept[0])
    spec, n, places = plan.spec, plan.n, plan.places
    if spec.PAIRS:
        run = plan.kernel(turns_forward_kernel)
        run(plan.blocks * spec.HEADS, inputs.angles, inputs.gates.dt, inputs.offsets, places, n)
        run = plan.kernel(offsets_forward_kernel)
        run(plan.sequences * spec.HEADS, inputs.offsets, contiguous(call.theta), theta, places, n)
    run = plan.kernel(rotary_forward_kernel)
    run(plan.blocks * spec.HEADS * spec.RANKS, inputs, RotaryOutputs(q, late_k, last_k, last_own), places, n)
    return outputs, kept if save else ()


def keeps(call: CumulativeRotaryCall) -> Outputs:
    """The angles before blocks."""
    size = (_blocks(call), call.heads, call.angles.shape[3])
    return (torch.empty(size=size, dtype=torch.int64, device=call.device),)


def backward(
    call: CumulativeRotaryCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]
) -> Gradients:
    found = {}
    for name in wanted:
        t = getattr(call, name)
        found[name] = torch.empty(size=t.shape, dtype=t.dtype, device=t.device)
    if call.count == 0:
        return found
    plan, inputs = _plan(call), _inputs(call, kept[0])
    spec, n, places = plan.spec, plan.n, plan.places
    flows, parts, suffixes = _grads(call, grads), _parts(plan, call), torch.empty_like(kept[0], dtype=torch.float32)
    run = plan.kernel(rotary_backward_kernel, warps=8 if spec.BLOCK_WIDTH > 32 else 4)
    keys = RotaryKeyGradients(found.get("B"), found.get("C"), found.get("last_k"))
    run(plan.blocks * spec.GROUPS * spec.RANKS, inputs, flows, parts, keys, places, n)
    if spec.PAIRS:
        run = plan.kernel(suffixes_backward_kernel)
        run(plan.sequences * spec.HEADS, parts.totals, flows.theta, suffixes, found.get("theta"), places, n)
    gates = RotaryGateGradients(*(found.get(name) for name in ("angles", "dt", "log_decay", "trapezoid_gate")))
    plan.kernel(gates_backward_kernel)(plan.blocks * spec.HEADS, inputs, flows, parts, suffixes, gates, places, n)
    return found


def _inputs(call: CumulativeRotaryCall, offsets: Tensor) -> RotaryInputs:
    gates = Gates(call.dt.contiguous(), call.log_decay.contiguous(), call.trapezoid_gate.contiguous())
    keys = (t if call.ranks else t.unsqueeze(2) for t in (call.B, call.C))
    B, C, angles = (strided(t) for t in (*keys, call.angles))
    return RotaryInputs(B, C, angles, gates, offsets, contiguous(call.last_k))


def _grads(call: CumulativeRotaryCall, grads: Sequence[Tensor | None]) -> RotaryGrads:
    """The gradients of all outputs, contiguous, zeros for those of queries and late keys that are None."""
    flows = [contiguous(d) for d in grads]
    for i in range(2):
        if flows[i] is None:
            size = (*call.B.shape[:2], *call.ranks, call.heads, call.B.shape[-1])
            flows[i] = torch.zeros(size, dtype=call.dtype, device=call.device)
    return RotaryGrads(*flows)


def _parts(plan: RotaryPlan, call: CumulativeRotaryCall) -> RotaryParts:
    S, n = plan.spec, plan.n
    sizes = (n.rows, S.HEADS, S.PAIRS), (plan.blocks, S.HEADS, S.PAIRS), (n.rows, S.HEADS)
    return RotaryParts(*(torch.empty((S.RANKS, *size), dtype=torch.float32, device=call.device) for size in sizes))


def _tokens(call: CumulativeRotaryCall) -> int:
    """Tokens of a block: by the channels alone, so that gradients are summed in one order whatever else is in the batch."""
    return max(1, min(32, ELEMENTS // power_of_two(call.B.shape[-1])))


def _blocks(call: CumulativeRotaryCall) -> int:
    """Blocks of tokens, one at least for each sequence; of packed ones at most."""
    (batch, tokens), block = call.B.shape[:2], _tokens(call)
    if call.packing is not None:
        return tokens // block + call.packing.count
    return batch * max(cdiv(tokens, block), 1)


def _plan(call: CumulativeRotaryCall) -> RotaryPlan:
    (batch, tokens), K, M = call.B.shape[:2], call.B.shape[-1], call.angles.shape[3]
    ranks, block, blocks, packing = call.ranks[0] if call.ranks else 1, _tokens(call), _blocks(call), call.packing
    pairs = power_of_two(M) if M else 0
    spec = RotarySpec(
        call.heads,
        ranks,
        call.B.shape[-2],
        K,
        M,
        TOKENS=block,
        BLOCK_PAIRS=pairs,
        BLOCK_REST=power_of_two(K - 2 * M) if K > 2 * M else 0,
        BLOCK_WIDTH=power_of_two(K),
        LINES=SUMS // max(pairs, 1),
        STAGES=STAGES,
    )
    places = Places(None, None)
    if packing is not None:
        places = packing.table((_places, block), lambda: _places(packing, block))
    n = RotaryNumbers(tokens, max(cdiv(tokens, block), 1), blocks, batch * tokens)
    return RotaryPlan(spec, places, n, blocks, call.count)


def _places(packing: Packing, block: int) -> Places:
    """The tables of a packed batch; nothing is read back, and whatever the boundaries are, tokens and blocks lie within the row."""
    bounds = packing.cu_seqlens.to(torch.int64).clamp(0, packing.total)
    begin, most = bounds[:-1], packing.total // block + packing.count
    end = torch.maximum(bounds[1:], begin)
    ends = ((end - begin + (block - 1)) // block).clamp(min=1).cumsum(0).clamp(max=most)
    firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
    at = torch.arange(most, device=bounds.device)
    sequence = torch.searchsorted(ends, at, right=True)
    idle = sequence >= packing.count
    sequence = sequence.clamp(max=packing.count - 1)
    first = (begin[sequence] + (at - firsts[sequence]) * block).masked_fill(idle, 0)
    spans = sequence, first, begin[sequence].masked_fill(idle, -1), end[sequence].masked_fill(idle, 0)
    return Places(torch.stack(spans, 1), torch.stack([firsts, ends - firsts, end - begin], 1))
