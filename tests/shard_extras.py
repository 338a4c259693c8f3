"""What the processes of test_shard.py check besides single ops: every public function, errors, layers, a decoder, repeated bits.

Each check returns its complaints, a list of strings that the test expects to be empty.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from shard_bytes import CHECKS, PARTS, check, counted, far, tensors
from shard_cases import CASES, PACKINGS, evaluate, layout, normal
from torch import Tensor

import flashmix
from flashmix.capabilities import public_ops, tiny_call
from flashmix.mechanisms.registry import MECHANISMS, Size
from flashmix.models import Decoder, DecoderConfig, LayerConfig
from flashmix.modules.losses import next_token_targets
from flashmix.op.packing import Packing
from flashmix.parallel.shard import Shard

LENGTHS = [17, 0, 2, 30]
# options of layers that have no preset
OTHERS: dict[str, list[dict[str, Any]]] = {
    "log_linear": [{"heads": 2, "state_dim": 4, "levels": 6}],
    "latent_attention": [{"heads": 2, "rank": 4, "shared_dim": 4}],
}
REFUSED = {"slstm", "momentum_deltanet", "titans_linear", "ttt_linear", "mom", "attention_with_cache"}


def run(rank: int, groups: dict[int, Any], whole: bool) -> dict[str, list[str]]:
    """The complaints of each check, by the ranks of the group of three, and of four for the bytes."""
    found = {}
    PARTS["of"] = 1 if whole else PARTS["of"]
    for name, its in CHECKS.items():
        ranks = 4 if name.startswith(("bytes", "mesh")) else 3
        if rank < ranks:
            found[name] = its(groups[ranks])
    return found


def pieces(shard: Shard) -> list[int]:
    return [p.sequence for p in shard.pieces[shard.rank]]


def results(op: Any, call: dict[str, Any], packing: Packing, take: Any, states: Any, start: Any) -> dict[str, Tensor]:
    """Results and gradients by name. `take` cuts tensors of tokens, `states` those of sequences; a weight is drawn for each entry.

    `start`: the states of sequences that come in, None for an op without states.
    """
    names, T, N = inspect.signature(op).parameters, sum(LENGTHS), len(LENGTHS)
    differentiable = op is not flashmix.scan_max
    options: dict[str, Any] = {"cu_seqlens": packing, **({"causal": True} if "causal" in names else {})}
    leaves = {n: t.clone().requires_grad_(differentiable) for n, t in call.items() if isinstance(t, Tensor)}
    inputs = dict(leaves)
    if start is not None:
        given = [states(t, "given").requires_grad_(differentiable and t.shape != (N, 1)) for t in tensors(start)]
        options |= {"return_state": True, "initial_state": tuple(given) if isinstance(start, tuple) else given[0]}
        inputs |= {f"state {place}": t for place, t in enumerate(given)}
    generator, loss = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
    found = {}
    for place, t in enumerate(tensors(op(**{**call, **leaves}, **options))):
        tokens = t.shape[0] == 1 and t.dim() > 2 and t.shape[1] == packing.total and place < 3 and t.shape[0] != N
        shape = (1, T, *t.shape[2:]) if tokens else (N, *t.shape[1:])
        flow = torch.randn(shape, generator=generator, dtype=torch.float64)
        loss = loss + (t * (take(flow) if tokens else states(flow, "ends"))).sum()
        found[f"{'tokens' if tokens else 'states'} {place}"] = t.detach()
    if differentiable:
        loss.backward()
    return found | {f"gradient {n}": t.grad for n, t in inputs.items() if t.grad is not None}


def states_at_the_end(op: Any, call: dict[str, Any], whole: Packing) -> Any:
    """What an op returns as the states of the whole row, None of an op without them."""
    if not {"initial_state", "return_state"} <= set(inspect.signature(op).parameters):
        return None
    with torch.no_grad():
        return op(**call, cu_seqlens=whole, return_state=True)[-1]


@check
def every_public_function(group: Any) -> list[str]:
    """Every public function with `cu_seqlens` honours a shard, outputs, states in and out and gradients, or raises ValueError."""
    found, T = [], sum(LENGTHS)
    whole = Packing.from_lengths(LENGTHS)
    shard = whole.shard(group, order="zigzag")
    names = [n for n, op in public_ops().items() if "cu_seqlens" in inspect.signature(op).parameters]
    for name in names:
        op = getattr(flashmix, name)
        call, short = (tiny_call(name, torch.float64, tokens=t, sizes={"P": 64}) for t in (T, T - 1))
        cut = {n for n, t in call.items() if isinstance(t, Tensor) and t.shape != short[n].shape}
        local = {n: shard.take(t) if n in cut else t for n, t in call.items()}
        if name in REFUSED:
            found += [] if refuses(op, local, name, cu_seqlens=shard) else [f"{name} must refuse a Shard"]
            continue

        def states(x: Tensor, edge: str) -> Tensor:
            its = x[pieces(shard)]
            if edge == "ends":
                return its * shard.ends.view(-1, *[1] * (x.dim() - 1))
            return torch.where(shard.begins.view(-1, *[1] * (x.dim() - 1)), its, 0.5 * its)  # those are not read

        start = states_at_the_end(op, call, whole)
        try:
            have = results(op, local, shard, shard.take, states, start)
        except ValueError as error:
            found.append(f"{name}: {error}")
            continue
        want = results(op, call, whole, lambda x: x, lambda x, edge: x.clone(), start)
        for key, t in want.items():
            mine = have[key]
            if key.startswith(("states", "gradient state ")):
                edge = shard.ends if key.startswith("states") else shard.begins
                mine, t = mine[edge], t[pieces(shard)][edge]
            elif key.startswith("tokens") or key.removeprefix("gradient ") in cut:
                t = shard.take(t)
            else:
                mine = shard.sum(mine)
            found += far(f"{name} {key}", mine, t)
        if start is not None:
            given = [torch.cat([t, t[:1]]) for t in (states(t, "ends") for t in tensors(start))]
            more = tuple(given) if isinstance(start, tuple) else given[0]
            if not refuses(op, local, cu_seqlens=shard, initial_state=more):
                found.append(f"{name} must refuse states of another number of pieces")
    return found if len(names) > 20 else [f"only {names} have cu_seqlens"]


def refuses(op: Any, call: dict[str, Any], words: str = "", **options: Any) -> bool:
    """Whether the call raises ValueError with these words, and sends nothing."""
    with counted() as sent:
        try:
            with torch.no_grad():
                op(**call, **options)
        except ValueError as error:
            return words in str(error) and not sent
    return False


@check
def errors(group: Any) -> list[str]:
    """Bad input raises ValueError or TypeError with its reason, before anything is sent."""
    whole = Packing.from_lengths(LENGTHS)
    shard = whole.shard(group)
    T, found = sum(LENGTHS), []
    q = torch.rand(1, shard.total, 2, 4, dtype=torch.float64)
    everything = torch.rand(1, T, 2, 4, dtype=torch.float64)
    attend: Any = flashmix.softmax_attention
    local: dict[str, Any] = {"q": q, "k": q, "v": q, "cu_seqlens": shard}
    layer = MECHANISMS["gla"].layer
    assert layer is not None
    mixer = layer(8, heads=2).double()
    x = torch.rand(1, shard.total, 8, dtype=torch.float64)
    model = Decoder(DecoderConfig(vocab_size=11, width=8, layers=[LayerConfig("gla", {"heads": 2})]))
    ids = torch.zeros(1, shard.total, dtype=torch.int64)
    elsewhere = Packing(torch.zeros(2, dtype=torch.int64, device="meta"), T)
    stranger = copy.copy(shard)
    stranger.group = "another"  # type: ignore[assignment]
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("lengths must be on the host", elsewhere.shard, {"group": group}),
        ("a Shard of another group", attend, {**local, "cu_seqlens_k": stranger}),
        ("order must be one of", whole.shard, {"group": group, "order": "ring"}),
        ("an overlap between 20 and 19", whole.shard, {"group": group, "ranges": [(0, 0, 20), (1, 19, T)]}),
        ("a gap between 20 and 21", whole.shard, {"group": group, "ranges": [(0, 0, 20), (1, 21, T)]}),
        ("a gap from 20 on", whole.shard, {"group": group, "ranges": [(0, 0, 20)]}),
        ("owners between 0 and 2, got 3", whole.shard, {"group": group, "ranges": [(3, 0, T)]}),
        ("within the row's", whole.shard, {"group": group, "ranges": [(0, 0, T + 1)]}),
        ("the Packing of the whole row", shard.shard, {"group": group}),
        ("this rank among its own", whole.shard, {"group": torch.distributed.GroupMember.NON_GROUP_MEMBER}),
        ("reduction must be", model, {"tokens": ids, "targets": ids, "cu_seqlens": shard}),
        ("shard.take", flashmix.linear_attention, {**dict.fromkeys("qkv", everything), "cu_seqlens": shard}),
        ("window must come with causal", attend, {**local, "window": (3, 3)}),
        ("dropout_p must be 0", attend, {**local, "dropout_p": 0.5}),
        ("cu_seqlens_k must be the Shard", attend, {**local, "cu_seqlens_k": shard.local}),
        ("alibi_slopes must come with causal", attend, {**local, "alibi_slopes": torch.ones(2, dtype=torch.float64)}),
        ("impl='native' cannot run this", flashmix.linear_attention, {**local, "impl": "native"}),
        ("a cache, which has no exchange", mixer, {"x": x, "cu_seqlens": shard, "cache": mixer.new_cache()}),
        ("next_token_targets", next_token_targets, {"tokens": x[:, :, 0].long(), "cu_seqlens": shard}),
        ("batch size 1", flashmix.token_shift, {"x": x.expand(2, -1, -1), "cu_seqlens": shard}),
        ("the row's 49 tokens", shard.take, {"x": x[:, :1]}),
    ]
    for words, call, arguments in wrong:
        if not refuses(call, arguments, words):
            found.append(f"no error {words!r}")
    with counted() as sent:
        choice = flashmix.explain(flashmix.short_conv, x, torch.rand(8, 4), cu_seqlens=shard).choice
    if sent or choice != "portable":
        found.append("explain must name the implementation and send nothing")
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("group must be", whole.shard, {"group": "gloo"}),
        ("ranges must be a list", whole.shard, {"group": group, "ranges": 5}),
        ("ranges must hold", whole.shard, {"group": group, "ranges": [5]}),
        ("dim must be an int", shard.take, {"x": torch.zeros(T), "dim": 0.0}),
    ]
    for words, call, arguments in kinds:
        try:
            call(**arguments)
            found.append(f"no error {words!r}")
        except TypeError as error:
            found += [] if words in str(error) else [str(error)]
    with flashmix.checks(True):
        try:
            Packing.from_lengths([T] if shard.rank != 2 else [T - 1, 1]).shard(group)
            found.append("lengths of other ranks must be compared")
        except ValueError as error:
            found += [] if "others on rank 2" in str(error) else [str(error)]
    return found


@check
def layers(group: Any) -> list[str]:
    """Every layer that does not refuse a shard gives the outputs and gradients of one process."""
    found, T = [], sum(LENGTHS)
    whole = Packing.from_lengths(LENGTHS)
    shard = whole.shard(group)
    size = Size(width=16, depth=2, head_dim=8, window=5)
    for name, entry in MECHANISMS.items():
        presets = OTHERS.get(name, [] if entry.preset is None else entry.preset(size))
        for options in {str(o): o for o in presets if not o.get("value_residual")}.values():
            assert entry.layer is not None and name not in REFUSED
            torch.manual_seed(0)
            layer = entry.layer(16, **options).double()
            x, flow = torch.randn(2, 1, T, 16, dtype=torch.float64)
            have, want = shard.take(x).requires_grad_(), x.clone().requires_grad_()
            ys = layer(have, cu_seqlens=shard), layer(want, cu_seqlens=whole)
            (ys[0] * shard.take(flow)).sum().backward()
            (ys[1] * flow).sum().backward()
            assert have.grad is not None and want.grad is not None
            found += far(f"{name} {options}", ys[0], shard.take(ys[1]))
            found += far(f"{name} {options} gradient", have.grad, shard.take(want.grad))
    return found


@check
def decoder(group: Any) -> list[str]:
    """A hybrid decoder, called as the documentation says: the loss and every parameter's gradient."""
    found, T = [], sum(LENGTHS)
    whole = Packing.from_lengths(LENGTHS)
    attention, window = {"heads": 2}, {"heads": 2, "window": 6}
    mixers = [("gated_deltanet", {"heads": 2}), ("kda", {"heads": 2}), ("attention", attention), ("attention", window)]
    config = DecoderConfig(vocab_size=11, width=16, layers=[LayerConfig(name, options) for name, options in mixers])
    torch.manual_seed(0)
    model = Decoder(config).double()
    tokens, targets = torch.randint(11, (2, 1, T))
    targets[0, ::5] = -100
    counted_targets = (targets != -100).sum()
    model(tokens, cu_seqlens=whole, targets=targets).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    exchanges: dict[tuple[str, bool], list[int]] = {}
    for order, recomputed in (("contiguous", False), ("zigzag", False), ("zigzag", True)):
        model.checkpoint_activations = recomputed
        model.zero_grad(set_to_none=True)
        shard = whole.shard(group, order=order)
        own = shard.take(targets)
        loss = model(shard.take(tokens), cu_seqlens=shard, targets=own, reduction="sum") / shard.sum(
            (own != -100).sum()
        )
        with counted() as sent:
            loss.backward()
        exchanges[order, recomputed] = [n for n, dtype in zip(sent, sent.dtypes, strict=True) if dtype != torch.uint8]
        if int(shard.sum((own != -100).sum())) != int(counted_targets):
            found.append("the number of counted targets")
        for name, p in model.named_parameters():
            expected = want[name]
            assert p.grad is not None and expected is not None
            found += far(f"{order} {name}, checkpoints {recomputed}", shard.sum(p.grad), expected)
    if exchanges["zigzag", True] != exchanges["zigzag", False] or not exchanges["zigzag", True]:
        found.append(f"checkpoints ask for states again: {exchanges}")
    return found


