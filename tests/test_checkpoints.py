"""Conversion of checkpoints: tiny random models of transformers, to flashmix and back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from fla_cases import RECORDED
from hf_cases import ATTENTION, FAMILIES, error, tiny, tokens, transformers
from tokenizers import Tokenizer

import flashmix
from flashmix.checkpoints import FAMILIES as CONVERTED
from flashmix.checkpoints import ConversionError, convert, load
from flashmix.checkpoints.files import WeightFiles
from flashmix.hf import FlashmixConfig, FlashmixForCausalLM
from flashmix.models import DecoderConfig, LayerConfig, preset
from flashmix.train import cli, session
from flashmix.train.folder import RunFolder
from flashmix.train.text import Options, write_text

SAME = 1e-5  # of the largest logit, in float32
TWO = ATTENTION | {"num_hidden_layers": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
DENSE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", TWO | {"tie_word_embeddings": True}, 2),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        TWO | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
        2,
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        TWO | {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        2,
    ),
    "qwen3_next_dense": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        FAMILIES["qwen3_next"][2] | {"mlp_only_layers": [1], "norm_topk_prob": False},
        2,
    ),
    "kimi_linear_groups": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        FAMILIES["kimi_linear"][2] | {"q_lora_rank": 12, "n_group": 2, "topk_group": 1, "num_experts_per_token": 1},
        2,
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 3, "conv_kernel": 3},
        2,
    ),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", {"num_hidden_layers": 2, "mixer_rms_eps": 1e-4}, 2),
    "xlstm": (
        "xLSTMConfig",
        "xLSTMForCausalLM",
        {"num_hidden_layers": 2, "num_heads": 2, "qk_dim_factor": 2.0, "v_dim_factor": 4.0}
        | {"ffn_proj_factor": 2.0, "ffn_round_up_to_multiple_of": 1},
        2,
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
        | {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 3},
        2,
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
        | {"lru_width": 24, "attention_window_size": 7},
        2,
    ),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"num_hidden_layers": 2, "intermediate_size": 40}, 2),
}
KNOWN = [*DENSE, "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "mamba2", "bamba"]


@pytest.fixture(params=KNOWN)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random model of the family, on the CPU, in float32."""
    monkeypatch.setitem(FAMILIES, request.param, (DENSE | FAMILIES)[request.param])
    model = by_group(tiny(request.param))
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.uniform_(-0.2, 0.2)
    return model


def by_group(model: Any) -> Any:
    """The model, whose Mamba-2 normalises each group on its own: transformers 5.17 has that in Zamba-2 alone."""
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    for mixer in model.modules():
        if hasattr(mixer, "n_groups") and not hasattr(mixer.norm, "group_size"):
            mixer.norm.group_size = mixer.intermediate_size // mixer.n_groups
            mixer.norm.forward = MethodType(Zamba2RMSNormGated.forward, mixer.norm)
    return model


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(got: Any, expected: Any) -> None:
    got, expected = state(got), state(expected)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def assert_same_files(got: Path, expected: Path) -> None:
    got, expected = WeightFiles(got), WeightFiles(expected)
    assert got.entries.keys() == expected.entries.keys()
    assert all(torch.equal(got.tensor(name), expected.tensor(name)) for name in got.entries)


@torch.no_grad()
def test_there_and_back(model: Any, tmp_path: Path) -> None:
    """The same logits here, in our own transformers model too; back with and without the configuration that ours keeps, the same bits."""
    row = tokens(1, 24)
    model.save_pretrained(tmp_path / "theirs")
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert report.numbers == sum(p.numel() for p in model.parameters()) + sum(
        b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias")
    )
    ours = FlashmixForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert error(ours(row).logits, model(row).logits) <= SAME
    for folder in ("theirs", "ours"):
        assert_same_bits(load(tmp_path / folder), ours.decoder)
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(type(model).from_pretrained(tmp_path / "back"), model)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "theirs/config.json").read_text()
    )
    ours.save_pretrained(tmp_path / "saved")  # without "converted_from"
    values = json.loads((tmp_path / "saved/config.json").read_text())
    values.pop("converted_from", None)
    (tmp_path / "saved/config.json").write_text(json.dumps(values))
    convert(tmp_path / "saved", tmp_path / "made", to=report.family)
    assert_same_files(tmp_path / "made", tmp_path / "back")
    made, config = transformers.AutoConfig.from_pretrained(tmp_path / "made").to_dict(), model.config.to_dict()
    told = json.loads((tmp_path / "made/config.json").read_text()).keys() & config.keys() - {"rope_parameters"}
    assert {name: made[name] for name in told} == {name: config[name] for name in told}


