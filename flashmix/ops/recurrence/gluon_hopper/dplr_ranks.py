"""DPLR whose sequences go on at other ranks, in the halves of `triton_gpu.ranks`: the phases of `dplr.py`, maps by Triton's kernels."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.recurrence.gluon_hopper import dplr
from flashmix.ops.recurrence.triton_gpu import Phases
from flashmix.ops.recurrence.triton_gpu.ranks import ChunkBackward, ChunkForward
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import ChunkInputs, ChunkScores
from flashmix.parallel.halves import Halves


class DplrForward(ChunkForward):
    def make_scores(self) -> ChunkScores:
        self.made = dplr.made_scores(self.run, False)
        return self.made.scores

    def make_outputs(self, run: Run, joined: Outputs, save: bool) -> tuple[Outputs, Outputs]:
        return dplr.outputs(run, self.made, joined, save)


class DplrBackward(ChunkBackward):
    def make_scores(self, kept: Outputs) -> tuple[ChunkInputs, ChunkScores]:
        self.made = dplr.made_scores(self.run, True)
        return self.made.inputs, self.made.scores

    def phases(self, decay: bool) -> Phases | None:
        return dplr.phases_of(self.run, self.made, decay)


HALVES = Halves(DplrForward, DplrBackward)
