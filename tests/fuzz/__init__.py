"""Random calls of every public op: `python -m fuzz --help`, run from `tests/`.

A case is a pure function of (seed, index): `draw.py` draws, the files of the families (`recurrence.py`, `mechanisms.py`, `attention.py`,
`cache.py`, `rowwise.py`, `losses.py`) say how a call of their ops is drawn and what it means, `check.py` compares each implementation with
that meaning, `laws.py` each call with other calls of the same op, `wrong.py` spoils one argument. `runner.py` runs cases and counts.
"""
