"""`flashmix.accelerate` with the packages peft and accelerate and with Trainer, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import error, tiny, tokens, transformers
from torch import Tensor

import flashmix

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("one_thread")]
SAME, SAME_GRADIENTS = 5e-6, 2e-5  # of the largest element: two float32 evaluations, two layers of recurrence
ADAPTED = {
    "qwen3_next": ["in_proj_qkvz", "out_proj"],
    "kimi_linear": ["q_proj", "g_a_proj", "o_proj"],
    "bamba": ["in_proj", "out_proj"],
    "lfm2": ["in_proj", "out_proj"],
    "falcon_mamba": ["in_proj", "x_proj"],
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_of_peft_have_the_same_gradients(family: str) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(target_modules=ADAPTED[family], r=2, init_lora_weights=False)
    model, row = peft.get_peft_model(tiny(family), adapters).train(), tokens(2, 40)

    def trained() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach()} | gradients

    expected = trained()
    assert len(expected) > 2
    flashmix.accelerate(model, strict=True, quiet=True)
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, got in trained().items():
            assert error(got, expected[name]) <= (SAME if name == "loss" else SAME_GRADIENTS), name


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba", "lfm2", "inkling"])
def test_weights_that_the_package_accelerate_offloads_are_there(family: str) -> None:
    package = pytest.importorskip("accelerate")
    model, row = tiny(family), tokens(2, 20)
    package.cpu_offload(model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    expected, words = model(row).logits, model.generate(row, max_new_tokens=4, do_sample=False)
    with flashmix.accelerate(model, strict=True, quiet=True):
        assert error(model(row).logits, expected) <= SAME
        assert torch.equal(model.generate(row, max_new_tokens=4, do_sample=False), words)
    assert torch.equal(model(row).logits, expected)


def test_trainer_on_packed_rows_with_checkpoints(tmp_path: Path) -> None:
    """The loss of each step is the mean over the tokens of each sample alone."""
    pytest.importorskip("accelerate")
    model, samples = tiny("qwen3_next"), [tokens(1, n, seed=n)[0] for n in (9, 14)]
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss * (len(row) - 1) for row in samples]
    expected = sum(losses) / sum(len(row) - 1 for row in samples)
    flashmix.accelerate(model, strict=True, quiet=True)
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    options |= {"max_steps": 1, "per_device_train_batch_size": 2, "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(str(tmp_path), gradient_checkpointing=True, **options)
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in samples]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator)
    assert error(torch.tensor(trainer.train().training_loss), expected) <= SAME
