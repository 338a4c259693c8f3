"""The mixture of experts: each token goes through a few of many gated MLPs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flashmix.modules.mlp import SwiGLU
from flashmix.op.checks import check_choice, check_multiple, check_range
from flashmix.op.dtypes import at_least_float32
from flashmix.op.public import Public
from flashmix.ops.gated_product.op import swiglu


class MixtureOfExperts(Public, nn.Module):
    """`y = scale sum_e p_e SwiGLU_e(x)` over the `active` experts of highest score, and a shared expert for every token.

    Scores `p` are a softmax of the router's logits over all experts, or their sigmoid. With `balance` a bias per expert, which no
    gradient reaches, is added to the scores for the choice alone. The rows of each expert are gathered, so that an expert is one
    product of matrices; the counts of rows are read on the host.

    Args:
        dim: channels in and out.
        hidden: channels between, of each expert.
        experts: number of experts.
        active: experts per token.
        shared: channels between of the shared expert; 0: none.
        shared_gate: whether a sigmoid of the input scales the shared expert.
        scores: "softmax" or "sigmoid".
        normalise: whether the scores of the chosen experts are divided by their sum.
        scale: factor of the experts' sum.
        groups: the experts lie in so many groups of neighbours.
        active_groups: only this many groups are chosen from, those with the largest sum of their best two scores.
        balance: whether there is a bias of the choice.

    Source: Shazeer et al., arXiv:1701.06538; shared experts: arXiv:2401.06066; sigmoid, bias and groups: arXiv:2412.19437, section 2.1.2.

    Example:
        >>> import torch
        >>> MixtureOfExperts(16, 8, experts=4, active=2)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    balance: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        active: int,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        scores: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        active_groups: int = 1,
        balance: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("scores", scores, "softmax", "sigmoid")
        check_multiple("experts", experts, "groups", groups)
        check_range("active_groups", active_groups, 1, groups)
        check_range("active", active, 1, experts // groups * active_groups)
        self.experts, self.active, self.scores = experts, active, scores
        self.normalise, self.scale = normalise, scale
        self.groups, self.active_groups = groups, active_groups
        self.router = nn.Linear(dim, experts, bias=False, device=device, dtype=dtype)
        self.register_buffer("balance", torch.zeros(experts, device=device) if balance else None)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden, device=device, dtype=dtype))
        self.shared = SwiGLU(dim, shared, device=device, dtype=dtype) if shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False, device=device, dtype=dtype) if shared_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance `1 / (3 inputs)` in the experts."""
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=(3 * weight.shape[2]) ** -0.5)

    def writers(self) -> Iterator[Tensor]:
        """The matrices that make the output."""
        yield self.down
        if self.shared is not None:
            yield from self.shared.writers()

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The factors `[N, active]` of the experts of each row `[N, D]`, and their numbers."""
        logits = self.router(rows)
        wide = at_least_float32(logits)
        scores = wide.softmax(-1) if self.scores == "softmax" else wide.sigmoid()
        order = scores if self.balance is None else scores + self.balance
        if self.active_groups < self.groups:
            blocks = order.unflatten(-1, (self.groups, -1))
            best = blocks.topk(min(2, blocks.shape[-1]), dim=-1).values.sum(-1).topk(self.active_groups, dim=-1).indices
            kept = torch.zeros_like(blocks[..., 0], dtype=torch.bool).scatter(-1, best, True)
            order = blocks.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        chosen = order.topk(self.active, dim=-1).indices
        factors = scores.gather(-1, chosen)
        if self.normalise:
            factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
        return (factors * self.scale).to(logits.dtype), chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        factors, chosen = self.route(rows)
        order = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        outputs = []
        for expert, part in enumerate(rows.index_select(0, order // self.active).split(counts)):
            if counts[expert]:
                gate, up = linear(part, self.gate_up[expert]).chunk(2, dim=-1)
                outputs.append(linear(swiglu(gate, up), self.down[expert]))
        sorted_outputs = torch.cat(outputs) if outputs else rows.new_empty(0, x.shape[-1])
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = (sorted_outputs.index_select(0, back).unflatten(0, chosen.shape) * factors[..., None]).sum(1)
        if self.shared is not None:
            common = self.shared(rows)
            y = y + (common if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * common)
        return y.view_as(x)
