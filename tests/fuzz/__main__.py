"""`python -m fuzz`, run from `tests/`: random calls until time is up, or one case again."""

from __future__ import annotations

import argparse
import os
import sys

from .cases import STRUCTURES, Space, run_case
from .runner import run


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Random calls of every public op of flashmix.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index", type=int, help="run this case alone")
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--calls", type=int, default=None, help="stop after so many cases")
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--few", action="store_true", help="few structures, as on a GPU")
    parser.add_argument(
        "--structures",
        type=int,
        default=STRUCTURES,
        help="of each op: fewer compile sooner, as kernels take most of a short run",
    )
    parser.add_argument("--correlated", action="store_true", help="keys may be parallel")
    parser.add_argument("--ops", default="", help="only these ops, separated by commas")
    parser.add_argument(
        "--impl", default="", help="only this implementation, as compute-sanitizer needs no plain PyTorch"
    )
    return parser.parse_args()


def main() -> int:
    options = parsed()
    only = tuple(name for name in options.ops.split(",") if name)
    space = Space(options.seed, options.device, options.correlated, options.few, only, options.impl, options.structures)
    if options.index is not None:
        outcome = run_case(space, options.index)
        print(f"{outcome.op}, {outcome.kind}\n{outcome.text}")
        for finding in outcome.findings:
            print(f"  {finding.impl}: {finding.text}")
        print("no defect" if not outcome.findings else f"{len(outcome.findings)} findings")
        return bool(outcome.findings)
    seconds = options.seconds or (60 * options.minutes if options.minutes else None)
    if seconds is None and options.calls is None:
        seconds = 60.0
    return run(space, seconds, options.calls, options.start, options.workers)


if __name__ == "__main__":
    sys.exit(main())
