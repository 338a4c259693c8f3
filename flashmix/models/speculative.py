"""Speculative decoding: a small model drafts a few tokens, the large one reads them at once and keeps those it agrees with.

The result is that of the large model alone: the same tokens when greedy, the same distribution when sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.models.cache import ModelCache
from flashmix.models.decoder import Decoder
from flashmix.models.generate import check_call, last_token, stacked, stop_tokens, stream
from flashmix.models.sampling import Sampling, SamplingOptions
from flashmix.op.checks import check_range
from flashmix.op.options import hands_on


@dataclass
class Acceptance:
    """The number of drafted tokens and of those that the model kept, updated during generation."""

    drafted: int = 0
    accepted: int = 0


class SpeculationOptions(SamplingOptions, total=False):
    """The options of `generate_speculatively`."""

    draft_tokens: int
    attention_mask: Tensor | None
    stop: int | Sequence[int] | None
    acceptance: Acceptance | None


@hands_on(stream, SamplingOptions.__annotations__)
def stream_speculatively(
    model: Decoder,
    draft: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    draft_tokens: int = 4,
    attention_mask: Tensor | None = None,
    stop: int | Sequence[int] | None = None,
    acceptance: Acceptance | None = None,
    **options: Unpack[SamplingOptions],
) -> Iterator[Tensor]:
    """Like `generate_speculatively`, but yields the new token of each row, `[B]`, as soon as every row has it."""
    run = _Speculation(model, draft, draft_tokens, Sampling(**options), acceptance)
    return run.stream(tokens, max_new_tokens, attention_mask, stop)


@hands_on(stream_speculatively)
def generate_speculatively(
    model: Decoder, draft: Decoder, tokens: Tensor, max_new_tokens: int, **options: Unpack[SpeculationOptions]
) -> Tensor:
    """Continues each row of `tokens` as `generate` with `model` does, with fewer calls of `model` where `draft` is right.

    In a round `draft` adds `draft_tokens` tokens one by one and `model` reads all of them in one call. With `p` and `q` the
    probabilities of `model` and `draft`, a token `x` is kept with probability `min(1, p(x) / q(x))`; in place of the first one
    that is not, one is drawn from `max(p - q, 0)`, normalised; after the last, one from `p`. So a round gives 1 to
    `draft_tokens + 1` tokens, each row its own number, and the caches forget what was not kept.

    Args:
        model: the decoder whose text is wanted.
        draft: any decoder of the same vocabulary, on the same device.
        tokens, max_new_tokens, attention_mask, temperature, top_k, top_p, stop, generator: as in `generate`.
        draft_tokens: tokens drafted in a round, at least 1.
        acceptance: counts to add to.

    Returns:
        The new tokens `[B, n]`, `n <= max_new_tokens`, as `generate` gives them.

    Raises:
        ValueError: an option is out of its range, a prompt is empty, or `draft` has another vocabulary or device.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2.

    Example:
        >>> import torch
        >>> from flashmix.models import generate, preset
        >>> model, draft = Decoder(preset("hybrid_nano")), Decoder(preset("gla_nano"))
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> torch.equal(generate_speculatively(model, draft, prompt, 8), generate(model, prompt, 8))
        True
    """
    return stacked(stream_speculatively(model, draft, tokens, max_new_tokens, **options), tokens)


class _Speculation:
    """One call: the two models and the caches of the rows that are not finished, which hold all but a row's last token."""

    def __init__(
        self, model: Decoder, draft: Decoder, count: int, sampling: Sampling, acceptance: Acceptance | None
    ) -> None:
        self.model, self.draft, self.count, self.sampling = model, draft, count, sampling
        self.acceptance = acceptance or Acceptance()

    def stream(
        self, tokens: Tensor, limit: int, attention_mask: Tensor | None, stop: int | Sequence[int] | None
    ) -> Iterator[Tensor]:
        """Checks the call at once; the steps are computed as they are asked for."""
        model, draft = self.model, self.draft
        check_call(tokens, limit, attention_mask, self.sampling)
        check_range("draft_tokens", self.count, 1, 2**31)
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"draft must have vocab_size {model.config.vocab_size} like model, got {draft.config.vocab_size}"
            )
        device, draft_device = model.embedding.weight.device, draft.embedding.weight.device
        if device != draft_device:
            raise ValueError(f"draft must be on {device} like model, got {draft_device}")
        self.caches: tuple[ModelCache, ModelCache] = model.new_cache(self.count + 1), draft.new_cache(self.count + 1)
        return self._steps(tokens, limit, attention_mask, stop_tokens(stop, tokens))

    @torch.no_grad()
    def _steps(self, tokens: Tensor, limit: int, attention_mask: Tensor | None, stops: Tensor) -> Iterator[Tensor]:
        if limit == 0:
            return
        rows = [[token] for token in self._read_prompt(tokens, attention_mask).tolist()]  # new tokens of each row
        ends, given = set(stops.tolist()), 0
        active = list(range(len(rows)))
        while True:
            kept = [place for place, row in enumerate(active) if len(rows[row]) < limit and rows[row][-1] not in ends]
            if len(kept) < len(active):
                index = torch.tensor(kept, dtype=torch.int64, device=tokens.device)
                for cache in self.caches:
                    cache.reorder(index)
                active = [active[place] for place in kept]
            ready = min((len(rows[row]) for row in active), default=max(len(row) for row in rows))
            for place in range(given, ready):
                yield tokens.new_tensor([row[min(place, len(row) - 1)] for row in rows])
            given = ready
            if not active:
                return
            left = max(limit - len(rows[row]) for row in active)
            last = torch.tensor([rows[row][-1] for row in active], device=tokens.device)
            for row, new in zip(active, self._round(last, min(self.count, left - 1)), strict=True):
                rows[row] += _until_stop(new[: limit - len(rows[row])], ends)

    def _read_prompt(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Both models read the prompts `[B, T]`; the first new token of each row."""
        cache, draft_cache = self.caches
        hidden = last_token(self.model.hidden(tokens, attention_mask=attention_mask, cache=cache), attention_mask)
        self.draft.hidden(tokens, attention_mask=attention_mask, cache=draft_cache)
        return self.sampling.sample(self.model.logits(hidden))

    def _round(self, last: Tensor, count: int) -> list[list[int]]:
        """The next 1 to `count + 1` tokens of each row after `last` `[B]`."""
        cache, draft_cache = self.caches
        drafted, q = self._draft(last, count)
        read = torch.cat([last[:, None], drafted], dim=1)
        p = self.sampling.probabilities(self.model.logits(self.model.hidden(read, cache=cache)))
        accepted, following = verify(p, q, drafted, self.sampling.generator)
        if bool((accepted < count).any()):
            self.model.roll_back(cache, count - accepted)
            self.draft.roll_back(draft_cache, count - accepted)
        self.acceptance.drafted += drafted.numel()
        self.acceptance.accepted += int(accepted.sum())
        rows = zip(drafted.tolist(), accepted.tolist(), following.tolist(), strict=True)
        return [[*tokens[:kept], token] for tokens, kept, token in rows]

    def _draft(self, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`count` tokens of the draft after `last` `[B]`, and its probabilities for them `[B, count, vocabulary]`.

        It reads the last of them as well, so that both caches hold the same tokens.
        """
        drafted, chances = [last], []
        for step in range(count + 1):
            hidden = self.draft.hidden(drafted[-1][:, None], cache=self.caches[1])
            if step < count:
                q = self.sampling.probabilities(self.draft.logits(hidden[:, -1]))
                chances.append(q)
                drafted.append(self.sampling.draw(q))
        empty = last.new_zeros(len(last), 0, self.draft.config.vocab_size, dtype=torch.float32)
        return torch.stack(drafted, dim=1)[:, 1:], torch.stack(chances, dim=1) if chances else empty


def verify(p: Tensor, q: Tensor, drafted: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The rule of rejection: how many drafted tokens are kept, and the token that follows them.

    Args:
        p: `[B, N + 1, vocabulary]`, the model's probabilities for each drafted token and for one more.
        q: `[B, N, vocabulary]`, the draft's, from which the tokens were drawn.
        drafted: `[B, N]` int64.
        generator: of random numbers.

    Returns:
        How many are kept, `[B]`, and the next token, `[B]`.

    Example:
        >>> import torch
        >>> p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> verify(p, torch.tensor([[[0.5, 0.5]]]), torch.tensor([[0]]))  # it should have been 1
        (tensor([0]), tensor([1]))
    """
    chance = keep_probability(p, q, drafted)
    threshold = torch.rand(chance.shape, generator=generator, device=p.device, dtype=p.dtype)
    accepted = (threshold < chance).long().cumprod(dim=1).sum(dim=1)
    following = torch.multinomial(leftover(p, q, accepted), 1, generator=generator).squeeze(1)
    return accepted, following


def keep_probability(p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """`min(1, p(x) / q(x))` for each drafted token `x`, `[B, N]`."""
    index = drafted[..., None]
    return (p[:, :-1].gather(2, index) / q.gather(2, index)).squeeze(2).clamp(max=1.0)


def leftover(p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """`max(p - q, 0)`, normalised, at the first token that was not kept, `[B, vocabulary]`; `p` where all were."""
    index = accepted[:, None, None].expand(-1, 1, p.shape[2])
    wanted = p.gather(1, index).squeeze(1)
    rest = (wanted - torch.nn.functional.pad(q, (0, 0, 0, 1)).gather(1, index).squeeze(1)).clamp(min=0.0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, wanted)  # total = 0: p equals q up to rounding


def _until_stop(tokens: list[int], ends: set[int]) -> list[int]:
    """`tokens` up to and with the first that ends a row."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]
