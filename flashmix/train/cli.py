"""The command line: `flashmix train`, `tokenize`, `tokenizer`, `generate`, `eval`, `convert` and `doctor`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashmix
from flashmix.train.folder import RunError, RunFolder, TrainConfig, reason
from flashmix.train.options import FLAGS, SETTINGS, add_tokenize, add_train

if TYPE_CHECKING:
    from flashmix.models import Decoder
    from flashmix.train.evaluate import EvalFolder
    from flashmix.train.ranks import Ranks
    from flashmix.train.text import Options
    from flashmix.train.tokens import Tokens

# The whole numbers among the settings of EvalConfig.
EVAL_NUMBERS = {
    "steps": "training steps of every cell (default: the task's own)",
    "batch_tokens": "tokens in one step (default: 1024)",
    "examples": "sequences to score on, for each size (default: 128)",
    "width": "channels of models whose name has no size (default: 64)",
    "depth": "their layers (default: 2)",
    "head_dim": "channels of their heads (default: 16)",
    "window": "of windowed attention in them (default: 16)",
    "threads": "CPU threads (default: as torch chooses)",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashmix", description="Token mixing for sequence models.")
    parser.add_argument("--version", action="version", version=f"flashmix {flashmix.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    add_train(commands)
    generate = commands.add_parser("generate", help="continue a text with the model of a run")
    generate.add_argument("run", metavar="RUN", help="the run's folder")
    text = "the text to continue (default: none, a new document); several are continued one after another, with --- between them"
    generate.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "read lines from stdin and continue the text after each, until the end of stdin"
    generate.add_argument("--interactive", action="store_true", help=text)
    text = "end a text before the first of these strings that the model writes (give it once for each)"
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    generate.add_argument("--tokens", type=int, default=500, help="most tokens to add (default: 500)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    generate.add_argument("--top-k", type=int, default=None, help="choose among the k likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, default=None, help="choose among the likeliest tokens of this total probability"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
    generate.add_argument(
        "--draft", metavar="RUN", help="a run whose smaller model drafts tokens; the text stays its own"
    )
    generate.add_argument(
        "--draft-tokens", type=int, default=4, metavar="INT", help="tokens that it drafts at a time (default: 4)"
    )
    text = "the checkpoint to take: last, best (least held-out loss), or a step that --keep has kept (default: last)"
    generate.add_argument("--checkpoint", default="last", metavar="WHICH", help=text)
    generate.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")

    add_tokenize(commands)
    add_eval(commands)
    add_convert(commands)
    doctor = commands.add_parser("doctor", help="what is here, and which implementation each op would take")
    text = "a self-test of about a minute: each op's each implementation, forward and backward, against its definition"
    doctor.add_argument("--check", action="store_true", help=text)
    return parser


def add_convert(commands: Any) -> None:
    conversion = commands.add_parser("convert", help="convert another library's weights to flashmix's, or back")
    text = "a folder with config.json and safetensors files, or the folder of a run"
    conversion.add_argument("source", metavar="FOLDER", help=text)
    conversion.add_argument(
        "out", metavar="OUT", nargs="?", help="the folder to be made (default: check, write nothing)"
    )
    text = "the model_type to go back to (default: the one that FOLDER came from)"
    conversion.add_argument("--to", metavar="FAMILY", help=text)


def add_eval(commands: Any) -> None:
    """`flashmix eval`: its settings are those of EvalConfig, which is imported only when the command runs."""
    evaluate = commands.add_parser("eval", help="train and score small models on synthetic tasks")
    keep = argparse.SUPPRESS
    text = "PRESET[_SIZE][+OPTION[=VALUE]]..., several with / between them for a hybrid, or presets for all (default: seven of them)"
    evaluate.add_argument("--models", nargs="+", metavar="MODEL", default=keep, help=text)
    text = "which of recall, parity, s5, needle (default: all)"
    evaluate.add_argument("--tasks", nargs="+", metavar="TASK", default=keep, help=text)
    text = "one cell for each of them; the table has their mean (default: 0)"
    evaluate.add_argument("--seeds", nargs="+", type=int, metavar="INT", default=keep, help=text)
    evaluate.add_argument("--out", metavar="RUN", help="the folder (default: runs/, the time, -eval)")
    evaluate.add_argument("--resume", metavar="RUN", help="continue the evaluation in this folder, or add to it")
    evaluate.add_argument(
        "--lr", type=float, metavar="FLOAT", default=keep, help="highest learning rate (default: the task's own)"
    )
    for name, text in EVAL_NUMBERS.items():
        evaluate.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="INT", default=keep, help=text)
    evaluate.add_argument("--device", default=keep, help="cpu, cuda, ... (default: a GPU if there is one)")


def train_command(arguments: argparse.Namespace) -> int:
    from flashmix.train.ranks import Ranks

    ranks = Ranks.of_environment()
    if ranks.several and not (arguments.resume or arguments.out):
        raise RunError("--out must be given under torchrun: a folder that all ranks see")
    folder = RunFolder(arguments.resume or arguments.out or time.strftime("runs/%Y%m%d-%H%M%S"))
    try:
        with silent_unless(ranks.first):
            return train_in(folder, arguments, ranks)
    except RunError:
        if ranks.first:  # all ranks have it
            raise
        return 1
    finally:
        folder.release()
        ranks.end()


@contextlib.contextmanager
def silent_unless(shown: bool) -> Iterator[None]:
    """Within it, what is printed on stdout goes nowhere, unless it is `shown`."""
    with contextlib.nullcontext() if shown else contextlib.redirect_stdout(io.StringIO()):
        yield


def train_in(folder: RunFolder, arguments: argparse.Namespace, ranks: Ranks) -> int:
    """Begins the run in `folder` or goes on with it; after a restart by torchrun a run that was begun goes on."""
    from flashmix.train import session
    from flashmix.train.text import Options, write_text

    chosen = vars(arguments)
    settings: dict[str, Any] = {name: chosen[name] for name in ("text", *FLAGS, *SETTINGS) if name in chosen}
    if "text" in settings:
        settings["text"] = tuple(settings["text"])
    if arguments.resume and arguments.out:
        raise RunError("--resume goes on in its own folder: leave --out away")
    if arguments.resume or (ranks.restarted and folder.config.exists()):
        trainer = session.resume(folder, {} if not arguments.resume else settings, ranks)
        print(f"resuming {folder.path} after step {trainer.step} of {trainer.config.steps}")
    else:
        trainer = session.begin(TrainConfig(**settings), folder, ranks)
    print(trainer.summary(), flush=True)
    try:
        finished = trainer.run()
    except RunError as error:
        raise RunError(f"{error}; {how_to_go_on(folder)}") from error
    if not finished:
        print(f"stopped after step {trainer.step}; {how_to_go_on(folder)}")
        return 130
    if arguments.sample and ranks.first:
        model, tokens = session.load(folder, trainer.config.device)
        print(f"--- a sample of {arguments.sample} tokens")
        show(write_text(model, tokens, "", Options(tokens=arguments.sample)))
        print("---")
    print(f"all of it is in {folder.path}; more text: {program()} generate {folder.path} --prompt 'def '")
    return 0


def program() -> str:
    """What a shell finds this program by: its name, or where `make train` has it (.venv/bin/flashmix)."""
    called = sys.argv[0]
    return called if Path(called).name == "flashmix" and shutil.which("flashmix") is None else "flashmix"


def how_to_go_on(folder: RunFolder) -> str:
    if not folder.checkpoint.exists() and not folder.shards.exists():
        return "there is no checkpoint yet to go on from"
    return f"go on from the last checkpoint: {program()} train --resume {folder.path}"


def show(parts: Iterable[str]) -> None:
    """Prints a text as it comes, and ends its line."""
    for part in parts:
        print(part, end="", flush=True)
    print(flush=True)


def generate_command(arguments: argparse.Namespace) -> int:
    from flashmix.models import Acceptance
    from flashmix.train import session
    from flashmix.train.text import Draft, Options, write_text

    prompts = arguments.prompt or [""]
    names = ("tokens", "temperature", "top_k", "top_p", "seed")
    options = Options(**{name: getattr(arguments, name) for name in names}, stop=tuple(arguments.stop))
    options.check()
    if arguments.interactive and arguments.draft:
        raise RunError("--interactive keeps one model's cache: leave --draft away")
    if arguments.interactive and len(prompts) > 1:
        raise RunError(f"--interactive must have at most one --prompt, got {len(prompts)}")
    model, tokens = session.load(RunFolder(arguments.run), arguments.device, arguments.checkpoint)
    if arguments.interactive:
        return converse(model, tokens, prompts[0], options)
    draft = None
    if arguments.draft:
        drafting = session.load_draft(RunFolder(arguments.draft), arguments.device, tokens)
        draft = Draft(drafting, arguments.draft_tokens, Acceptance())
    for index, prompt in enumerate(prompts):
        text = write_text(model, tokens, prompt, options, draft)
        if index:
            print("---")
        print(prompt, end="", flush=True)
        show(text)
    if draft is not None:
        kept = draft.acceptance
        print(f"--- {kept.accepted} of {kept.drafted} drafted tokens were kept", file=sys.stderr)
    return 0


def converse(model: Decoder, tokens: Tokens, prompt: str, options: Options) -> int:
    """Answers each line of stdin until its end; `prompt` stands before the first one."""
    from flashmix.train.text import Conversation

    conversation = Conversation(model, tokens, options)
    conversation.add(prompt)
    print(prompt, end="", flush=True)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        conversation.add(line)
        show(conversation.answer())


def eval_command(arguments: argparse.Namespace) -> int:
    from flashmix.train.evaluate import EvalFolder

    folder = EvalFolder(arguments.resume or arguments.out or time.strftime("runs/%Y%m%d-%H%M%S-eval"))
    try:
        return evaluate_in(folder, arguments)
    finally:
        folder.release()


def evaluate_in(folder: EvalFolder, arguments: argparse.Namespace) -> int:
    """Begins the evaluation in `folder` or goes on with it."""
    from flashmix.train import evaluate

    chosen = vars(arguments)
    names = ("tasks", "models", "seeds", "lr", "device", *EVAL_NUMBERS)
    settings: dict[str, Any] = {name: chosen[name] for name in names if name in chosen}
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if settings.get("models") == ("presets",):
        from flashmix.models import PRESETS

        settings["models"] = tuple(PRESETS)
    if arguments.resume:
        if arguments.out:
            raise RunError("--resume goes on in its own folder: leave --out away")
        evaluation = evaluate.resume(folder, settings)
    else:
        evaluation = evaluate.begin(evaluate.EvalConfig(**settings), folder)
    path, total = evaluation.folder.path, len(list(evaluation.config.cells()))
    print(f"{len(evaluation.left)} of {total} cells to do, into {path}", flush=True)
    finished = evaluation.run()
    print(evaluate.make_table(evaluation.results))
    if not finished:
        done = total - len(evaluation.left)
        print(f"stopped with {done} of {total} cells done; go on: {program()} eval --resume {path}")
        return 130
    print(f"numbers, table and plots are in {path}")
    return 0


def convert_command(arguments: argparse.Namespace) -> int:
    from flashmix.checkpoints import ConversionError, convert
    from flashmix.train.export import export

    run = RunFolder(arguments.source)
    try:
        if run.checkpoint.exists() or run.shards.exists():
            if arguments.to or not arguments.out:
                raise RunError("a run is written as a model of flashmix first: leave --to away, and name OUT")
            export(run, Path(arguments.out))
            print(f"{arguments.out}: AutoModelForCausalLM reads it after `from flashmix.hf import FlashmixConfig`")
            return 0
        print(convert(arguments.source, arguments.out, to=arguments.to))
    except ConversionError as error:
        raise RunError(str(error)) from error
    return 0


def text_command(name: str, arguments: argparse.Namespace) -> int:
    from flashmix.train import text_commands

    status: int = getattr(text_commands, name)(arguments)
    return status


def doctor_command(arguments: argparse.Namespace) -> int:
    from flashmix import doctor

    if not arguments.check:
        print(doctor.report())
        return 0
    from flashmix.selftest.check import check

    print("\n".join(doctor.hardware()), flush=True)
    return 0 if check(partial(print, flush=True)) else 1


CLOSED_PIPE = 128 + 13  # the status of a process that ends by SIGPIPE, as a shell has it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; what the user can put right is one line on stderr and exit code 1."""
    accept_any_bytes()
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()
    except RunError as error:
        print(f"flashmix: {error}", file=sys.stderr)
    except BrokenPipeError:  # whoever read it has seen enough, as `head` has
        write_nowhere()
        return CLOSED_PIPE
    except OSError as error:
        print(f"flashmix: {error.filename or 'a file'}: {reason(error)}", file=sys.stderr)
    except ImportError as error:
        print(f"flashmix: {error}; training and evaluation take: pip install 'flashmix[train]'", file=sys.stderr)
    except KeyboardInterrupt:
        print("flashmix: stopped", file=sys.stderr)
        return 130
    return 1


def run(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "train": train_command,
        "tokenize": partial(text_command, "tokenize_command"),
        "tokenizer": partial(text_command, "tokenizer_command"),
        "generate": generate_command,
        "eval": eval_command,
        "convert": convert_command,
        "doctor": doctor_command,
    }
    return commands[arguments.command](arguments)


def accept_any_bytes() -> None:
    """Bytes that are no UTF-8, in arguments and stdin, are printed as they are; characters that stdout lacks become "?"."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "replace")


def write_nowhere() -> None:
    """Turns away what is still to be written to a closed pipe, so that Python says nothing of it as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
