"""A Qwen3-Next of 8 layers in transformers on a GPU: alone, with flash-linear-attention installed, and with `flashmix.accelerate`.

`python benchmarks/transformers_h200.py [--wheels FOLDER] [--write [FOLDER]] [--profile FOLDER] [--tiny]`. Hidden size 2048, the other
sizes as published but for a dense MLP (experts would be most of the time) and a sixth of the vocabulary, as 8 is a sixth of 48 layers.

- train: forward, loss and backward of one row of 8192 tokens in bfloat16: milliseconds (median), tokens a second, most memory.
- decode: milliseconds a token and tokens a second after a prompt of 512, one `forward` on the model's own cache a token, host included,
  for 1 and 64 rows: in the first round, where each length of the keys is new to the process, and the best of all rounds. Rounds of the
  variants take turns.
- mamba2: the same of a Mamba-2 of 8 layers (64 heads of 64, N 128), which flash-linear-attention does not serve.

Each measurement has a process of its own. All processes warm up (and compile) at once; who is ready after 0.55 of `--limit` is measured,
one after the other, while the rest are stopped; those go on afterwards, and are measured if there is time left. The file is written
after each result.
`--wheels` is a folder with the wheels of fla-core, flash-linear-attention and einops, which its processes alone see. Its backward
refuses Triton below 3.7.1 on Hopper, which compiles it wrong: the refusal is lifted, and its time is that of wrong gradients there.
Its autotuner compiles the variants of a kernel side by side, and times each for 20 milliseconds in place of 125; `--tuning` is a file that
keeps what it has found from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

KINDS = ("train", "decode", "mamba2")
VARIANTS = ("fla", "accelerate", "accelerate and attention", "transformers")  # the slowest to get ready first
ORDER = ("accelerate", "fla", "accelerate and attention", "transformers")  # of the measurements
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
TINY |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


ROUNDS = 4  # of decoding
VOCABULARY = 25344


class Sizes:
    """What is measured: published sizes on a GPU, or `tiny` to try this program on a CPU."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.device = tiny, "cpu" if tiny else "cuda"
        self.layers, self.tokens, self.prompt = (4, 128, 16) if tiny else (8, 8192, 512)
        self.batches, self.new_tokens = (1, 4) if tiny else (1, 64), 4 if tiny else 48
        self.steps = 2 if tiny else 5

    def model(self, kind: str, attention: str) -> Any:
        """The model with random weights, made on the device."""
        from transformers import AutoModelForCausalLM

        config = self.qwen3_next()
        if kind == "mamba2":
            config, attention = self.mamba2(), "eager"  # it has none
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)

    def mamba2(self) -> Any:
        from transformers import Mamba2Config

        heads = {"num_heads": 4, "head_dim": 32} if self.tiny else {"num_heads": 64, "head_dim": 64}
        sizes = {
            "hidden_size": 64 if self.tiny else 2048,
            "state_size": 128,
            "n_groups": 1,
            "num_hidden_layers": self.layers,
        }
        return Mamba2Config(vocab_size=VOCABULARY, **heads, **sizes)

    def qwen3_next(self) -> Any:
        from transformers import Qwen3NextConfig

        more = TINY if self.tiny else {"hidden_size": 2048, "intermediate_size": 5632}
        dense = {"mlp_only_layers": list(range(self.layers)), "num_hidden_layers": self.layers}
        return Qwen3NextConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, **more, **dense)

    def row(self, batch: int, tokens: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(self.device)

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()


def variant_of(name: str, kind: str, sizes: Sizes) -> Any:
    """The model as this variant runs it, and a check of what runs."""
    if not name.startswith("accelerate"):
        model = sizes.model(kind, "sdpa")
        if kind == "mamba2":
            return model
        from transformers.models.qwen3_next import modeling_qwen3_next as file

        function = file.torch_chunk_gated_delta_rule.__closure__
        found = [cell.cell_contents.__module__ for cell in function or () if callable(cell.cell_contents)]
        if any(module.startswith("fla") for module in found) != (name == "fla"):
            raise SystemExit(f"{name}: the delta rule is {found}")
        if name == "fla":
            lift_refusal()
            tune_quickly(20)
        return model
    import flashmix

    with_attention = name.endswith("attention")
    model = sizes.model(kind, flashmix.hf.register_attention() if with_attention else "sdpa")
    row = sizes.row(1, 64)
    with torch.no_grad():
        plain = model(row, use_cache=False).logits.float()
        flashmix.accelerate(model, strict=True, quiet=True)
        error = (model(row, use_cache=False).logits.float() - plain).norm() / plain.norm()
    if not error < 0.05:  # bfloat16 through all layers
        raise SystemExit(f"{name}: logits differ by {error:.1e}")
    return model


def lift_refusal() -> None:
    """Lets flash-linear-attention run its backward on a Triton that compiles it wrong, to be timed."""
    from fla.ops.common import chunk_o  # type: ignore[import-not-found]

    chunk_o.TRITON_ABOVE_3_7_1 = True


def tune_quickly(milliseconds: int) -> None:
    """Has Triton's autotuner compile the variants of a kernel side by side, and time each so long in place of 125 milliseconds."""
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    times = {"warmup": max(1, milliseconds // 4), "rep": milliseconds}
    Autotuner.do_bench = property(lambda self: lambda call, quantiles: do_bench(call, quantiles=quantiles, **times))  # type: ignore[assignment]
    pruned = Autotuner.prune_configs

    def compiled(self: Autotuner, options: dict[str, Any]) -> list[Any]:
        configs = pruned(self, options)
        arguments = list(self.nargs.values())
        with ThreadPoolExecutor(8) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*arguments, **{**options, **config.all_kwargs(), "warmup": True})
        return configs

    Autotuner.prune_configs = compiled  # type: ignore[method-assign]


def train_step(model: Any, row: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(row, labels=row, use_cache=False).loss.backward()


def measure_train(model: Any, sizes: Sizes, profile: str | None) -> dict[str, Any]:
    """Milliseconds of a step, tokens a second and GiB."""
    row = sizes.row(1, sizes.tokens)
    train_step(model, row)
    sizes.wait()
    if not sizes.tiny:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(sizes.steps):
        start = time.perf_counter()
        train_step(model, row)
        sizes.wait()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    if profile is not None:
        write_profile(lambda: train_step(model, row), Path(profile))
    memory = 0.0 if sizes.tiny else torch.cuda.max_memory_allocated() / 2**30
    return {"ms": median * 1e3, "tokens_per_second": sizes.tokens / median, "GiB": memory}


@torch.no_grad()
def decode(model: Any, sizes: Sizes, batch: int, count: int, profile: str | None = None) -> float:
    """Seconds of `count` tokens of each row after the prompt."""
    out = model(sizes.row(batch, sizes.prompt), use_cache=True, logits_to_keep=1)
    name = "past_key_values" if "past_key_values" in out else "cache_params"  # of Mamba-2
    cache = {name: out[name]}

    def one() -> None:
        nonlocal out
        out = model(out.logits[:, -1:].argmax(-1), **cache, use_cache=True)

    for _ in range(2):
        one()
    sizes.wait()
    start = time.perf_counter()
    for _ in range(count):
        one()
    sizes.wait()
    seconds = time.perf_counter() - start
    if profile is not None:
        write_profile(one, Path(profile))
    return seconds


def measure_decode(model: Any, sizes: Sizes, profile: str | None) -> dict[str, Any]:
    """Tokens a second and GiB for each batch, one round."""
    found: dict[str, Any] = {}
    for batch in sizes.batches:
        if not sizes.tiny:
            torch.cuda.reset_peak_memory_stats()
        where = None if profile is None else f"{profile}_{batch}"
        seconds = decode(model, sizes, batch, sizes.new_tokens, where)
        memory = 0.0 if sizes.tiny else torch.cuda.max_memory_allocated() / 2**30
        token = seconds / sizes.new_tokens
        found[f"B={batch}"] = {"ms": token * 1e3, "tokens_per_second": batch / token, "GiB": memory}
    return found


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What a worker measured: its only round, or of several the best of each batch and the first beside it."""
    if len(rounds) < 2:
        return rounds[0] if rounds else None
    found = {}
    for batch, first in rounds[0].items():
        best = max((one[batch] for one in rounds), key=lambda one: one["tokens_per_second"])
        found[batch] = best | {"first_tokens_per_second": first["tokens_per_second"]}
    return found


def write_profile(run: Callable[[], Any], path: Path) -> None:
    """A table of the kernels of one run, and of the host's calls."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with torch.profiler.profile(activities=activities) as found:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    averages = found.key_averages()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=60, max_name_column_width=90))


def work(variant: str, kind: str, tiny: bool, profile: str | None) -> None:
    """One process: warms up, says so, and for each line measures and prints one line of JSON."""
    sizes = Sizes(tiny)
    model = variant_of(variant, kind, sizes)
    if kind == "train":
        model.train()
        train_step(model, sizes.row(1, 256 if variant == "transformers" else sizes.tokens))  # which compiles nothing
        model.zero_grad(set_to_none=True)
    else:
        model.eval()
        for batch in sizes.batches:
            decode(model, sizes, batch, 2)
    sizes.wait()
    if not tiny:
        torch.cuda.empty_cache()
    print("ready", flush=True)
    measure = measure_train if kind == "train" else measure_decode
    path = None if profile is None or variant == "transformers" else f"{profile}/{kind}_{variant.replace(' ', '_')}"
    for line in sys.stdin:
        print(json.dumps(measure(model, sizes, path if "last" in line else None)), flush=True)


class Worker:
    """A process of `work`, and a thread that reads what it prints."""

    def __init__(self, variant: str, kind: str, options: argparse.Namespace, path: str | None) -> None:
        self.variant, self.kind = variant, kind
        self.began, self.waited = time.monotonic(), 0.0
        self.ready, self.done = threading.Event(), threading.Event()
        self.results: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--worker", variant, kind]
        command += (["--tiny"] if options.tiny else []) + (["--profile", options.profile] if options.profile else [])
        places = [place for place in (path, os.environ.get("PYTHONPATH")) if place]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TRANSFORMERS_VERBOSITY": "error"}
        if path is not None:
            environment |= {"TRITON_CACHE_DIR": f"{path}/triton"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready"):
                self.waited = time.monotonic() - self.began
                self.ready.set()
            elif line.startswith("{"):
                self.results.append(json.loads(line))
                self.done.set()
        self.ready.set()
        self.done.set()

    def measure(self, seconds: float, last: bool) -> None:
        """Lets it measure one round; it is ended if it takes longer, or it was the last one."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.done.clear()
            try:
                self.process.stdin.write("last\n" if last else "one\n")
                self.process.stdin.flush()
                last |= not self.done.wait(max(seconds, 0))
            except BrokenPipeError:
                last = True
        if last:
            self.process.kill()
            self.process.wait()


def unpacked(wheels: str, into: str) -> str:
    """A folder with the packages of these wheels, which are pure Python."""
    for wheel in Path(wheels).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return into


def keep_tuning(file: Path, folder: str) -> None:
    """Writes what the peer has tuned, by its place in Triton's cache."""
    cache = Path(folder) / "triton"
    found = {str(p.relative_to(cache)): p.read_text() for p in cache.rglob("*.autotune.json")}
    file.write_text(json.dumps(found))


def restore_tuning(file: Path, folder: str) -> None:
    for name, text in json.loads(file.read_text()).items() if file.exists() else ():
        place = Path(folder) / "triton" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def run_all(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """The rows of the table."""
    end = time.monotonic() + options.limit
    fla = unpacked(options.wheels, folder) if options.wheels else None
    if options.tuning:
        restore_tuning(Path(options.tuning), folder)
    wanted = [v for v in VARIANTS if v in (options.only or VARIANTS) and (v != "fla" or fla)]
    if options.profile:
        Path(options.profile).mkdir(parents=True, exist_ok=True)
    pairs = [
        (v, kind) for v in wanted for kind in options.kinds if kind != "mamba2" or v in ("accelerate", "transformers")
    ]
    workers = [Worker(v, kind, options, fla if v == "fla" else None) for v, kind in pairs]
    rows: list[dict[str, Any]] = []
    try:
        for worker in workers:
            worker.ready.wait(max(end - time.monotonic() - 0.45 * options.limit, 0))
        late = [w for w in workers if not w.ready.is_set()]
        for worker in late:
            worker.process.send_signal(signal.SIGSTOP)
        ready = sorted((w for w in workers if w not in late), key=lambda w: ORDER.index(w.variant))
        training = [w for w in ready if w.kind == "train"]
        decoding = [w for w in ready if w.kind != "train"]
        turns = [(w, True) for w in training if w.variant != "transformers"]
        turns += [(w, turn == ROUNDS - 1) for turn in range(ROUNDS) for w in decoding]
        turns += [(w, True) for w in training if w.variant == "transformers"]  # the longest
        for worker, last in turns:
            worker.measure(end - time.monotonic(), last)
            if last:
                report(worker, rows, options)
        for worker in late:
            worker.process.send_signal(signal.SIGCONT)
        for worker in late:
            if worker.ready.wait(max(end - time.monotonic() - 5, 0)):
                worker.measure(end - time.monotonic(), True)
            report(worker, rows, options)
        if options.tuning:
            keep_tuning(Path(options.tuning), folder)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    return rows


def report(worker: Worker, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds what a worker measured to the rows; None if it never got ready."""
    row = {"variant": worker.variant, "kind": worker.kind, "warm_up_seconds": worker.waited}
    rows.append(row | {"result": best_of(worker.results)})
    print(json.dumps(rows[-1]), flush=True)
    write(rows, options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The file of results, whole after each row, for a run may be ended at any time."""
    if options.write is not None:
        import timing

        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        where = Path(options.write) if options.write else None
        timing.write_results("transformers_h200", rows, where, {"card": card})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels")
    parser.add_argument("--tuning", metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=VARIANTS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER")
    parser.add_argument("--profile", metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=145.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try this program")
    parser.add_argument("--worker", nargs=2, metavar=("VARIANT", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        variant, kind = options.worker
        work(variant, kind, options.tiny, options.profile)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_all(options, folder)


if __name__ == "__main__":
    main()
