"""The training loop: steps, measurements, checkpoints, and a clean stop on Ctrl-C."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.models import Decoder, parameter_groups
from flashmix.train import checkpoint
from flashmix.train.data import Batch, Corpus, Stream
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.plot import draw_loss_curve
from flashmix.train.progress import Progress


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate rises linearly over `warmup` steps, then falls along half a cosine to `final_lr * lr` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on gains, biases and decay rates."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C (or SIGTERM) requests a stop, the second one stops at once; yields a function: was a stop requested?"""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        with suppress(OSError):  # nobody reads it any more
            print("\nstopping after this step (once more: at once)", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """A model in training: `run` trains it from its current step to the last one, or until it is interrupted."""

    def __init__(self, config: TrainConfig, folder: RunFolder, model: Decoder, corpus: Corpus) -> None:
        self.config, self.folder = config, folder
        self.device = torch.device(config.device or "cpu")
        self.model = model.to(self.device)
        self.forward: Callable[..., Tensor] = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config)
        self.training = Stream(corpus, corpus.split(held_out=False), config.seq_len, config.seed)
        self.held_out = Stream(corpus, corpus.split(held_out=True), config.seq_len, config.seed)
        self.step = 0
        self.position = 0
        self.saved_step = 0
        self.unread: list[tuple[Tensor, Tensor]] = []
        self.clock = time.perf_counter()

    def resume(self) -> None:
        """Loads the checkpoint of the run folder; measurements of later steps are dropped and made again."""
        state = checkpoint.load(self.folder.checkpoint, self.device)
        checkpoint.restore(state, self.model, self.optimizer)
        self.step = self.saved_step = state.step
        self.position = state.position
        self.folder.forget_metrics_after(state.step)

    def summary(self) -> str:
        """One line: the model, the text, the steps."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        mixers = " ".join(layer.mixer for layer in self.model.config.layers)
        return (
            f"{size:,} parameters ({mixers}); "
            f"{self.training.bytes:,} bytes to train on, {self.held_out.bytes:,} held out; "
            f"{self.config.steps} steps of {self.config.batch_tokens} tokens on {self.device}"
        )

    def run(self) -> bool:
        """Trains; True if the last step is done, False if it was stopped before. Either way the run is saved.

        Raises BrokenPipeError, with all saved as well: nobody reads what is printed.
        """
        try:
            with stop_on_interrupt() as stopped, Progress(self.config.steps, self.step) as progress:
                self._run(stopped, progress)
        except BrokenPipeError:
            self.save()
            raise
        return self.step == self.config.steps

    def _run(self, stopped: Callable[[], bool], progress: Progress) -> None:
        config = self.config
        self.clock = time.perf_counter()
        while self.step < config.steps and not stopped():
            self.train_step()
            progress.update()
            done = self.step == config.steps
            if done or self.step % config.log_every == 0:
                progress.show(details=self.read_losses())
            if done or self.step % config.eval_every == 0:
                self.measure_held_out(progress.say, stopped)
            if done or self.step % config.save_every == 0 or stopped():
                self.save()

    def loss_of(self, batch: Batch) -> Tensor:
        """Mean over the tokens of the batch, nats."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return self.forward(batch.inputs, cu_seqlens=batch.packing, targets=batch.targets)

    def train_step(self) -> None:
        """One optimiser step. It does not wait for the device: the losses stay there until `read_losses`."""
        batch = self.training.batch(self.position, self.config.batch_tokens, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        loss = self.loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.unread.append((loss.detach(), norm.detach()))
        self.step += 1
        self.position += self.config.batch_tokens

    def read_losses(self) -> dict[str, str]:
        """Waits for the device, writes one row per step, and returns what the progress shows.

        Raises RunError: a loss is not finite; the checkpoint from before it stays.
        """
        if not self.unread:
            return {}
        losses, norms = (torch.stack(values).tolist() for values in zip(*self.unread, strict=True))
        now = time.perf_counter()
        speed = len(losses) * self.config.batch_tokens / (now - self.clock)
        first = self.step - len(losses)
        bits = self.training.bits_per_byte
        self.folder.append_metrics(
            [
                {
                    "step": first + i + 1,
                    "loss": loss,
                    "bits_per_byte": bits(loss),
                    "gradient_norm": norm,
                    "lr": learning_rate(first + i, self.config),
                    "tokens_per_second": round(speed),
                }
                for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
            ]
        )
        self.unread, self.clock = [], now
        bad = next((first + i + 1 for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            raise RunError(f"the loss of step {bad} is not finite: try a lower --lr (the last checkpoint is untouched)")
        mean = sum(losses) / len(losses)
        return {"loss": f"{mean:.3f}", "bits/byte": f"{bits(mean):.3f}", "tokens/s": f"{speed:,.0f}"}

    @torch.no_grad()
    def measure_held_out(self, say: Callable[[str], None] = print, stopped: Callable[[], bool] = lambda: False) -> None:
        """Writes and reports the mean loss over the held-out documents (their first `eval_tokens` tokens)."""
        self.read_losses()
        total = min(self.held_out.total, self.config.eval_tokens)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        for position in range(0, total, self.config.batch_tokens):
            if stopped():
                break
            count = min(self.config.batch_tokens, total - position)
            loss += self.loss_of(self.held_out.batch(position, count, self.device)).double() * count
        else:
            mean = loss.item() / total
            bits = self.held_out.bits_per_byte(mean)
            self.folder.append_metrics([{"step": self.step, "held_out_loss": mean, "held_out_bits_per_byte": bits}])
            say(f"step {self.step}: {bits:.3f} bits per byte on {total:,} held-out tokens")
        self.model.train()
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Writes the measurements, the checkpoint and the loss curve, the most valuable first."""
        self.read_losses()
        if self.saved_step < self.step:
            state = checkpoint.capture(self.step, self.position, self.model, self.optimizer)
            checkpoint.save(state, self.folder.checkpoint)
            self.saved_step = self.step
        draw_loss_curve(self.folder)
        self.clock = time.perf_counter()
