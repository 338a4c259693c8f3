"""lm-evaluation-harness on a model that `flashmix train` made, exported as a transformers model, with a task of local files."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole
PROGRAM = r"""
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
import flashmix.hf
from flashmix.train.cli import main

here = Path(sys.argv[1])
(here / "text.txt").write_text("".join(f"{n} and {n} make {2 * n}. " for n in range(10)) * 40)
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
tokenizer.train([str(here / "text.txt")], trainer)
tokenizer.save(str(here / "tokenizer.json"))
sizes = "--preset gated_deltanet_nano --seq-len 64 --batch-tokens 512 --steps 60 --lr 0.01 --sample 0 --device cpu".split()
paths = ["--text", str(here / "text.txt"), "--tokenizer", str(here / "tokenizer.json"), "--out", str(here / "run")]
assert main(["train", *paths, *sizes]) == 0

assert main(["convert", str(here / "run"), str(here / "exported")]) == 0
flashmix.hf.FlashmixConfig  # the Auto classes know it

import lm_eval

rows = [{"question": f"{n} and {n} make", "choices": [str(2 * n), str(2 * n + 1)], "answer": 0} for n in range(10)]
(here / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
task = {"task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(here / "task.jsonl")}}, "test_split": "test"}
task |= {"output_type": "multiple_choice", "doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer"}
task |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
found = lm_eval.simple_evaluate(
    model="hf", model_args=f"pretrained={here / 'exported'},max_length=64", device="cpu", tasks=[task], bootstrap_iters=0
)
accuracy = found["results"]["sums"]["acc,none"]
print("accuracy", accuracy)
assert accuracy > 0.5, "no better than chance"
"""


def test_it_scores_an_exported_model(tmp_path: Path) -> None:
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)], check=True)
