"""MesaNet's solution on Hopper: one pass for the states before each chunk, then all steps of a chunk in one program.

The backward makes the states again, solves for the adjoint, and has the recurrence make the gradients of the two linear maps `R x` and
`S^T x` of keys, values, strengths and decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.op.choose import chosen
from flashmix.op.heads import repeat_heads
from flashmix.ops.mesa.call import MesaCall
from flashmix.ops.mesa.gluon_hopper.solve import mesa_solve_hopper_kernel
from flashmix.ops.mesa.triton_gpu.states import mesa_states_kernel
from flashmix.ops.mesa.triton_gpu.structs import MesaInputs, MesaNumbers, MesaResults, MesaSpec
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE
from flashmix.ops.recurrence.triton_gpu import for_heads
from flashmix.ops.recurrence.triton_gpu.layout import chunk_tables, count_chunks

__all__ = ["backward", "forward", "keeps"]

ROWS = 64  # of states that a program makes
C = 64  # tokens of a chunk


def forward(call: MesaCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and last states; keeps `x`."""
    call = _contiguous(call)
    _, R, S = call.results()
    o, x = (_like_tokens(call, width) for width in (call.V, call.K))
    _run(call, None, MesaResults(o, x, R, S, _states(call), None, None))
    return (o, R, S), (x,) if save else ()


def keeps(call: MesaCall) -> Outputs:
    """The solution."""
    return (_like_tokens(call, call.K),)


def backward(call: MesaCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given tensors."""
    call = _contiguous(call)
    do = torch.zeros_like(call.v) if grads[0] is None else grads[0].to(call.dtype).contiguous()
    x, adjoint = kept[0], _like_tokens(call, call.K)
    ridge = torch.zeros(_chunks(call), *call.ridge.shape, dtype=torch.float32, device=call.device)
    _, R, S = call.results()
    _run(call, do, MesaResults(None, x, R, S, _states(call), adjoint, ridge))
    k = repeat_heads(call.k, call.value_heads)
    strength = call.beta.float().unsqueeze(-1)
    written = (strength * k).to(call.dtype)
    read = call.read.but(q=x, k=written, scale=call.scale)
    solved = call.product.but(q=x, k=written, v=k, scale=-1.0)
    found, other = _gradients(read, do, grads[2]), _gradients(solved, adjoint, grads[1])
    d_written = found["k"].float() + other["k"].float()
    result = {
        "q": for_heads(adjoint, call.q),
        "k": for_heads(strength * d_written + other["v"], call.k).to(call.dtype),
        "v": found["v"],
        "beta": (d_written * k).sum(-1).to(call.beta.dtype),
        "log_decay": (found["log_decay"].float() + other["log_decay"].float()).to(call.log_decay.dtype),
        "ridge": ridge.sum(0).to(call.ridge.dtype),
    }
    states = {name: part.get("initial_state") for name, part in (("R", other), ("S", found))}
    return result | {name: d for name, d in states.items() if d is not None}


def _gradients(call: RecurrenceCall, do: Tensor, dstate: Tensor | None) -> Gradients:
    """Those of a call of the recurrence, by its best implementation."""
    impl = chosen(RECURRENCE.implementations, call)
    assert impl is not None
    wanted = [name for name in ("k", "v", "log_decay", "initial_state") if getattr(call, name) is not None]
    _, kept = RECURRENCE.forward(call, True, impl)
    return RECURRENCE.backward(call, kept, (do, dstate), wanted, impl)


def _contiguous(call: MesaCall) -> MesaCall:
    changed = {name: t.contiguous() for name in call.names if (t := getattr(call, name)) is not None}
    return call.but(**changed | {"ridge": call.ridge.float().contiguous()})


def _like_tokens(call: MesaCall, width: int) -> Tensor:
    """`[B, T, HV, width]`; 0 past the last sequence of a packed batch, which is in no chunk."""
    make = torch.empty if call.packing is None else torch.zeros
    return make(*call.v.shape[:3], width, dtype=call.dtype, device=call.device)


def _states(call: MesaCall) -> Tensor:
    shape = _chunks(call), call.value_heads, call.K + call.V, call.K
    return torch.empty(shape, dtype=torch.float32, device=call.device)


def _chunks(call: MesaCall) -> int:
    return count_chunks(call.read, C)


def _run(call: MesaCall, do: Tensor | None, out: MesaResults) -> None:
    """Both passes."""
    where = chunk_tables(call.read, C)
    n = MesaNumbers(call.scale, call.v.shape[1], cdiv(call.v.shape[1], C), call.steps)
    x = MesaInputs(call.q, call.k, call.v, call.beta, call.log_decay, call.ridge, call.R, call.S, do)
    sizes = call.value_heads, call.q.shape[2], call.K, call.V
    of_states, of_solution = _specs(sizes, call.packing is not None)
    rows = call.sequences * call.value_heads * (cdiv(call.K, ROWS) + cdiv(call.V, ROWS))
    bound(mesa_states_kernel, of_states, num_warps=8)(rows, x._replace(do=None), out, where, n)
    bound(mesa_solve_hopper_kernel, of_solution, num_warps=8)(_chunks(call) * call.value_heads, x, out, where, n)


@lru_cache(maxsize=256)
def _specs(sizes: tuple[int, ...], packed: bool) -> tuple[MesaSpec, MesaSpec]:
    HV, H, K, V = (int(size) for size in sizes)
    states = MesaSpec(C, HV, H, K, V, max(64, power_of_two(K)), ROWS, packed)
    return states, states._replace(BV=0)
