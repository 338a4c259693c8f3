"""The kernels of softmax attention without a GPU: compiled for every target, and a few calls in Triton's interpreter.

Compiling all of `CALLS` for all targets takes half an hour (FLASHMIX_ALL_KERNELS=1); by default only FAST are, for a Hopper card
and for the card with the least shared memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from samples import sample, sample_of_rows

pytest.importorskip("triton")

from attention_cases import CASES, EVERYTHING, KERNEL_STEPS, Case, make_call
from budget import assert_within_budget
from compilers.late_reads import late_reads
from compilers.triton_carries import not_carried
from kernels import TARGETS, Launch, code_of, compile_launch, recording

from flashmix import Packing, explain
from flashmix.gpu.arch import SHARED_MEMORY_KIB
from flashmix.ops.attention import call as limits
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention.gluon_hopper import backward_host
from flashmix.ops.attention.gluon_hopper.plan import Plans
from flashmix.ops.attention_cache import KVCache, attention_with_cache

BF16 = torch.bfloat16
T = 300
# By the number of query heads.
FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda heads: {"causal": True},
    "window": lambda heads: {"window": (20, 5), "dropout_p": 0.1},
    "softcap": lambda heads: {"causal": True, "softcap": 9.0, "sink": torch.empty(heads)},
    "alibi": lambda heads: {"causal": True, "alibi_slopes": torch.empty(heads)},
    "decay": lambda heads: {"causal": True, "log_decay": torch.empty(1, T, heads)},
    "packed": lambda heads: {"causal": True, "cu_seqlens": torch.tensor([0, 7, T], dtype=torch.int32)},
    "ranges": lambda heads: {"causal": True, "key_starts": torch.tensor([3]), "key_lengths": torch.tensor([200])},
    "everything": lambda heads: {
        "window": (20, 0),
        "causal": True,
        "softcap": 9.0,
        "sink": torch.empty(heads),
        "alibi_slopes": torch.empty(heads),
        "log_decay": torch.empty(1, T, heads),
        "dropout_p": 0.1,
        "cu_seqlens": torch.tensor([0, 7, T], dtype=torch.int32),
    },
}


def call(
    dim: int,
    dim_v: int,
    feature: str,
    dtype: torch.dtype,
    gradient: bool = True,
    impl: str = "triton",
    heads: int = 2,
    group: int = 1,
) -> Callable[[], None]:
    def run() -> None:
        shapes = ((heads * group, dim), (heads, dim), (heads, dim_v))
        leaves = [torch.zeros(1, T, *shape, dtype=dtype, requires_grad=gradient) for shape in shapes]
        options = FEATURES[feature](heads * group)
        if impl == "gluon":
            options.pop("dropout_p", None)
        o, _ = softmax_attention(*leaves, **options, impl=impl)
        if gradient:
            torch.autograd.grad(o, leaves, torch.zeros_like(o))

    return run


CALLS = {
    f"{dim}/{dim_v} {feature} {dtype}": call(dim, dim_v, feature, dtype)
    for dim, dim_v, feature, dtype in (
        *((dim, dim, feature, BF16) for dim in (64, 128) for feature in FEATURES),
        *((dim, dim_v, "plain", BF16) for dim, dim_v in ((1, 1), (24, 8), (80, 80), (96, 40), (192, 128), (256, 256))),
        *((dim, dim, "everything", BF16) for dim in (96, 192, 256)),
        *((dim, dim, "plain", torch.float16) for dim in (64, 128)),
        *((dim, dim, feature, torch.float32) for dim in (64, 128, 256) for feature in ("plain", "everything")),
    )
}
CALLS |= {f"512 {dtype}": call(512, 512, "plain", dtype, gradient=False) for dtype in (BF16, torch.float32)}


def cached(
    dim: int, dim_v: int, dtype: torch.dtype, page_size: int, tokens: int, packed: bool = False
) -> Callable[[], None]:
    """Append and attend, with a window and a sink; in pages of `page_size`, or in one (0)."""

    def run() -> None:
        sizes = {"heads": 2, "dim_qk": dim, "dim_v": dim_v, "dtype": dtype}
        cache = KVCache.contiguous(3, 5000, **sizes)
        if page_size:
            cache = KVCache.paged(60, page_size, torch.zeros(3, 5000 // page_size, dtype=torch.int32), **sizes)
        shape = (1, 3 * tokens) if packed else (3, tokens)
        q, k, v = (torch.zeros(*shape, h, d, dtype=dtype) for h, d in ((8, dim), (2, dim), (2, dim_v)))
        options = {"cu_seqlens": torch.arange(4) * tokens} if packed else {}
        attention_with_cache(
            q, cache, k, v, window=(4000, 0), sink=torch.zeros(8), return_lse=True, impl="triton", **options
        )

    return run


CALLS |= {
    f"cache {dim}/{dim_v} {dtype} pages of {page_size}, {tokens} tokens, packed {packed}": cached(
        dim, dim_v, dtype, page_size, tokens, packed
    )
    for dim, dim_v, dtype, page_size, tokens, packed in (
        *((128, 128, BF16, page_size, tokens, False) for page_size in (0, 16, 128) for tokens in (1, 4, 300)),
        (64, 64, BF16, 0, 2, True),
        (192, 128, BF16, 16, 1, False),
        (256, 256, BF16, 0, 40, False),
        (100, 24, BF16, 16, 40, True),
        (128, 128, torch.float32, 16, 3, False),
        (256, 256, torch.float32, 0, 1, True),
    )
}
FAST = (
    "128/128 plain torch.bfloat16",
    "80/80 plain torch.bfloat16",
    "cache 128/128 torch.bfloat16 pages of 16, 1 tokens, packed False",
)
COMPILED_EVERYWHERE = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
MOST_STACK = 1024  # bytes a thread, of what does not fit into registers
EVERYWHERE = {
    "cache 256/256 torch.float32 pages of 0, 1 tokens, packed True": 2376,
    "128/128 everything torch.float32": 1072,
}
STACK = {  # what was counted, where it is more: right, and slow
    ("192/192 everything torch.bfloat16", (8, 0)): 6304,
    ("64/64 everything torch.bfloat16", (9, 0)): 1208,
    ("256/256 everything torch.bfloat16", (9, 0)): 1056,
}


@pytest.mark.parametrize("name", CALLS if COMPILED_EVERYWHERE else sample(FAST, (FAST[0], FAST[2])))
def test_kernels_compile(name: str) -> None:
    few = ((8, 6),) if name.startswith("128/128") else ((9, 0),)
    for capability in TARGETS if COMPILED_EVERYWHERE else few:
        with recording(capability) as launches:
            CALLS[name]()
        assert launches
        for launch in launches:
            made = compile_launch(launch)
            where = f"{launch.name} of {name} for {capability}"
            assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024, f"{where}: {made.shared} bytes of shared memory"
            most = STACK.get((name, capability), EVERYWHERE.get(name, MOST_STACK))
            assert made.stack <= most, f"{where}: {made.stack} bytes of stack"


CARRYING = [name for name in CALLS if "128/128" in name]
FEW_CARRYING = [
    name for name in CARRYING if "everything torch.bfloat16" in name or "pages of 16, 3" in name or "ranges" in name
]


@pytest.mark.parametrize("name", CALLS if COMPILED_EVERYWHERE else sample(CARRYING, FEW_CARRYING))
def test_loops_carry_what_they_change(name: str) -> None:
    with recording((9, 0)) as launches:
        CALLS[name]()
    for launch in launches:
        assert not not_carried(launch), launch.name


HOPPER = {
    f"{dim}/{dim_v} {feature} {dtype}": call(dim, dim_v, feature, dtype, impl="gluon")
    for dim, dim_v, feature, dtype in (
        *((128, 128, feature, BF16) for feature in FEATURES if feature != "ranges"),
        *((dim, dim, "plain", BF16) for dim in (80, 96, 192, 256)),
        (64, 64, "packed", BF16),
        *((dim, 128, "plain", dtype) for dim, dtype in ((192, BF16), (64, BF16), (128, torch.float16))),
        *((dim, dim, "everything", BF16) for dim in (96, 256)),
    )
}
HOPPER |= {f"{dim}/{dim} grouped": call(dim, dim, "plain", BF16, impl="gluon", group=4) for dim in (96, 128, 192)}
FAST_HOPPER = ("128/128 packed torch.bfloat16", "192/128 plain torch.bfloat16", "192/192 grouped")
SERIAL = {f"C75{n}" for n in range(10, 18)}  # ptxas waits for each product by itself


@pytest.mark.parametrize(
    "name", HOPPER if COMPILED_EVERYWHERE else sample(FAST_HOPPER, (FAST_HOPPER[0], FAST_HOPPER[2]))
)
def test_hopper_kernels_compile(name: str) -> None:
    """Within shared memory, next to nothing outside the registers, and no product that ptxas waits for."""
    with recording((9, 0)) as launches:
        HOPPER[name]()
    ours = [launch for launch in launches if launch.name.startswith("hopper_")]
    assert ours
    for launch in ours:
        assert_compiles(launch, name, 512 if "everything" in name or "256/256" in name else 256)


def assert_compiles(launch: Launch, name: str, most: int) -> None:
    made = compile_launch(launch)
    assert made.shared <= SHARED_MEMORY_KIB[9, 0] * 1024, f"{launch.name} of {name}: {made.shared} bytes"
    assert made.stack <= most, f"{launch.name} of {name}: {made.stack} bytes"
    assert not made.advice & SERIAL, f"{launch.name} of {name}: {made.advice}"


# Of eight heads, one of which goes from its first keys; two that programs stay for come first.
BACKWARD = (
    (64, "packed"),
    (128, "window"),
    (64, "window"),
    (64, "softcap"),
    *((dim, "plain") for dim in (80, 96, 128, 192)),
    (128, "packed"),
    (192, "packed"),
)


@pytest.mark.parametrize(
    "dim, feature", BACKWARD if COMPILED_EVERYWHERE else sample_of_rows(BACKWARD[:2], [BACKWARD[1]])
)
def test_hopper_backward_of_eight_heads_compiles(dim: int, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, and no reader of k or v leaves it to the next copy before it has read."""
    monkeypatch.setattr(limits, "LEAST_CHANNELS_CAUSAL", 0)
    monkeypatch.setattr(backward_host, "PLANS", Plans(backward_host.BackwardPlan))
    with recording((9, 0)) as launches:
        call(dim, dim, feature, BF16, impl="gluon", heads=8)()
    (launch,) = (launch for launch in launches if re.match("hopper_backward(_stay|_keys)?_kernel", launch.name))
    assert_compiles(launch, f"{dim} {feature}", 256)
    if "stay" in launch.name:
        found = late_reads(code_of(launch).asm["cubin"])
        # readers of the blocks' numbers may still read, as a thread writes these: all roles but one arrive there, twice in the code
        numbers = max({barrier for barrier, _ in found}, key=[barrier for barrier, _ in found].count)
        assert {barrier for barrier, reads in found if reads} <= {numbers}


