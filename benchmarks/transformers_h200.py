"""A Qwen3-Next of 8 layers in transformers on a GPU: alone, with flash-linear-attention installed, and with `flashmix.accelerate`.

`python benchmarks/transformers_h200.py [--wheels FOLDER] [--write [FOLDER]] [--profile FOLDER] [--tiny]`. Hidden size 2048, the other
sizes as published but for a dense MLP (experts would be most of the time) and a sixth of the vocabulary, as 8 is a sixth of 48 layers.

- train: forward, loss and backward of one row of 8192 tokens in bfloat16: milliseconds (median), tokens a second, most memory.
- decode: milliseconds a token and tokens a second after a prompt of 512, one `forward` on the model's own cache a token, host included,
  for 1 and 64 rows: in the first round, where each length of the keys is new to the process, and the best of all rounds. Rounds of the
  variants take turns.
- mamba2: the same of one row of a Mamba-2 of 8 layers (64 heads of 64, N 128), which flash-linear-attention does not serve; the torch
  functions of transformers take 256 GiB for 64 prompts of 512.

Each measurement has a process of its own. All but flash-linear-attention's warm up (and compile) at once and are measured one after the
other; meanwhile `--warm N` niced processes compile the variants that its autotuner times, stopped while others are measured. Then its
own processes start, and when they are ready all are measured again in turns. The file is written after each result.
`--wheels` is a folder with the wheels of fla-core, flash-linear-attention and einops, which its processes alone see. Its backward
refuses Triton below 3.7.1 on Hopper, which compiles it wrong: the refusal is lifted, and its time is that of wrong gradients there.
Its autotuner times each variant for 20 milliseconds in place of 125; `--cache` is the folder of what it has compiled and found.
"""

from __future__ import annotations

import argparse
import copy
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
from pathlib import Path
from typing import Any

import torch
from model import compile_only, ended, tuned_in

KINDS = ("train", "decode", "mamba2")
VARIANTS = ("accelerate", "fla", "accelerate and attention", "transformers")  # in the order of their measurements
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
TINY |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


ROUNDS = 3  # of measurements in turns
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
        return model
    import flashmix

    with_attention = name.endswith("attention")
    model = sizes.model(kind, flashmix.hf.register_attention() if with_attention else "sdpa")
    row = sizes.row(1, 64)
    with torch.no_grad():
        exact, plain = copy.deepcopy(model).float()(row, use_cache=False).logits, model(row, use_cache=False).logits
        flashmix.accelerate(model, strict=True, quiet=True)
        ours = model(row, use_cache=False).logits
    own, theirs = ((logits.float() - exact).norm() / exact.norm() for logits in (ours, plain))
    if not own <= 1.5 * theirs:  # what bfloat16 costs through all layers
        raise SystemExit(f"{name}: logits err by {own:.1e}, those of transformers alone by {theirs:.1e}")
    return model


def lift_refusal() -> None:
    """Lets flash-linear-attention run its backward on a Triton that compiles it wrong, to be timed."""
    from fla.ops.common import chunk_o  # type: ignore[import-not-found]

    chunk_o.TRITON_ABOVE_3_7_1 = True


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
    """The fastest round of each batch, and beside it the rate of the first one."""
    if not rounds:
        return None
    if "ms" in rounds[0]:
        return min(rounds, key=lambda one: one["ms"]) | {"all_ms": [one["ms"] for one in rounds]}
    return {batch: best_of([one[batch] for one in rounds]) for batch in rounds[0]}


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
    if kind == "mamba2":
        sizes.batches = (1,)
    if variant == "fla":
        tuned_in(20)
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
        print(json.dumps(measure(model, sizes, path if "profile" in line else None)), flush=True)


def compile_variants(number: int, kind: str) -> None:
    """One process of `--warm`: runs a small flash-linear-attention model once, whose variants are compiled in an order of its own."""
    sizes = Sizes(tiny=False)
    sizes.layers, sizes.tokens = 4, 2048
    compile_only(number)
    model = variant_of("fla", kind, sizes)
    if kind == "train":
        train_step(model.train(), sizes.row(1, sizes.tokens))
        return
    sizes.prompt = 64
    for batch in sizes.batches:
        decode(model.eval(), sizes, batch, 2)


