"""Rotary embedding against its definition, its bounds and its errors."""

from __future__ import annotations

import math

import definitions
import pytest
import torch
from rowwise_cases import (
    DTYPES,
    assert_compiles,
    assert_matches,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    random,
    saved_bytes,
)
from torch import Tensor

from flashmix import Packing
from flashmix.ops.rotary.joined import split_and_rotated
from flashmix.ops.rotary.op import rotary, rotary_table
from flashmix.ops.rotary.scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling


def counted(batch: int, tokens: int, start: int = 0) -> Tensor:
    return (start + torch.arange(tokens)).expand(batch, tokens)


def pairs_to_halves(x: Tensor, rotated: int) -> Tensor:
    """Channels `(2 i, 2 i + 1)` moved to `(i, i + R/2)`."""
    return torch.cat([x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]], dim=-1)


def halves_to_pairs(x: Tensor, rotated: int) -> Tensor:
    halves = x[..., :rotated].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([halves, x[..., rotated:]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated, channels", [(16, 16), (6, 16), (2, 7)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary_is_its_definition(
    rotated: int, channels: int, interleaved: bool, inverse: bool, dtype: torch.dtype
) -> None:
    cos, sin = rotary_table(32, rotated, dtype=torch.float64)
    signed = -sin if inverse else sin

    def definition(x: Tensor) -> Tensor:
        x = pairs_to_halves(x, rotated) if interleaved else x
        y = definitions.rotary(x, cos.to(x.dtype), signed.to(x.dtype), counted(2, 9, 4))
        return halves_to_pairs(y, rotated) if interleaved else y

    def op(x: Tensor) -> Tensor:
        return rotary(x, cos, sin, positions=4, interleaved=interleaved, inverse=inverse)

    assert_matches(op, definition, random(2, 9, 3, channels, dtype=dtype))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_ways_to_say_the_positions(tokens: int) -> None:
    cos, sin = rotary_table(40, 8)
    x = random(2, tokens, 3, 8)
    plain = rotary(x, cos, sin)
    assert_same_bits("int", rotary(x, cos, sin, positions=0), plain)
    assert_same_bits("tensor", rotary(x, cos, sin, positions=counted(2, tokens)), plain)
    assert_same_bits("int32", rotary(x, cos, sin, positions=counted(2, tokens).int()), plain)
    assert_same_bits("shifted", rotary(x, cos, sin, positions=7), rotary(x, cos[7:], sin[7:]))
    assert_same_bits("long table", rotary(x, cos[:tokens], sin[:tokens]), plain)


def test_left_padding_gives_the_same_numbers() -> None:
    cos, sin = rotary_table(16, 8)
    x = random(1, 5, 2, 8)
    padded = torch.cat([torch.zeros(1, 3, 2, 8), x], dim=1)
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
    assert_same_bits("padded", rotary(padded, cos, sin, positions=positions)[:, 3:], rotary(x, cos, sin))


def test_packed_is_one_by_one() -> None:
    cos, sin = rotary_table(16, 8)
    lengths = [3, 0, 1, 7]
    packing = Packing.from_lengths(lengths)
    x = random(1, 11, 2, 8)
    for start in (0, 5):
        alone = [rotary(part, cos, sin, positions=start) for part in x.split(lengths, dim=1)]
        for cu_seqlens in (packing, packing.cu_seqlens, packing.cu_seqlens.int()):
            assert_same_bits("packed", rotary(x, cos, sin, positions=start, cu_seqlens=cu_seqlens), torch.cat(alone, 1))


def test_inverse_undoes_and_lengths_are_kept() -> None:
    cos, sin = rotary_table(9, 8, dtype=torch.float64)
    x = random(2, 9, 3, 8, dtype=torch.float64)
    y = rotary(x, cos, sin)
    torch.testing.assert_close(rotary(y, cos, sin, inverse=True), x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_table_holds_the_angles() -> None:
    cos, sin = rotary_table(5, 6, base=100.0, dtype=torch.float64)
    angles = torch.arange(5.0).double()[:, None] * torch.tensor(
        [1.0, 100 ** (-2 / 6), 100 ** (-4 / 6)], dtype=torch.float64
    )
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def stretched(name: str, theta: float, factor: float, trained: int, dim: int, base: float, pair: int) -> float:
    """One frequency of each scaling, in the words of its paper."""
    turns = trained * theta / (2 * math.pi)
    if name == "linear":
        return theta / factor
    if name == "ntk":
        return (base * factor ** (dim / (dim - 2))) ** (-2 * pair / dim)
    if name == "llama3":
        if turns > 4:
            return theta
        if turns < 1:
            return theta / factor
        smooth = (turns - 1) / (4 - 1)
        return (1 - smooth) * theta / factor + smooth * theta
    # YaRN: pairs are counted; those that turn 32 times and once in the trained length bound the blend.
    first = math.floor(dim * math.log(trained / (32 * 2 * math.pi)) / (2 * math.log(base)))
    last = math.ceil(dim * math.log(trained / (1 * 2 * math.pi)) / (2 * math.log(base)))
    blend = min(max((pair - first) / (last - first), 0), 1)
    return theta / factor * blend + theta * (1 - blend)


@pytest.mark.parametrize(
    "name, scaling, magnitude",
    [
        ("linear", LinearScaling(4.0), 1.0),
        ("ntk", NTKScaling(4.0), 1.0),
        ("yarn", YarnScaling(4.0, trained=2048), 1.1386294361119891),
        ("yarn", YarnScaling(4.0, trained=2048, attention=1.0), 1.0),
        ("llama3", Llama3Scaling(4.0, trained=2048), 1.0),
    ],
)
def test_scaled_tables_hold_the_stretched_angles(name: str, scaling, magnitude: float) -> None:  # type: ignore[no-untyped-def]
    dim, base = 64, 10000.0
    cos, sin = rotary_table(50, dim, base, scaling=scaling, dtype=torch.float64)
    for pair in range(dim // 2):
        theta = stretched(name, base ** (-2 * pair / dim), 4.0, 2048, dim, base, pair)
        for position in (0, 1, 49):
            rounding = 16 * torch.finfo(torch.float64).eps * max(1.0, position * theta)  # of the angle
            assert abs(cos[position, pair].item() - magnitude * math.cos(position * theta)) <= rounding
            assert abs(sin[position, pair].item() - magnitude * math.sin(position * theta)) <= rounding


def test_scaling_by_one_changes_nothing() -> None:
    plain = rotary_table(9, 16, dtype=torch.float64)
    for scaling in (LinearScaling(1.0), NTKScaling(1.0), YarnScaling(1.0, trained=64), Llama3Scaling(1.0, trained=64)):
        for have, want in zip(rotary_table(9, 16, scaling=scaling, dtype=torch.float64), plain, strict=True):
            torch.testing.assert_close(have, want)
    with pytest.raises(ValueError, match=r"factor must be at least 1, got 0\.5"):
        LinearScaling(0.5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_follows_its_axis(interleaved: bool) -> None:
    """Several axes are several rotations, one for each section of pairs."""
    cos, sin = rotary_table(20, 12, dtype=torch.float64)
    axes = [0, 0, 1, 2, 2, 1]
    positions = torch.randint(20, (2, 7, 3), generator=torch.Generator().manual_seed(0))
    x = random(2, 7, 3, 14, dtype=torch.float64)
    y = rotary(x, cos, sin, positions=positions, axes=axes, interleaved=interleaved)
    turned = [rotary(x, cos, sin, positions=positions[..., axis], interleaved=interleaved) for axis in range(3)]
    for pair, axis in enumerate(axes):
        for channel in (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 6):
            assert_same_bits(f"pair {pair}", y[..., channel], turned[axis][..., channel])
    same = positions[..., :1].expand(2, 7, 3)
    assert_same_bits(
        "text", rotary(x, cos, sin, positions=same, axes=axes), rotary(x, cos, sin, positions=same[..., 0])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = rotary_table(9, 6)
    x = random(2, 9, 3, 8, dtype=dtype)
    want = rotary(x, cos, sin, interleaved=interleaved)
    got = rotary(x, cos, sin, interleaved=interleaved, inplace=True)
    assert got is x
    assert_same_bits("in place", x, want)
    with pytest.raises(ValueError, match="inplace must be False where a gradient is wanted, got True"):
        rotary(x.requires_grad_(), cos, sin, inplace=True)


def test_gradients_to_second_order() -> None:
    cos, sin = (t.requires_grad_() for t in rotary_table(4, 4, dtype=torch.float64))
    x = random(1, 3, 2, 5, dtype=torch.float64).requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        for interleaved in (False, True):
            assert check(lambda x: rotary(x, cos.detach(), sin.detach(), interleaved=interleaved), (x,))  # noqa: B023
            assert check(lambda *a: rotary(*a, interleaved=interleaved), (x, cos, sin))  # noqa: B023


def test_compiles() -> None:
    cos, sin = rotary_table(16, 6)
    assert_compiles(lambda x: rotary(x, cos, sin, positions=3), random(1, 7, 2, 8))
    packing = Packing.from_lengths([2, 5])
    assert_compiles(lambda x: rotary(x, cos, sin, cu_seqlens=packing.cu_seqlens), random(1, 7, 2, 8))
    positions = counted(1, 7).contiguous()
    assert_compiles(lambda x: rotary(x, cos, sin, positions=positions, interleaved=True), random(1, 7, 2, 8))


def test_positions_unread_are_bounded() -> None:
    """While tracing the contents are unknown: a position past the table reads its last row, never past it."""
    cos, sin = rotary_table(4, 4)
    compiled = torch.compile(lambda x, p: rotary(x, cos, sin, positions=p), fullgraph=True, backend="aot_eager")
    x = random(1, 2, 1, 4)
    assert_same_bits(
        "bounded", compiled(x, torch.tensor([[-3, 99]])), rotary(x, cos, sin, positions=torch.tensor([[0, 3]]))
    )


@pytest.mark.parametrize("channels", [6, 24])
def test_tokens_are_their_own(channels: int) -> None:
    cos, sin = rotary_table(403, channels)
    assert_rows_do_not_meet(lambda x: rotary(x, cos, sin), random(3, 403, 3, channels))
    assert_rows_do_not_meet(lambda x: rotary(x, cos, sin, interleaved=True), random(3, 403, 3, channels))
    assert_repeats(lambda x: rotary(x, cos, sin), random(3, 403, 3, channels))


def test_the_backward_keeps_cosines_and_sines_only() -> None:
    cos, sin = rotary_table(64, 32)
    assert saved_bytes(lambda x: rotary(x, cos, sin), random(2, 64, 3, 32)) == 2 * 64 * 16 * 4


def test_strided_inputs() -> None:
    cos, sin = rotary_table(8, 4)
    x = random(2, 3, 8, 4).transpose(1, 2)
    assert_same_bits("transposed", rotary(x, cos, sin), rotary(x.contiguous(), cos, sin))
    shared = random(1, 8, 1, 4).expand(2, 8, 3, 4)
    assert_same_bits("expanded", rotary(shared, cos, sin), rotary(shared.contiguous(), cos, sin))


X, (COS, SIN) = torch.ones(2, 4, 3, 8), rotary_table(16, 8)
REFUSED = [
    (
        {"cos": rotary_table(16, 24)[0]},
        ValueError,
        r"at most D/2 = 4 columns for heads of D = 8 channels, got 12: a table for 24",
    ),
    ({"sin": SIN[:, :2]}, ValueError, r"sin must have shape \[16, 4\], got \[16, 2\]"),
    ({"cos": COS[0]}, ValueError, r"cos must have shape \[P, R/2\], got \[4\]"),
    ({"x": torch.ones(2, 4, 24)}, ValueError, r"x must have shape \[B, T, H, D\], got \[2, 4, 24\]"),
    ({"x": X.long()}, TypeError, "x must have a floating dtype, got int64"),
    ({"cos": COS.long()}, TypeError, "cos must have a floating dtype, got int64"),
    ({"cos": COS.to("meta")}, ValueError, "cos must be on cpu like x, got meta"),
    ({"positions": 13}, ValueError, "positions must be below the table's length 16, got 16"),
    ({"positions": -1}, ValueError, "positions must be non-negative, got -1"),
    ({"positions": 1.5}, TypeError, "positions must be None, an int or a tensor, got float"),
    ({"positions": torch.full((2, 4), 16)}, ValueError, "positions must be below the table's length 16, got 16"),
    ({"positions": torch.full((2, 4), -2)}, ValueError, "positions must be non-negative, got -2"),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, ValueError, r"positions must have shape \[2, 4\], got \[4\]"),
    ({"positions": torch.zeros(2, 4)}, TypeError, "positions must have dtype int32 or int64, got float32"),
    ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens must come with inputs of batch size 1"),
    ({"x": X[:1], "cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens must end at the token count 4, got 3"),
    (
        {"x": X[:1], "cu_seqlens": torch.tensor([0, 4]), "positions": torch.zeros(1, 4).long()},
        ValueError,
        "got a tensor",
    ),
    ({"x": X[:1], "cu_seqlens": torch.tensor([0, 1, 4]), "positions": 14}, ValueError, "table's length 16, got 16"),
    ({"axes": [0] * 4}, TypeError, "positions must be a torch.Tensor, got NoneType"),
    ({"axes": [0] * 4, "positions": torch.zeros(2, 4).long()}, ValueError, r"positions must have shape \[B, T, A\]"),
    ({"axes": [0] * 3, "positions": torch.zeros(2, 4, 3).long()}, ValueError, "axes must have R/2 = 4 entries, got 3"),
    (
        {"axes": [0, 0, 3, 0], "positions": torch.zeros(2, 4, 3).long()},
        ValueError,
        "axes must be between 0 and 2, got 3",
    ),
    ({"axes": [0] * 4, "positions": torch.full((2, 4, 3), 16)}, ValueError, "table's length 16, got 16"),
    ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
]


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_rotary_refuses(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rotary(**{"x": X, "cos": COS, "sin": SIN, **arguments})


@pytest.mark.parametrize("dim", [0, -2, 63])
def test_rotary_table_refuses_odd_dims(dim: int) -> None:
    with pytest.raises(ValueError, match=f"dim must be even and positive .*, got {dim}"):
        rotary_table(4, dim)
    with pytest.raises(ValueError, match="positions must be non-negative, got -1"):
        rotary_table(-1, 4)


@pytest.mark.interpreted
@pytest.mark.parametrize("lengths", [None, (3, 0, 4)])
@pytest.mark.parametrize("used", ["qkv", "k", "v"])
def test_parts_of_one_projection_have_one_gradient(lengths, used):
    """With the bits of split and rotary; float16, for the interpreter cuts bfloat16 off."""
    packing = None if lengths is None else Packing.from_lengths(list(lengths))
    qkv = torch.randn(1 if lengths else 2, 7, 8, 16, dtype=torch.float16).requires_grad_()
    cos, sin = rotary_table(7, 16)
    found = []
    for joined in (False, True):
        if joined:
            q, k, v = split_and_rotated(qkv, (4, 2, 2), (cos, sin, packing, False))
        else:
            qk, v = qkv.split([6, 2], dim=2)
            q, k = rotary(qk, cos, sin, cu_seqlens=packing, impl="triton").split([4, 2], dim=2)
        loss = sum(
            (t.float() * torch.arange(t.numel()).view(t.shape) / t.numel()).sum()
            for n, t in zip("qkv", (q, k, v), strict=True)
            if n in used
        )
        found.append([q, k, v, *torch.autograd.grad(loss, [qkv])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