@pytest.mark.parametrize(
    "dims, options, reason",
    [
        ((128, 128), {"dropout_p": 0.1}, "it has no dropout"),
        ((64, 64), {"causal": True}, "Triton's kernels are as fast for such calls with head dims below 65"),
        ((32, 32), {}, "its tiles take head dims from 33 to 256, got 32"),
        ((300, 128), {}, "its tiles take head dims from 33 to 256, got 300"),
        ((128, 128), {"dtype": torch.float32}, "its kernels take bfloat16 and float16, got torch.float32"),
        ((128, 128), {"tokens_k": 0}, "the inputs are empty"),
        ((128, 128), {}, "it needs tensors on a CUDA device, got cpu"),
    ],
)
def test_what_hopper_refuses(dims: tuple[int, int], options: dict[str, Any], reason: str) -> None:
    options = dict(options)
    dtype, tokens_k = options.pop("dtype", BF16), options.pop("tokens_k", 5)
    q, k, v = (
        torch.zeros(1, t, 2, d, dtype=dtype) for t, d in ((5, dims[0]), (tokens_k, dims[0]), (tokens_k, dims[1]))
    )
    found = explain(softmax_attention, q, k, v, **options)
    assert found.choice != "gluon" and found.reasons["gluon"] == reason


def test_lengths_and_packing_do_not_recompile() -> None:
    """Fault 11: a new length, batch or packing of the same kind runs what is compiled already."""
    for feature in ("plain", "packed"):
        with recording((9, 0)) as launches:
            for batch, tokens, heads in ((1, 16, 2), (1, 1, 2), (3, 1000, 4), (1, 129, 1)):
                ends = torch.tensor([0, 1, tokens], dtype=torch.int32)
                batch, options = (1, {"cu_seqlens": ends}) if feature == "packed" else (batch, {})
                leaves = [torch.zeros(batch, tokens, heads, 64, dtype=BF16, requires_grad=True) for _ in range(3)]
                o, _ = softmax_attention(*leaves, causal=True, impl="triton", **options)
                torch.autograd.grad(o, leaves, torch.zeros_like(o))
        names = [
            launch.name for launch in launches if launch.name != "block_table_kernel"
        ]  # one for each size of blocks
        assert len(names) == len(set(names)) == 4, names


