"""What all calls of one kind share: the tiles, the constants of each kernel, and the kernels that were compiled with them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flashmix.gpu import device as gpu
from flashmix.gpu.compiled import Kernel
from flashmix.ops.recurrence.call import Rule
from flashmix.ops.recurrence.triton_gpu.adapter import Gate, Problem
from flashmix.ops.recurrence.triton_gpu.channel_output import channel_output_backward_kernel
from flashmix.ops.recurrence.triton_gpu.channel_pairs import channel_pairs_backward_kernel
from flashmix.ops.recurrence.triton_gpu.gate import gate_forward_kernel
from flashmix.ops.recurrence.triton_gpu.output import output_backward_kernel
from flashmix.ops.recurrence.triton_gpu.scores import channel_scores_forward_kernel, scores_forward_kernel
from flashmix.ops.recurrence.triton_gpu.segments import segments_backward_kernel, segments_forward_kernel
from flashmix.ops.recurrence.triton_gpu.state import state_backward_kernel, state_forward_kernel
from flashmix.ops.recurrence.triton_gpu.table import Tiles, tiles

_RULES = {Rule.LINEAR: 0, Rule.TIED: 1, Rule.UNTIED: 2, Rule.DPLR: 3}
_GATES = {Gate.NONE: 0, Gate.HEAD: 1, Gate.TOKEN: 2, Gate.CHANNEL: 3}
SLOTS = {Rule.LINEAR: 1, Rule.TIED: 2, Rule.UNTIED: 2, Rule.DPLR: 4}


class Plan:
    """The tiles and kernels of a problem whose operands q, a, k, b have `heads`."""

    def __init__(self, problem: Problem, heads: tuple[int, int, int, int], table: Tiles) -> None:
        self.tiles = table
        self.exact = problem.dtype == torch.float32  # then decays are summed in float64
        self.heads = heads
        if problem.rule is Rule.TIED:
            self.state_heads = (heads[0], heads[2], heads[2], heads[2])
        else:
            self.state_heads = heads
        if problem.gate is Gate.CHANNEL:  # the decayed keys, one a value head
            self.state_heads = (problem.value_heads,) * 4
        self.problem = problem
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            kernel, constants = getattr(self, "_" + name)()
            self._kernels[name] = Kernel(kernel, constants)
        return self._kernels[name]

    def _sizes(self, heads: tuple[int, int, int, int]) -> dict[str, Any]:
        p = self.problem
        named = dict(zip(("HQ", "HA", "HK", "HB"), heads, strict=True))
        return {"HV": p.value_heads, **named, "K": p.K, "RULE": _RULES[p.rule], "PACKED": p.packed, "C": self.tiles.C}

    def _flags(self) -> dict[str, Any]:
        p = self.problem
        flags = {"READ_BEFORE": p.read_before, "PRECISION": self.tiles.precision}
        if p.gate is Gate.CHANNEL:
            return {**flags, **self._passes, "REACH": self.tiles.gate["BK"]}
        return {**flags, "GATE": _GATES[p.gate]}

    @property
    def _passes(self) -> dict[str, int]:
        """float16 has no room for factors above 1."""
        return {"LEVELS": self.tiles.C.bit_length() - 1, "LIMIT": 0 if self.problem.dtype == torch.float16 else 80}

    def _gate(self) -> tuple[Any, dict[str, Any]]:
        p = self.problem
        sizes = {"HV": p.value_heads, "K": p.K, "PACKED": p.packed, "C": self.tiles.C}
        return gate_forward_kernel, {**sizes, **self._passes, "EXACT": self.exact, **self.tiles.gate}

    def _scores(self) -> tuple[Any, dict[str, Any]]:
        constants = {
            **self._sizes(self.heads), **self._flags(), **self.tiles.scores, "SLOTS": SLOTS[self.problem.rule],
            "INVERSE_PRECISION": self.tiles.inverse_precision,
        }  # fmt: skip
        if self.problem.gate is Gate.CHANNEL:
            return channel_scores_forward_kernel, constants
        return scores_forward_kernel, {**constants, "EXACT": self.exact}

    def _state_constants(self, table: dict[str, int], **flags: bool) -> dict[str, Any]:
        p = self.problem
        return {
            **self._sizes(self.state_heads), "V": p.V, "CHANNEL": p.gate is Gate.CHANNEL, "SLOTS": SLOTS[p.rule],
            "PRECISION": self.tiles.precision, **flags, **table,
        }  # fmt: skip

    def _state_output(self) -> tuple[Any, dict[str, Any]]:
        return state_forward_kernel, self._state_constants(self.tiles.state, OUTPUT=True, SAVE=False)

    def _state_save(self) -> tuple[Any, dict[str, Any]]:
        return state_forward_kernel, self._state_constants(self.tiles.state, OUTPUT=False, SAVE=True)

    def _state_maps(self) -> tuple[Any, dict[str, Any]]:
        return state_forward_kernel, self._state_constants(self.tiles.maps, OUTPUT=False, SAVE=False)

    def _state_backward(self) -> tuple[Any, dict[str, Any]]:
        return state_backward_kernel, self._state_constants(self.tiles.state_backward, SAVE=True)

    def _state_ends(self) -> tuple[Any, dict[str, Any]]:
        return state_backward_kernel, self._state_constants(self.tiles.state_backward, SAVE=False)

    def _join_constants(self) -> dict[str, Any]:
        p = self.problem
        return {
            "K": p.K, "V": p.V, "DIAGONAL": p.rule is Rule.LINEAR, "PRECISION": self.tiles.segment_precision,
            **self.tiles.join,
        }  # fmt: skip

    def _join_forward(self) -> tuple[Any, dict[str, Any]]:
        return segments_forward_kernel, self._join_constants()

    def _join_backward(self) -> tuple[Any, dict[str, Any]]:
        return segments_backward_kernel, self._join_constants()

    def _output_backward(self) -> tuple[Any, dict[str, Any]]:
        p = self.problem
        constants = {
            **self._sizes(self.heads), **self._flags(), **self.tiles.output, "V": p.V, "EXACT": self.exact,
            "SLOTS": SLOTS[p.rule],
        }  # fmt: skip
        if p.gate is not Gate.CHANNEL:
            return output_backward_kernel, constants
        return channel_output_backward_kernel, {n: c for n, c in constants.items() if n not in ("HQ", "HA")}

    def _pairs_backward(self) -> tuple[Any, dict[str, Any]]:
        return channel_pairs_backward_kernel, {
            **self._sizes(self.heads), **self._flags(), **self.tiles.pairs, "V": self.problem.V, "EXACT": self.exact,
        }  # fmt: skip


def plan(problem: Problem, heads: tuple[int, int, int, int]) -> Plan:
    """The plan of a problem; lengths and batches share one, as far as they are cut alike."""
    kind = replace(problem, batch=0, tokens=0, sequences=0)
    return cached_plan(
        kind, heads, tiles(problem).segments, torch.get_float32_matmul_precision(), gpu.target(problem.device)
    )


@lru_cache(maxsize=1024)
def cached_plan(
    kind: Problem, heads: tuple[int, int, int, int], segments: int, precision: str, target: gpu.Target
) -> Plan:
    """What a plan depends on is its key; float32 precision and the card are looked up by the table."""
    return Plan(kind, heads, tiles(kind, segments))
