"""The functions of fla.ops with several states: against what they call, in the original's orders, and its formulas for the states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashmix
from flashmix.compat import fla

B, T, H, K, V = 2, 9, 3, 6, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def setup_function() -> None:
    torch.manual_seed(0)


def test_mesa_net_solves_for_the_query() -> None:
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    g, beta, lamb = -torch.rand(B, T, H).double(), torch.rand(B, T, H).double(), torch.rand(H, K).double() + 0.3
    R, S = torch.zeros(B, H, K, K).double(), torch.zeros(B, H, K, V).double()
    o, *states = fla.chunk_mesa_net(q, k, v, g, beta, lamb, output_final_state=True, use_qk_l2norm_in_kernel=True)
    tokens, (r, s) = [], (R, S)
    for t in range(T):
        fade, write = g[:, t].exp()[..., None, None], beta[:, t, :, None] * unit(k)[:, t]
        R = fade * R + write[..., None] * unit(k)[:, t, :, None]
        S = fade * S + write[..., None] * v[:, t, :, None]
        x = torch.linalg.solve(R + torch.diag_embed(lamb), unit(q)[:, t])
        torch.testing.assert_close(o[:, t], torch.einsum("bhk,bhkv->bhv", x, S))
        token = [y[:, t] for y in (unit(q), unit(k), v, g)]
        one, r, s = fla.mesa_net_decoding_one_step(*token, lamb, beta[:, t], r, s)
        tokens.append(one)
    torch.testing.assert_close(states, [R, S])
    torch.testing.assert_close(torch.stack(tokens, 1), o)
    torch.testing.assert_close([r, s], [R, S])
    with pytest.raises(NotImplementedError, match="one initial state"):
        fla.chunk_mesa_net(q, k, v, g, beta, lamb, h_kk_init=R)


@pytest.mark.parametrize("name", ["chunk_momentum_delta_rule", "fused_recurrent_momentum_delta_rule"])
def test_the_delta_rule_with_momentum(name: str) -> None:
    q, k, v, state = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), normal(2, B, H, K, V)
    alpha, mu, beta, eta = -torch.rand(4, B, T, H).double()
    o, final = getattr(fla, name)(q, k, v, alpha, mu, None, -beta, -eta, 0.5, state, True)
    S, M = state
    for t in range(T):
        key, a = unit(k)[:, t], alpha[:, t].exp()[..., None, None]
        w = torch.einsum("bhk,bhkv->bhv", key, a * S) - v[:, t]
        M = mu[:, t].exp()[..., None, None] * M - eta[:, t, :, None, None] * key[..., None] * w[..., None, :]
        S = a * S + beta[:, t, :, None, None] * M
        torch.testing.assert_close(o[:, t], 0.5 * torch.einsum("bhk,bhkv->bhv", unit(q)[:, t], S))
    torch.testing.assert_close(final, torch.stack([S, M]))
    with pytest.raises(NotImplementedError, match="use_p_times_alpha"):
        getattr(fla, name)(q, k, v, alpha, mu, use_p_times_alpha=False)


def test_rwkv4_goes_on_from_its_state() -> None:
    w, u, k, v = normal(K), normal(K), normal(B, T, K), normal(B, T, K)
    start = torch.zeros(B, 3, 1, K).double()
    start[:, 2] = -1e38
    o, state = fla.fused_recurrent_rwkv4(w, u, k, v, start)
    assert state.shape == start.shape
    wanted, last = flashmix.rwkv4(k, v, -w.exp(), u, return_state=True)
    assert last is not None
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(state[:, :, 0], torch.stack(last, 1))
    first, state = fla.fused_recurrent_rwkv4(w, u, k[:, :4], v[:, :4], start)
    torch.testing.assert_close(torch.cat([first, fla.fused_recurrent_rwkv4(w, u, k[:, 4:], v[:, 4:], state)[0]], 1), o)
