"""One call of softmax attention, and who can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.call import Call, Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing

MOST_CHANNELS_BACKWARD = 256
LEAST_CHANNELS_HOPPER = 33  # of the larger head dim: for fewer its tiles were not timed
# For fewer channels Triton's kernels are as fast with gates, with slopes if not causal, and if a call is causal, short and not packed.
LEAST_CHANNELS_CAUSAL = 65
LEAST_TOKENS_CAUSAL = 1024


@dataclass(frozen=True)
class AttentionCall(Call):
    """Queries `q [B, Tq, HQ, K]` over keys `k [B, Tk, H, K]` and values `v [B, Tk, H, V]`.

    Query `i` of a sequence stands at position `i + Tk - Tq` and sees the keys from `left` before to `right` after it (None: all of
    them); causal attention is `right = 0`. `alibi_slopes`: `[HQ]`, or `[B, HQ]` where nothing is packed. `seed`: the random number that
    dropout is a function of. `key_starts`, `key_lengths` `[B]`: the first key of each sequence, and the key after its last one, which
    takes the place of `Tk`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    alibi_slopes: Tensor | None
    log_decay: Tensor | None
    seed: Tensor | None
    packing: Packing | None
    packing_k: Packing | None
    scale: float
    left: int | None
    right: int | None
    softcap: float | None
    dropout_p: float
    return_lse: bool
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens_q(self) -> int:
        return self.q.shape[1]

    @property
    def tokens_k(self) -> int:
        return self.k.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[2]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads_q // self.heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of what each row of scores has one of."""
        return self.batch, self.heads_q, self.tokens_q

    @property
    def packed(self) -> bool:
        return self.packing is not None

    @property
    def ranged(self) -> bool:
        """Whether sequences have fewer keys than `Tk`."""
        return self.key_starts is not None or self.key_lengths is not None

    @property
    def slopes_by_sequence(self) -> bool:
        """Whether each sequence has slopes of its own, `[B, HQ]`."""
        return self.alibi_slopes is not None and self.alibi_slopes.dim() == 2

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """The first key of each sequence and the end of its keys, `[B]` each, within the tensors."""
        end = torch.full((self.batch,), self.tokens_k, device=self.device)
        if self.key_lengths is not None:
            end = self.key_lengths.clamp(0, self.tokens_k)
        start = torch.zeros_like(end) if self.key_starts is None else self.key_starts.clamp(min=0)
        return torch.minimum(start, end), end

    @property
    def gradient(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors())

    def results(self) -> Outputs:
        """`o [B, Tq, HQ, V]`, and with `return_lse` `lse [B, HQ, Tq]`, packed `[HQ, Tq]`."""
        q = self.q
        o = torch.empty(*q.shape[:3], self.v.shape[3], dtype=q.dtype, device=q.device)
        if not self.return_lse:
            return (o,)
        shape = self.rows[1:] if self.packed else self.rows
        return o, torch.empty(size=shape, dtype=state_dtype(q.dtype), device=q.device)

    def row_statistics(self) -> Outputs:
        """Empty tensors `[B, HQ, Tq]`, kept for backward: what each row's scores are counted from, m, and the sum l of its exponentials."""
        q = self.q
        return tuple([torch.empty(self.rows, dtype=state_dtype(q.dtype), device=q.device) for _ in range(2)])


def triton_supports(call: AttentionCall) -> str | None:
    channels = max(call.q.shape[3], call.v.shape[3])
    if call.gradient and channels > MOST_CHANNELS_BACKWARD:
        return f"its backward takes head dims up to {MOST_CHANNELS_BACKWARD}, got {channels}"
    if call.ranged and call.log_decay is not None:
        return "it sums log_decay over whole rows, and has no key_starts or key_lengths beside it"
    return gpu.refuses(call.device, call.dtype)


def hopper_supports(call: AttentionCall) -> str | None:
    channels = max(call.q.shape[3], call.v.shape[3])
    if not LEAST_CHANNELS_HOPPER <= channels <= MOST_CHANNELS_BACKWARD:
        return f"its tiles take head dims from {LEAST_CHANNELS_HOPPER} to {MOST_CHANNELS_BACKWARD}, got {channels}"
    biased = call.log_decay is not None or (call.alibi_slopes is not None and call.right != 0)
    short = call.right == 0 and not call.packed and call.tokens_q < LEAST_TOKENS_CAUSAL
    if channels < LEAST_CHANNELS_CAUSAL and (biased or short):
        return f"Triton's kernels are as fast for such calls with head dims below {LEAST_CHANNELS_CAUSAL}"
    if call.dropout_p > 0:
        return "it has no dropout"
    if call.ranged:
        return "it has no key_starts or key_lengths"
    if call.slopes_by_sequence:
        return "it has no alibi_slopes of each sequence"
    if min(call.q.numel(), call.k.numel(), call.v.numel()) == 0:
        return "the inputs are empty"
    return gpu.hopper_refuses(call.device, call.dtype, (torch.bfloat16, torch.float16))


def sdpa_supports(call: AttentionCall) -> str | None:
    extras = {
        "a window of several queries": (call.left is not None or call.right not in (None, 0)) and call.tokens_q > 1,
        "a window beside key_starts or key_lengths": call.left is not None and call.ranged,
        "softcap": call.softcap is not None,
        "dropout": call.dropout_p > 0,
        "a sink": call.sink is not None,
        "ALiBi": call.alibi_slopes is not None,
        "log_decay": call.log_decay is not None,
        "packed sequences": call.packed,
        "key_starts or key_lengths of several queries": call.ranged and call.tokens_q > 1,
        "return_lse": call.return_lse,
    }
    for extra, wanted in extras.items():
        if wanted:
            return f"torch's scaled_dot_product_attention does not take {extra}"
    dim_qk, dim_v, device = call.q.shape[3], call.v.shape[3], call.device.type
    if dim_qk != dim_v:
        return f"torch holds [Tq, Tk] scores when the head dims differ, got {dim_qk} and {dim_v}"
    if call.right == 0 and call.tokens_q not in (1, call.tokens_k):
        return "torch aligns the causal mask to the first key, not to the last"
    if call.right == 0 and not call.scale > 0:
        return "torch multiplies the causal mask by the scale as well, and one of 0 or less takes it away"
    if min(call.batch, call.tokens_q, call.tokens_k) == 0:
        return "the inputs are empty"
    if device != "cpu" and call.gradient:
        return f"torch's backward on {device} is not deterministic"
    return None
