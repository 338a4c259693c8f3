"""flashmix.compat.mamba_ssm and .causal_conv1d against loops of what the originals document."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import compat_loops as loops
import pytest
import torch
from budget import assert_within_budget
from torch import Tensor
from torch.nn.functional import silu, softplus

from flashmix.compat import causal_conv1d, mamba_ssm

B, T, H, P, G, N, W = 2, 7, 4, 5, 2, 6, 4
Inputs = dict[str, Tensor]


def inputs() -> Inputs:
    torch.manual_seed(0)
    x = {"x": torch.randn(B, T, H, P), "dt": torch.randn(B, T, H), "A": -torch.rand(H) - 0.5}
    x |= {"B": torch.randn(B, T, G, N), "C": torch.randn(B, T, G, N), "D": torch.randn(H), "D_wide": torch.randn(H, P)}
    x |= {"z": torch.randn(B, T, H, P), "dt_bias": torch.randn(H), "state": torch.randn(B, H, P, N)}
    return x


def scan(
    x: Inputs, D: str | None = None, z: bool = False, bias: bool = False, soft: bool = False, limit=None, state=False
):
    dt = x["dt"] + x["dt_bias"] if bias else x["dt"]
    dt = softplus(dt) if soft else dt
    dt = dt if limit is None else dt.clamp(*limit)
    keys, queries = (x[n].repeat_interleave(H // G, 2) for n in ("B", "C"))
    start = x["state"].mT if state else None
    o, S = loops.linear(queries, keys, x["x"] * dt[..., None], dt * x["A"], scale=1.0, S=start)
    if D:
        o = o + (x[D] if x[D].dim() == 2 else x[D][:, None]) * x["x"]
    return o * silu(x["z"]) if z else o, S.mT


def check(got: Any, loop: Callable[[Inputs], Any], x: Inputs) -> None:
    wide, narrow = loop({n: y.double() for n, y in x.items()}), loop(x)
    for a, b, c in zip(got, wide, narrow, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        assert_within_budget("compat", a, b, c, steps=2)


def names(x: Inputs) -> list[Tensor]:
    return [x[n] for n in ("x", "dt", "A", "B", "C")]


def positive(x: Inputs) -> Inputs:
    return {**x, "dt": x["dt"].abs()}


def test_chunk_scan_defaults() -> None:
    """The step is taken as it is, nothing but `y` is returned."""
    x = positive(inputs())
    y = mamba_ssm.mamba_chunk_scan_combined(*names(x), 64)
    assert isinstance(y, Tensor)
    check([y], lambda x: scan(x)[:1], x)
    assert torch.equal(mamba_ssm.mamba_chunk_scan(*names(x), 16), y)


@pytest.mark.parametrize("D", ["D", "D_wide"])
def test_chunk_scan_with_everything(D: str) -> None:
    x = inputs()
    result = mamba_ssm.mamba_chunk_scan_combined(
        *names(x),
        256,
        x[D],
        x["z"],
        x["dt_bias"],
        initial_states=x["state"],
        dt_softplus=True,
        dt_limit=(0.3, 0.9),
        return_final_states=True,
    )
    check(result, lambda x: scan(x, D, True, True, True, (0.3, 0.9), True), x)


def test_seq_idx_separates_sequences() -> None:
    x = positive(inputs())
    idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    y = mamba_ssm.mamba_chunk_scan_combined(*names(x), 64, D=x["D"], z=x["z"], seq_idx=idx)
    for row, edges in enumerate(((0, 3, 7), (0, 1, 5, 7))):
        for a, b in pairwise(edges):
            part = {n: t[row : row + 1, a:b] if t.dim() > 2 and n != "D_wide" else t for n, t in x.items()}
            check([y[row : row + 1, a:b]], lambda x: scan(x, "D", True)[:1], part)
    with pytest.raises(NotImplementedError, match="seq_idx"):
        mamba_ssm.mamba_chunk_scan_combined(*names(x), 64, seq_idx=idx, return_final_states=True)


@pytest.mark.parametrize("indices", [None, torch.tensor([2, 0])], ids=["rows", "slots"])
@pytest.mark.parametrize("full", [False, True])
def test_state_update_is_one_token_in_place(indices: Tensor | None, full: bool) -> None:
    x = {n: y[:, :1] if n not in ("A", "D", "D_wide", "dt_bias", "state") else y for n, y in inputs().items()}
    pool = torch.randn(3, H, P, N)
    state = x["state"].clone()
    if indices is not None:
        pool[indices] = state
        kept = pool.clone()
        state = pool
    spread = {"dt": x["dt"][:, 0, :, None].expand(B, H, P), "A": x["A"][:, None, None].expand(H, P, N)}
    options: dict[str, Any] = {"dt_softplus": True}
    if full:
        options |= {"D": x["D"][:, None].expand(H, P), "z": x["z"][:, 0]}
        options |= {"dt_bias": x["dt_bias"][:, None].expand(H, P).clone()}
    y = mamba_ssm.selective_state_update(
        *(state, x["x"][:, 0], spread["dt"], spread["A"], x["B"][:, 0], x["C"][:, 0]),
        state_batch_indices=indices,
        **options,
    )
    last = state if indices is None else state[indices]
    check([y[:, None], last], lambda x: scan(x, "D" if full else None, full, full, True, None, True), x)
    if indices is not None:
        assert torch.equal(pool[1], kept[1])


@pytest.mark.parametrize("indices", [None, torch.tensor([2, 0])], ids=["rows", "slots"])
def test_state_update_of_a_half_precision_pool(indices: Tensor | None) -> None:
    """A float16 state, which the step itself does not take, is rounded once per token."""
    x = inputs()
    state = torch.randn(B if indices is None else 3, H, P, N).half()
    token = x["x"][:, 0], x["dt"][:, 0, :, None].expand(B, H, P), x["A"][:, None, None].expand(H, P, N)
    wide = state.float()
    wanted = mamba_ssm.selective_state_update(wide, *token, x["B"][:, 0], x["C"][:, 0], state_batch_indices=indices)
    y = mamba_ssm.selective_state_update(state, *token, x["B"][:, 0], x["C"][:, 0], state_batch_indices=indices)
    assert torch.equal(y, wanted) and torch.equal(state, wide.half())


def first_mamba(x: Inputs, soft: bool, extras: bool) -> tuple[Tensor, Tensor]:
    """The loop of Mamba-1: `u`, `delta`, `z` `[B, D, T]`, `A` `[D, N]`, keys and queries `[B, N, T]`."""
    dt = x["delta"] + x["bias"][:, None] if extras else x["delta"]
    dt = softplus(dt) if soft else dt
    h, y = x["h"], []
    for t in range(dt.shape[2]):
        step = dt[:, :, t, None]
        h = torch.exp(step * x["rates"]) * h + step * x["u"][:, :, t, None] * x["keys"][:, None, :, t]
        y.append((h * x["queries"][:, None, :, t]).sum(-1))
    o = torch.stack(y, -1)
    return (o + x["skip"][:, None] * x["u"]) * silu(x["gate"]) if extras else o, h


@pytest.mark.parametrize("soft, extras", [(False, False), (True, True), (False, True)])
def test_the_first_mamba(soft: bool, extras: bool) -> None:
    torch.manual_seed(1)
    x = {"u": torch.randn(B, P, T), "delta": torch.rand(B, P, T), "rates": -torch.rand(P, N), "bias": torch.rand(P)}
    x |= {"keys": torch.randn(B, N, T), "queries": torch.randn(B, N, T), "skip": torch.randn(P)}
    x |= {"gate": torch.randn(B, P, T), "h": torch.zeros(B, P, N)}
    given = [x[n] for n in ("u", "delta", "rates", "keys", "queries")]
    options: dict[str, Any] = {"delta_softplus": soft}
    if extras:
        options |= {"D": x["skip"], "z": x["gate"], "delta_bias": x["bias"]}
    y, state = mamba_ssm.selective_scan_fn(*given, return_last_state=True, **options)
    check([y, state], lambda x: first_mamba(x, soft, extras), x)
    grouped = [g[:, None] if n > 2 else g for n, g in enumerate(given)]
    assert torch.equal(mamba_ssm.selective_scan_fn(*grouped, **options), y)
    state, tokens = torch.zeros(B, P, N), []
    for t in range(T):
        told = {"D": x["skip"], "z": x["gate"][..., t], "dt_bias": x["bias"]} if extras else {}
        u, dt, A, keys, queries = (g if g is x["rates"] else g[..., t] for g in given)
        tokens.append(mamba_ssm.selective_state_update(state, u, dt, A, keys, queries, dt_softplus=soft, **told))
    check([torch.stack(tokens, -1), state], lambda x: first_mamba(x, soft, extras), x)
    with pytest.raises(NotImplementedError, match="without tokens"):
        mamba_ssm.selective_scan_fn(*given[:3], torch.randn(P, N), x["queries"])


def test_what_of_a_state_update_is_not_there_raises() -> None:
    x = inputs()
    state, token, A = x["state"], x["x"][:, 0], x["A"][:, None, None].expand(H, P, N)
    dt, B_, C_ = torch.rand(B, H, P), x["B"][:, 0], x["C"][:, 0]
    with pytest.raises(NotImplementedError, match="between the channels"):
        mamba_ssm.selective_state_update(state, token, dt, A, B_, C_)
    with pytest.raises(NotImplementedError, match="return_varlen_states"):
        mamba_ssm.mamba_chunk_scan_combined(*names(x), 64, return_varlen_states=True)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, groups: int, before: bool, center: bool):
    x = x * silu(z) if z is not None and not before else x
    y = x.unflatten(-1, (groups, -1))
    y = y - y.mean(-1, keepdim=True) if center else y
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * weight
    y = y if bias is None else y + bias
    return y * silu(z) if z is not None and before else y


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_norm(before: bool, group_size: int | None, center: bool, biased: bool) -> None:
    torch.manual_seed(0)
    x = {"x": torch.randn(3, 8), "z": torch.randn(3, 8), "weight": torch.randn(8), "bias": torch.randn(8)}
    function = mamba_ssm.layernorm_fn if center else mamba_ssm.rmsnorm_fn
    bias = x["bias"] if biased else None
    got = function(x["x"], x["weight"], bias, z=x["z"], group_size=group_size, norm_before_gate=before)

    def loop(x: Inputs) -> list[Tensor]:
        return [
            norm(x["x"], x["weight"], x["bias"] if biased else None, x["z"], 8 // (group_size or 8), before, center)
        ]

    check([got], loop, x)


def test_norm_module_gates_after_the_norm_by_default() -> None:
    torch.manual_seed(0)
    layer, x, z = mamba_ssm.RMSNorm(8, eps=1e-6), torch.randn(3, 8), torch.randn(3, 8)
    assert list(layer.state_dict()) == ["weight"]
    torch.testing.assert_close(layer(x, z), norm(x, layer.weight, None, z, 1, True, False))
    late = mamba_ssm.RMSNorm(8, eps=1e-6, group_size=2, norm_before_gate=False)
    torch.testing.assert_close(late(x, z), norm(x, layer.weight, None, z, 4, False, False))
    torch.testing.assert_close(late(x), norm(x, layer.weight, None, None, 4, False, False))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, act: str | None) -> Tensor:
    """`[B, D, T]`, with the `W - 1` inputs before the first."""
    state = x.new_zeros(*x.shape[:2], W - 1) if state is None else state
    x = torch.cat([state, x], -1)
    y = sum(weight[:, i, None] * x[..., i : x.shape[-1] - W + 1 + i] for i in range(W))
    y = y if bias is None else y + bias[:, None]
    return silu(y) if act else y


def conv_inputs() -> Inputs:
    torch.manual_seed(0)
    return {
        "x": torch.randn(B, 6, T),
        "weight": torch.randn(6, W),
        "bias": torch.randn(6),
        "state": torch.randn(B, 6, W - 1),
    }


def test_convolution_has_no_activation_by_default() -> None:
    x = conv_inputs()
    y = causal_conv1d.causal_conv1d_fn(x["x"], x["weight"])
    assert isinstance(y, Tensor)
    check([y], lambda x: [convolution(x["x"], x["weight"], None, None, None)], x)


@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_convolution_with_states(activation: str) -> None:
    x = conv_inputs()
    out = torch.empty(B, 6, W - 1)
    y, last = causal_conv1d.causal_conv1d_fn(
        *(x["x"], x["weight"], x["bias"]),
        initial_states=x["state"],
        return_final_states=True,
        final_states_out=out,
        activation=activation,
    )
    assert last is out and torch.equal(out, x["x"][..., -W + 1 :])
    check([y], lambda x: [convolution(x["x"], x["weight"], x["bias"], x["state"], "silu")], x)
    idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [3, 3, 3, 3, 3, 3, 4]])
    y = causal_conv1d.causal_conv1d_fn(x["x"], x["weight"], seq_idx=idx)
    for row, cut in enumerate((3, 6)):
        for part in (slice(0, cut), slice(cut, T)):
            alone = causal_conv1d.causal_conv1d_fn(x["x"][row : row + 1, :, part], x["weight"])
            torch.testing.assert_close(y[row : row + 1, :, part], alone)
    with pytest.raises(NotImplementedError, match="activation 'gelu'"):
        causal_conv1d.causal_conv1d_fn(x["x"], x["weight"], activation="gelu")


@pytest.mark.parametrize("length", [W - 1, W, W + 2])
@pytest.mark.parametrize("tokens", [None, 1, 3])
@pytest.mark.parametrize("indices", [None, torch.tensor([2, 0], dtype=torch.int32)], ids=["rows", "slots"])
def test_convolution_step(length: int, tokens: int | None, indices: Tensor | None) -> None:
    x = conv_inputs()
    pool = torch.randn(B if indices is None else 3, 6, length)
    rows = slice(None) if indices is None else indices.long()
    before = pool[rows].clone()
    new = x["x"][..., : tokens or 1]
    y = causal_conv1d.causal_conv1d_update(
        new[..., 0] if tokens is None else new, pool, x["weight"], x["bias"], "silu", conv_state_indices=indices
    )
    whole = x | {"x": new, "state": before[..., length - W + 1 :]}
    got = y.unsqueeze(-1) if tokens is None else y
    check([got], lambda x: [convolution(x["x"], x["weight"], x["bias"], x["state"], "silu")], whole)
    assert torch.equal(pool[rows], torch.cat([before, new], -1)[..., -length:])
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        causal_conv1d.causal_conv1d_update(new, pool, x["weight"], cache_seqlens=torch.zeros(B))
