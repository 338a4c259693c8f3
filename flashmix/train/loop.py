"""The training loop: steps, measurements, checkpoints, and a clean stop on Ctrl-C."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmix.models import Decoder
from flashmix.train import checkpoint, shards
from flashmix.train.data import Batch, Corpus, Stream
from flashmix.train.dataset import Dataset
from flashmix.train.folder import RunError, RunFolder, TrainConfig
from flashmix.train.log import make_log
from flashmix.train.optimizer import Updates
from flashmix.train.plot import draw_loss_curve
from flashmix.train.progress import Progress
from flashmix.train.ranks import Ranks, order_of
from flashmix.train.speed import peak_of, work_of


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate rises linearly over `warmup` steps, then falls along half a cosine to `final_lr * lr` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@contextmanager
def stop_on_interrupt(ranks: Ranks | None = None) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C (or SIGTERM) requests a stop, the second one stops at once; yields a function: was a stop requested?

    Of several ranks none stops at once: a terminal and torchrun both hand on the same Ctrl-C.
    """
    ranks = ranks or Ranks()
    asked, once_more = False, "" if ranks.several else " (once more: at once)"

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and not ranks.several:
            raise KeyboardInterrupt
        if ranks.first and not asked:
            with suppress(OSError):  # nobody reads it any more
                print(f"\nstopping after {'the next' if ranks.several else 'this'} step{once_more}", file=sys.stderr)
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def perplexity(loss: float) -> float:
    """Of a loss per token in nats; infinite where it is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


def whole(x: Tensor) -> Tensor:
    """A tensor that may lie over ranks, whole on each of them."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class Trainer:
    """A model in training: `run` trains it from its current step to the last one, or until it is interrupted."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        model: Decoder,
        corpus: Corpus | Dataset,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks or Ranks()
        self.device = self.ranks.device(config.device or "cpu")
        self.model = model.to(self.device)
        self.order = order_of(self.model.config)
        self._prepare()
        self.training = Stream(corpus, corpus.split(held_out=False), config.seq_len, config.seed)
        self.held_out = Stream(corpus, corpus.split(held_out=True), config.seq_len, config.seed)
        self.step = 0
        self.position = 0
        self.saved_step = 0
        self.counted = config.batch_tokens  # targets of the step that the loss counts
        self.unread: list[tuple[Tensor, Tensor]] = []
        self.asked: Callable[[], bool] = lambda: False  # whether this process was asked to stop
        self.clock = time.perf_counter()
        self.peak = peak_of(self.device)
        self.work = work_of(self.model, self.training.mean_length) / self.ranks.count
        self.least_held_out = math.inf
        self.log = make_log(config.log, folder) if self.ranks.first else None

    def _prepare(self) -> None:
        """Shards the parameters over the ranks, and makes the optimiser of what this one has."""
        self.ranks.shard(self.model, self.config)
        masters = self.config.dtype == "bfloat16" and not self.ranks.several  # over several ranks FSDP2 has them
        self.updates = Updates(self.model, self.config, masters)
        self.forward: Callable[..., Tensor] = torch.compile(self.model) if self.config.compile else self.model

    @property
    def whole_step(self) -> bool:
        """Whether a step is one row of this process alone, all of which counts: its loss is a mean; else losses are shares of a sum."""
        return self.config.rows == 1 and not self.ranks.several and self.training.mask is None

    def resume(self) -> None:
        """Loads the checkpoint of the run folder; measurements of later steps are dropped and made again.

        A run that torchrun restarted before its first checkpoint begins again.
        """
        shards_of_run = shards.newest(self.folder)
        if shards_of_run is not None:
            state = self._take_shards(shards_of_run)
            self.step, self.position = state["step"], state["position"]
        elif self.folder.checkpoint.exists() or not self.ranks.restarted:
            whole = self.ranks.together(lambda: checkpoint.load(self.folder.checkpoint, self.device))
            self._take(whole)
            self.step, self.position = whole.step, whole.position
        self.saved_step = self.step
        self.ranks.on_first(lambda: self.folder.forget_metrics_after(self.step))
        held_out = [row["held_out_loss"] for row in self.folder.read_metrics() if "held_out_loss" in row]
        self.least_held_out = min(held_out, default=math.inf)

    def _take_shards(self, path: Path) -> dict[str, Any]:
        """Puts the checkpoint of several ranks into the model and the optimiser; returns its state."""
        if not self.updates.masters:
            return shards.restore(path, self.ranks, self.updates)
        model = Decoder(self.model.config).to(self.device)  # of float32 weights, as the shards have
        updates = Updates(model, self.config)
        state = shards.restore(path, self.ranks, updates)
        self.updates.load(updates.weights(), updates.state())
        return state

    def _take(self, whole: checkpoint.Checkpoint) -> None:
        """Puts the checkpoint of one process into the model and the optimiser; over several ranks each takes its part."""
        if not self.ranks.several:
            checkpoint.restore(whole, self.updates)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

        model = Decoder(self.model.config).to(self.device, next(self.model.parameters()).dtype)
        updates = Updates(model, self.config)
        self.ranks.together(lambda: checkpoint.restore(whole, updates))
        weights, moments = get_state_dict(model, updates.adamw)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            self.model, self.updates.adamw, model_state_dict=weights, optim_state_dict=moments, options=options
        )

    def summary(self) -> str:
        """One line: the model, the text, the steps."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        mixers = " ".join(layer.mixer for layer in self.model.config.layers)
        over = f", over {self.ranks.count} ranks, {self.config.context} a row" if self.ranks.several else ""
        return (
            f"{size:,} parameters ({mixers}); "
            f"{self.training.bytes:,} bytes to train on, {self.held_out.bytes:,} held out; "
            f"{self.config.steps} steps of {self.config.batch_tokens} tokens on {self.device}{over}"
        )

    def run(self) -> bool:
        """Trains; True if the last step is done, False if it was stopped before. Either way the run is saved.

        Raises BrokenPipeError, with all saved as well: nobody reads what is printed.
        """
        try:
            progress = Progress(self.config.steps, self.step, shown=self.ranks.first)
            with stop_on_interrupt(self.ranks) as asked, progress:
                self.asked = asked
                self._run((lambda: self.ranks.stopping) if self.ranks.several else asked, progress)
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
        """Of a step that is one batch the mean over its tokens, else the batch's share of the mean over the step's tokens, nats."""
        if self.whole_step:
            return self.loss(batch)
        return self.loss(batch, reduction="sum") / self.counted

    def loss(self, batch: Batch, **options: str) -> Tensor:
        return self.forward(batch.inputs, cu_seqlens=batch.packing, targets=batch.targets, **options)

    def batch(self, stream: Stream, position: int, count: int) -> Batch:
        """A row of the stream, or this rank's part of it."""
        found = stream.batch(position, count, self.device)
        return found if self.ranks.context is None else found.over(self.ranks.context, self.order)

    def rows(self) -> list[int]:
        """The positions of the rows of the next step that this rank works on."""
        count, own = self.config.rows, self.config.rows // self.ranks.data_ranks
        places = range(self.ranks.data * own, (self.ranks.data + 1) * own)
        return [self.position + place * (self.config.batch_tokens // count) for place in places]

    def train_step(self) -> None:
        """One optimiser step. It does not wait for the device: the losses stay there until `read_losses`."""
        rows, losses = self.rows(), []
        self.counted = max(1, self.training.counted(self.position, self.config.batch_tokens))
        for position in rows:
            batch = self.batch(self.training, position, self.config.batch_tokens // self.config.rows)
            loss = self.loss_of(batch)
            self.ranks.backward(self.model, loss, last=position == rows[-1])
            losses.append(loss.detach())
        norm = self.updates.step(learning_rate(self.step, self.config), self.config.clip)
        self.unread.append((self.summed(losses), whole(norm.detach())))
        self.step += 1
        self.position += self.config.batch_tokens

    def summed(self, losses: list[Tensor]) -> Tensor:
        """The loss of a step from those of this rank's rows; with it the ranks agree whether one of them was asked to stop."""
        if not self.ranks.several:
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        asked = torch.full((), float(self.asked()), dtype=torch.float64, device=self.device)
        found = self.ranks.sum(torch.stack([torch.stack(losses).double().sum(), asked]))
        self.ranks.agree_on_stop(found[1])
        return found[0]

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
        self.append(
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
        found = {"loss": f"{mean:.3f}", "bits/byte": f"{bits(mean):.3f}", "tokens/s": f"{speed:,.0f}"}
        return found if self.peak is None else {**found, "MFU": f"{self.work * speed / self.peak:.1%}"}

    @torch.no_grad()
    def measure_held_out(self, say: Callable[[str], None] = print, stopped: Callable[[], bool] = lambda: False) -> None:
        """Writes and reports the mean loss over the held-out documents (their first `eval_tokens` tokens)."""
        self.read_losses()
        total = min(self.held_out.total, self.config.eval_tokens)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        row = self.config.batch_tokens // self.config.rows
        positions = range(0, total, row)
        for index in range(
            self.ranks.data, -(-len(positions) // self.ranks.data_ranks) * self.ranks.data_ranks, self.ranks.data_ranks
        ):
            if stopped():
                break
            position = positions[
                min(index, len(positions) - 1)
            ]  # ranks without a row of their own keep the others company
            count = min(row, total - position)
            batch = self.batch(self.held_out, position, count)
            own = self.loss(batch).double() * count if self.whole_step else self.loss(batch, reduction="sum").double()
            loss += own * (index < len(positions))
        else:
            mean = self.ranks.sum(loss).item() / max(1, self.held_out.counted(0, total))
            bits = self.held_out.bits_per_byte(mean)
            found = {"held_out_loss": mean, "held_out_bits_per_byte": bits, "held_out_perplexity": perplexity(mean)}
            self.append([{"step": self.step, **found}])
            say(
                f"step {self.step}: {bits:.3f} bits per byte on {total:,} held-out tokens, "
                f"perplexity {perplexity(mean):.2f} per token"
            )
            self.save_best(mean)
        self.model.train()
        self.clock = time.perf_counter()

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Measurements into the folder, which the first rank writes."""
        if self.ranks.first:
            self.folder.append_metrics(rows)
        if self.log is not None:
            self.log(rows)

    def save_best(self, held_out: float) -> None:
        """Writes the weights as `best.pt` if no held-out loss was smaller."""
        if held_out >= self.least_held_out:
            return
        self.least_held_out = held_out
        weights = shards.whole_weights(self.model) if self.ranks.several else self.updates.weights()
        state = checkpoint.Checkpoint(self.step, self.position, weights, {}, checkpoint.random_state())
        self.ranks.on_first(lambda: checkpoint.save(state, self.folder.best))

    def save(self) -> None:
        """Writes the measurements, the checkpoint and the loss curve, the most valuable first."""
        self.read_losses()
        if self.saved_step < self.step:
            if self.ranks.several:
                shards.save(self.folder, self.ranks, (self.step, self.position), self.updates, self.config.keep)
            else:
                checkpoint.save(checkpoint.capture(self.step, self.position, self.updates), self.folder.checkpoint)
                checkpoint.keep_earlier(self.folder, self.step, self.config.keep)
            self.saved_step = self.step
        if self.ranks.first:
            draw_loss_curve(self.folder)
        self.clock = time.perf_counter()
