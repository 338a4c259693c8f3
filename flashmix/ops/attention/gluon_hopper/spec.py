"""The spec of the Hopper kernels, and tensors as TMA moves them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.gpu.tma import Tiles
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.table import HEADS_OF_BOTH_WAYS, REGISTERS, config_for, takes_llvm_passes
from flashmix.ops.attention.triton_gpu.spec import AttentionSpec, Channels, spec_of, steps_of
from flashmix.ops.attention.triton_gpu.table import parts

# With coordinates (RAGGED, start + tokens, RAGGED - tokens + row) an address comes to row `start + row`, since it counts modulo 2^64, and
# the last coordinate is inside below RAGGED: what lies past the end of a packed sequence is read as 0 and never written.
RAGGED = 1 << 30
ENDLESS = 0x7FFF0000
MOST_IN_PARTS = (
    96  # channels of the larger head dim that the backward takes in two parts, as the tiles of 128 are too wide
)
MOST_WITH_VALUES = 128  # up to which one pass over the keys makes dV besides dK and dQ
MOST_WITH_OWN_RESULTS = 128  # channels for which shared memory has room beside q, k and v
# float16 ends at 2^16: P of scores 2^24 times as large as the first tile's are in its range, and those down to 2^-6 of it normal numbers
HEADROOM = {torch.float16: 8, torch.bfloat16: 0}


def hopper_spec(call: AttentionCall, phase: str) -> tuple[AttentionSpec, dict[str, int]]:
    """What the phase's kernel is compiled for, and its launch options."""
    biased = call.log_decay is not None or call.alibi_slopes is not None
    config = config_for(phase, call.q.shape[3], call.v.shape[3], biased)
    spec, _ = spec_of(call, phase, config)
    warps = 4
    if phase == "backward":
        QK, V = _together(spec.QK.ALL, spec.V.ALL)
        two_ways = spec.CAUSAL and not spec.LEFT and call.heads_q >= HEADS_OF_BOTH_WAYS
        with_v = max(spec.QK.ALL, spec.V.ALL) <= MOST_WITH_VALUES
        stays = with_v and (spec.LEFT or (spec.CAUSAL and QK.FIRST == 64))
        spec = spec._replace(QK=QK, V=V, BY_HEAD=call.group > 1, TWO_WAYS=two_ways, STAYS=stays, WITH_V=with_v)
        warps = 8 if QK.FIRST == 128 else 4
    elif phase == "values":
        QK, V = _together(spec.QK.ALL, spec.V.ALL)
        spec = spec._replace(QK=QK, V=V, WITH_Q=False)
    elif phase == "wide":
        spec = spec._replace(WITH_Q=False)
    elif phase == "queries":  # at 256 channels shared memory has room for one tile of values
        spec = spec._replace(V_STAGES=1 if max(spec.QK.FIRST, spec.V.FIRST) > 128 else spec.STAGES)
    else:
        first_max = spec.CAUSAL or not biased
        spec = spec._replace(
            OWN_RESULTS=max(spec.QK.ALL, spec.V.ALL) <= MOST_WITH_OWN_RESULTS or not _fits(spec.V, spec.QK),
            FIRST_MAX=first_max,
            HEADROOM=HEADROOM[call.dtype] if first_max else 0,
        )
    passes = takes_llvm_passes(phase, max(spec.QK.ALL, spec.V.ALL), biased or spec.SOFTCAP)
    return spec, {"num_warps": warps, "maxnreg": REGISTERS[config.warps // 4][0], "llvm_passes": passes}


def _together(dim_qk: int, dim_v: int) -> tuple[Channels, Channels]:
    """The parts of q and of v in the backward with dQ: two of q, a piece of dQ each, from 65 to 96 and from 129 channels, else one of both.

    Above 128 channels those of v are as wide as q's, in whose memory dV leaves, or its first alone.
    """
    whole = max(dim_qk, dim_v)
    if 64 < whole <= MOST_IN_PARTS:
        return Channels(dim_qk, *parts(max(dim_qk, 65))), Channels(dim_v, *parts(max(dim_v, 64)))
    if whole > MOST_WITH_VALUES:
        second = parts(whole)[1]
        return Channels(dim_qk, 128, second), Channels(dim_v, 128, second if dim_v > 128 else 0)
    one = 64 if whole <= 64 else 128
    return Channels(dim_qk, one, 0), Channels(dim_v, one, 0)


def _fits(results: Channels, tile: Channels) -> bool:
    """Whether results can lie where a tile of q did."""
    return results.FIRST == tile.FIRST and results.SECOND in (0, tile.SECOND)


def tiles(x: Tensor, S: AttentionSpec, rows: int, width: Channels) -> tuple[Tiles, Tiles | None]:
    """Both parts of x `[B, T, H, D]` in tiles of `rows`; None for a part that is not there."""
    batch, token, head = steps_of(x)
    if S.PACKED:
        shape = [ENDLESS, ENDLESS, x.shape[2], RAGGED, x.shape[3]]
        steps = [(1 << 34) - token, token, head, token, 1]
    else:
        shape, steps = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]], [batch, head, token, 1]
    box = (1,) * (len(shape) - 2)
    first, second = (Tiles(x, shape, steps, (*box, rows, w or width.FIRST)) for w in width[1:])
    return first, second if width.SECOND else None
