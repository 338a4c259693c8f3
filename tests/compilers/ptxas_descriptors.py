"""Whether ptxas kept what Hopper's products read: the descriptors of operands in shared memory, as PTX has them and as code has them.

Descriptors are made of a few integer instructions, most of constants. So both texts are run from top to bottom, for one thread and
taking no branch; what is not known stays unknown. In a pipelined loop that is where an operand lies, the lower half of its
descriptor, but not the upper, which says how it lies there. What is known of a descriptor in the code must be so of one in PTX,
and none may be made of a register that nothing was written to. ptxas 12.8 loses some (flashmix/gpu/ptxas.py).
"""

from __future__ import annotations

import functools
import operator
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

BASE = 0x400  # where shared memory begins that a launch asks for
NEVER_WRITTEN = 0xBAD000  # no sum of it is a descriptor
LOW = (1 << 32) - 1
REGISTER = re.compile(r"(U?R)(\d+)$")
FLAG = re.compile(r"!?U?P(\d+|T)$")
WRITES = re.compile(r"(?:@\S+\s+)?(\S+)\s+(%[a-z]+\d+), (.*);$")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(@\S+ )?\s*([A-Z][\w.]*) ?(.*?) ?;")
Known = int | None
Halves = tuple[Known, Known]  # of 64 bits, the lower first
PTX: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": operator.add,
    "sub": operator.sub,
    "or": operator.or_,
    "xor": operator.xor,
    "and": operator.and_,
    "shl": operator.lshift,
    "shr.u": operator.rshift,
    "bfe.u": lambda a, at, count: (a >> at) & ((1 << count) - 1),
    "shfl.sync.idx": lambda a, *_: a,
}


def number(text: str) -> Known:
    found = re.fullmatch(r"(-?)(?:0x([0-9a-fA-F]+)|(\d+))", text)
    if found is None:
        return None
    size = int(found[2], 16) if found[2] else int(found[3])
    return -size if found[1] else size


def halves(whole: int) -> Halves:
    return whole & LOW, whole >> 32 & LOW


def plus(a: Halves, b: Halves) -> Halves:
    """The sum of two 64 bits; where a lower half is not known nothing is carried: descriptors never do."""
    low = None if a[0] is None or b[0] is None else a[0] + b[0]
    high = None if a[1] is None or b[1] is None else (a[1] + b[1] + ((low or 0) >> 32)) & LOW
    return None if low is None else low & LOW, high


def lost_descriptors(ptx: str, cubin: bytes) -> list[str]:
    """The products, as code, that read what no product in PTX does, as far as PTX tells all of its own: whole descriptors, or their
    upper halves alone.
    """
    wanted = in_ptx(ptx) if "wgmma" in ptx else []
    whole = set(wanted) if all(None not in one for one in wanted) else None
    upper = {high for _, high in wanted} if all(high is not None for _, high in wanted) else None
    return [
        text
        for text, found in (in_code(_disassembled(cubin)) if wanted else ())
        if any(lost(one, whole, upper) for one in found)
    ]


def lost(one: Halves, whole: set[Halves] | None, upper: set[Known] | None) -> bool:
    if whole is not None and None not in one:
        return one not in whole
    return upper is not None and one[1] is not None and one[1] not in upper


