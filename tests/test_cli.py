"""The commands as a user meets them: what they print, their exit codes, and one line instead of a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashmix.train import cli, session
from flashmix.train.folder import RunFolder, TrainConfig
from flashmix.train.tokens import Tokens

SETTINGS: dict[str, object] = {"preset": "hybrid_nano", "steps": 6, "batch-tokens": 192, "seq-len": 64, "warmup": 2}
SETTINGS |= {"held-out": 0.2, "eval-tokens": 256, "eval-every": 3, "save-every": 3}
SETTINGS |= {"threads": 1, "device": "cpu", "sample": 20}
SMALL = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(8):
        (folder / f"{index}.txt").write_text("".join(f"{index} plus {n} is {index + n}\n" for n in range(8)))
    return str(folder)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command prints as it fails."""
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("flashmix: "), error
    return error[0]


def test_commands_to_go_on_with_are_as_the_shell_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make train` runs .venv/bin/flashmix, which no path has."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [".venv/bin/flashmix", "train"])
    assert cli.program() == ".venv/bin/flashmix"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert cli.program() == "flashmix"


def test_train_then_generate(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--text", text, "--out", "run", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "gated_deltanet gated_deltanet gated_deltanet attention" in printed
    assert "bits per byte" in printed and "a sample of 20 tokens" in printed
    written = " ".join(sorted(path.name for path in Path("run").iterdir()))
    assert (
        written == "best.pt checkpoint.pt checksums.json config.json documents.json loss.png metrics.jsonl tokens.bin"
    )
    outputs = []
    for options in (
        ["--seed", "1"],
        ["--seed", "1"],
        ["--seed", "2"],
        ["--temperature", "0"],
        ["--top-k", "1", "--seed", "7"],
    ):
        assert cli.main(["generate", "run", "--prompt", "2 plus", "--tokens", "12", "--device", "cpu", *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert all(output.startswith("2 plus") for output in outputs)
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[3] == outputs[4], "the likeliest token is the only one of the likeliest one"


def test_without_out_a_run_gets_a_folder_of_its_own(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--text", text, *SMALL, "--steps", "1"]) == 0
    (run,) = Path("runs").iterdir()
    assert (run / "checkpoint.pt").exists() and str(run) in capsys.readouterr().out


def test_resume_keeps_the_settings_of_the_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--text", text, "--out", "run", *SMALL]) == 0
    assert cli.main(["train", "--resume", "run", "--steps", "8", "--sample", "0"]) == 0
    assert "resuming run after step 6 of 8" in capsys.readouterr().out
    settings = json.loads(Path("run/config.json").read_text())["train"]
    assert settings["steps"] == 8 and settings["batch_tokens"] == 192
    line = fails(capsys, "train", "--resume", "run", "--seq-len", "32")
    assert "--seq-len belongs to the run and stays 64" in line
    assert "leave --out away" in fails(capsys, "train", "--resume", "run", "--out", "other")
    assert "already holds a run" in fails(capsys, "train", "--text", text, "--out", "run", *SMALL)


def test_a_tokenizers_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in Path(text).iterdir()], trainer)
    tokenizer.save("tokenizer.json")

    tokens = Tokens.from_file("tokenizer.json")
    line = "2 plus 3 is 5, naïve\n"
    assert tokens.decode(tokens.encode(line.encode())) == line
    assert len(tokens.encode(b"2 plus 3 is 5")) < 8 and tokens.vocabulary == tokenizer.get_vocab_size() + 1

    assert cli.main(["train", "--text", text, "--out", "run", "--tokenizer", "tokenizer.json", *SMALL]) == 0
    Path("tokenizer.json").unlink()  # the run has its own
    documents = json.loads(Path("run/documents.json").read_text())
    assert sum(d["tokens"] for d in documents) < 0.5 * sum(d["bytes"] for d in documents)
    assert cli.main(["generate", "run", "--prompt", "2 plus", "--tokens", "5", "--draft", "run"]) == 0
    assert "2 plus" in capsys.readouterr().out
    assert cli.main(["train", "--text", text, "--out", "bytes", *SMALL, "--sample", "0"]) == 0
    capsys.readouterr()
    line = fails(capsys, "generate", "run", "--draft", "bytes")
    assert "--draft bytes must have the tokenizer of the run, got another one" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "cannot read nowhere.txt: No such file or directory"),
        (["--text", "empty"], "no text found in empty"),
        (["--text", "empty.txt"], "no text found in empty.txt"),
        (["--text", "one_byte.txt"], "the text is too small"),
        (["--tokenizer", "nowhere.json"], "cannot read the tokenizer nowhere.json: No such file or directory"),
        (["--tokenizer", "bad.json"], "bad.json is not a tokenizers file"),
        (["--tokenizer", "binary.json"], "cannot read the tokenizer binary.json: it is not a text file"),
        (["--preset", "nothing"], "--preset: name must be one of"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--out", "empty.txt"], "cannot make the run folder empty.txt"),
        (["--resume", "empty"], "empty holds no run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_put_right_is_one_line(
    text: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("empty").mkdir()
    Path("empty.txt").write_text("")
    Path("one_byte.txt").write_text("x")
    Path("bad.json").write_text('{"model": 1}')
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    given = arguments if arguments[0] == "--resume" else ["--text", text, "--out", "run", *SMALL, *arguments]
    assert message in fails(capsys, "train", *given)
    assert not Path("run").exists(), "a run that did not begin leaves no folder"


def test_an_unreadable_file_is_one_line(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    line = fails(capsys, "train", "--text", text, "--out", "run", *SMALL)
    assert "0.txt: Permission denied" in line and not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be between 0.0 and"),
        (["--top-p", "1.5"], "top_p must be between 0.0 and 1.0, got 1.5"),
        (["--top-k", "0"], "top_k must be between 1 and"),
        (["--tokens", "-1"], "must be between 0 and"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_generate_refuses_options_out_of_range(
    text: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    session.begin(
        TrainConfig(text=(text,), preset="hybrid_nano", device="cpu", threads=1, steps=1), RunFolder("run")
    ).run()
    assert message in fails(capsys, "generate", "run", *arguments)


def test_a_draft_leaves_the_text_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(text=(text,), device="cpu", threads=1, steps=4, batch_tokens=64, seq_len=32, warmup=1)
    for name in ("hybrid", "gla"):
        session.begin(replace(config, preset=f"{name}_nano"), RunFolder(name)).run()
    likeliest = ["generate", "hybrid", "--prompt", "2 plus", "--tokens", "12", "--device", "cpu", "--temperature", "0"]
    capsys.readouterr()
    assert cli.main(likeliest) == 0
    alone = capsys.readouterr().out
    for draft in ("gla", "hybrid"):
        assert cli.main([*likeliest, "--draft", draft, "--draft-tokens", "3"]) == 0
        printed = capsys.readouterr()
        assert printed.out == alone and "drafted tokens were kept" in printed.err
    assert cli.main([*likeliest, "--temperature", "1", "--draft", "gla"]) == 0
    capsys.readouterr()
    assert "nowhere holds no run" in fails(capsys, *likeliest, "--draft", "nowhere")
    assert "draft_tokens must be between 1" in fails(capsys, *likeliest, "--draft", "gla", "--draft-tokens", "0")
    settings = json.loads(Path("gla/config.json").read_text())
    Path("gla/config.json").write_text(json.dumps(settings | {"model": settings["model"] | {"vocab_size": 300}}))
    assert "does not fit the model" in fails(capsys, *likeliest, "--draft", "gla")


def test_a_missing_package_is_named_before_anything_is_done(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = "import sys; sys.modules['matplotlib'] = None; from flashmix.train.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "train", "--text", text, "--out", "run", *SMALL],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "matplotlib" in done.stderr and "pip install 'flashmix[train]'" in done.stderr
    assert not Path("run").exists()


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--learning-rat", "3"])
    assert caught.value.code == 2 and "--learning-rat" in capsys.readouterr().err


def test_every_setting_is_an_option() -> None:
    assert {*cli.SETTINGS, *cli.FLAGS, "text"} == set(TrainConfig().to_dict())


def test_ctrl_c_in_a_real_process_ends_whole_and_resumes(text: str) -> None:
    command = [sys.executable, "-m", "flashmix.train.cli", "train"]
    options = [*SMALL, "--steps", "100000", "--save-every", "2", "--eval-every", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--text", text, "--out", "run", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not Path("run/checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "stopped after step" in out and "flashmix train --resume run" in out and "Traceback" not in error
    step = int(out.split("stopped after step ")[1].split(";")[0])
    assert cli.main(["train", "--resume", "run", "--steps", str(step + 1), "--sample", "0"]) == 0
