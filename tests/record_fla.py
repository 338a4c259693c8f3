"""Tiny models of flash-linear-attention as they are: configurations, names and shapes of weights, and logits, into recorded_fla.json.

    python tests/record_fla.py        with fla-core and flash-linear-attention 0.6.0, einops and Triton; no GPU

Its kernels run in Triton's interpreter with the first configuration of each; its `Attention` calls a flash-attn that is written out here.
The weights are drawn from their names (`fla_cases.weights`), so that no number of them need be recorded.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FLA_CONV_BACKEND"] = "triton"

import torch
from fla_cases import RECORDED, row, weights
from triton.runtime.autotuner import Autotuner

COMMON: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 13}
HYBRID = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 1, "num_v_heads": 2, "head_dim": 8, "expand_v": 1.5}),
    "gated_deltanet_bare": (
        "GatedDeltaNet",
        {"num_heads": 2, "head_dim": 8, "use_gate": False, "use_short_conv": False, "allow_neg_eigval": True},
    ),
    "gated_deltanet_hybrid": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 8, "attn": HYBRID}),
    "delta_net": ("DeltaNet", {"num_heads": 2, "tie_word_embeddings": True}),
    "delta_net_sum": ("DeltaNet", {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True}),
    "kda": ("KDA", {"num_heads": 1, "num_v_heads": 2, "head_dim": 8}),
    "kda_bounded": ("KDA", {"num_heads": 2, "head_dim": 8, "safe_gate": True, "lower_bound": -5.0}),
    "gated_deltaproduct": (
        "GatedDeltaProduct",
        {"num_heads": 2, "head_dim": 8, "num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True},
    ),
    "gated_deltaproduct_bare": ("GatedDeltaProduct", {"num_heads": 2, "head_dim": 8, "num_householder": 2}),
    "comba": ("Comba", {"num_heads": 1, "num_v_heads": 2, "head_dim": 8, "expand_v": 1}),
    "gla": ("GLA", {"num_heads": 2, "norm_eps": 1e-3}),
    "gla_shared": ("GLA", {"num_heads": 2, "num_kv_heads": 1, "fuse_norm": False}),
    "gla_convolution": ("GLA", {"num_heads": 2, "num_kv_heads": 1, "use_short_conv": True, "use_output_gate": False}),
    "retnet": ("RetNet", {"num_heads": 2}),
    "retnet_bare": ("RetNet", {"num_heads": 2, "use_output_gate": False, "use_short_conv": True}),
    "retnet_shared": ("RetNet", {"num_heads": 2, "num_kv_heads": 1}),
    "gsa": ("GSA", {"num_heads": 2, "num_slots": 4, "expand_k": 1, "expand_v": 1}),
    "gsa_shared": ("GSA", {"num_heads": 2, "num_kv_heads": 1, "num_slots": 4, "expand_k": 1, "expand_v": 1}),
    "hgrn2": ("HGRN2", {"num_heads": 2, "expand_ratio": 8, "num_hidden_layers": 3}),
    "gsa_convolution": (
        "GSA",
        {"num_heads": 2, "num_kv_heads": 1, "num_slots": 4, "expand_k": 1, "expand_v": 1, "use_short_conv": True},
    ),
    "hgrn2_convolution": ("HGRN2", {"num_heads": 2, "expand_ratio": 8, "use_short_conv": True}),
    "hgrn2_plain": ("HGRN2", {"num_heads": 2, "expand_ratio": 8, "use_lower_bound": False}),
    "mamba2": ("Mamba2", {"head_dim": 8, "state_size": 8, "n_groups": 2}),
    "rwkv6": ("RWKV6", {"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 4}),
    "rwkv7": (
        "RWKV7",
        {"head_dim": 8, "decay_low_rank_dim": 4, "gate_low_rank_dim": 5, "a_low_rank_dim": 3, "v_low_rank_dim": 2},
    ),
    "transformer": ("Transformer", {"num_heads": 2, "num_kv_heads": 1, "qk_norm": True, "window_size": 4}),
}


def flash_attn(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int]) -> Any:
    """What `Attention` asks of flash-attn."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    T = q.shape[2]
    back = torch.arange(T)[:, None] - torch.arange(T)
    kept = (back >= 0) & (back <= (window_size[0] if window_size[0] >= 0 else T))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~kept, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def heads_by_group(mamba2: Any) -> None:
    """Lets the plain path give neighbouring heads to a group, as its kernels do; as it stands it deals the heads out in turn."""
    source = textwrap.dedent(inspect.getsource(mamba2.Mamba2.torch_forward))
    wrong = ".repeat(1, 1, self.num_heads // self.n_groups, 1)"
    assert source.count(wrong) == 2
    names = vars(mamba2)
    exec(source.replace(wrong, ".repeat_interleave(self.num_heads // self.n_groups, 2)"), names)
    mamba2.Mamba2.torch_forward = names["torch_forward"]


def main() -> None:
    Autotuner._bench = lambda self, *_, **__: [0.0, 0.0, 0.0]
    import fla.layers.attn
    import fla.models
    from fla.layers import mamba2

    fla.layers.attn.flash_attn_func = flash_attn
    heads_by_group(mamba2)
    recorded = {}
    for name in sys.argv[1:] or MODELS:
        kind, options = MODELS[name]
        config = getattr(fla.models, f"{kind}Config")(**COMMON | options)
        model = getattr(fla.models, f"{kind}ForCausalLM")(config).eval()
        shapes = {n: list(t.shape) for n, t in model.state_dict().items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        model.load_state_dict(weights(shapes), strict=not config.tie_word_embeddings)
        with torch.no_grad():
            logits = model(row(13)).logits[0]
        told = {n: v for n, v in config.to_dict().items() if n in COMMON | options or n in ("model_type", "norm_eps")}
        recorded[name] = {
            "config": told,
            "shapes": shapes,
            "logits": [[float(f"{x:.8g}") for x in r] for r in logits.tolist()],
        }
        print(name, len(shapes), float(logits.abs().max()))
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    lines = ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in (before | recorded).items())
    Path(RECORDED).write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
