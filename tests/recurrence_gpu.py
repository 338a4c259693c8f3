"""What the tests of the recurrence on a GPU share: cases, inputs, results by name."""

from __future__ import annotations

from typing import Any

import torch
from budget import relative_errors
from cases import CASES, Case, make_inputs, run_op
from test_recurrence import STAGES, same_bits
from torch import Tensor

from flashmix import Packing

BF16 = torch.bfloat16
DEVICE = "cuda"
Results = dict[str, Tensor]
# One of each rule and each gate: what these launch is all there is.
KINDS = [
    case
    for case in CASES
    if case.name
    in (
        *("linear-head", "linear-value", "read_before-channel", "delta-token", "delta-channel", "untied-token"),
        "dplr-channel",
    )
]
# The same for the kernels of Hopper cards; other cards run them with Triton's, which `impl="auto"` takes there.
HOPPER = [
    Case("hopper-token", "delta", "token", K=128, V=128),
    Case("hopper-head-K96V80", "delta", "head", H=1, K=96, V=80),
    Case("hopper-channel", "delta", "channel", K=128, V=128),
    Case("hopper-fused-token", "delta", "token", HV=2, K=128, V=128),
    Case("hopper-fused-linear", "linear", "token", HV=2, K=128, V=96),
    Case("hopper-fused-grouped", "delta", "token", HV=6, K=128, V=128),
    Case("hopper-none", "delta", "none", HV=2, K=72, V=128),
    Case("hopper-linear", "linear", "token", HV=2, K=128, V=96),
    Case("hopper-linear-channel", "linear", "channel", K=96, V=128),
    Case("hopper-64-token", "delta", "token", K=64, V=64),
    Case("hopper-64-none", "delta", "none", HV=2, K=64, V=64),
    Case("hopper-64-linear", "linear", "token", HV=2, K=64, V=64),
    Case("hopper-256-token", "delta", "token", K=256, V=256),
    Case("hopper-256-none", "delta", "none", HV=2, K=256, V=256),
    Case("hopper-128-64-token", "delta", "token", K=128, V=64),
    Case("hopper-128-64-linear", "linear", "token", HV=2, K=128, V=64),
    Case("hopper-64-128-token", "delta", "token", HV=2, K=64, V=128),
    Case("hopper-64-128-linear", "linear", "head", K=64, V=128),
    Case("hopper-256-linear", "linear", "token", K=256, V=256),
    Case("hopper-256-linear-none", "linear", "none", HV=2, K=256, V=256),
    Case("hopper-256-linear-head", "linear", "head", H=1, K=256, V=256),
    Case("hopper-dplr", "dplr", "channel", K=128, V=128),
    Case("hopper-dplr-64", "dplr", "channel", K=64, V=64),
]
KINDS += HOPPER
STATES = ("initial_state", "dinitial_state", "state")


def impl_of(case: Case) -> str:
    """What runs a case: the implementation that a call takes by itself, or Triton's kernels, asked for."""
    return "auto" if case in HOPPER or case.name.startswith("hopper") else "triton"


def small(case: Case, dtype: torch.dtype = BF16) -> Results:
    return {name: t.to(DEVICE) for name, t in make_inputs(case, dtype).items()}


def large(case: Case, decay: float = 1.0) -> Results:
    """bfloat16 inputs of a delta rule, made where they are used."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": DEVICE}
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    k = torch.randn(B, T, H, K, dtype=BF16, **options)
    k /= k.norm(dim=-1, keepdim=True)
    x = {"q": torch.randn(B, T, H, K, dtype=BF16, **options), "v": torch.randn(B, T, HV, V, dtype=BF16, **options)}
    x |= {"k": k, "beta": torch.rand(B, T, HV, **options)}
    shape = (B, T, HV, K) if case.gate == "channel" else (B, T, HV)
    x["log_decay"] = torch.rand(shape, **options).mul_(-decay)
    if case.states:
        x["initial_state"] = torch.randn(case.sequences, HV, K, V, **options)
    return x


def results(case: Case, x: Results, cu_seqlens: Tensor | Packing | None = None) -> Results:
    """Outputs and gradients by name; what flows back to a token depends on this token alone."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, state = run_op(case, leaves, impl_of(case), cu_seqlens)
    grads = torch.autograd.grad([o, state], list(leaves.values()), [x["v"].flip(-1), torch.full_like(state, 0.5)])
    return {"o": o.detach(), "state": state.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def cut(x: Results, tokens: Any, sequence: Any = slice(None)) -> Results:
    """Some tokens of all that have tokens, some sequences of the states; what is one for all is left out."""
    return {n: t[sequence] if n in STATES else t[:, tokens] for n, t in x.items() if t.dim() > 1}


def rows(x: Results, part: slice) -> Results:
    return {name: t[part] for name, t in x.items()}


def assert_same(found: Results, wanted: Results, tokens: int = 2) -> None:
    """Bit for bit; but one token a sequence takes the step, whose output rounds differently."""
    for name, t in wanted.items():
        if tokens == 1 and not name.startswith("d"):
            assert relative_errors(found[name], t)[0] <= 2 * STAGES * torch.finfo(found["o"].dtype).eps, name
        else:
            same_bits(found[name], t, name)
