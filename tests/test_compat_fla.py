"""flashmix.compat.fla against token loops of what the original documents: defaults, layouts, every flag that changes a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compat_loops as loops
import pytest
import torch
from budget import assert_within_budget
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from flashmix.compat import fla

B, T, H, K, V = 2, 9, 2, 6, 5
Inputs = dict[str, Tensor]


def inputs(heads: int = H, steps: int = 1) -> Inputs:
    """Inputs of every function by the name of the argument, float32; values have `heads` heads."""
    torch.manual_seed(0)
    x = {name: torch.randn(B, T, H, K) for name in ("q", "r", "raw_k", "p")}
    x |= {name: normalize(torch.randn(B, T * steps, H, K), dim=-1) for name in ("k", "kk")}
    x |= {"v": torch.randn(B, T * steps, heads, V), "beta": torch.rand(B, T * steps, heads)}
    x |= {"unit_v": normalize(torch.randn(B, T, heads, V), dim=-1), "raw_beta": torch.randn(B, T, heads)}
    x |= {"g": -torch.rand(B, T, heads), "raw_g": torch.randn(B, T, heads), "gv": -torch.rand(B, T, heads, V)}
    x |= {"gk": -torch.rand(B, T, heads, K), "raw_gk": torch.randn(B, T, heads, K), "w": torch.rand(B, T, heads, V)}
    x |= {"a": 0.3 * torch.randn(B, T, H, K), "b": torch.rand(B, T, heads, K), "u": torch.randn(H, K)}
    x |= {"beta_atk": torch.rand(B, T, heads), "g_atk": -torch.rand(B, T, heads), "s": torch.randn(B, T, heads, 4)}
    x |= {"g_s": -torch.rand(B, T, heads, 4), "S": torch.randn(B, heads, K, V), "A": torch.rand(B, heads, K)}
    x |= {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads), "dt_bias_k": torch.randn(heads * K)}
    return x | {"scales": torch.rand(B, T, heads, T.bit_length() + 1)}


def check(call: Callable[[Inputs], Any], loop: Callable[[Inputs], Any], x: Inputs) -> None:
    """Compares every tensor of both results, in order; what is not a tensor must be equal."""
    wide = {name: tensor.double() for name, tensor in x.items()}
    results = [flat(f(y)) for f, y in ((call, x), (loop, wide), (loop, x))]
    assert len(results[0]) == len(results[1])
    for got, reference, baseline in zip(*results, strict=True):
        if not isinstance(reference, Tensor):
            assert got is reference
            continue
        assert got.dtype == torch.float32 and got.shape == reference.shape
        assert_within_budget("compat", got, reference, baseline, steps=2)


def flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in flat(part)]
    return [result]


def grouped(x: Inputs, *names: str) -> list[Tensor]:
    """The tensors with the heads of the values."""
    return [x[name].repeat_interleave(x["v"].shape[2] // x[name].shape[2], 2) for name in names]


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def same(names: str, call: Callable[[Any, Inputs], Any], loop: Callable[[Inputs], Any], steps: int = 1) -> None:
    """A case for each function name: `call(function, inputs)` must be `loop(inputs)`."""
    for name in names.split():
        CASES[f"{name}-{sum(case.startswith(name + '-') for case in CASES)}"] = (name, call, loop, steps)


CASES: dict[str, tuple[str, Callable[[Any, Inputs], Any], Callable[[Inputs], Any], int]] = {}
ON = {"output_final_state": True}

GDN = "chunk_gated_delta_rule chunk_gdn"
RGDN = "fused_recurrent_gated_delta_rule fused_recurrent_gdn"
same(
    GDN,
    lambda f, x: f(x["q"], x["k"], x["v"], x["g"], x["beta"]),
    lambda x: (loops.delta(*grouped(x, "q", "k"), x["v"], x["beta"], x["g"])[0], None),
)
same(
    GDN,
    lambda f, x: f(x["q"], x["k"], x["v"], x["g"], x["beta"], 0.3, x["S"].mT, True, state_v_first=True),
    lambda x: (lambda o, S: (o, S.mT),)[0](
        *loops.delta(*grouped(x, "q", "k"), x["v"], x["beta"], x["g"], scale=0.3, S=x["S"])
    ),
)
same(
    GDN + " " + RGDN,
    lambda f, x: f(
        *(x["q"], x["raw_k"], x["v"]),
        g=x["raw_g"],
        beta=x["raw_beta"],
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        use_gate_in_kernel=True,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        transpose_state_layout=False,
        **ON,
    ),
    lambda x: loops.delta(
        *map(unit, grouped(x, "q", "raw_k")),
        x["v"],
        2 * x["raw_beta"].sigmoid(),
        -x["A_log"].exp() * softplus(x["raw_g"] + x["dt_bias"]),
    ),
)
same(
    RGDN,
    lambda f, x: f(x["q"], x["k"], x["v"], x["g"], x["gk"], None, x["beta"], **ON),
    lambda x: loops.delta(*grouped(x, "q", "k"), x["v"], x["beta"], x["g"][..., None] + x["gk"]),
)
same(
    RGDN,
    lambda f, x: f(x["q"], x["k"], x["v"]),
    lambda x: (loops.delta(*grouped(x, "q", "k"), x["v"], torch.ones_like(x["beta"]))[0], None),
)
same(
    "chunk_kda",
    lambda f, x: f(x["q"], x["k"], x["v"], x["gk"], x["beta"], None, x["S"], True, safe_gate=True, use_graph=True),
    lambda x: loops.delta(*grouped(x, "q", "k"), x["v"], x["beta"], x["gk"], S=x["S"]),
)
KDA = "chunk_kda fused_recurrent_kda"


def kda(gate: Callable[[Inputs], Tensor], **options: Any) -> None:
    """KDA with the gate in the kernel; options that are strings name inputs."""
    same(
        KDA,
        lambda f, x: f(
            *(x["q"], x["raw_k"], x["v"], x["raw_gk"], x["raw_beta"]),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **{name: x[value] if isinstance(value, str) else value for name, value in options.items()},
        ),
        lambda x: (
            loops.delta(*map(unit, grouped(x, "q", "raw_k")), x["v"], x["raw_beta"].sigmoid(), gate(x))[0],
            None,
        ),
    )


def biased(x: Inputs) -> Tensor:
    return x["raw_gk"] + x["dt_bias_k"].view(-1, K)


kda(lambda x: -x["A_log"].exp()[:, None] * softplus(biased(x)), A_log="A_log", dt_bias="dt_bias_k")
kda(lambda x: -x["A_log"].exp()[:, None] * softplus(x["raw_gk"]), A_log="A_log")
kda(
    lambda x: -4 * torch.sigmoid(x["A_log"].exp()[:, None] * biased(x)),
    A_log="A_log",
    dt_bias="dt_bias_k",
    lower_bound=-4.0,
)
kda(lambda x: -8 * torch.sigmoid(x["raw_gk"]), lower_bound=-8.0)
same(
    "chunk_delta_rule fused_recurrent_delta_rule",
    lambda f, x: f(x["q"], x["raw_k"], x["v"], x["beta"], 0.5, x["S"], True, True),
    lambda x: loops.delta(*map(unit, grouped(x, "q", "raw_k")), x["v"], x["beta"], scale=0.5, S=x["S"]),
)
same(
    "fused_recurrent_delta_rule",
    lambda f, x: f(x["q"], x["k"], x["v"]),
    lambda x: (loops.delta(*grouped(x, "q", "k"), x["v"], torch.ones_like(x["beta"]))[0], None),
)
same(
    "chunk_gdn2 fused_recurrent_gdn2",
    lambda f, x: f(x["q"], x["k"], x["v"], x["gk"], x["b"], x["w"], initial_state=x["S"], **ON),
    lambda x: loops.gdn2(*grouped(x, "q", "k"), *(x[n] for n in ("v", "gk", "b", "w")), S=x["S"]),
)
same(
    "chunk_gated_delta_product",
    lambda f, x: f(x["q"], x["k"], x["v"], x["g"], x["beta"], 3, None, x["S"], True),
    lambda x: loops.product(*grouped(x, "q", "k"), x["v"], x["g"], x["beta"], 3, S=x["S"]),
    steps=3,
)
same(
    "chunk_gated_delta_product",
    lambda f, x: f(x["q"], x["k"], x["v"], None, x["beta"], 2),
    lambda x: (loops.product(*grouped(x, "q", "k"), x["v"], None, x["beta"], 2)[0], None),
    steps=2,
)
BY_CHANNEL = "fused_recurrent_gated_delta_rule fused_recurrent_kda fused_recurrent_delta_rule fused_recurrent_comba"


def test_a_strength_per_channel_of_the_values() -> None:
    """Each channel is the column of a state of its own, with all forms of states, decays and layouts."""
    torch.manual_seed(0)
    q, k, p = torch.nn.functional.normalize(torch.randn(3, 2, 9, 2, 6, dtype=torch.float64), dim=-1)
    v, beta = torch.randn(2, 9, 4, 5, dtype=torch.float64), torch.rand(2, 9, 4, 5, dtype=torch.float64)
    g, gk = -torch.rand(2, 9, 4, dtype=torch.float64), -torch.rand(2, 9, 4, 6, dtype=torch.float64)
    S = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    given = {"fused_recurrent_kda": (q, k, v, gk, beta), "fused_recurrent_delta_rule": (q, k, v, beta)}
    given |= {
        "fused_recurrent_gated_delta_rule": (q, k, v, g, None, None, beta),
        "fused_recurrent_comba": (q, k, p, v, g, beta),
    }
    for name in BY_CHANNEL.split():
        call = getattr(fla, name)
        o, state = call(*given[name], initial_state=S, output_final_state=True)
        for j in range(v.shape[3]):
            one = [x[..., j] if x is beta else x[..., j : j + 1] if x is v else x for x in given[name]]
            alone, last = call(*one, initial_state=S[..., j : j + 1].contiguous(), output_final_state=True)
            torch.testing.assert_close(o[..., j : j + 1], alone)
            torch.testing.assert_close(state[..., j : j + 1], last)
    call, options = fla.fused_recurrent_kda, {"output_final_state": True, "state_v_first": True}
    plain = call(q, k, v, gk, beta, initial_state=S, output_final_state=True)
    o, state = call(q, k, v, gk, beta, initial_state=S.mT.contiguous(), **options)
    assert torch.equal(o, plain[0]) and torch.equal(state, plain[1].mT)


for name, order in (("chunk_comba", ("q", "raw_k", "v", "p")), ("fused_recurrent_comba", ("q", "raw_k", "p", "v"))):
    same(
        name,
        lambda f, x, order=order: f(*(x[n] for n in order), x["g"], x["beta"], None, x["S"], True, True),
        lambda x: loops.comba(
            *map(unit, grouped(x, "q", "raw_k")), x["v"], *map(unit, grouped(x, "p")), x["g"], x["beta"], S=x["S"]
        ),
    )
OJA = "chunk_gated_oja_rule fused_recurrent_gated_oja_rule"
same(
    OJA,
    lambda f, x: f(x["q"], x["k"], x["unit_v"], x["gv"], x["beta"], None, x["S"], True),
    lambda x: loops.oja(*grouped(x, "q", "k"), x["unit_v"], x["gv"], x["beta"], S=x["S"]),
)
same(
    OJA,
    lambda f, x: f(x["q"], x["raw_k"], x["unit_v"], x["gv"], x["beta"], use_k_l2norm=True),
    lambda x: (loops.oja(*grouped(x, "q"), *map(unit, grouped(x, "raw_k")), x["unit_v"], x["gv"], x["beta"])[0], None),
)
CURVED = {
    "chunk_precond_gated_delta_rule": lambda x: (
        x["q"],
        x["raw_k"],
        x["v"],
        x["g_atk"],
        x["g"],
        x["beta_atk"],
        x["beta"],
    ),
    "fused_recurrent_precond_gated_delta_rule": lambda x: (
        *(x["q"], x["raw_k"], x["v"], x["g"], None, None, x["beta"], x["g_atk"], x["beta_atk"]),
    ),
    "chunk_precond_kda": lambda x: (x["q"], x["raw_k"], x["v"], x["gk"], x["g_atk"], x["beta_atk"], x["beta"]),
    "fused_recurrent_precond_kda": lambda x: (
        *(x["q"], x["raw_k"], x["v"], x["gk"], x["g_atk"], x["beta_atk"], x["beta"]),
    ),
}
for name, arguments in CURVED.items():
    decay = "gk" if "kda" in name else "g"
    same(
        name,
        lambda f, x, arguments=arguments: f(*arguments(x), initial_state=x["S"], initial_A_state=x["A"], **ON),
        lambda x, decay=decay: loops.preconditioned(
            *map(unit, grouped(x, "q", "raw_k")),
            *(x[n] for n in ("v", decay, "g_atk", "beta_atk", "beta")),
            -0.2,
            S=x["S"],
            A=x["A"],
        ),
    )
same(
    "fused_recurrent_precond_kda",
    lambda f, x: f(
        *(x[n] for n in ("q", "k", "v", "raw_gk", "g_atk", "beta_atk", "beta")),
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=True,
        A_log=x["A_log"],
        log_atk_scale=x["dt_bias"],
        x=3.0,
        eps=0.1,
    ),
    lambda x: (
        loops.preconditioned(
            *grouped(x, "q", "k"),
            x["v"],
            -x["A_log"].exp()[:, None] * softplus(x["raw_gk"]),
            *(x[n] for n in ("g_atk", "beta_atk", "beta")),
            x["dt_bias"][:, None],
            x=3.0,
            eps=0.1,
        )[0],
        None,
        None,
    ),
)


def names(x: Inputs, text: str) -> list[Tensor]:
    return [x[name] for name in text.split()]


same(
    "chunk_dplr_delta_rule fused_recurrent_dplr_delta_rule",
    lambda f, x: f(*names(x, "q k v a kk gk"), None, x["S"], True),
    lambda x: loops.dplr(*names(x, "q k v a kk gk"), S=x["S"]),
)
same(
    "chunk_iplr_delta_rule fused_recurrent_iplr_delta_rule",
    lambda f, x: f(*names(x, "q k v a kk")),
    lambda x: (loops.dplr(*names(x, "q k v a kk"))[0], None),
)
same(
    "chunk_rwkv7",
    lambda f, x: f(*names(x, "r gk k v a kk")),
    lambda x: (loops.dplr(*names(x, "r k v a kk gk"), scale=1.0)[0], None),
)
same(
    "fused_recurrent_rwkv7",
    lambda f, x: f(*names(x, "r gk k v a kk")),
    lambda x: loops.dplr(*names(x, "r k v a kk gk")),
)
same(
    "fused_mul_recurrent_rwkv7",
    lambda f, x: f(*names(x, "r gk k v kk b"), initial_state=x["S"], **ON),
    lambda x: loops.dplr(*names(x, "r k v"), -x["kk"], x["kk"] * x["b"], x["gk"], scale=1.0, S=x["S"]),
)
same(
    "chunk_gla",
    lambda f, x: f(*names(x, "q k v gk"), None, x["S"].mT, True, True),
    lambda x: (lambda o, S: (o, S.mT))(*loops.linear(*names(x, "q k v gk"), S=x["S"])),
)
same("fused_recurrent_gla", lambda f, x: f(*names(x, "q k v gk"), **ON), lambda x: loops.linear(*names(x, "q k v gk")))
same(
    "fused_recurrent_gla",
    lambda f, x: f(*names(x, "q k v"), gv=x["gv"], **ON),
    lambda x: loops.linear(*names(x, "q k v"), gv=x["gv"]),
)
SIMPLE = "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla"
same(
    SIMPLE,
    lambda f, x: f(*names(x, "q k v g"), -x["A_log"].exp(), **ON),
    lambda x: loops.linear(*names(x, "q k v"), x["g"] - x["A_log"].exp()),
)
same(
    SIMPLE,
    lambda f, x: f(*names(x, "q k v"), g_gamma=-x["A_log"].exp()),
    lambda x: (loops.linear(*names(x, "q k v"), torch.zeros_like(x["g"]) - x["A_log"].exp())[0], None),
)
same(SIMPLE, lambda f, x: f(*names(x, "q k v"), scale=2.0)[0], lambda x: loops.linear(*names(x, "q k v"), scale=2.0)[0])
same(
    "parallel_simple_gla", lambda f, x: f(*names(x, "q k v g")), lambda x: (loops.linear(*names(x, "q k v g"))[0], None)
)


def per_head(x: Inputs, g: list[float]) -> Tensor:
    return torch.zeros_like(x["g"]) + torch.tensor(g, dtype=x["g"].dtype)


def retention(x: Inputs, **options: Any) -> Any:
    g = per_head(x, [1 - 2.0 ** (-5 - h) for h in range(H)]).log()
    return loops.linear(*names(x, "q k v"), g, **options)


same(
    "chunk_retention fused_chunk_retention fused_recurrent_retention",
    lambda f, x: f(*names(x, "q k v"), initial_state=x["S"], **ON),
    lambda x: retention(x, S=x["S"]),
)
same("parallel_retention", lambda f, x: f(*names(x, "q k v")), lambda x: (retention(x)[0], None))
same(
    "chunk_lightning_attn fused_recurrent_lightning_attn",
    lambda f, x: f(*names(x, "q k v"), 1, 4, **ON),
    lambda x: loops.linear(*names(x, "q k v"), per_head(x, [-8 / H * (1 - 1 / 4) * h for h in range(H)])),
)
same(
    "fused_recurrent_linear_attn",
    lambda f, x: f(*names(x, "q k v")),
    lambda x: (loops.linear(*names(x, "q k v"))[0], None),
)
LINEAR = "chunk_linear_attn fused_chunk_linear_attn"


def normalised(x: Inputs, S: Tensor | None = None, z: Tensor | None = None) -> Any:
    """With features that are 0 for one query."""
    q, k, v = features(x)
    o, S = loops.linear(q, k, v, S=S)
    sums = k.cumsum(1) + (0 if z is None else z)
    return o / ((K**-0.5 * q * sums).sum(-1, keepdim=True) + 1e-10), S, sums[:, -1:]


def features(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q = x["q"].exp()
    return torch.cat([q[:, :3], 0 * q[:, 3:4], q[:, 4:]], 1), x["raw_k"].exp(), x["v"]


same(LINEAR, lambda f, x: f(*features(x)), lambda x: (normalised(x)[0], None))
same(
    LINEAR,
    lambda f, x: f(*features(x), initial_state=(x["S"].exp(), x["A"].unsqueeze(1)), **ON),
    lambda x: normalised(x, x["S"].exp(), x["A"].unsqueeze(1)),
)
same("fused_recurrent_linear_attn", lambda f, x: f(*features(x), normalize=True, **ON), normalised)
same(
    "chunk_rwkv6 fused_recurrent_rwkv6",
    lambda f, x: f(*names(x, "r k v gk u"), None, x["S"], True),
    lambda x: loops.rwkv6(*names(x, "r k v gk u"), S=x["S"]),
)


def hgrn(x: Inputs) -> Any:
    h, o = x["A"].flatten(1), []
    for t in range(T):
        h = x["gk"][:, t].flatten(1).exp() * h + x["raw_k"][:, t].flatten(1)
        o.append(h)
    return torch.stack(o, 1), h


same(
    "chunk_hgrn fused_recurrent_hgrn",
    lambda f, x: f(x["raw_k"].flatten(2), x["gk"].flatten(2), x["A"].flatten(1), True),
    hgrn,
)


def lightnet(x: Inputs) -> Any:
    k, g, z = loops.additive_gate(x["raw_k"])
    o, S = loops.linear(x["q"], k, x["v"], g)
    return o, S, z


same("chunk_lightnet fused_recurrent_lightnet", lambda f, x: f(*names(x, "q raw_k v"), **ON), lightnet)
SLOTS = "chunk_gsa fused_recurrent_gsa"
same(SLOTS, lambda f, x: f(*names(x, "q k v s g_s"), **ON), lambda x: loops.slots(*names(x, "q k v s g_s")))
same(
    SLOTS,
    lambda f, x: f(*names(x, "q k v s"), scale=0.4),
    lambda x: (loops.slots(*names(x, "q k v"), *loops.additive_gate(x["s"])[:2], scale=0.4)[0], None),
)


def first_slots(x: Inputs) -> tuple[Tensor, Tensor]:
    return x["S"][..., :4], x["S"][:, :, :4]


same(  # the states do not fade before the first token
    SLOTS,
    lambda f, x: f(*names(x, "q k v s"), initial_state=first_slots(x), **ON),
    lambda x: loops.slots(*names(x, "q k v"), *loops.additive_gate(x["s"])[:2], states=first_slots(x)),
)


def one_key_head(x: Inputs) -> Inputs:
    return {**x, **{n: x[n][:, :, :1] for n in ("k", "v", "s", "g_s")}}


same(
    SLOTS,
    lambda f, x: f(*names(one_key_head(x), "q k v s g_s"))[0],
    lambda x: loops.slots(x["q"], *(y.expand(B, T, H, -1) for y in names(one_key_head(x), "k v s g_s")))[0],
)
same(
    "chunk_abc",
    lambda f, x: f(*names(x, "q k v s")),
    lambda x: (loops.slots(*names(x, "q k v"), *loops.additive_gate(x["s"])[:2])[0], None),
)


def log_linear(x: Inputs, scale: float) -> Tensor:
    """Token t reads token j on level `bit_length(t xor j)`."""
    level = torch.tensor([[(t ^ j).bit_length() for j in range(T)] for t in range(T)])
    by_level = x["scales"].gather(3, level[None, :, None].expand(*x["scales"].shape[:3], T)).mT  # [B, T, T, H]
    past = x["g"].cumsum(1)
    decay = (
        (past[:, :, None] - past[:, None]).masked_fill(~torch.ones(T, T).tril().bool()[:, :, None], -torch.inf).exp()
    )
    q, k = grouped(x, "q", "k")
    return torch.einsum("bthk,bjhk,btjh,bjhv->bthv", scale * q, k, by_level * decay, x["v"])


LOG_LINEAR = "chunk_log_linear_attn"
same(LOG_LINEAR, lambda f, x: f(*names(x, "q k v g scales")), lambda x: (log_linear(x, 1.0), None))
same(LOG_LINEAR, lambda f, x: f(*names(x, "q k v g scales"), scale=None), lambda x: (log_linear(x, K**-0.5), None))


def based(x: Inputs, scale: float, eps: float | None) -> Tensor:
    s = loops.scores(x["q"], x["k"], scale)
    return loops.weighted(1 + s + s**2 / 2, x["v"], eps)


BASED = "parallel_based fused_chunk_based"
same(BASED, lambda f, x: f(*names(x, "q k v")), lambda x: based(x, K**-0.5, 1e-6))
same(BASED, lambda f, x: f(*names(x, "q k v"), 0.2, False), lambda x: based(x, 0.2, None))
same(
    "parallel_rebased",
    lambda f, x: f(*names(x, "q k v")),
    lambda x: loops.weighted(loops.scores(x["q"], x["k"], K**-0.5) ** 2, x["v"], 1e-5),
)
same(
    "parallel_rebased",
    lambda f, x: f(*names(x, "q k v"), 0.1, False),
    lambda x: loops.weighted(loops.scores(x["q"], x["k"], 1.0) ** 2, x["v"], 0.1),
)
same(
    "parallel_attn",
    lambda f, x: f(x["q"], x["k"][:, :, :1], x["v"][:, :, :1], window_size=3, sink_bias=x["A_log"]),
    lambda x: loops.attention(x["q"], x["k"][:, :, :1], x["v"][:, :, :1], causal=True, window=(2, 0), sink=x["A_log"])[
        0
    ],
)
same(
    "parallel_attn parallel_forgetting_attn",
    lambda f, x: f(*names(x, "q k v g"), 0.3),
    lambda x: loops.attention(*names(x, "q k v"), scale=0.3, causal=True, decay=x["g"])[0],
)


@pytest.mark.parametrize("case", CASES)
def test_function_is_its_loop(case: str) -> None:
    name, call, loop, steps = CASES[case]
    function = getattr(fla, name)
    check(lambda x: call(function, x), loop, inputs(steps=steps))


GROUPED = ["chunk_gated_delta_rule-0", "chunk_gated_delta_rule-1", "chunk_kda-1", "fused_recurrent_gdn2-0"]
GROUPED += ["chunk_delta_rule-0", "chunk_comba-0", "chunk_gated_oja_rule-0", "chunk_precond_kda-0"]


@pytest.mark.parametrize("case", GROUPED)
def test_value_heads_share_keys(case: str) -> None:
    name, call, loop, steps = CASES[case]
    check(lambda x: call(getattr(fla, name), x), loop, inputs(heads=2 * H, steps=steps))


REVERSIBLE = [name for name, declared in fla.FLA.options.items() if declared.marks.get("reverse") == ""]
REVERSIBLE.remove("fused_recurrent_gsa")  # of two states: a test of its own


@pytest.mark.parametrize("name", REVERSIBLE)
def test_reverse_is_the_flipped_sequence(name: str) -> None:
    """`reverse=True` runs from the last token to the first: outputs in the order of the tokens, the state before the first."""
    x = inputs()
    text = {"gla": "q k v gk", "simple_gla": "q k v g", "retention": "q k v", "linear_attn": "q k v"}
    text |= {
        "lightning_attn": "q k v",
        "dplr_delta_rule": "q k v a kk gk",
        "rwkv6": "r k v gk u",
        "rwkv7": "r gk k v kk b",
    }
    tensors = names(x, text[name.split("recurrent_")[1]])
    extra = {"layer_idx": 1, "num_layers": 4} if "lightning" in name else {}
    function = getattr(fla, name)
    o, S = function(*tensors, **extra, initial_state=x["S"], reverse=True, output_final_state=True)
    flipped = (y.flip(1) if y.dim() == 4 or y.dim() == 3 else y for y in tensors)
    o_flipped, S_flipped = function(*flipped, **extra, initial_state=x["S"], output_final_state=True)
    assert torch.equal(o, o_flipped.flip(1)) and torch.equal(S, S_flipped)

    cu = torch.tensor([0, 4, 4, T])
    row = [y[:1] if y.dim() > 2 else y for y in tensors]
    start = torch.randn(3, H, K, V)
    o, S = function(*row, **extra, initial_state=start, reverse=True, output_final_state=True, cu_seqlens=cu)
    for n, (a, b) in enumerate(((0, 4), (4, T))):
        part = [y[:, a:b] if y.dim() > 2 else y for y in row]
        place = (0, 2)[n]
        alone, last = function(
            *part, **extra, initial_state=start[place : place + 1], reverse=True, output_final_state=True
        )
        assert torch.equal(o[:, a:b], alone) and torch.equal(S[place : place + 1], last)
    assert torch.equal(S[1], start[1])


def test_slots_in_reverse_are_the_flipped_sequence() -> None:
    """Both states, packed sequences; without a gate the running softmax still goes from the first token to the last."""
    x = inputs()
    tensors, function = names(x, "q k v s g_s"), fla.fused_recurrent_gsa
    o, S = function(*tensors, initial_state=first_slots(x), reverse=True, output_final_state=True)
    o_flipped, S_flipped = function(
        *(y.flip(1) for y in tensors), initial_state=first_slots(x), output_final_state=True
    )
    assert torch.equal(o, o_flipped.flip(1))
    assert torch.equal(S[0], S_flipped[0]) and torch.equal(S[1], S_flipped[1])
    row, start = [y[:1] for y in tensors], (torch.randn(2, H, K, 4), torch.randn(2, H, 4, V))
    o, S = function(
        *row, initial_state=start, reverse=True, output_final_state=True, cu_seqlens=torch.tensor([0, 4, T])
    )
    for n, (a, b) in enumerate(((0, 4), (4, T))):
        part, states = [y[:, a:b] for y in row], tuple(s[n : n + 1] for s in start)
        alone, last = function(*part, initial_state=states, reverse=True, output_final_state=True)
        assert (
            torch.equal(o[:, a:b], alone)
            and torch.equal(S[0][n : n + 1], last[0])
            and torch.equal(S[1][n : n + 1], last[1])
        )
    check(
        lambda x: function(*names(x, "q k v s"), reverse=True)[0],
        lambda x: loops.slots(*(y.flip(1) for y in (*names(x, "q k v"), *loops.additive_gate(x["s"])[:2])))[0].flip(1),
        x,
    )


def test_log_linear_attention_goes_on_from_its_own_state() -> None:
    def in_parts(x: Inputs) -> Tensor:
        parts, state = [], None
        for a, b in ((0, 3), (3, T)):
            part = [y[:, a:b] for y in names(x, "q k v g scales")]
            o, state = fla.chunk_log_linear_attn(*part, initial_state=state, output_final_state=True)
            parts.append(o)
        return torch.cat(parts, 1)

    check(in_parts, lambda x: log_linear(x, 1.0), inputs())
    with pytest.raises(NotImplementedError, match="LogLinearAttentionState"):
        fla.chunk_log_linear_attn(*names(inputs(), "q k v g scales"), initial_state=object())


PACKED = [
    *(
        f"{kind}_{rule}"
        for rule in ("gated_delta_rule", "kda", "delta_rule", "comba")
        for kind in ("chunk", "fused_recurrent")
    ),
    *("chunk_gla", "chunk_simple_gla", "chunk_retention", "chunk_gsa", "chunk_lightnet", "chunk_linear_attn"),
    *("chunk_gated_delta_product", "chunk_rwkv7", "fused_recurrent_hgrn", "parallel_attn"),
]
ARGUMENTS = {
    "gated_delta_rule": lambda x: {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["g"], "beta": x["beta"]},
    "kda": lambda x: {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["gk"], "beta": x["beta"]},
    "delta_rule": lambda x: {n: x[n] for n in ("q", "k", "v", "beta")},
    "comba": lambda x: {n: x[n] for n in ("q", "k", "v", "p", "g", "beta")},
    "gla": lambda x: {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["gk"]},
    "simple_gla": lambda x: {n: x[n] for n in ("q", "k", "v", "g")},
    "gsa": lambda x: {n: x[n] for n in ("q", "k", "v", "s")},
    "lightnet": lambda x: {"q": x["q"], "k": x["raw_k"], "v": x["v"]},
    "linear_attn": lambda x: dict(zip("qkv", features(x), strict=True)),
    "gated_delta_product": lambda x: {n: x[n] for n in ("q", "k", "v", "g", "beta")},
    "rwkv7": lambda x: {"r": x["r"], "w": x["gk"], "k": x["k"], "v": x["v"], "a": x["a"], "b": x["kk"]},
    "hgrn": lambda x: {"x": x["raw_k"].flatten(2), "g": x["gk"].flatten(2)},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_alone(name: str) -> None:
    x = {n: y[:1] for n, y in inputs().items()}
    key = name.removeprefix("chunk_").removeprefix("fused_recurrent_")
    arguments = ARGUMENTS.get(key, lambda x: {n: x[n] for n in "qkv"})(x)
    options: dict[str, Any] = {"num_householder": 1} if "product" in name else {}
    function = getattr(fla, name)
    whole = flat(function(**arguments, **options, cu_seqlens=torch.tensor([0, 4, T])))[0]
    for a, b in ((0, 4), (4, T)):
        alone = flat(function(**{n: y[:, a:b] for n, y in arguments.items()}, **options))[0]
        wide = flat(function(**{n: y[:, a:b].double() for n, y in arguments.items()}, **options))[0]
        assert_within_budget(name, whole[:, a:b], wide, alone)


def test_state_in_another_dtype_is_read_and_gradients_pass() -> None:
    x = inputs()
    half = {n: x[n].bfloat16() for n in ("q", "k", "v", "g", "beta", "S")}
    o, S = fla.chunk_gated_delta_rule(*(half[n] for n in ("q", "k", "v", "g", "beta")), None, half["S"], True)
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    start = x["S"].mT.clone().requires_grad_()
    o, S = fla.chunk_kda(*names(x, "q k v gk beta"), initial_state=start, state_v_first=True, output_final_state=True)
    (o.sum() + S.sum()).backward()
    assert start.grad is not None and start.grad.abs().sum() > 0


def test_a_cut_leaves_no_trace_in_either_layout() -> None:
    """A continued call equals the whole one, with the state in either layout."""
    x = inputs()
    whole, last = fla.chunk_gated_delta_rule(*names(x, "q k v g beta"), output_final_state=True)
    for v_first in (False, True):
        cut = [y[:, :4] for y in names(x, "q k v g beta")], [y[:, 4:] for y in names(x, "q k v g beta")]
        _, S = fla.chunk_gated_delta_rule(*cut[0], output_final_state=True, state_v_first=v_first)
        o, S = fla.chunk_gated_delta_rule(*cut[1], initial_state=S, output_final_state=True, state_v_first=v_first)
        torch.testing.assert_close(o, whole[:, 4:])
        torch.testing.assert_close(S.mT if v_first else S, last)


def test_lightnet_and_abc_go_on_from_a_state() -> None:
    x = inputs()
    whole, (S, z) = fla.chunk_lightnet(*names(x, "q raw_k v"), output_final_state=True)
    _, state = fla.chunk_lightnet(*(y[:, :4] for y in names(x, "q raw_k v")), output_final_state=True)
    o, (S2, z2) = fla.chunk_lightnet(
        *(y[:, 4:] for y in names(x, "q raw_k v")), initial_state=state, output_final_state=True
    )
    assert z.shape == (B, 1, H, K)
    for got, want in ((o, whole[:, 4:]), (S2, S), (z2, z)):
        torch.testing.assert_close(got, want)
    whole, _ = fla.chunk_abc(*names(x, "q k v s"))
    _, state = fla.chunk_abc(*(y[:, :4] for y in names(x, "q k v s")), output_final_state=True)
    o, _ = fla.chunk_abc(*(y[:, 4:] for y in names(x, "q k v s")), initial_state=state)
    torch.testing.assert_close(o, whole[:, 4:])
    with pytest.raises(NotImplementedError, match="normaliser is lost"):
        fla.chunk_abc(*names(x, "q k v s"), initial_state=state[:2])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda x: fla.chunk_gated_delta_rule(*names(x, "q k v g beta"), cp_context=object()),
            NotImplementedError,
            "cp_c",
        ),
        (lambda x: fla.chunk_gated_delta_rule(*names(x, "q k v g beta"), use_l2norm=True), TypeError, "use_l2norm"),
        (lambda x: fla.chunk_gated_delta_rule(*names(x, "q k v g")), TypeError, "beta"),
        (lambda x: fla.chunk_gated_delta_rule(*names(x, "q k v g beta"), g=x["g"]), TypeError, "multiple values"),
        (lambda x: fla.chunk_gated_delta_rule(*names(x, "q k v g beta"), allow_neg_eigval=True), ValueError, "sigmoid"),
        (lambda x: fla.fused_recurrent_gdn(*names(x, "q k v g gk gv beta")), NotImplementedError, "gv"),
        (lambda x: fla.fused_recurrent_gated_oja_rule(*names(x, "q k v gv w")), NotImplementedError, "beta of shape"),
        (
            lambda x: fla.chunk_kda(*names(x, "q k v gk beta"), return_intermediate_states=True),
            NotImplementedError,
            "ret",
        ),
        (lambda x: fla.chunk_kda(*names(x, "q k v gk beta"), use_gate_in_kernel=True), ValueError, "A_log"),
        (lambda x: fla.fused_recurrent_gla(*names(x, "q k v gk gv")), NotImplementedError, "gk and gv"),
        (
            lambda x: fla.parallel_retention(*names(x, "q k v"), output_attentions=True),
            NotImplementedError,
            "output_att",
        ),
        (
            lambda x: fla.chunk_precond_kda(*names(x, "q k v gk g_atk beta_atk beta"), cp_context=1),
            NotImplementedError,
            "no cp_context",
        ),
        (lambda x: fla.chunk_ttt_linear(*names(x, "q k v")), AttributeError, "rates of the token that reads"),
        (lambda x: fla.chunk_nothing, AttributeError, "chunk_nothing"),
    ],
)
def test_what_is_not_there_raises_by_name(call: Callable[[Inputs], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(inputs())


def test_helpers_of_packed_sequences() -> None:
    cu = fla.prepare_cu_seqlens_from_lens(torch.tensor([3, 0, 2]))
    assert cu.tolist() == [0, 3, 3, 5] and cu.dtype == torch.int32
    assert fla.prepare_lens(cu).tolist() == [3, 0, 2]
    assert fla.prepare_position_ids(cu).tolist() == [0, 1, 2, 0, 1]
    assert fla.prepare_sequence_ids(cu).tolist() == [0, 0, 0, 2, 2]


def test_gate_of_gla_is_not_cumulative() -> None:
    """One token's decay fades what came before it and nothing else."""
    x = inputs()
    g = torch.zeros(B, T, H, K)
    g[:, 4] = logsigmoid(x["raw_k"][:, 4])
    o, _ = fla.chunk_gla(*names(x, "q k v"), g)
    plain, _ = fla.chunk_gla(*names(x, "q k v"), torch.zeros_like(g))
    assert torch.equal(o[:, :4], plain[:, :4]) and not torch.equal(o[:, 4:], plain[:, 4:])