class Worker:
    """A process of `work`, and a thread that reads what it prints."""

    def __init__(self, variant: str, kind: str, options: argparse.Namespace, places: Places) -> None:
        self.variant, self.kind = variant, kind
        self.began, self.waited = time.monotonic(), 0.0
        self.ready, self.done = threading.Event(), threading.Event()
        self.results: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--worker", variant, kind]
        command += (["--tiny"] if options.tiny else []) + (["--profile", options.profile] if options.profile else [])
        environment = places.environment(variant == "fla")
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

    def measure(self, seconds: float, profile: bool = False) -> None:
        """Lets it measure one round; it is ended if it takes longer."""
        if self.process.poll() is not None or self.process.stdin is None or not self.ready.is_set():
            return
        self.done.clear()
        try:
            self.process.stdin.write("profile\n" if profile else "one\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return
        if not self.done.wait(max(seconds, 0)):
            self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Places:
    """Where flash-linear-attention lies, and what it compiles."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.wheels = options.wheels and unpacked(options.wheels, folder)
        self.cache = options.cache or f"{folder}/triton"

    def environment(self, fla: bool) -> dict[str, str]:
        places = [self.wheels] if fla and self.wheels else []
        places += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        found = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TRANSFORMERS_VERBOSITY": "error"}
        return found | ({"TRITON_CACHE_DIR": self.cache} if fla else {})

    def compiling(self, count: int) -> list[subprocess.Popen[bytes]]:
        """So many processes of `compile_variants`; what is not timed is not stored as a choice."""
        environment, started = self.environment(True) | {"FLA_CACHE_RESULTS": "0"}, []
        for i in range(count if self.wheels else 0):
            kind = "decode" if i % 4 == 3 else "train"
            command = ["nice", sys.executable, __file__, "--compile", str(i + 1), kind]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
        return started


def unpacked(wheels: str, into: str) -> str:
    """A folder with the packages of these wheels, which are pure Python."""
    for wheel in Path(wheels).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return into


def run_all(options: argparse.Namespace, folder: str) -> None:
    """The rows of the table, written as they are found."""
    end = time.monotonic() + options.limit
    places = Places(options, folder)
    if options.profile:
        Path(options.profile).mkdir(parents=True, exist_ok=True)
    pairs = [(v, kind) for v in VARIANTS for kind in options.kinds if v in (options.only or VARIANTS)]
    pairs = [(v, kind) for v, kind in pairs if v in ("accelerate", "transformers") or kind != "mamba2"]
    workers = [Worker(v, kind, options, places) for v, kind in pairs if v != "fla"]
    peers: list[Worker] = []
    compiling = places.compiling(options.warm)
    try:
        for worker in workers:
            worker.ready.wait(max(end - time.monotonic() - 0.6 * options.limit, 0))
        together(compiling, signal.SIGSTOP)
        in_turns(workers, end, options, profile=True)
        together(compiling, signal.SIGCONT)
        peers = [Worker(v, kind, options, places) for v, kind in pairs if v == "fla" and places.wheels]
        for worker in peers:
            worker.ready.wait(max(end - time.monotonic() - 0.1 * options.limit, 0))
        ended(compiling, 0)
        everyone = [w for pair in pairs for w in workers + peers if (w.variant, w.kind) == pair]
        for _ in range(ROUNDS):
            in_turns(everyone, end, options)
    finally:
        for process in [worker.process for worker in workers + peers] + compiling:
            process.kill()
            process.wait()


def together(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)


def in_turns(workers: list[Worker], end: float, options: argparse.Namespace, profile: bool = False) -> None:
    """One round of all, training first; one that takes a second a step is measured once."""
    slow = [w for w in workers if w.variant == "transformers" and w.kind == "train" and w.results]
    for worker in sorted(workers, key=lambda w: w.kind != "train"):
        if worker not in slow:
            worker.measure(end - time.monotonic(), profile)
        rows = [{"variant": w.variant, "kind": w.kind, "warm_up_seconds": w.waited} for w in workers]
        write([row | {"result": best_of(w.results)} for row, w in zip(rows, workers, strict=True)], options)


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
    parser.add_argument("--cache", metavar="FOLDER", help="of what flash-linear-attention compiles and tunes, kept")
    parser.add_argument(
        "--warm", type=int, default=0, metavar="N", help="processes that compile its variants beforehand"
    )
    parser.add_argument("--only", nargs="*", choices=VARIANTS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER")
    parser.add_argument("--profile", metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=145.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try this program")
    parser.add_argument("--worker", nargs=2, metavar=("VARIANT", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, metavar=("NUMBER", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_variants(int(options.compile[0]), options.compile[1])
        return
    if options.worker:
        variant, kind = options.worker
        work(variant, kind, options.tiny, options.profile)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_all(options, folder)


if __name__ == "__main__":
    main()
