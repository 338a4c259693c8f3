"""The one decoder: embedding, blocks of mixer and MLP, norm, head. Every architecture is a list of layers for it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashmix.layer.cache import LayerCache, RecurrentCache
from flashmix.layer.padding import Padding, padding_of
from flashmix.models.cache import ModelCache
from flashmix.models.config import NORMS, DecoderConfig, LayerConfig
from flashmix.modules import ChannelMixing, LayerNorm, LinearCrossEntropy, MixtureOfExperts, RMSNorm
from flashmix.op.checks import check_choice, check_dtype, check_shape, contents_are_checked, dims
from flashmix.op.packing import Packing, as_packing, check_whole
from flashmix.op.recompute import KINDS, MADE_AGAIN, recomputing
from flashmix.parallel.exchange import keep_states


class Block(nn.Module):
    """`h = x + mixer(norm(x))`, then `h + mlp(norm(h))`; with `norm_after` `x + norm(mixer(x))` and `h + norm(mlp(h))`."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, **placement: Any) -> None:
        super().__init__()
        self.kind = layer.mixer
        self.norm_after = layer.norm_after
        self.recompute: Collection[str] = (
            MADE_AGAIN  # which outputs the backward makes again; a `Decoder` says it to all
        )
        norm = partial(NORMS[config.norm], config.width, config.norm_eps, **placement)
        self.mixer_norm = norm()
        self.mixer = layer.build(config.width, **placement)
        without = layer.mlp is not None and layer.mlp["kind"] == "none"
        self.mlp_norm = None if without else norm()
        self.mlp = layer.build_mlp(config.width, config.mlp_width, **placement)

    def forward(
        self,
        x: Tensor,
        packing: Packing | None,
        cache: LayerCache | None,
        shared: dict[str, Tensor],
        mlp_cache: RecurrentCache | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The residual stream and what is still to be added to it, both ways: the next norm adds it in the pass that it makes anyway.

        The dictionary holds the values of the first layer of each kind that shares them (`Mixer.shares`).
        """
        with contextlib.nullcontext() if packing is not None and packing.sharded else recomputing(x, self.recompute):
            return self._run(x, packing, cache, shared, mlp_cache, added)

    def _run(
        self,
        x: Tensor,
        packing: Packing | None,
        cache: LayerCache | None,
        shared: dict[str, Tensor],
        mlp_cache: RecurrentCache | None,
        added: Tensor | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.norm_after:
            y = x = x if added is None else x + added
        else:
            y, x = normalised(self.mixer_norm, x, added)
        if self.mixer.shares is None:
            y = self.mixer(y, cu_seqlens=packing, cache=cache)
        else:
            first = shared.get(self.kind)
            y, values = self.mixer(y, cu_seqlens=packing, cache=cache, first_values=first, return_values=True)
            shared = {self.kind: values, **shared}
        if self.norm_after:
            y = self.mixer_norm(y)
        if self.mlp is None or self.mlp_norm is None:
            return x, y, shared
        if self.norm_after:
            x = x + y
            return x, self.mlp_norm(self._mlp(x, packing, mlp_cache)), shared
        y, x = self.mlp_norm.add_and_norm(y, x)
        return x, self._mlp(y, packing, mlp_cache), shared

    def _mlp(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        """The MLP, which may look at the token before."""
        assert self.mlp is not None
        if not isinstance(self.mlp, ChannelMixing):
            y: Tensor = self.mlp(x)
            return y
        before = None if cache is None else cache.recent
        y, last = self.mlp(x, initial_state=before, return_state=cache is not None, cu_seqlens=packing)
        if cache is not None:
            cache.recent = last
        return y

    def writers(self) -> Iterator[Tensor]:
        """The matrices whose products are added to the residual stream."""
        yield self.mixer.output.weight
        if self.mlp is not None:
            yield from self.mlp.writers()  # type: ignore[operator]


def normalised(norm: RMSNorm | LayerNorm, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(norm(x + added), x + added)`, where None adds nothing; with the bits of a sum that was made before, as by `summed`."""
    if added is not None and added.dtype != x.dtype:  # under autocast: the norm of a sum has the dtype of `added`
        x, added = x + added, None
    return norm.add_and_norm(x, None) if added is None else norm.add_and_norm(added, x)


def summed(block: nn.Module, x: Tensor, *arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A block with its sum made, so that the next one keeps one tensor as its input."""
    x, added, shared = block(x, *arguments)
    return x + added, shared


class Decoder(nn.Module):
    """A decoder-only language model made from a `DecoderConfig`.

    Args:
        config: sizes and layers.
        checkpoint_activations: keep only the input of each block and compute the rest again in the backward; over a `Shard` the states of
            other ranks are kept as well, not asked for again.
        recompute: which outputs the backward makes again in place of keeping them, on a GPU, with the same bits: any of "norms",
            "gated_norms", "convolutions", "rotary" and "products". Each block has them as its attribute `recompute`.
        device, dtype: of the parameters.

    Example:
        >>> import torch
        >>> from flashmix.models.presets import preset
        >>> model = Decoder(preset("gated_deltanet_nano"))
        >>> tokens = torch.randint(256, (2, 10))
        >>> model(tokens).shape, model(tokens[:, :-1], targets=tokens[:, 1:]).shape
        (torch.Size([2, 10, 256]), torch.Size([]))
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        checkpoint_activations: bool = False,
        recompute: Collection[str] = MADE_AGAIN,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(config.vocab_size, config.width, device=device, dtype=dtype)
        norm = partial(NORMS[config.norm], config.width, config.norm_eps, device=device, dtype=dtype)
        self.embedding_norm = norm() if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer, device=device, dtype=dtype) for layer in config.layers)
        for kind in recompute:
            check_choice("recompute", kind, *KINDS)
        for block in self._blocks():
            block.recompute = tuple(recompute)
        self.norm = norm()
        self.head = nn.Linear(config.width, config.vocab_size, bias=False, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.loss = LinearCrossEntropy(softcap=config.logit_softcap)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal weights of variance `1 / (3 inputs)`, smaller by `sqrt(2 blocks)` where they write to the residual.

        Embeddings have a spread of 0.2 (after their scale) and logits start as if the head's weights had 0.02: small enough to begin near
        the uniform distribution, and large enough beside the output of the first blocks (measured on bytes of
        source code, 600k tokens: 2.23 bits per byte; with 0.02 for both 2.45).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5)
            elif isinstance(module, MixtureOfExperts):
                module.reset_parameters()
        nn.init.normal_(self.head.weight, std=0.02)
        scale = self.config.embedding_scale or 1.0
        nn.init.normal_(self.embedding.weight, std=0.2 / scale)
        self.norm.set_scale(0.1 * scale if self.config.tied else 1.0)
        for block in self._blocks():
            for weight in block.writers():
                weight.mul_((2 * len(self.blocks)) ** -0.5)

    def new_cache(self, history: int = 0) -> ModelCache:
        """An empty cache; `history` last tokens of it can be rolled back."""
        mixers: list[LayerCache] = [block.mixer.new_cache() for block in self._blocks()]
        mlps = [RecurrentCache() for block in self._blocks() if isinstance(block.mlp, ChannelMixing)]
        return ModelCache([*mixers, *mlps], history)

    def _blocks(self) -> Iterator[Block]:
        """The blocks, with their type."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        cache: ModelCache | None = None,
        targets: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits of the next token, or the loss against `targets` without ever holding the logits.

        Args:
            tokens: `[B, T]` int64 or int32.
            cu_seqlens: `[N + 1]` boundaries of packed sequences or their `Packing`; needs `B == 1`.
            attention_mask: `[B, T]`, non-zero where there is a token; the others are padding, wherever they are. With a
                cache it covers the tokens of this call only.
            cache: from `new_cache`, the memory of the tokens before these; updated in place. For inference only.
            targets: `[B, T]` int64, the token that should follow each token; -100 where it does not count (as padding).
            reduction: of the loss, "mean" over counted targets, "sum" or "none"; over a `Shard` not "mean", which takes the other
                ranks' targets.

        Returns:
            Logits `[B, T, vocab_size]`; with `targets` the loss.

        Raises:
            TypeError: `tokens` or the mask has another dtype.
            ValueError: a token is not in the vocabulary, shapes do not fit, both `cu_seqlens` and `attention_mask` are
                given, the cache holds another number of sequences or is used while gradients are recorded, a mean over a `Shard`.
        """
        if targets is not None and reduction == "mean" and isinstance(cu_seqlens, Packing) and cu_seqlens.sharded:
            raise ValueError(
                "reduction must be 'sum' or 'none' over a Shard, whose ranks count targets together, got 'mean'"
            )
        x, padding = self._hidden(tokens, cu_seqlens, attention_mask, cache)
        if targets is None:
            return self.logits(x if padding is None else padding.restore(x))
        check_shape("targets", targets, *tokens.shape)
        if padding is None:
            return self.loss(x, self.head.weight, targets, reduction)
        loss = self.loss(x, self.head.weight, padding.remove(targets), reduction)
        return padding.restore(loss) if reduction == "none" else loss

    def hidden(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The input of the head, `[B, T, width]`, zero at padding; arguments as in `forward`."""
        x, padding = self._hidden(tokens, cu_seqlens, attention_mask, cache)
        return x if padding is None else padding.restore(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head on `hidden` `[..., width]`: `[..., vocab_size]`."""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def roll_back(self, cache: ModelCache, count: int | Tensor) -> None:
        """Forgets the last `count` tokens of the cache (a number, or `[B]` one for each sequence).

        The newest snapshot before them is restored and the tokens between it and the goal are read again.

        Raises ValueError: the cache's `history` does not reach that far, or a packed or padded call lies between.
        """
        tokens, mask = cache.take_back(count)
        if tokens.shape[1]:
            self.hidden(tokens, attention_mask=mask, cache=cache)

    def _hidden(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | Packing | None,
        attention_mask: Tensor | None,
        cache: ModelCache | None,
    ) -> tuple[Tensor, Padding | None]:
        """The input of the head, and the padding that was removed from it."""
        B, T = dims("tokens", tokens, "B T")
        check_dtype("tokens", tokens, torch.int64, torch.int32)
        if tokens.numel() and contents_are_checked(tokens):
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise ValueError(
                    f"tokens must be between 0 and vocab_size - 1 = {self.config.vocab_size - 1}, got {bad}"
                )
        packing = as_packing(cu_seqlens, B, T, tokens.device)
        padding = padding_of(attention_mask, cu_seqlens, B, T)
        if cache is not None:
            check_whole(packing, "a cache")
            cache.record(tokens, rolls_back=packing is None and padding is None)
        if padding is not None:
            tokens, packing = padding.remove(tokens), padding.packing
        x = self.embedding(tokens)
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        mlp_caches = iter([] if cache is None else cache.layers[len(self.blocks) :])
        shared: dict[str, Tensor] = {}
        added: Tensor | None = None
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[index]
            if recompute and layer_cache is None:
                options: dict[str, Any] = {"context_fn": keep_states} if packing is not None and packing.sharded else {}
                x, shared = checkpoint(summed, block, x, packing, None, shared, use_reentrant=False, **options)
            else:
                has_memory = layer_cache is not None and isinstance(block.mlp, ChannelMixing)
                mlp_cache = next(mlp_caches) if has_memory else None
                x, added, shared = block(x, packing, layer_cache, shared, mlp_cache, added)
        return normalised(self.norm, x, added)[0], padding


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimiser: weight decay on the matrices of linear layers and embeddings, none on the rest.

    Example:
        >>> from flashmix.models.presets import preset
        >>> [group["weight_decay"] for group in parameter_groups(Decoder(preset("gla_nano")), 0.1)]
        [0.1, 0.0]
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    for experts in model.modules():
        if isinstance(experts, MixtureOfExperts):
            matrices |= {id(experts.gate_up), id(experts.down)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if id(p) in matrices], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
    ]