def in_ptx(ptx: str) -> list[Halves]:
    """The descriptors of all `wgmma`, in their order.

    A register that is written in several places, a loop's counter, has what all of them agree on: so the text is run until nothing changes.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    written = Counter(found[2] for line in lines if (found := WRITES.match(line)))
    values: dict[str, Halves] = {"global_smem": (BASE, 0), "%tid.x": (0, 0)}
    while True:
        before = dict(values)
        found = list(_run_ptx(lines, values, {name for name, times in written.items() if times > 1}))
        if values == before:
            return found


def _run_ptx(lines: list[str], values: dict[str, Halves], several: set[str]) -> Iterator[Halves]:
    """Runs the text once; what `several` are is joined with what they were."""

    def value(text: str) -> Halves:
        known = number(text)
        return halves(known) if known is not None else values.get(text, (None, None))

    for line in lines:
        if "wgmma.mma_async" in line:
            operands = re.sub(r"\{[^}]*\}", "", line.split(None, 1)[1]).split(",")
            yield from (value(text.strip()) for text in operands[1:3] if text.strip())
        elif found := WRITES.match(line):
            name, made = found[2], _ptx_result(found[1], [value(text.strip()) for text in found[3].split(",")])
            before = values.get(name, made) if name in several else made
            values[name] = tuple(x if x == y else None for x, y in zip(before, made, strict=True))


def _ptx_result(name: str, x: list[Halves]) -> Halves:
    if name == "cvt.u64.u32":
        return x[0][0], 0
    if name.startswith("mov"):
        return x[0]
    if re.fullmatch(r"(add|or)\.[bsu]64", name):  # the parts of a descriptor have no bit in common
        return plus(x[0], x[1])
    run = next((PTX[known] for known in PTX if name.startswith(known)), None)
    wide = name.endswith("64")
    whole = [low if not wide or low is None or high is None else low | high << 32 for low, high in x]
    if run is None or None in whole:
        return None, None
    low, high = halves(run(*whole))
    return low, high if wide else 0


def _disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def in_code(text: str) -> Iterator[tuple[str, list[Halves]]]:
    """Each `HGMMA` with its descriptors: of both operands, or of the second where the first is in registers."""
    machine = Machine()
    for line in text.splitlines():
        if (found := INSTRUCTION.search(line)) is None:
            continue
        guard, name, rest = found[1], found[2], found[3]
        if name.startswith("HGMMA"):
            at = int(re.search(r"gdesc\[UR(\d+)\]", rest)[1])  # type: ignore[index]
            firsts = (at + 2,) if re.match(r"R\d+, R\d+, gdesc", rest) else (at, at + 2)
            yield found[0], [machine.pair(f"UR{first}") for first in firsts]
            columns = int(re.search(r"64x(\d+)x", name)[1])  # type: ignore[index]
            machine.forget(rest.split(",")[0], columns // 2)
        elif name == "BRA" and not guard:
            machine = Machine(machine.written)  # what comes next is reached from elsewhere
        else:
            machine.run(name, [part.strip() for part in rest.split(",")], certain=not guard)


class Machine:
    """Registers, uniform ones too, and flags, as far as they are known."""

    def __init__(self, written: set[str] | None = None) -> None:
        self.registers: dict[str, int] = {}
        self.flags: dict[str, int] = {}
        self.written = set() if written is None else written

    def held(self, name: str) -> Known:
        return self.registers.get(name, None if name in self.written else NEVER_WRITTEN)

    def value(self, text: str) -> Known:
        text = text.removesuffix(".reuse")
        if text in ("RZ", "URZ", "SRZ"):
            return 0
        if REGISTER.match(text.lstrip("-~")):
            held = self.held(text.lstrip("-~"))
            return None if held is None else (-held if text[0] == "-" else ~held if text[0] == "~" else held) & LOW
        known = number(text)
        return None if known is None else known & LOW

    def flag(self, text: str) -> Known:
        held = 1 if text.lstrip("!") in ("PT", "UPT") else self.flags.get(text.lstrip("!"))
        return 1 - held if held is not None and text[0] == "!" else held

    def pair(self, text: str) -> Halves:
        """64 bits: a register and the next, or a number."""
        if found := REGISTER.match(text.lstrip("-")):
            low, high = (self.held(f"{found[1]}{int(found[2]) + i}") for i in (0, 1))
            if text[0] != "-":
                return low, high
            return (None, None) if low is None or high is None else halves(-(low | high << 32))
        known = 0 if text in ("RZ", "URZ") else number(text)
        return (None, None) if known is None else halves(known)

    def forget(self, target: str, count: int) -> None:
        if found := REGISTER.match(target):
            for i in range(count):
                name = f"{found[1]}{int(found[2]) + i}"
                self.registers.pop(name, None)
                self.written.add(name)

    def run(self, name: str, operands: list[str], certain: bool) -> None:
        """One instruction: its target becomes known or unknown."""
        outs = []
        while operands and FLAG.match(operands[0]):
            outs.append(operands.pop(0))
        target = operands.pop(0) if operands else ""
        own = name.removeprefix("U") if target.startswith("U") or name.startswith("U") else name
        while operands and FLAG.match(operands[0]) and own in ("IADD3", "LEA"):
            outs.append(operands.pop(0))
        wide = own in ("IADD3.64", "CS2R")
        if own == "IADD3.64":
            low, high = functools.reduce(plus, (self.pair(text) for text in operands[:3]))
        else:
            low, high = self.result(own, operands), 0
        self.forget(
            target, 4 if ".128" in own or own.startswith("LDSM") else 2 if wide or re.search(r"64|WIDE|^D", own) else 1
        )
        for flag in outs:
            self.flags.pop(flag, None)
        if outs and own == "IADD3" and low is not None and certain:
            self.flags[outs[0]] = low >> 32
        if (found := REGISTER.match(target)) and certain:
            self.put(target, low)
            if wide:
                self.put(f"{found[1]}{int(found[2]) + 1}", high)

    def put(self, name: str, value: Known) -> None:
        if value is not None:
            self.registers[name] = value & LOW

    def result(self, name: str, operands: list[str]) -> Known:
        """What an instruction makes of its operands, not yet cut to 32 bits."""
        if name in ("S2R", "S2UR"):
            return {"SR_CgaCtaId": 0, "SR_TID.X": 0, "SR_LANEID": 0}.get(operands[0])
        x = [self.value(text) for text in operands]
        for known, count, run in OPERATIONS:
            if re.fullmatch(known, name) and len(x) >= count and None not in x[:count]:
                carries = [self.flag(text) or 0 for text in operands[count:]] if name.endswith(".X") else []
                return run(*x[:count]) + sum(carries)
        return None


def _lookup(a: int, b: int, c: int, table: int) -> int:
    """Any function of three bits."""
    terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
    return sum(terms) & LOW  # of no bit is more than one true


OPERATIONS: tuple[tuple[str, int, Callable[..., int]], ...] = (
    (r"MOV|R2UR|SHFL\.IDX|CS2R(\.32)?", 1, lambda a: a),
    (r"IMAD\.MOV(\.U32)?", 3, lambda a, b, c: c),
    (r"IMAD(\.U32|\.SHL|\.SHL\.U32|\.IADD|\.X)?", 3, lambda a, b, c: a * b + c),
    (r"IADD3(\.X)?", 3, lambda a, b, c: a + b + c),
    (r"VIADD", 2, operator.add),
    (r"SHF\.R\.U32\.HI", 3, lambda a, count, b: (b << 32 | a) >> count + 32),
    (r"SHF\.L\.U32", 2, operator.lshift),
    (r"SGXT\.U32", 2, lambda a, count: a & ((1 << count) - 1)),
    (r"LEA", 3, lambda a, b, count: (a << count) + b),
    (r"LOP3\.LUT", 4, _lookup),
)