@check
def given_gradients(group: Any) -> list[str]:
    """What comes back from other ranks is added to gradients of the op's own, not to the caller's."""
    found, whole = [], Packing.from_lengths(LENGTHS)
    shard = whole.shard(group)
    x, weight = shard.take(normal(1, sum(LENGTHS), 3)).requires_grad_(), normal(3, 4)
    for name, y in {
        "shift": flashmix.token_shift(x, cu_seqlens=shard)[0],
        "convolution": flashmix.short_conv(x, weight, cu_seqlens=shard)[0],
        "residual": flashmix.short_conv(x, weight, residual=x, cu_seqlens=shard)[0],
    }.items():
        flow = normal(*y.shape)
        before = flow.clone()
        torch.autograd.grad(y, x, flow)
        found += [] if torch.equal(flow, before) else [name]
    return found


@check
def long_sequences(group: Any) -> list[str]:
    """Rotations where positions lie beyond what the rank has tokens, and beyond the smallest table."""
    whole = Packing.from_lengths([300, 3])
    shard, rotary = whole.shard(group), flashmix.modules.RotaryEmbedding(4)
    x = normal(1, 303, 2, 4)
    found = far("rotary", rotary(shard.take(x), cu_seqlens=shard), shard.take(rotary(x, cu_seqlens=whole)))
    cos, sin = flashmix.rotary_table(299, 4)
    return (
        found
        if refuses(flashmix.rotary, {"x": shard.take(x), "cos": cos, "sin": sin, "cu_seqlens": shard}, "table")
        else [*found, "table"]
    )


