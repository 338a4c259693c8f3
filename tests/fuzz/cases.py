"""What one case is: from (seed, index) to an op, a kind, a sample and the findings about it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch
from paper_loops import MECHANISMS

from . import attention, laws, losses, mechanisms, recurrence, rowwise, scan, wrong
from .check import Finding, differential
from .draw import Draw, Layout
from .sample import OPS, Sample

INDICES = ("state_indices", "cache_lengths", "cache_page_table")
KEYS = ("k", "a", "b", "p", "kk", "erase", "write", "v", "q")  # of a rule that corrects: v of Oja's, q of QDelta's
KINDS = {"differential": 55, "law": 35, "wrong": 10}
STRUCTURES = 3  # of each op on a GPU
NAMES = sorted(OPS)
NORMS = ("rms_norm", "layer_norm", "group_norm", "l2_norm")


@dataclass(frozen=True)
class Space:
    """Where cases are drawn from: a seed, a device, and whether keys may be parallel."""

    seed: int
    device: str = "cpu"
    correlated: bool = False
    few: bool = False  # few structures, as on a GPU, on the CPU: for kernels in the interpreter
    only: tuple[str, ...] = ()  # ops
    impl: str = ""  # the only implementation
    structures: int = STRUCTURES  # of each op, where there are few

    @property
    def names(self) -> list[str]:
        return [name for name in NAMES if not self.only or name in self.only]

    @property
    def slots(self) -> int:
        """How many structures a GPU run has; index modulo this is one of them."""
        return self.structures * len(self.names)

    def draw(self, index: int) -> Draw:
        few = self.few or self.device != "cpu"
        return Draw(
            self.seed, index, index % self.slots if few else None, few, self.correlated, few and self.device == "cpu"
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a case: its op and kind, and what was found."""

    op: str
    kind: str
    findings: list[Finding]
    text: str


def sample_of(draw: Draw, op: str) -> Sample:
    """A random call of `op`."""
    sample = _sample_of(draw, op)
    for name in sorted(sample.tensors):
        layout = draw.layout(written=name in sample.written)
        if name in INDICES:  # each entry is of its own sequence
            continue
        if (
            layout.kind == "expanded" and name in KEYS and recurrence.corrects(sample.tensors) and not draw.correlated
        ):  # one key for all tokens
            layout = Layout()
        if layout.kind == "expanded" and (op, name) == ("mesa_net", "initial_state0"):  # is symmetric
            layout = Layout()
        if (
            layout.kind == "expanded"
            and op in NORMS
            and layout.axis % sample.tensors[name].dim() == sample.tensors[name].dim() - 1
        ):
            layout = Layout()  # a row of equal channels has its own roundings, all in one direction
        if layout.kind == "axes swapped" and name == "state":  # products with a transposed state add in another order
            sample.loose |= {"layout"}
        sample.layouts[name] = layout
        sample.tensors[name] = layout.values(sample.tensors[name])
    return sample


def _sample_of(draw: Draw, op: str) -> Sample:
    if op in MECHANISMS:
        return mechanisms.drawn(draw, op)
    if op in laws.RULES:
        return recurrence.drawn_rule(draw, op)
    if op == "delta_net_step":
        return rowwise.drawn_layer_step(draw)
    if op == "scan_step":
        return scan.drawn_step(draw)
    if op in ("selective_scan", "selective_scan_step"):
        return scan.drawn_selective(draw, op)
    if op in ("scan", "scan_max"):
        return scan.drawn(draw, op)
    if op.endswith("_step"):
        return recurrence.drawn_step(draw, op)
    if op in ("softmax_attention", "attention_with_cache"):
        return attention.drawn(draw) if op == "softmax_attention" else attention.drawn_cache(draw)
    if op in NORMS:
        return rowwise.drawn_norm(draw, op)
    if op in ("gated", "swiglu"):
        return rowwise.drawn_gated(draw, op)
    if op in ("softplus_decay", "bounded_decay", "write_strength"):
        return rowwise.drawn_decay(draw, op)
    if op in ("short_conv", "short_conv_qkv", "token_shift"):
        return rowwise.drawn_conv(draw, op)
    if op in ("rotary", "rotary_qk"):
        return rowwise.drawn_rotary(draw, op)
    return losses.drawn(draw, op)


def run_case(space: Space, index: int) -> Outcome:
    """Draws the case and checks it. An exception that the case does not ask for is a finding."""
    draw = space.draw(index)
    op = space.names[index % len(space.names)]
    kind = draw.free.choices(list(KINDS), list(KINDS.values()))[0]
    text = ""
    try:
        sample = sample_of(draw, op)
        sample.impl = space.impl
        text = described(sample)
        with torch.random.fork_rng(devices=[]):
            if kind == "wrong":
                kind, findings = wrong.check(sample, draw, space.device)
            elif kind == "law" and (names := laws.applicable(sample)):
                kind = draw.free.choice(names)
                findings = list(laws.LAWS[kind](sample, draw, space.device))
            else:
                kind, findings = "differential", list(differential(sample, space.device))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
        line = (str(error).strip().splitlines() or ["no message"])[0]
        findings = [Finding("?", f"{type(error).__name__}: {line} ({where})")]
    return Outcome(op, kind, findings, text)


def described(sample: Sample) -> str:
    """The call in words: shapes, dtypes, layouts and options."""
    parts = []
    for name, t in sample.tensors.items():
        layout = sample.layouts.get(name)
        mark = (
            "" if layout is None or layout.kind == "contiguous" else f" {layout.kind} {layout.axis % max(1, t.dim())}"
        )
        parts.append(f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}{mark}")
    packed = "" if sample.lengths is None else f"; lengths {list(sample.lengths)}"
    return f"{', '.join(parts)}; {sample.options}{packed}"