def test_a_packing_makes_each_table_once() -> None:
    """However many layers and passes ask for it; queries and keys of one packing share it too."""
    from flashmix.ops.attention.triton_gpu import packed

    packing = Packing.from_lengths([7, T - 7])
    with recording((9, 0)), mock.patch.object(packed, "table_of", wraps=packed.table_of) as made:
        for _ in range(2):
            leaves = [torch.zeros(1, T, 2, 64, dtype=BF16, requires_grad=True) for _ in range(3)]
            o, _ = softmax_attention(*leaves, causal=True, cu_seqlens=packing, cu_seqlens_k=packing, impl="triton")
            torch.autograd.grad(o, leaves, torch.zeros_like(o))
    blocks = [call.args[2] for call in made.call_args_list]
    assert blocks and len(blocks) == len(set(blocks)), blocks


SMALL = [
    Case("everything", **EVERYTHING, tokens=40, tokens_k=70, heads=4, window=(30, 0), dropout_p=0.2, dim=10, dim_v=5, batch=1),
    Case("packed", lengths=(33, 0, 5), lengths_k=(40, 2, 0), dim=12, heads_q=4, window=(9, 3), causal=False),
    Case("weak decay over several tiles", decay=True, gate=0.001, tokens=20, tokens_k=420, batch=1, heads_q=1, heads=1),
    Case("two parts", tokens=40, dim=70, dim_v=90, batch=1, heads_q=2, heads=1),
    Case("ranges", tokens=37, tokens_k=80, batch=3, key_starts=(0, 21, 80), key_lengths=(70, 80, 9), alibi="rows", dim=12, heads=1),
]  # fmt: skip


