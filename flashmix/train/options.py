"""The options of `flashmix train`, one line per setting; types and defaults are those of TrainConfig."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from flashmix.train.folder import DTYPES, LOGS, OPTIMIZERS, TrainConfig

SETTINGS = {
    "data": "a folder that `flashmix tokenize` has written, in place of --text and --tokenizer",
    "tokenizer": "a tokenizers file (JSON); without it a token is a byte",
    "preset": "the model: a name from flashmix.models.presets",
    "width": "channels of the model (default: the preset's)",
    "layers": "blocks of the model (default: the preset's)",
    "heads": "heads of each mixer (default: the preset's; with --mixers one for 64 channels)",
    "mixers": "the mixers, repeated up to --layers: 3*gated_deltanet+attention(window=512)",
    "mlp_width": "hidden channels of each MLP (default: 8/3 of the width)",
    "init_from": "begin with the weights of this run, or of this checkpoint (docs/convert.md)",
    "steps": "optimiser steps",
    "batch_tokens": "tokens in one step, documents packed end to end",
    "rows": "packed rows in one step, one after another or on ranks; their gradients are added, and memory is that of one",
    "context": "ranks that share each row (under torchrun)",
    "seq_len": "longest sequence in tokens; longer documents are cut",
    "optimizer": "adamw, or muon: Muon for the matrices of the blocks, AdamW for the rest (torch 2.9)",
    "lr": "highest learning rate",
    "final_lr": "learning rate at the last step, as a fraction of --lr",
    "warmup": "steps over which the learning rate rises",
    "weight_decay": "of matrices",
    "clip": "largest gradient norm",
    "held_out": "fraction of the bytes held out, in whole documents",
    "eval_tokens": "most held-out tokens to measure on",
    "eval_every": "steps between measurements on the held-out documents",
    "save_every": "steps between checkpoints",
    "keep": "how many of the last checkpoints are kept",
    "log_every": "steps between readings of the loss",
    "log": "also write measurements for tensorboard or wandb, if it is installed",
    "seed": "of the weights and of the order of the text",
    "threads": "CPU threads (default: as torch chooses)",
    "device": "cpu, cuda, cuda:1, ... (default: a GPU if there is one)",
    "dtype": "float32; bfloat16: of the model and all it computes, with float32 master weights; float64: of everything",
}

FLAGS = {
    "compile": "compile the model first (on a CPU this needs a C++ compiler)",
    "checkpoint_activations": "keep only the input of each block for the backward: less memory, a third more time",
    "tied": "the head is the embedding",
}

CHOICES: dict[str, tuple[str, ...]] = {"dtype": DTYPES, "optimizer": OPTIMIZERS, "log": LOGS}


def add_train(commands: Any) -> None:
    """`flashmix train`. An option that is not given is absent, so that a resumed run keeps its own."""
    train = commands.add_parser("train", help="train a language model on text files")
    keep = argparse.SUPPRESS
    text = "files and folders; each file is a document (default: Python's own standard library)"
    train.add_argument("--text", nargs="+", metavar="PATH", default=keep, help=text)
    train.add_argument("--out", metavar="RUN", help="the run's folder (default: runs/ and the time)")
    train.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    for name, text in FLAGS.items():
        train.add_argument(option(name), action=argparse.BooleanOptionalAction, default=keep, help=text)
    train.add_argument(
        "--sample", type=int, default=300, metavar="INT", help="tokens to print at the end (default: 300)"
    )
    kinds = {field.name: str(field.type) for field in fields(TrainConfig)}
    for name, text in SETTINGS.items():
        default = getattr(TrainConfig, name)
        kind: Any = {"int": int, "float": float}.get(kinds[name].split(" ")[0], str)
        shown = "" if default is None else f" (default: {default})"
        metavar = kind.__name__.upper()
        choices = CHOICES.get(name)
        train.add_argument(
            option(name),
            type=kind,
            choices=choices,
            default=keep,
            metavar=metavar,
            help=text.replace("%", "%%") + shown,
        )


def option(name: str) -> str:
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def add_tokenize(commands: Any) -> None:
    """`flashmix tokenize` and `flashmix tokenizer`."""
    tokenize = commands.add_parser("tokenize", help="turn texts of any size into a folder of tokens for train --data")
    text = "files and folders: texts (a file is a document), .jsonl (a line), .parquet (a row)"
    tokenize.add_argument("text", nargs="+", metavar="PATH", help=text)
    tokenize.add_argument(
        "--out", required=True, metavar="FOLDER", help="the folder; an unfinished one is gone on with"
    )
    tokenize.add_argument("--tokenizer", metavar="FILE", help="a tokenizers file (JSON); without it a token is a byte")
    text = "the name of the text in lines and rows (default: text)"
    tokenize.add_argument("--text-field", default="text", metavar="NAME", help=text)
    text = "the name of the messages, each with role and content; the assistant's alone count (default: messages)"
    tokenize.add_argument("--messages-field", default="messages", metavar="NAME", help=text)
    text = (
        "how messages are written: Jinja, or JSON with chat_template (default: that beside the tokenizer, else ChatML)"
    )
    tokenize.add_argument("--template", metavar="FILE", help=text)
    tokenize.add_argument("--workers", type=int, metavar="INT", help="processes (default: one for each CPU)")

    tokenizer = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer on texts")
    tokenizer.add_argument("text", nargs="+", metavar="PATH", help="files and folders, as of tokenize")
    tokenizer.add_argument("--out", required=True, metavar="FILE", help="the tokenizers file (JSON) to be written")
    tokenizer.add_argument("--vocabulary", type=int, default=16384, metavar="INT", help="tokens (default: 16384)")
    text = "bytes of text to train on, from evenly spaced documents (default: 50000000)"
    tokenizer.add_argument("--bytes", type=int, default=50_000_000, metavar="INT", help=text)
    text = "a token of its own that no word is part of, as chat templates have (give it once for each)"
    tokenizer.add_argument("--special", action="append", default=[], metavar="TEXT", help=text)
