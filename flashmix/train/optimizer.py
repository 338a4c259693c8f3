"""The optimiser of a run: AdamW, or Muon for the matrices of the blocks; over float32 master weights where the model has bfloat16 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.models import Decoder, parameter_groups
from flashmix.modules.decay import ExactParameters
from flashmix.train.folder import RunError, TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on gains, biases and decay rates."""
    return _adamw(parameter_groups(model, config.weight_decay), config)


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _muon(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Muon with the learning rates of AdamW (arXiv:2502.16982): its updates have AdamW's root mean square."""
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise RunError(f"--optimizer muon needs torch 2.9 or newer, got {torch.__version__}")
    made: torch.optim.Optimizer = muon(
        parameters, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return made


class Updates:
    """One update of a model's parameters after another.

    Args:
        model: the model, on its device; with `masters` its parameters become bfloat16, but for those of `ExactParameters`.
        config: the settings.
        masters: whether float32 copies of the parameters are what is updated, and what a checkpoint holds.
    """

    def __init__(self, model: Decoder, config: TrainConfig, masters: bool = False) -> None:
        self.model, self.masters = model, {}
        if masters:
            exact = {p for m in model.modules() if isinstance(m, ExactParameters) for p in m.parameters()}
            for parameter in model.parameters():
                if parameter not in exact:
                    self.masters[parameter] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                    parameter.data = parameter.detach().to(torch.bfloat16)
        groups = parameter_groups(model, config.weight_decay)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if config.optimizer == "muon":
            blocks = {p for p in model.blocks.parameters() if p.dim() == 2}
            own = [self._updated(p) for p in groups[0]["params"] if p in blocks]
            groups[0]["params"] = [p for p in groups[0]["params"] if p not in blocks]
            self.optimizers["muon"] = _muon(own, config)
        for group in groups:
            group["params"] = [self._updated(p) for p in group["params"]]
        self.optimizers["adamw"] = _adamw(groups, config)

    def _updated(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.masters.get(parameter, parameter)

    @property
    def adamw(self) -> torch.optim.Optimizer:
        return self.optimizers["adamw"]

    def step(self, lr: float, clip: float) -> Tensor:
        """Updates the parameters by their gradients, which are then gone; returns the norm of these before it was clipped."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
        for parameter, master in self.masters.items():
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(torch.float32), None
        updated = [self._updated(parameter) for parameter in self.model.parameters()]
        norm = nn.utils.clip_grad_norm_(updated, clip, foreach=True)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        if self.masters:
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))

    def weights(self) -> dict[str, Tensor]:
        """The model's state with what is updated in place of what is rounded."""
        state = self.model.state_dict()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            state[name] = self._updated(parameter).detach()
        return state

    def state(self) -> dict[str, Any]:
        """The state of the optimisers; of AdamW alone as torch has it."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return states if len(states) > 1 else states["adamw"]

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError: they belong to another model or optimiser."""
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            if parameter in self.masters:
                self.masters[parameter].copy_(weights[name])
        self._round()
        states = state if len(self.optimizers) > 1 else {"adamw": state}
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(states[name])
