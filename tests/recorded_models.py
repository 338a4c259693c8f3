"""Recorded cases of the modules, the layers and the models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from recorded_jobs import LAYER, MOST, SOME, Draw, gradients
from torch import Tensor, nn

import flashmix
import flashmix.layers
import flashmix.models
import flashmix.modules


@dataclass(frozen=True)
class ModuleJob:
    """A layer, model or module with the implementations that it takes by itself."""

    name: str
    run: Any  # (name, dtype, device) -> results
    dtypes: dict[str, str] = field(default_factory=lambda: SOME)

    @property
    def group(self) -> str:
        return self.name

    def dtypes_on(self, device: str) -> list[str]:
        return self.dtypes.get(device, "").split()

    def implementations(self, dtype: torch.dtype, device: str) -> list[str]:
        return ["auto"]

    def results(self, dtype: torch.dtype, device: str, impl: str) -> dict[str, Any]:
        return self.run(self.name, dtype, device)


LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2 of groups": ("Mamba2", {"heads": 4, "state_dim": 8, "groups": 2, "conv_width": 2}),
    "Mamba2": ("Mamba2", {"state_dim": 16}),
    "deltanet, negative eigenvalues": ("DeltaNet", {"negative_eigenvalues": True}),
    "kda, bounded": ("KDA", {"lower": -5.0, "rank": 3}),
    "gated deltanet, more value heads": ("GatedDeltaNet", {"value_heads": 4, "value_dim": 6}),
    "ABC": ("ABC", {"slots": 5, "head_dim": 4}),
    "Lightning": ("Lightning", {"layer": 1, "layers": 3}),
    "HGRN2": ("HGRN2", {"lower": 0.25}),
    "GSA": ("GSA", {"slots": 5}),
    "deltaproduct, three steps": ("DeltaProduct", {"value_heads": 4, "steps": 3}),
    "comba, value heads": ("Comba", {"value_heads": 4}),
    "oja, value heads": ("Oja", {"value_heads": 4, "value_dim": 6, "rank": 3}),
    "RWKV6": ("RWKV6", {"shift_rank": 3, "decay_rank": 4}),
    "attention, window": ("SoftmaxAttention", {"heads": 4, "kv_heads": 2, "window": 3}),
    "attention, gated": (
        "SoftmaxAttention",
        {"heads": 4, "kv_heads": 1, "head_dim": 6, "rotary": 2, "qk_norm": True, "gated": True},
    ),
    "attention, no positions": ("SoftmaxAttention", {"rotary": 0}),
}
NOT_LAYERS = ("AttentionCache", "LayerCache", "Mixer", "RecurrentCache")
WIDTH = 32


def layer_results(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Forward, packed, masked, gradients, and a prompt that is continued token by token."""
    kind, options = LAYERS.get(name.split("/")[1], (name.split("/")[1], {}))
    layer = getattr(flashmix.layers, kind)(WIDTH, **{"heads": 2, **options}).to(dtype).to(device)
    draw = Draw(name)
    x = draw("normal", 2, 70, WIDTH).to(dtype).to(device).requires_grad_()
    row, packing = x.detach()[:1, :20], flashmix.Packing.from_lengths([3, 0, 12, 5], device=device)
    mask = draw("mask", 2, 70).to(device)
    found: dict[str, Any] = {"o": layer(x)}
    found |= gradients(name, found["o"], {"x": x, **dict(layer.named_parameters())})
    with torch.no_grad():
        found |= {"packed": layer(row, cu_seqlens=packing), "masked": layer(x, attention_mask=mask)}
        cache, start = layer.new_cache(), 0
        for tokens in (66, 1, 1, 2):
            found[f"cached {start}"] = layer(x[:, start : start + tokens], cache=cache)
            start += tokens
        later = layer.new_cache()
        layer(row, cu_seqlens=packing, cache=later)
        found["after packed"] = layer(x.detach()[0, :4, None], cache=later)
    return found


