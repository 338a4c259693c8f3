"""The processes of a run: one, or those that torchrun started. docs/distributed.md has the commands.

Data ranks share the rows of a step; within a data rank the ranks of its context group share the tokens of each row. Parameters lie
sharded over all of them (FSDP2).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from flashmix.models import Decoder, DecoderConfig
from flashmix.modules.decay import ExactParameters
from flashmix.train.folder import RunError, TrainConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Made = TypeVar("Made")


class Ranks:
    """This process among those of the run, and what they agree on; `Ranks.of_environment()` under torchrun, `Ranks()` alone."""

    def __init__(self, rank: int = 0, count: int = 1, local: int = 0, restarted: bool = False) -> None:
        self.rank, self.count, self.local, self.restarted = rank, count, local, restarted
        self.data, self.data_ranks = 0, 1
        self.context: Any = None  # the process group of a row, where several ranks share it
        self.mesh: DeviceMesh | None = None
        self._asked: tuple[Tensor, Any] | None = None  # how many ranks asked for a stop, in the step before
        self.stopping = False

    @staticmethod
    def of_environment() -> Ranks:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        rank, count, local, restarts = (
            int(os.environ.get(name, default)) for name, default in zip(names, "0100", strict=True)
        )
        return Ranks(rank, count, local, restarts > 0)

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def check(self, config: TrainConfig) -> None:
        """Raises RunError, on every rank alike, for settings that do not fit the number of ranks."""
        if config.context > 1 and not self.several:
            raise RunError(f"--context {config.context} takes several ranks: start the run with torchrun")
        if self.count % config.context:
            raise RunError(f"--context must divide the {self.count} ranks, got {config.context}")
        data_ranks = self.count // config.context
        if config.rows % data_ranks:
            raise RunError(f"--rows must be a multiple of the {data_ranks} data ranks, got {config.rows}")
        if self.several and config.optimizer != "adamw":
            raise RunError(f"--optimizer must be adamw over several ranks, got {config.optimizer}")
        if self.several and config.device not in (None, "cpu", "cuda"):
            raise RunError(
                f"--device must be cpu or cuda under torchrun, which gives each rank its GPU, got {config.device}"
            )

    def start(self, config: TrainConfig) -> None:
        """Meets the other ranks, as torchrun's environment says, unless they have met."""
        if not self.several or self.mesh is not None:
            return
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        kind = "cuda" if config.device == "cuda" else "cpu"
        if kind == "cuda":
            torch.cuda.set_device(self.local)
        if not dist.is_initialized():
            # torchrun keeps its store over restarts: without a prefix a new start reads the dead ranks' addresses, and waits for them
            store, rank, ranks = next(dist.rendezvous("env://"))
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backends, store=store, rank=rank, world_size=ranks)
        self.data_ranks = self.count // config.context
        both = init_device_mesh(kind, (self.data_ranks, config.context), mesh_dim_names=("data", "context"))
        self.mesh = init_device_mesh(kind, (self.count,))
        self.data = both["data"].get_local_rank()
        self.context = both["context"].get_group() if config.context > 1 else None

    def end(self) -> None:
        """Leaves the other ranks."""
        if self.mesh is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
            self.mesh = None
            time.sleep(0.1)  # a thread of gloo that lets go of its last tensor at the end of Python aborts the process

    def device(self, name: str) -> torch.device:
        return torch.device("cuda", self.local) if self.several and name == "cuda" else torch.device(name)

    # ---- what is done together -------------------------------------------------------------------------------------------------------

    def together(self, make: Callable[[], Made]) -> Made:
        """`make()` on every rank. Raises RunError on all of them where one did, so that none waits for another."""
        if not self.several:
            return make()
        import torch.distributed as dist

        made, trouble = None, ""
        try:
            made = make()
        except RunError as error:
            trouble = str(error)
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, trouble)
        for rank, text in enumerate(found):
            if text:
                raise RunError(text if rank == 0 else f"{text} (on rank {rank})")
        return made  # type: ignore[return-value]

    def on_first(self, make: Callable[[], Made]) -> Made | None:
        """`make()` on the first rank, None elsewhere, when it is done there. Raises RunError on all ranks."""
        return self.together(lambda: make() if self.first else None)

    def gathered(self, value: Made) -> list[Made]:
        """The value of each rank."""
        if not self.several:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the place of `x`."""
        if self.several:
            import torch.distributed as dist

            dist.all_reduce(x)
        return x

    def agree_on_stop(self, asked: Tensor) -> None:
        """Takes how many ranks have asked for a stop by this step, and reads that of the step before: nothing waits for this one."""
        if self._asked is not None:
            before, done = self._asked
            if done is not None:
                done.synchronize()
            self.stopping = self.stopping or bool(before > 0)
        done = None
        if asked.is_cuda:
            host = torch.empty_like(asked, device="cpu", pin_memory=True)
            host.copy_(asked, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            asked = host
        self._asked = asked, done

    # ---- the model -------------------------------------------------------------------------------------------------------------------

    def shard(self, model: Decoder, config: TrainConfig) -> None:
        """Shards the parameters over all ranks."""
        if self.mesh is not None:
            shard_parameters(model, self.mesh, config.dtype == "bfloat16")

    def backward(self, model: nn.Module, loss: Tensor, last: bool) -> None:
        """The gradients of a share of the loss; they are added between ranks with the `last` row of a step."""
        if self.several:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = loss * self.count  # FSDP2 has the mean over the ranks
        loss.backward()


def shard_parameters(model: Decoder, mesh: DeviceMesh, narrow: bool) -> None:
    """Shards the parameters of each block and of the rest over the ranks of a mesh.

    `narrow`: they are cast to bfloat16 for a step, but for those of `ExactParameters`, and gradients are summed in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy()
    if narrow:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        for module in model.modules():
            if isinstance(module, ExactParameters):  # few numbers, gathered once a step
                fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
                for name in module.reads:
                    register_fsdp_forward_method(module, name)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def order_of(model: DecoderConfig) -> str:
    """The layout of a row that the model's attention is best with."""
    full = any(layer.mixer == "attention" and layer.options.get("window") is None for layer in model.layers)
    return "zigzag" if full else "contiguous"