@check
def complex_scans(group: Any) -> list[str]:
    """Complex numbers whose decays depend on the token, some of which forget all."""
    found, T = [], sum(LENGTHS)
    whole = Packing.from_lengths(LENGTHS)
    shard = whole.shard(group, order="zigzag")
    torch.manual_seed(0)
    x, flow, start = (torch.complex(normal(*s), normal(*s)) for s in ((1, T, 3), (1, T, 3), (len(LENGTHS), 3)))
    decay = torch.complex(-0.1 * normal(1, T, 3).abs(), 3 * normal(1, T, 3))
    decay.real[:, ::11] = -torch.inf

    def results(packing: Packing, take: Any, state: Tensor) -> list[Tensor]:
        leaves = [take(x).requires_grad_(), take(decay).requires_grad_()]
        h, _ = flashmix.scan(*leaves, initial_state=state, cu_seqlens=packing)
        (h * take(flow)).real.sum().backward()
        return [h.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    have, want = results(shard, shard.take, start[pieces(shard)]), results(whole, lambda x: x.clone(), start)
    for place, (a, b) in enumerate(zip(have, want, strict=True)):
        found += far(f"result {place}", torch.view_as_real(a), torch.view_as_real(shard.take(b)))
    return found


@check
def repeated(group: Any) -> list[str]:
    """The same call twice gives the same bits."""
    found = []
    whole = Packing.from_lengths(PACKINGS["mixed"])
    ranges = [tuple(r[:3]) for r in layout("arbitrary", whole.total, 3)]
    for case in CASES[:: PARTS["of"]]:
        both = []
        for _ in range(2):
            shard = whole.shard(group, ranges=ranges)  # type: ignore[arg-type]
            both.append(evaluate(case, shard, 0, shard.pieces[shard.rank]))
        for name, (t, _) in both[0].items():
            if not torch.equal(t, both[1][name][0]):
                found.append(f"{case.name}: {name}")
    return found


@check
def mesh(group: Any) -> list[str]:
    """A mesh of one dimension is a group; one of two is not."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = Packing.from_lengths(LENGTHS)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    shard = whole.shard(both["context"], order="zigzag")
    x = torch.arange(sum(LENGTHS))
    found = [] if torch.equal(shard.gather(shard.take(x, 0), 0), x) and shard.ranks == 2 else ["a mesh is a group"]
    return found if refuses(whole.shard, {"group": both}, "a mesh of one dimension") else [*found, "two dimensions"]


@check
def parts_of_a_gradient(group: Any) -> list[str]:
    """A gradient of the values alone, from the final states alone; and under autocast, where states are joined in float32."""
    found, T = [], sum(LENGTHS)
    torch.manual_seed(0)
    whole = Packing.from_lengths([T])  # passes through a rank
    shard = whole.shard(group)
    q, v, beta = normal(1, T, 2, 4), normal(1, T, 2, 4), torch.rand(1, T, 2, dtype=torch.float64)
    k = flashmix.l2_norm(q)

    def final(packing: Packing, take: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        given = [take(x).to(dtype) for x in (q, k, v, beta)]
        given[2].requires_grad_()
        state = flashmix.delta_rule(*given, return_state=True, cu_seqlens=packing)[1]
        assert state is not None
        (grad,) = torch.autograd.grad((state if packing is whole else state[shard.ends]).sum(), given[2])
        return state.detach(), grad

    have, want = final(shard, shard.take, torch.float64), final(whole, lambda x: x.clone(), torch.float64)
    found += far("gradient of the final states", have[1], shard.take(want[1]))
    with torch.autocast("cpu", torch.bfloat16):
        have, want = final(shard, shard.take, torch.float32), final(whole, lambda x: x.clone(), torch.float32)
    error = (have[0][shard.ends] - want[0][pieces(shard)][shard.ends]).abs()
    if error.numel() and error.max() > 64 * torch.finfo(torch.float32).eps * want[0].abs().max():
        found.append(f"states under autocast: {float(error.max())}")
    return found


@check
def whole_tensors(group: Any) -> list[str]:
    """`gather` inverts `take` on any axis, and its gradient is the sum over ranks; `positions` are global."""
    torch.manual_seed(0)
    whole, found = Packing.from_lengths(LENGTHS), []
    shard = whole.shard(group, order="zigzag")
    for x, dim in ((normal(sum(LENGTHS)), 0), (normal(2, 3, sum(LENGTHS)), -1), (whole.positions[None], 1)):
        found += [] if torch.equal(shard.gather(shard.take(x, dim), dim), x) else [f"gather on axis {dim}"]
    found += [] if torch.equal(shard.positions, shard.take(whole.positions, 0)) else ["positions"]
    x = shard.take(normal(1, sum(LENGTHS), 3)).requires_grad_()
    flow = normal(1, sum(LENGTHS), 3) * (1 + shard.rank)
    (shard.gather(x) * flow).sum().backward()
    assert x.grad is not None
    return found + far("gradient of gather", x.grad, shard.take(shard.sum(flow)))