def model_results(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Logits, loss, gradients, and generation: greedy, padded, sampled and speculative."""
    config = flashmix.models.preset(f"{name.split('/')[1]}", vocab_size=64)
    model = flashmix.models.Decoder(config).to(dtype).to(device)
    draw = Draw(name)
    tokens = draw("below64", 2, 71).to(device)
    found: dict[str, Any] = {"loss": model(tokens[:, :-1], targets=tokens[:, 1:])}
    found |= gradients(name, found["loss"], dict(model.named_parameters()))
    prompt, mask = tokens[:, :9], torch.ones(2, 9, dtype=torch.bool, device=device)
    mask[0, :4] = False
    with torch.no_grad():
        found["logits"] = model(tokens)
        found["padded logits"] = model(prompt, attention_mask=mask)
    greedy = flashmix.models.generate(model, prompt, 8)
    padded = flashmix.models.generate(model, prompt, 8, attention_mask=mask)
    generator = torch.Generator(device).manual_seed(0)
    sampled = flashmix.models.generate(model, prompt, 8, temperature=1.0, top_k=20, top_p=0.9, generator=generator)
    found |= {"greedy": greedy, "padded": padded, "sampled": sampled}
    if name.endswith("nano"):
        draft = flashmix.models.Decoder(flashmix.models.preset("gla_nano", vocab_size=64)).to(dtype).to(device)
        found["speculative"] = flashmix.models.generate_speculatively(model, draft, prompt, 8)
    return found


def module_results(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The modules one after the other: outputs and gradients."""
    m, draw, found = flashmix.modules, Draw(name), {}
    x, gate = (draw("normal", 2, 70, WIDTH).to(dtype).to(device).requires_grad_() for _ in range(2))
    heads = draw("normal", 2, 70, 2, 16).to(dtype).to(device).requires_grad_()
    modules: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "RMSNorm": (m.RMSNorm(WIDTH), (x,)),
        "GatedRMSNorm": (m.GatedRMSNorm(WIDTH), (x, gate)),
        "SwiGLU": (m.SwiGLU(WIDTH), (x,)),
        "LowRank": (m.LowRank(WIDTH, 4, WIDTH, activation="tanh", bias=True), (x,)),
        "ShortConvolution": (m.ShortConvolution(WIDTH), (x,)),
        "MambaDecay": (m.MambaDecay(2, 16), (heads,)),
        "BoundedDecay": (m.BoundedDecay(2, 16), (heads,)),
        "LogSigmoidDecay": (m.LogSigmoidDecay(), (x,)),
        "RWKV6Decay": (m.RWKV6Decay(), (x,)),
        "RWKV7Decay": (m.RWKV7Decay(), (x,)),
        "ForgetGate": (m.ForgetGate(0.2), (x,)),
        "WriteStrength": (m.WriteStrength(True), (x,)),
        "RotaryEmbedding": (m.RotaryEmbedding(16), (heads,)),
    }
    for kind, (module, inputs) in modules.items():
        module.to(dtype).to(device)
        found[kind] = module(*inputs)
        leaves = {f"{kind}.{n}": p for n, p in module.named_parameters()} | {f"{kind}.x": inputs[0]}
        found |= gradients(f"{name}/{kind}", found[kind], leaves)
    return found


def module_jobs() -> Iterator[ModuleJob]:
    yield ModuleJob("modules", module_results, MOST)
    for name in (*(n for n in flashmix.layers.__all__ if n not in (*NOT_LAYERS, *LAYERS)), *LAYERS):
        yield ModuleJob(f"layer/{name}", layer_results, LAYER)
    for name in flashmix.models.PRESETS:
        yield ModuleJob(f"model/{name}_tiny", model_results, {"cpu": "f32", "cuda": "bf16"})
        yield ModuleJob(f"model/{name}_nano", model_results, {"cpu": "f64"})
