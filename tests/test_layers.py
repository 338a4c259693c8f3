"""Every layer: its paper's step, cached = full, packed = one by one, padded = unpadded, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from budget import assert_within_budget
from definitions import l2_norm
from layer_math import convolve, delta_inputs, heads, rms
from model_cases import LAYERS, WIDTH, assert_same, left_padded, make_layer, numbers
from samples import every, sample
from torch import Tensor
from torch.nn.functional import layer_norm, logsigmoid, silu, softplus

from flashmix.layers import GLA, KDA, RWKV7, AttentionCache, DeltaNet, GatedDeltaNet, Mamba2, RecurrentCache, RetNet
from flashmix.op.packing import Packing

LENGTHS = [3, 0, 1, 6]

every_layer = pytest.mark.parametrize("name", LAYERS)


def some_layers(first: int) -> pytest.MarkDecorator:
    """Every layer; by default one in three, another third in the next test."""
    return pytest.mark.parametrize("name", every(3, LAYERS, first))


@every_layer
def test_prefill_then_steps_then_chunks_is_the_full_forward(name: str) -> None:
    layer, x = make_layer(name), numbers(2, 12, WIDTH)
    with torch.no_grad():
        full = layer(x)
        for parts in ([12], [1] * 12, [5, 1, 1, 1, 3, 1], [2, 7, 0, 1, 2], [0, 4, 8]):
            cache = layer.new_cache()
            assert_same(torch.cat([layer(part, cache=cache) for part in x.split(parts, dim=1)], dim=1), full)


@every_layer
def test_packed_is_one_by_one(name: str) -> None:
    layer, x = make_layer(name), numbers(1, sum(LENGTHS), WIDTH)
    one_by_one = torch.cat([layer(part) for part in x.split(LENGTHS, dim=1)], dim=1)
    packing = Packing.from_lengths(LENGTHS)
    assert_same(layer(x, cu_seqlens=packing), one_by_one)
    assert_same(layer(x, cu_seqlens=packing.cu_seqlens.int()), one_by_one)


@some_layers(0)
def test_packed_prefill_fills_a_cache_for_each_sequence(name: str) -> None:
    layer, x, later = make_layer(name), numbers(1, sum(LENGTHS), WIDTH), numbers(len(LENGTHS), 4, WIDTH, seed=2)
    with torch.no_grad():
        cache = layer.new_cache()
        layer(x, cu_seqlens=Packing.from_lengths(LENGTHS), cache=cache)
        steps = torch.cat([layer(later[:, t : t + 1], cache=cache) for t in range(2)], dim=1)
        chunk = layer(later[:, 2:], cache=cache)
        for row, part in enumerate(x.split(LENGTHS, dim=1)):
            full = layer(torch.cat([part, later[row : row + 1]], dim=1))[0, -4:]
            assert_same(torch.cat([steps[row], chunk[row]]), full)


@some_layers(1)
def test_packed_continuation_of_a_cache(name: str) -> None:
    layer, first, second = make_layer(name), numbers(1, 10, WIDTH), numbers(1, 10, WIDTH, seed=2)
    before, after = [6, 0, 4, 0], [2, 3, 0, 5]
    with torch.no_grad():
        cache = layer.new_cache()
        layer(first, cu_seqlens=Packing.from_lengths(before), cache=cache)
        got = layer(second, cu_seqlens=Packing.from_lengths(after), cache=cache)
        parts = zip(first.split(before, 1), second.split(after, 1), got.split(after, 1), strict=True)
        for old, new, out in parts:
            assert_same(out, layer(torch.cat([old, new], dim=1))[:, old.shape[1] :])


@some_layers(2)
def test_padding_changes_nothing_wherever_it_is(name: str) -> None:
    layer, x = make_layer(name), numbers(3, 7, WIDTH)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0, 1]])
    got = layer(x, attention_mask=mask)
    for row in range(3):
        real = mask[row] == 1
        assert_same(got[row, real], layer(x[row : row + 1, real])[0])
        assert not got[row, ~real].any()
    packed = x[mask == 1][None]
    assert_same(got[mask == 1][None], layer(packed, cu_seqlens=Packing.from_lengths(mask.sum(1))))


@some_layers(0)
def test_a_mask_without_padding_is_no_mask(name: str) -> None:
    layer, x = make_layer(name), numbers(2, 5, WIDTH)
    assert torch.equal(layer(x, attention_mask=torch.ones(2, 5, dtype=torch.bool)), layer(x))


@some_layers(1)
def test_left_padded_prefill_then_steps(name: str) -> None:
    layer = make_layer(name)
    rows = [numbers(1, length, WIDTH, seed=length) for length in (7, 2, 5)]
    later = numbers(3, 5, WIDTH)
    padded, mask = left_padded(rows, fill=9.0)
    with torch.no_grad():
        cache = layer.new_cache()
        layer(padded, attention_mask=mask, cache=cache)
        steps = torch.cat([layer(later[:, t : t + 1], cache=cache) for t in range(5)], dim=1)
        for index, row in enumerate(rows):
            assert_same(steps[index], layer(torch.cat([row, later[index : index + 1]], dim=1))[0, -5:])


@every_layer
def test_gradients_reach_every_parameter_and_no_later_token(name: str) -> None:
    layer, x = make_layer(name), numbers(2, 6, WIDTH).requires_grad_()
    layer(x).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} has no gradient"
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), f"{parameter_name}: {parameter.grad}"
    (gradient,) = torch.autograd.grad(layer(x)[:, 3].sum(), x)
    assert gradient[:, 3].any() and not gradient[:, 4:].any()


@some_layers(2)
def test_the_numerical_gradient_agrees(name: str) -> None:
    layer, x = make_layer(name), numbers(1, 4, WIDTH)
    names, values = zip(*layer.named_parameters(), strict=True)
    direction = [numbers(*value.shape, seed=seed) for seed, value in enumerate(values)]

    def loss(step: float) -> Tensor:
        moved = {n: v + step * d for n, v, d in zip(names, values, direction, strict=True)}
        return torch.func.functional_call(layer, moved, (x,)).square().sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(0.0), values), direction, strict=True))
    h = 1e-5
    with torch.no_grad():
        quotients = [(8 * (loss(s) - loss(-s)) - (loss(2 * s) - loss(-2 * s))) / (12 * s) for s in (h, 10 * h)]
        rounding = 64 * torch.finfo(torch.float64).eps * loss(0.0) / h
    truncation = abs(quotients[1] - quotients[0])  # of the wider one, 10^4 times that of the narrow one
    assert abs(slope - quotients[0]) <= truncation + rounding


@some_layers(0)
def test_earlier_outputs_do_not_depend_on_later_tokens(name: str) -> None:
    layer, x = make_layer(name, torch.float32), numbers(2, 9, WIDTH, dtype=torch.float32)
    changed = torch.cat([x[:, :6], 100 * x[:, 6:]], dim=1)
    assert torch.equal(layer(x)[:, :6], layer(changed)[:, :6])


@some_layers(1)
def test_state_dict_round_trip(name: str) -> None:
    layer, x = make_layer(name), numbers(2, 5, WIDTH)
    torch.manual_seed(1)
    other = LAYERS[name]().double()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@some_layers(2)
def test_dtypes_devices_and_short_inputs(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(name, dtype)
        for tokens in (0, 1, 5):
            y = layer(numbers(2, tokens, WIDTH, dtype=dtype))
            assert y.shape == (2, tokens, WIDTH) and y.dtype == dtype and torch.isfinite(y).all()
        with torch.no_grad():
            cache = layer.new_cache()
            for _ in range(3):
                assert layer(numbers(2, 1, WIDTH, dtype=dtype), cache=cache).dtype == dtype


@some_layers(0)
def test_autocast_trains_and_decodes(name: str) -> None:
    layer, x = make_layer(name, torch.float32), numbers(2, 9, WIDTH, dtype=torch.float32)
    wanted = layer(x).detach()
    narrow = make_layer(name, torch.bfloat16)(x.bfloat16()).detach()
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
        got.float().square().sum().backward()
        with torch.no_grad():
            cache = layer.new_cache()
            cached = torch.cat([layer(part, cache=cache) for part in x.split([4, 1, 1, 3], dim=1)], dim=1)
    assert got.dtype == torch.bfloat16
    assert_within_budget("forward", got.detach(), wanted, narrow)
    assert_within_budget("cached", cached, wanted, narrow)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@some_layers(1)
def test_the_same_bits_again(name: str) -> None:
    layer, x = make_layer(name, torch.float32), numbers(1, 10, WIDTH, dtype=torch.float32)
    packing = Packing.from_lengths(LENGTHS)

    def run() -> list[Tensor]:
        y = layer(x, cu_seqlens=packing)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    assert all(torch.equal(once, again) for once, again in zip(run(), run(), strict=True))


# Attention, a decay per token and per channel, of the value axis; the others, of which three more compile as models, with `-m whole`.
COMPILED = ("attention", "hgrn2", "kda", "mamba2")


@pytest.mark.parametrize("name", sample(LAYERS, COMPILED))
def test_compiles_without_a_break(name: str) -> None:
    torch.compiler.reset()
    layer, x = make_layer(name), numbers(2, 5, WIDTH)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_same(compiled(x), layer(x))


@some_layers(2)
def test_snapshot_restore_and_reorder(name: str) -> None:
    layer, x = make_layer(name), numbers(3, 9, WIDTH)
    order = torch.tensor([2, 0, 2, 1])
    with torch.no_grad():
        cache = layer.new_cache()
        layer(x[:, :5], cache=cache)
        snapshot = cache.snapshot()
        expected = [layer(x[:, t : t + 1], cache=cache) for t in range(5, 9)]
        for _ in range(2):
            cache.restore(snapshot)
            got = [layer(x[:, t : t + 1], cache=cache) for t in range(5, 9)]
            assert_same(torch.cat(got, 1), torch.cat(expected, 1))
        cache.restore(snapshot)
        cache.reorder(order)
        got = [layer(x[order, t : t + 1], cache=cache) for t in range(5, 9)]
        assert_same(torch.cat(got, 1), torch.cat(expected, 1)[order])


@every_layer
def test_what_a_layer_refuses(name: str) -> None:
    layer, x = make_layer(name), numbers(2, 4, WIDTH)
    packed, mask = x.view(1, 8, WIDTH), torch.ones(1, 8)
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens must not both be given"):
        layer(packed, cu_seqlens=Packing.from_lengths([4, 4]), attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[2, 4\], got \[2, 5\]"):
        layer(x, attention_mask=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match="attention_mask must have dtype bool or int64"):
        layer(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"x must have shape \[2, 4, 16\], got \[2, 4, 17\]"):
        layer(numbers(2, 4, 17))
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, D\], got \[2, 16\]"):
        layer(x[:, 0])
    with pytest.raises(ValueError, match="cu_seqlens must come with inputs of batch size 1"):
        layer(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="it carries no gradient"):
        layer(x, cache=layer.new_cache())
    with torch.no_grad():
        cache = layer.new_cache()
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="cache must hold 3 sequences like x, got 2"):
            layer(numbers(3, 1, WIDTH), cache=cache)
        wrong = RecurrentCache() if isinstance(cache, AttentionCache) else AttentionCache()
        with pytest.raises(TypeError, match=f"cache must be an? {type(cache).__name__}, got {type(wrong).__name__}"):
            layer(x, cache=wrong)


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="head_dim must be given where heads = 3 does not divide 16"):
        DeltaNet(16, 3)
    with pytest.raises(ValueError, match="value_heads must be a positive multiple of heads = 4, got 6"):
        GatedDeltaNet(16, 4, value_heads=6)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        RetNet(16, 0)
    with pytest.raises(ValueError, match="heads must be a positive multiple of groups = 3, got 4"):
        Mamba2(16, 4, groups=3)
    with pytest.raises(ValueError, match="lower must be between"):
        KDA(16, 2, lower=-6.0)


# Each family against its paper's step, token by token, with nothing of flashmix but the layer's own weights.


def recurrence_loop(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor | None = None, write: Tensor | None = None
) -> Tensor:
    """`S = decay S - write (erase^T S) + k v^T`, `o = S^T q`; `[T, H, K]`, `v` `[T, H, V]`, decay `[T, H, K or 1]`."""
    T, H, K = q.shape
    S = q.new_zeros(H, K, v.shape[-1])
    outputs = []
    for t in range(T):
        old = S
        S = decay[t][..., None] * S + k[t][:, :, None] * v[t][:, None, :]
        if erase is not None and write is not None:
            S = S - write[t][:, :, None] * (erase[t][:, :, None] * old).sum(1, keepdim=True)
        outputs.append((S * q[t][:, :, None]).sum(1))
    return torch.stack(outputs)


def test_deltanet_is_its_paper() -> None:
    layer, x = make_layer("deltanet"), numbers(7, WIDTH)
    assert isinstance(layer, DeltaNet)
    q, k, v = delta_inputs(layer, x)
    beta = 2 * torch.sigmoid(x @ layer.strength.weight.T)[..., None]
    o = recurrence_loop(q, k, beta * v, torch.ones_like(beta), erase=k, write=beta * k)
    expected = (rms(o) * layer.norm.weight).flatten(1) @ layer.output.weight.T
    assert_same(layer(x[None])[0], expected)


def test_gated_deltanet_is_its_paper() -> None:
    layer, x = make_layer("gated_deltanet"), numbers(7, WIDTH)
    assert isinstance(layer, GatedDeltaNet)
    q, k, v = delta_inputs(layer, x)
    b, a = (x @ layer.strength_and_decay.weight.T).chunk(2, -1)
    beta = torch.sigmoid(b)[..., None]
    decay = torch.exp(-layer.decay.A_log.exp() * softplus(a + layer.decay.dt_bias))[..., None]
    o = recurrence_loop(q, k, beta * v, decay, erase=decay * k, write=beta * k)
    gate = heads(x @ layer.gate.weight.T, layer.value_heads)
    assert_same(layer(x[None])[0], (rms(o) * layer.norm.weight * silu(gate)).flatten(1) @ layer.output.weight.T)


@pytest.mark.parametrize("name", ["kda", "kda_bounded"])
def test_kda_is_its_paper(name: str) -> None:
    layer, x = make_layer(name), numbers(7, WIDTH)
    assert isinstance(layer, KDA)
    q, k, v = delta_inputs(layer, x)
    beta = torch.sigmoid(x @ layer.strength.weight.T)[..., None]
    f = heads(x @ layer.decay_projection.down.weight.T @ layer.decay_projection.up.weight.T, 2)
    rate = layer.decay.A_log.exp()[:, None]
    biased = f + layer.decay.dt_bias
    g = -rate * softplus(biased) if layer.lower is None else layer.lower * torch.sigmoid(rate * biased)
    decay = torch.exp(g)
    o = recurrence_loop(q, k, beta * v, decay, erase=decay * k, write=beta * k)
    gate = heads(x @ layer.gate.down.weight.T @ layer.gate.up.weight.T + layer.gate.up.bias, 2)
    expected = (rms(o) * layer.norm.weight * torch.sigmoid(gate)).flatten(1) @ layer.output.weight.T
    assert_same(layer(x[None])[0], expected)


def test_gla_is_its_paper() -> None:
    layer, x = make_layer("gla"), numbers(7, WIDTH)
    assert isinstance(layer, GLA)
    q, k, v, gate = (heads(part, 2) for part in (x @ layer.qkvg.weight.T).split(layer.qkvg.sizes, -1))
    low = x @ layer.decay_projection.down.weight.T @ layer.decay_projection.up.weight.T
    decay = torch.exp(logsigmoid(heads(low + layer.decay_projection.up.bias, 2)) / 16)
    o = recurrence_loop(q * layer.head_dim**-0.5, k, v, decay)
    expected = (rms(o) * layer.norm.weight * silu(gate)).flatten(1) @ layer.output.weight.T
    assert_same(layer(x[None])[0], expected)


def test_retnet_is_its_paper() -> None:
    layer, x = make_layer("retnet"), numbers(7, WIDTH)
    assert isinstance(layer, RetNet)
    qk, v, gate = (x @ layer.qkvg.weight.T).split(layer.qkvg.sizes, -1)
    pairs = heads(qk, 4).unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
    frequency = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    angle = torch.arange(7, dtype=torch.float64)[:, None] * frequency
    turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())  # the table is float32
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turn[:, None]).transpose(-1, -2).flatten(-2)
    q, k = turned.chunk(2, dim=1)
    decay = (1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64))).log().float().double().exp()
    o = recurrence_loop(q * layer.head_dim**-0.5, k, heads(v, 2), decay[None, :, None].expand(7, 2, 1))
    expected = (rms(o) * layer.norm.weight * silu(heads(gate, 2))).flatten(1) @ layer.output.weight.T
    assert_same(layer(x[None])[0], expected)


@pytest.mark.parametrize("name", ["mamba2", "mamba2_groups", "mamba2_one_norm"])
def test_mamba2_is_its_paper(name: str) -> None:
    layer, x = make_layer(name), numbers(7, WIDTH)
    assert isinstance(layer, Mamba2)
    xbc, z, step = (x @ layer.input.weight.T).split(layer.input.sizes, -1)
    xbc = convolve(xbc, layer.convolution.weight, layer.convolution.bias)
    values, B, C = xbc.split(layer.inner_sizes, -1)
    B, C = (heads(part, layer.groups).repeat_interleave(4 // layer.groups, 1) for part in (B, C))
    values, dt = heads(values, 4), softplus(step + layer.decay.dt_bias)[..., None]
    o = recurrence_loop(C, B, dt * values, torch.exp(-layer.decay.A_log.exp()[:, None] * dt))
    o = heads((o + layer.skip[:, None] * values).flatten(1) * silu(z), layer.norm.groups)
    o = rms(o, layer.norm.eps).flatten(1) * layer.norm.weight
    assert_same(layer(x[None])[0], o @ layer.output.weight.T)


def test_rwkv7_is_its_paper() -> None:
    layer, x = RWKV7(WIDTH, 2, value_residual=True).double(), numbers(7, WIDTH)
    first_values = numbers(7, WIDTH, seed=2)
    torch.nn.init.normal_(layer.bonus)
    shifted = torch.cat([x.new_zeros(1, WIDTH), x[:-1]])
    r, w, k, v, a, g = (x + mix * (shifted - x) for mix in layer.shift_mix)

    def low_rank(module: torch.nn.Module, inputs: Tensor) -> Tensor:
        hidden = inputs @ module.down.weight.T
        hidden = hidden if module.activation is None else module.activation(hidden)
        return hidden @ module.up.weight.T + (0 if module.up.bias is None else module.up.bias)

    own = v @ layer.value.weight.T
    v = heads(own + (first_values - own) * torch.sigmoid(low_rank(layer.value_mix, v)), 2)
    a = torch.sigmoid(low_rank(layer.remove, a))
    r, k = heads(r @ layer.receptance.weight.T, 2), k @ layer.key.weight.T
    kk = l2_norm(heads(k * layer.removal_key, 2))
    k = heads(k * (1 + (a - 1) * layer.key_keep), 2)
    decay = torch.exp(-0.6065306597126334 * torch.sigmoid(heads(low_rank(layer.decay_projection, w), 2)))
    o = recurrence_loop(r, k, v, decay, erase=kk, write=kk * heads(a, 2))
    o = layer_norm(o, (8,), eps=64e-5).flatten(1) * layer.norm_weight + layer.norm_bias
    o = o + ((r * k * layer.bonus).sum(-1, keepdim=True) * v).flatten(1)
    expected = (o * low_rank(layer.gate, g)) @ layer.output.weight.T
    got, values = layer(x[None], first_values=first_values[None], return_values=True)
    assert_same(got[0], expected)
    assert_same(values[0], own)
    with pytest.raises(ValueError, match="first_values must be given"):
        layer(x[None])
    with pytest.raises(ValueError, match=r"first_values must have shape \[1, 7, 16\], got \[1, 6, 16\]"):
        layer(x[None], first_values=first_values[None, :6])
