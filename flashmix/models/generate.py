"""Generation: the model reads the prompt at once, then continues token by token from its cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from flashmix.models.cache import ModelCache
from flashmix.models.decoder import Decoder
from flashmix.models.replay import TokenSteps
from flashmix.models.sampling import Sampling, SamplingOptions
from flashmix.op.checks import check_range, check_shape, dims
from flashmix.op.options import hands_on


class GenerateOptions(SamplingOptions, total=False):
    """The options of `generate`."""

    attention_mask: Tensor | None
    stop: int | Sequence[int] | None
    cache: ModelCache | None
    cuda_graph: bool | None


def stream(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    cache: ModelCache | None = None,
    cuda_graph: bool | None = None,
) -> Iterator[Tensor]:
    """Like `generate`, but yields the new token of each row, `[B]`, as soon as it is known."""
    sampling = Sampling(temperature, top_k, top_p, generator)
    check_call(tokens, max_new_tokens, attention_mask, sampling)
    kept = cache is not None  # the caller continues from it: a row that has stopped must not enter it any more
    steps = TokenSteps(model, model.new_cache() if cache is None else cache, cuda_graph)
    return _steps(steps, tokens, max_new_tokens, attention_mask, sampling, stop_tokens(stop, tokens), kept)


@hands_on(stream)
def generate(model: Decoder, tokens: Tensor, max_new_tokens: int, **options: Unpack[GenerateOptions]) -> Tensor:
    """Continues each row of `tokens`; greedy generation gives the argmax of the full forward at every position.

    Args:
        model: the decoder.
        tokens: `[B, T]` int64, the prompts; of unequal length with padding (left or right) and a mask.
        max_new_tokens: tokens to generate at most.
        attention_mask: `[B, T]`, non-zero where there is a token.
        temperature: 0 for the likeliest token; else logits are divided by it and a token is drawn.
        top_k: draw from the `k` likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability, at least one.
        stop: token or tokens that end a row; the row then repeats it.
        generator: of random numbers, on the model's device.
        cache: to continue from: what the model has read before `tokens`. Afterwards it holds, for each row, all but the
            row's last new token; a longer prompt starts with that one.
        cuda_graph: whether tokens after the first are replays of a CUDA graph, which the second captures: the host then launches one
            thing per token. The model must not change meanwhile. None: on a GPU, where nothing stands in the way (hooks, a layer that
            waits for the device, a cache with a history) and more than a few tokens are wanted; False: never; True: else an error.

    Returns:
        The new tokens `[B, n]`, `n <= max_new_tokens` (less where all rows have stopped).

    Raises:
        ValueError: an option is out of its range, a prompt is empty, or `cuda_graph` is True where that is not possible.

    Example:
        >>> import torch
        >>> from flashmix.models.presets import preset
        >>> generate(Decoder(preset("gla_nano")), torch.tensor([[1, 2, 3]]), 5).shape
        torch.Size([1, 5])
    """
    return stacked(stream(model, tokens, max_new_tokens, **options), tokens)


def stacked(steps: Iterator[Tensor], tokens: Tensor) -> Tensor:
    """The tokens `[B, n]` of a stream that continues the prompts `tokens`."""
    new = list(steps)
    return torch.stack(new, dim=1) if new else tokens[:, :0]


def check_call(tokens: Tensor, max_new_tokens: int, attention_mask: Tensor | None, sampling: Sampling) -> None:
    """Raises ValueError for an invalid argument of `generate`."""
    B, T = dims("tokens", tokens, "B T")
    check_range("max_new_tokens", max_new_tokens, 0, 2**31)
    sampling.check()
    if T == 0:
        raise ValueError("tokens must hold at least one token a row, got [B, 0]")
    if attention_mask is not None:
        check_shape("attention_mask", attention_mask, B, T)
        if not bool((attention_mask != 0).any(dim=1).all()):
            raise ValueError("attention_mask must leave at least one token in every row")


def stop_tokens(stop: int | Sequence[int] | None, tokens: Tensor) -> Tensor:
    """The tokens that end a row, as a tensor like `tokens`."""
    return tokens.new_tensor([stop] if isinstance(stop, int) else list(stop or ()))


@torch.no_grad()
def _steps(
    steps: TokenSteps,
    tokens: Tensor,
    max_new_tokens: int,
    attention_mask: Tensor | None,
    sampling: Sampling,
    stops: Tensor,
    kept: bool,
) -> Iterator[Tensor]:
    model, cache = steps.model, steps.cache
    finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    last = tokens[:, -1]
    ended = 0  # rows that are finished
    for step in range(max_new_tokens):
        if step:
            logits = steps(last, max_new_tokens - step, ~finished[:, None] if kept and ended else None)
        else:
            hidden = last_token(model.hidden(tokens, attention_mask=attention_mask, cache=cache), attention_mask)
            logits = model.logits(hidden)
        last = torch.where(finished, last, sampling.sample(logits).to(tokens.dtype))
        yield last
        if len(stops):
            finished = torch.isin(last, stops)
            ended = int(finished.sum())
            if ended == len(finished):
                return


def last_token(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """`[B, D]`: the last of `[B, T, D]` that is a token in each row."""
    if attention_mask is None:
        return hidden[:, -1]
    last = hidden.shape[1] - 1 - (attention_mask != 0).flip(1).int().argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token `[B]` from each row of logits `[B, vocabulary]`; options as in `generate`.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> sample(logits).tolist(), sample(logits, 1.0, top_k=1).tolist()
        ([1], [1])
    """
    return Sampling(temperature, top_k, top_p, generator).sample(logits)


def probabilities(
    logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The probabilities `[..., vocabulary]`, float32 (float64 for float64), that `sample` draws from; 1 for the likeliest at 0.

    Example:
        >>> import torch
        >>> probabilities(torch.tensor([[0.0, 2.0, 1.0]])).tolist()
        [[0.0, 1.0, 0.0]]
    """
    return Sampling(temperature, top_k, top_p).probabilities(logits)