OLD_LLAMA3 = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
KDA = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1, 3]}
PUBLISHED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mamba2": ({"norm_before_gate": True, "rms_norm": True, "time_step_limit": [0.0, float("inf")]}, []),
    "mamba": ({"ssm_cfg": {}, "fused_add_norm": True, "n_layer": 2, "d_model": 32}, []),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3 | {"original_max_position_embeddings": 16}},
        ["rope_parameters"],
    ),
    "qwen3_next": (
        {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25, "full_attention_interval": 3},
        ["rope_parameters"],
    ),
    "kimi_linear": (
        {"linear_attn_config": KDA, "rope_theta": 1e4, "rope_scaling": None, "mla_use_nope": True},
        ["layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"],
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
@torch.no_grad()
def test_configurations_as_older_versions_wrote_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, (DENSE | FAMILIES)[family])
    model, row = by_group(tiny(family)), tokens(1, 24)
    model.save_pretrained(tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs/config.json").read_text())
    more, gone = PUBLISHED[family]
    assert set(gone) <= set(values) and not set(gone) & set(more)
    kept = {name: value for name, value in values.items() if name not in (*gone, "dtype")}
    (tmp_path / "theirs/config.json").write_text(json.dumps(kept | more | {"torch_dtype": "float32"}))
    same = by_group(type(model).from_pretrained(tmp_path / "theirs").eval())
    assert error(same(row).logits, model(row).logits) <= SAME  # transformers reads it as the same model
    assert error(load(tmp_path / "theirs")(row), model(row).logits) <= SAME


def test_every_family_is_tested() -> None:
    names = {getattr(transformers, (DENSE | FAMILIES)[name][0]).model_type for name in KNOWN}
    recorded = {entry["config"]["model_type"] for entry in json.loads(RECORDED.read_text()).values()}
    assert set(CONVERTED) == names | recorded


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a tiny Llama."""
    monkeypatch.setitem(FAMILIES, "llama", DENSE["llama3"])
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_all_that_does_not_fit_is_in_one_error_and_nothing_is_written(llama: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.extra.weight"] = torch.zeros(3)
        del weights["model.layers.0.self_attn.k_proj.weight"]
        weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(4, 4)
        weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].float()

    rewrite(llama, spoil)
    with pytest.raises(ConversionError) as raised:
        convert(llama, llama.parent / "ours")
    assert str(raised.value).splitlines() == [
        "these weights do not fit:",
        "  missing: model.layers.0.self_attn.k_proj.weight, which blocks.0.mixer.qkvg.weight needs",
        "  dtype: the weights of blocks.1.mlp.gate_up.weight must have one dtype, got torch.bfloat16, torch.float32",
        "  shape: model.layers.1.mlp.down_proj.weight must have [32, 48], got [4, 4]",
        "  unknown: model.extra.weight",
    ]
    assert not (llama.parent / "ours").exists()


def test_shards_tokenizer_and_dtypes_are_kept(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (llama / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("flashmix.checkpoints.files.SHARD_BYTES", 9000)
    convert(llama, llama.parent / "ours")
    names = sorted(path.name for path in (llama.parent / "ours").iterdir())
    assert names[0] == "config.json" and "model-00002-of-00007.safetensors" in names and "tokenizer.json" in names
    assert not [name for name in names if "tmp" in name or "partial" in name]
    convert(llama.parent / "ours", llama.parent / "back")
    assert_same_files(llama.parent / "back", llama)
    assert {entry.dtype for entry in WeightFiles(llama.parent / "back").entries.values()} == {torch.bfloat16}
    assert load(llama.parent / "ours").head.weight.dtype == torch.bfloat16
    assert load(llama, dtype=torch.float32).head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of flashmix, llama, qwen3,"),
        ({"attention_bias": True}, "no decoder of flashmix has attention_bias = True"),
        ({"hidden_act": "gelu"}, "no decoder of flashmix has hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "no decoder of flashmix has rope_type = 'dynamic'"),
        ({"vocab_size": None}, "the configuration must have vocab_size, got nothing"),
    ],
)
def test_configurations_that_are_refused(llama: Path, change: dict[str, Any], text: str) -> None:
    values = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ConversionError) as raised:
        convert(llama)
    assert str(raised.value).startswith(text)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConversionError, match=r"must be a folder with a config\.json, got none there$"):
            convert(folder)


def test_files_that_are_cut_off_are_refused(llama: Path) -> None:
    whole = (llama / "model.safetensors").read_bytes()
    for length in (4, 60, len(whole) - 1):
        (llama / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ConversionError, match="must be a whole safetensors file"):
            convert(llama)


def test_a_decoder_of_flashmix_becomes_a_family_that_can_hold_it(tmp_path: Path) -> None:
    layers = 2 * [LayerConfig("attention", {"heads": 4, "kv_heads": 2})]
    decoder = FlashmixForCausalLM(FlashmixConfig.of(DecoderConfig(97, 32, layers))).eval()
    decoder.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "llama", to="llama")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
    row = tokens(1, 20)
    with torch.no_grad():
        assert error(decoder(row).logits, model(row).logits) <= SAME
    with pytest.raises(
        ConversionError, match=r"^this decoder is no qwen3: a model of that family would have other lay"
    ):
        convert(tmp_path / "ours", to="qwen3")
    with pytest.raises(ConversionError, match=r"^to must name a family for a model that does not come from one"):
        convert(tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours")
    FlashmixForCausalLM(FlashmixConfig.of(preset("gla_nano"))).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=r"^this decoder is no kimi_linear: it has no layer of kda$"):
        convert(tmp_path / "ours", to="kimi_linear")


def test_the_command(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(llama)]) == 0
    assert "llama, to flashmix: 15 rules" in capsys.readouterr().out
    assert cli.main(["convert", str(llama), str(llama)]) == 1
    assert "must be an empty folder or none, got one with files" in capsys.readouterr().err
    assert flashmix.convert is convert


def test_a_run_becomes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = tmp_path / "text.txt", tmp_path / "words.json"
    text.write_text("one plus two is three\n" * 60)
    assert cli.main(["tokenizer", str(text), "--vocabulary", "270", "--out", str(tokenizer)]) == 0
    options = (
        "--preset transformer_nano --steps 1 --batch-tokens 64 --seq-len 32 --held-out 0.3 --sample 0 --device cpu"
    )
    run = ["--text", str(text), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "run")]
    assert cli.main(["train", *run, *options.split()]) == 0
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    assert (
        "ours: AutoModelForCausalLM reads it after `from flashmix.hf import FlashmixConfig`" in capsys.readouterr().out
    )
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    plain = Tokenizer.from_file(str(tokenizer))
    separator = plain.get_vocab_size()
    assert words("one plus two")["input_ids"] == [separator, *plain.encode("one plus two").ids]
    assert words.eos_token_id == words.bos_token_id == separator
    read = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert read.eos_token_id == read.bos_token_id == separator == read.vocab_size - 1
    assert cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "llama"), "--to", "llama"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    row = tokens(1, 9)
    with torch.no_grad():
        assert error(model(row).logits, load(tmp_path / "ours")(row)) <= SAME


def test_a_run_of_bytes_becomes_a_folder(tmp_path: Path) -> None:
    """transformers' greedy text is that of `flashmix generate`: the same tokens in, the separator first, the same tokens out."""
    text = tmp_path / "text.txt"
    text.write_text("one plus two is three\n" * 60)
    sizes = "--preset transformer_nano --steps 30 --batch-tokens 128 --seq-len 32 --held-out 0.3 --sample 0 --device cpu --lr 0.01"
    assert cli.main(["train", "--text", str(text), "--out", str(tmp_path / "run"), *sizes.split()]) == 0
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    every = "".join(map(chr, range(300))) + "\r\n"
    assert words(every)["input_ids"] == [256, *every.encode()] and words.decode(words(every)["input_ids"][1:]) == every
    flashmix.hf.FlashmixConfig  # noqa: B018 # registers the model with the Auto classes
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    new = model.generate(**words("one", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    decoder, tokens = session.load(RunFolder(tmp_path / "run"), "cpu")
    assert words.decode(new[0, 4:]) == "".join(write_text(decoder, tokens, "one", Options(tokens=8, temperature=0.0)))


def test_the_language_model_of_a_model_with_vision(tmp_path: Path) -> None:
    """Vision and draft head are left out and reported; the way back writes the language model alone."""
    model = tiny("qwen3_5")
    model.save_pretrained(tmp_path / "theirs")

    def dress(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)
        weights["model.visual.patch_embed.weight"] = torch.zeros(2)
        weights["mtp.fc.weight"] = torch.zeros(2)

    rewrite(tmp_path / "theirs", dress)
    values = json.loads((tmp_path / "theirs/config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": values, "architectures": ["Qwen3_5ForConditionalGeneration"]}
    (tmp_path / "theirs/config.json").write_text(json.dumps(whole))
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert sorted(report.left_out) == ["model.visual.patch_embed.weight", "mtp.fc.weight"]
    assert "left out: " in str(report)
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(type(model).from_pretrained(tmp_path / "back"), model)
