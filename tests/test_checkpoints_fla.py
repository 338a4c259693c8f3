"""Conversion of flash-linear-attention's models: its own logits (tests/record_fla.py), and the same bits there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_cases import RECORDED, row, weights

from flashmix.checkpoints import FAMILIES, ConversionError, convert, load
from flashmix.checkpoints.files import Planned, WeightFiles, write_weights
from flashmix.selftest.budget import relative_errors

MODELS: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
SAME = 1e-5  # of the largest logit, in float32


def written(folder: Path, name: str, **change: Any) -> Path:
    """A folder of the recorded model, with a configuration that is changed."""
    drawn = weights(MODELS[name]["shapes"])
    tensors = list(drawn.values())
    folder.mkdir()
    groups = [[Planned(n, tuple(t.shape), t.dtype)] for n, t in drawn.items()]
    write_weights(folder, groups, lambda index: [tensors[index]])
    (folder / "config.json").write_text(json.dumps(MODELS[name]["config"] | change))
    return folder


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_there_and_back(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", name)
    report = convert(folder, tmp_path / "ours")
    decoder = load(tmp_path / "ours").eval()
    logits = decoder(row(13))[0]
    assert relative_errors(logits, torch.tensor(MODELS[name]["logits"]))[1] <= SAME
    values = json.loads((tmp_path / "ours/config.json").read_text())
    for kept in (True, False):  # with the configuration that ours keeps, and with one made of the decoder
        if not kept:
            del values["converted_from"]
            (tmp_path / "ours/config.json").write_text(json.dumps(values))
        back = tmp_path / f"back_{kept}"
        convert(tmp_path / "ours", back, to=report.family)
        got, expected = WeightFiles(back), WeightFiles(folder)
        theirs = {n: n for n in expected.entries}
        if name == "gla_shared":  # `fuse_norm` decides on the name of the norm, and is written as true
            assert kept <= json.loads((back / "config.json").read_text()).get("fuse_norm", False)
            theirs = {n.replace(".g_norm.", ".g_norm_swish_gate."): n for n in theirs}
        assert got.entries.keys() == theirs.keys()
        assert all(torch.equal(got.tensor(n), expected.tensor(theirs[n])) for n in theirs)


def test_every_family_of_fla_is_recorded() -> None:
    from flashmix.checkpoints.families.fla import FLA

    assert {entry["config"]["model_type"] for entry in MODELS.values()} >= {family.name for family in FLA}
    assert {family.name for family in FLA} < set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("delta_net", {"use_beta": False}, "no decoder of flashmix has use_beta = False"),
        ("gla", {"clamp_min": -3.0}, "no decoder of flashmix has clamp_min = -3.0"),
        ("gla", {"feature_map": "relu"}, "no decoder of flashmix has feature_map = 'relu'"),
        ("gsa", {"feature_map": "t2r"}, "no decoder of flashmix has feature_map = 't2r'"),
        ("kda", {"safe_gate": True}, "the configuration must have lower_bound with safe_gate, got nothing"),
        ("hgrn2", {"expand_ratio": 4}, "no decoder of flashmix has an HGRN-2 with keys of another width than values"),
        ("mamba2", {"dt_limit": [0.0, 0.5]}, "no decoder of flashmix has time_step_limit = [0.0, 0.5]"),
        ("mamba2", {"norm_before_gate": True}, "no decoder of flashmix has norm_before_gate = True"),
        ("transformer", {"qkv_bias": True}, "no decoder of flashmix has qkv_bias = True"),
        ("retnet", {"attnres_block_size": 2}, "no decoder of flashmix has attnres_block_size = 2"),
    ],
)
def test_configurations_that_are_refused(name: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError) as raised:
        convert(written(tmp_path / "theirs", name, **change))
    assert str(raised.value).startswith(text)
