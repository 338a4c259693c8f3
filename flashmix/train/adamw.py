"""AdamW whose step on a GPU is one pass over memory, also where float32 master weights stand behind rounded parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv

CHUNK, BLOCK = 16384, 1024  # entries of a program, and those that it holds at once


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW with the same state; tensors on a GPU are updated by a Triton kernel (`adamw_gpu.py`) where it can run.

    Two things go into the same pass, and only there; `one_pass` says whether the next step is it:

    - `rounded[p]` is the parameter of the model that `p` is the master of: its gradient is taken, and it becomes `p` in its own dtype.
    - `scale`, a float32 tensor `[]`, multiplies the gradients, as clipping does.

    Args:
        params, lr, betas, eps, weight_decay: as torch's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.rounded: dict[Tensor, Tensor] = {}
        self.scale: Tensor | None = None
        self._known: dict[str, tuple[Any, Tensor]] = {}
        self._spare: dict[str, Tensor] = {}
        self._captured: list[Tensor] = []

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.rounded.get(parameter, parameter).grad

    def one_pass(self) -> bool:
        """Whether the kernel runs the next step."""
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor) or group["amsgrad"] or group["maximize"] or group["differentiable"]:
                return False
            if not all(0 < beta < 1 for beta in group["betas"]):
                return False
            for parameter in group["params"]:
                gradient = self.gradient(parameter)
                used = parameter, gradient, self.rounded.get(parameter), *self._moments(parameter)
                if gradient is not None and not all(takes(t, parameter) for t in used if t is not None):
                    return False
        return True

    def _moments(self, parameter: Tensor) -> tuple[Tensor, ...]:
        state = self.state.get(parameter)
        return (state["exp_avg"], state["exp_avg_sq"]) if state else ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have gradients."""
        if closure is not None or not self.one_pass():
            if self.rounded or self.scale is not None:
                raise RuntimeError("rounded parameters and scaled gradients need one_pass()")
            return super().step(closure)
        for index, group in enumerate(self.param_groups):
            kinds: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                gradient, copy = self.gradient(parameter), self.rounded.get(parameter)
                if gradient is not None:
                    dtypes = parameter.dtype, gradient.dtype, None if copy is None else copy.dtype
                    kinds[parameter.device, dtypes].append(parameter)
            for (device, dtypes), parameters in kinds.items():
                self._update(group, parameters, dtypes, f"{index} {device} {dtypes}")
        return None

    def _update(self, group: dict[str, Any], parameters: list[Tensor], dtypes: Sequence[Any], name: str) -> None:
        """One launch: parameters of a group that have the same dtypes and device."""
        from flashmix.gpu.launch import bound
        from flashmix.train.adamw_gpu import DTYPES, AdamWNumbers, AdamWSpec, AdamWTables, adamw_kernel

        device = parameters[0].device
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)
        rows, chunks = [], []
        for parameter in parameters:
            state, copy = self.state[parameter], self.rounded.get(parameter)
            used = parameter, self.gradient(parameter), state["exp_avg"], state["exp_avg_sq"], copy, state["step"]
            rows.append((*[0 if t is None else t.data_ptr() for t in used], parameter.numel(), 0))
        table = self._table(f"{name} addresses", rows, device)
        sizes = [parameter.numel() for parameter in parameters]
        if self._known.get(f"{name} chunks", (None,))[0] != sizes:
            chunks = [(i, chunk) for i, size in enumerate(sizes) for chunk in range(cdiv(size, CHUNK))]
            self._known[f"{name} chunks"] = sizes, torch.tensor(chunks, dtype=torch.int32, device=device)
        places = self._known[f"{name} chunks"][1]
        (beta1, beta2), lr = group["betas"], group["lr"]
        steps = lr, lr * group["weight_decay"], group["eps"]
        n = AdamWNumbers(*steps, 1 - beta1, beta2, 1 - beta2, math.log(beta1), math.log(beta2))
        own, gradient, copied = (DTYPES[dtype] for dtype in dtypes)
        spec = AdamWSpec(own, gradient, copied, CHUNK, BLOCK)
        with gpu.on(device):
            bound(adamw_kernel, spec, num_warps=4)(len(places), AdamWTables(table, places, self.scale), n)

    def _table(self, name: str, rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
        """The rows on the device; sent again where they are others than before.

        Pinned memory is taken one call ahead: there is none to be had while a CUDA graph is captured. What a graph sends is kept as it is.
        """
        known, spare = self._known.get(name, (None, None)), self._spare.pop(name, None)
        if known[0] == rows and known[1] is not None:
            if spare is not None:
                self._spare[name] = spare
            return known[1]
        table = torch.tensor(rows, dtype=torch.int64)
        if device.type == "cuda":
            spare = table.pin_memory() if spare is None or spare.shape != table.shape else spare.copy_(table)
            capturing = torch.cuda.is_current_stream_capturing()
            table = spare.to(device, non_blocking=True)
            if capturing:
                self._captured.append(spare)
            else:
                self._spare[name] = torch.empty_like(spare, pin_memory=True)
        self._known[name] = rows, table
        return table


def takes(t: Tensor, parameter: Tensor) -> bool:
    """Whether the kernel takes a tensor that goes with a parameter."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.is_contiguous()
        and t.shape == parameter.shape
        and t.device == parameter.device
        and t.data_ptr() % 16 == 0
        and gpu.refuses(t.device, t.dtype) is None
    )
