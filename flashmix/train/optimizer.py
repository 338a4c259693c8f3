"""The optimiser of a run: AdamW, or Muon for the matrices of the blocks; over float32 master weights where the model has bfloat16 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.models import Decoder, parameter_groups
from flashmix.modules.decay import ExactParameters
from flashmix.train.adamw import AdamW
from flashmix.train.folder import RunError, TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW with weight decay on matrices only, not on gains, biases and decay rates."""
    return _adamw(parameter_groups(model, config.weight_decay), config)


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> AdamW:
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8)


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
    def adamw(self) -> AdamW:
        found = self.optimizers["adamw"]
        assert isinstance(found, AdamW)
        return found

    def step(self, lr: float, clip: float) -> Tensor:
        """Updates the parameters by their gradients, which are then gone; returns the norm of these before it was clipped."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
        norm = self._clip_in_one_pass(clip) if self._one_pass() else self._clip(clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for parameter in self.masters:
            parameter.grad = None
        self._round(
            {parameter: master for parameter, master in self.masters.items() if master not in self.adamw.rounded}
        )
        return norm

    def _one_pass(self) -> bool:
        """Whether AdamW's step takes the gradients of the rounded parameters, clips them and rounds its masters."""
        adamw = self.adamw
        own = {p for group in adamw.param_groups for p in group["params"]}
        adamw.rounded = {master: parameter for parameter, master in self.masters.items() if master in own}
        if adamw.one_pass():
            return True
        adamw.rounded, adamw.scale = {}, None
        return False

    def _clip(self, clip: float) -> Tensor:
        """Clips the gradients, those of masters in float32; returns their norm before."""
        self._widen_gradients()
        updated = [self._updated(parameter) for parameter in self.model.parameters()]
        return nn.utils.clip_grad_norm_(updated, clip, foreach=True)

    def _clip_in_one_pass(self, clip: float) -> Tensor:
        """The same, where AdamW itself multiplies its gradients: those are read once."""
        self._widen_gradients()
        adamw = self.adamw
        updated = [self._updated(parameter) for parameter in self.model.parameters()]
        gradients = [g for p in updated if (g := adamw.gradient(p)) is not None]
        kinds: dict[Any, list[Tensor]] = {}
        for gradient in gradients:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        norms = [norm for kind in kinds.values() for norm in torch._foreach_norm(kind, 2, torch.float32)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        adamw.scale = (clip / (norm + 1e-6)).clamp(max=1.0)
        if "muon" in self.optimizers:
            others = [p.grad for group in self.optimizers["muon"].param_groups for p in group["params"]]
            torch._foreach_mul_([g for g in others if g is not None], adamw.scale)
        return norm

    def _widen_gradients(self) -> None:
        """Hands the gradients of rounded parameters to their masters, but for those that AdamW takes itself."""
        for parameter, master in self.masters.items():
            if parameter.grad is not None and master not in self.adamw.rounded:
                master.grad, parameter.grad = parameter.grad.to(torch.float32), None

    @torch.no_grad()
    def _round(self, masters: dict[Any, Any]) -> None:
        if masters:
            torch._foreach_copy_(list(masters), list(masters.values()))

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
        self._round(self.masters)
        states = state if len(self.optimizers) > 1 else {"adamw": state}
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(states[name])
