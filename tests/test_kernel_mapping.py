"""`flashmix.hf.kernel_mapping`: what it maps has the signatures of transformers' functions, and computes the same."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import error, transformers
from torch import nn

import flashmix.hf

pytestmark = pytest.mark.usefixtures("one_thread")
SAME = 5e-6  # of the largest element: two float32 evaluations
FUNCTIONS = {
    "chunk_gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention"),
    "fused_recurrent_kda": ("kimi_linear", "recurrent_kimi_delta_attention"),
    "mamba_chunk_scan_combined": ("bamba", "mamba2_chunk_scan"),
    "causal_conv1d_fn": ("bamba", "causal_conv1d_fn"),
    "causal_conv1d_update": ("bamba", "causal_conv1d_update"),
}
WITH_THE_PACKAGE = """
import sys
import kernels, torch, flashmix.hf
sys.path.append(sys.argv[1])
from hf_cases import error, tiny, tokens
for family in ("qwen3_next", "kimi_linear", "bamba"):
    model, row = tiny(family), tokens(2, 40)
    plain, sequences = model(row).logits, model.generate(row, max_new_tokens=8, do_sample=False)
    with kernels.use_kernel_mapping(flashmix.hf.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    logits = model(row).logits
    assert 0 < error(logits, plain) <= 5e-6, family  # 0: nothing was replaced
    assert torch.equal(model.generate(row, max_new_tokens=8, do_sample=False), sequences), family
"""


def theirs(name: str) -> Any:
    family, function = FUNCTIONS[name]
    module = import_module(f"{transformers.__name__}.models.{family}.modeling_{family}")
    return inspect.unwrap(getattr(module, function))


def arguments(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = 1 if name.startswith("fused") or name.endswith("update") else 70

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name.startswith("causal_conv1d"):
        state = {"conv_state": normal(2, 12, 4)} if tokens == 1 else {}
        return {"hidden_states": normal(2, 12, tokens), "weight": normal(12, 4), "activation": "silu"} | state
    if name.startswith("mamba"):
        x = {"hidden_states": normal(2, tokens, 4, 8), "dt": normal(2, tokens, 4), "A": -normal(4).abs()}
        x |= {"B": normal(2, tokens, 2, 6), "C": normal(2, tokens, 2, 6), "D": normal(4), "dt_bias": normal(4)}
        state = {"initial_states": normal(2, 4, 8, 6), "return_final_states": True, "dt_softplus": True}
        return x | state | {"chunk_size": 16}
    x = {key: normal(2, tokens, 4, 8) for key in ("query", "key", "value")}
    x["g"] = -normal(2, tokens, 4, 8).abs() if name.endswith("kda") else -normal(2, tokens, 4).abs()
    x |= {"beta": normal(2, tokens, 4).sigmoid(), "initial_state": normal(2, 4, 8, 8)}
    return x | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_a_layer_of_the_same_signature_and_results(name: str) -> None:
    layer = flashmix.hf.kernel_mapping()[name]["cpu"].load()
    members = {member for member, _ in inspect.getmembers(layer)} - {
        member for member, _ in inspect.getmembers(nn.Module)
    }
    assert members <= {"can_torch_compile", "has_backward"} and layer.__init__ is nn.Module.__init__
    _, *parameters = inspect.signature(layer.forward).parameters.values()
    expected = inspect.signature(theirs(name)).parameters.values()
    assert [(p.name, p.kind) for p in parameters] == [(p.name, p.kind) for p in expected]

    given, again = arguments(name), arguments(name)
    results, wanted = layer().forward(**given), theirs(name)(**again)
    if isinstance(wanted, torch.Tensor):
        results, wanted = (results,), (wanted,)
    for got, want in zip(results, wanted, strict=True):
        assert error(got, want) <= SAME
    if "conv_state" in given:
        assert torch.equal(given["conv_state"], again["conv_state"])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "delta" in name])
def test_heads_of_keys_that_heads_of_values_share(name: str) -> None:
    """As transformers 5.23 calls these functions; before, it repeated the keys."""
    layer, given = flashmix.hf.kernel_mapping()[name]["cpu"].load()(), arguments(name)
    shared = {key: given[key][:, :, ::2] for key in ("query", "key")}
    repeated = {key: value.repeat_interleave(2, 2) for key, value in shared.items()}
    for got, want in zip(layer.forward(**given | shared), layer.forward(**given | repeated), strict=True):
        assert error(got, want) <= SAME


def test_all_of_the_mapping_is_tested() -> None:
    assert flashmix.hf.kernel_mapping().keys() == FUNCTIONS.keys()


@pytest.mark.whole
def test_models_compute_the_same_through_the_package() -> None:
    """In a process of its own: a file of these tests has the name of the package."""
    try:
        installed = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        pytest.skip("kernels is not installed")
    bounds = transformers.utils.import_utils
    if not bounds.is_kernels_available():
        known = f"{bounds.KERNELS_MIN_VERSION} to {bounds.KERNELS_MAX_VERSION}"
        pytest.skip(f"transformers {transformers.__version__} takes kernels {known}, installed is {installed}")
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITH_THE_PACKAGE, str(Path(__file__).parent)], check=True)
