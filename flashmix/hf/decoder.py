"""The one decoder as a transformers model: configuration, model, cache. Importing this file imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from flashmix.hf.rows import BatchRows, Boundaries
from flashmix.models.cache import ModelCache
from flashmix.models.config import DecoderConfig
from flashmix.models.decoder import Decoder


class FlashmixConfig(PreTrainedConfig):
    """A `DecoderConfig` as transformers keeps it, in `config.json`.

    Attributes:
        architecture: `DecoderConfig.to_dict()`.
        vocab_size, hidden_size, num_hidden_layers, tie_word_embeddings: read from `architecture`.
    """

    model_type = "flashmix"
    architecture: dict[str, Any] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    use_cache: bool = True

    def __post_init__(self, **options: Any) -> None:
        if self.architecture is not None:
            config = self.decoder_config()
            self.vocab_size, self.hidden_size = config.vocab_size, config.width
            self.num_hidden_layers, self.tie_word_embeddings = len(config.layers), config.tied
        super().__post_init__(**options)

    @classmethod
    def of(cls, config: DecoderConfig, **options: Any) -> FlashmixConfig:
        """The configuration of a decoder; `options` are those of `PreTrainedConfig` (token numbers, dtype)."""
        return cls(architecture=config.to_dict(), **options)

    def decoder_config(self) -> DecoderConfig:
        """The `DecoderConfig` itself."""
        if self.architecture is None:
            raise ValueError("architecture must be given, got nothing")
        return DecoderConfig.from_dict(self.architecture)


class FlashmixCache(Cache):
    """A `ModelCache` under the name and operations that `generate` asks for."""

    def __init__(self, states: ModelCache) -> None:
        super().__init__(layers=[])
        self.states, self.tokens = states, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens of each row were read, padding included."""
        return self.tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what `beam_idx[i]` was."""
        self.states.reorder(beam_idx)

    @property
    def is_compileable(self) -> bool:
        return False


class FlashmixForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with what transformers asks of a model: logits, shifted loss, a cache, `generate`, saving.

    Example:
        >>> from flashmix.models.presets import preset
        >>> model = FlashmixForCausalLM(FlashmixConfig.of(preset("gated_deltanet_nano")))
        >>> tokens = torch.randint(256, (2, 10))
        >>> model(tokens, labels=tokens).loss.shape, model.generate(tokens, max_new_tokens=3, do_sample=False).shape
        (torch.Size([]), torch.Size([2, 13]))
    """

    config_class = FlashmixConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: FlashmixConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config())
        self.boundaries = Boundaries()
        self.initialised = not self.decoder.head.weight.is_meta
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """After loading: makes the buffers that no file holds. The decoder initialises its weights itself.

        Raises ValueError: the file lacks weights of this module.
        """
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if self.initialised or any(tensor.is_meta for tensor in own):
            return
        missing = [
            name for name, p in module.named_parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(f"the weights must hold {', '.join(missing)} of a {type(module).__name__}, got nothing")
        for block, layer in zip(self.decoder.blocks, self.decoder.config.layers, strict=True):
            if block.mixer is module and module._non_persistent_buffers_set:
                fresh = layer.build(self.decoder.config.width, device="cpu")
                for name in module._non_persistent_buffers_set:
                    getattr(module, name).copy_(getattr(fresh, name))

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """Only the inputs of blocks are kept for the backward."""
        self.decoder.checkpoint_activations = True

    def gradient_checkpointing_disable(self) -> None:
        self.decoder.checkpoint_activations = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.decoder.checkpoint_activations

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Its caches are its own; the first call of `generate` makes one."""
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FlashmixCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **told: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and with `labels` the loss.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, S]`, its last T columns say which of these tokens are no padding.
            position_ids: `[B, T]`; where they are 0 again, another packed sample begins.
            past_key_values: the memory of the tokens before these, overwritten.
            labels: `[B, T]`, shifted here; -100 does not count. In training the logits are not made: `logits` is None.
            use_cache: whether to return a cache; never while gradients are recorded.
            logits_to_keep: how many last tokens to make logits of; 0: all.
            num_items_in_batch: what the summed loss is divided by, in place of the number of counted labels.
            told: boundaries of packed samples (`cu_seq_lens_q`, `seq_idx`); other options are not looked at.
        """
        batch, tokens = input_ids.shape
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        mask = None if mask is None or bool((mask != 0).all()) else mask
        given = told | {"position_ids": position_ids}
        packing = None
        if past_key_values is None:
            packing = self.boundaries.packing_of(given, batch, tokens, mask is not None)
        wants_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is None and wants_cache and packing is None and not torch.is_grad_enabled():
            past_key_values = FlashmixCache(self.decoder.new_cache())
        rows = BatchRows(batch, tokens, packing)
        cache = None if past_key_values is None else past_key_values.states
        hidden = self.decoder.hidden(rows.join(input_ids), cu_seqlens=packing, attention_mask=mask, cache=cache)
        hidden = rows.part(hidden)
        if past_key_values is not None:
            past_key_values.tokens += tokens
        loss = None if labels is None else self._loss(hidden, labels, num_items_in_batch)
        needed = labels is None or not self.training
        logits = self.decoder.logits(hidden[:, -logits_to_keep:]) if needed else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _loss(self, hidden: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """The mean loss of the next label, or its sum over `items`; the logits are never held whole."""
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        reduction = "mean" if items is None else "sum"
        loss: Tensor = self.decoder.loss(hidden, self.decoder.head.weight, targets, reduction)
        return loss if items is None else loss / items


AutoConfig.register("flashmix", FlashmixConfig)
AutoModelForCausalLM.register(FlashmixConfig, FlashmixForCausalLM)