EACH = [(case, dtype) for case in SMALL for dtype in (torch.float32, torch.float16)]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case, dtype",
    sample_of_rows(EACH, [(case, dtype) for case, dtype in EACH if dtype == torch.float16 or case.name == "packed"]),
    ids=str,
)
def test_interpreted_kernels_are_within_budget(case: Case, dtype: torch.dtype) -> None:
    made = make_call(case, dtype)
    found, reference, baseline = made.op("triton"), made.definition(torch.float64), made.definition(dtype)
    for name, wanted in reference.items():
        seen = wanted != -torch.inf
        assert torch.equal(found[name] == -torch.inf, ~seen)
        assert_within_budget(f"{case}, {name}", found[name][seen], wanted[seen], baseline[name][seen], dtype)


def hopper_cases() -> list[Case]:
    """The cases that the Hopper kernels take, at their head dims: those of 16 channels at each tile of theirs."""
    cases = [replace(case, dropout_p=0.0) for case in CASES if 0 not in (case.batch, case.tokens, case.tokens_k)]
    cases = [case for case in cases if not case.ranges and case.alibi != "rows"]
    made = [case for case in cases if max(case.dim, case.dim_v or 0) >= 65]
    for dim, dim_v in ((128, 128), (96, 96), (192, 128), (256, 256)):
        made += [
            replace(c, dim=dim, dim_v=dim_v, name=f"{c.name}, dims {dim} and {dim_v}") for c in cases if c.dim == 16
        ]
    # more blocks of keys than a card has multiprocessors, and heads of both ways
    many = Case("many blocks", tokens=1100, heads=8, heads_q=8)
    for dim in (72, 96, 128, 192):
        made += [
            replace(many, name=f"many blocks, dims {dim}", dim=dim),
            replace(many, name=f"many blocks, grouped, dims {dim}", dim=dim, heads=2, heads_q=16),
            replace(many, name=f"many blocks, window, dims {dim}", dim=dim, window=(300, 0)),
        ]
    packed = {"batch": 1, "tokens": 2600, "lengths": (1100, 0, 5, 700, 64, 400)}
    return made + [replace(many, name=f"many blocks, packed, dims {d}", dim=d, **packed) for d in (64, 96, 128, 192)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("case", hopper_cases(), ids=str)
def test_hopper_kernels_are_within_budget(case: Case, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    within_budget("gluon", case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_within_budget(case: Case, dtype: torch.dtype) -> None:
    within_budget("triton", case, dtype)


def within_budget(impl: str, case: Case, dtype: torch.dtype) -> None:
    """A case forward and backward against the definition in float64, and the same bits when repeated."""
    from test_attention import check

    made = make_call(case, dtype)
    made.drawn_on = "cuda"
    found, again = (made.on("cuda").op(impl) for _ in range(2))
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name]), f"{name} differs from call to call"
    found = {name: tensor.cpu() for name, tensor in found.items()}
    check(case, dtype, found, made.definition(torch.float64), made.definition(dtype), KERNEL_STEPS.get(dtype, 1))
