"""The sample of a product that runs by default; the rest of it runs with `-m whole`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def sample(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All cases of one argument, those that are not chosen with the mark `whole`; every one that is chosen is a case."""
    return sample_of_rows([(case,) for case in cases], [(case,) for case in chosen])


def sample_of_rows(rows: Iterable[tuple[Any, ...]], chosen: Collection[tuple[Any, ...]]) -> list[Any]:
    """The same of cases of several arguments."""
    rows = list(rows)
    assert chosen and all(row in rows for row in chosen), [row for row in chosen if row not in rows]
    return _marked(rows, [row in chosen for row in rows])


def every(step: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """All cases of one argument, of so many in a row one by default, from the `first` on."""
    rows = [(case,) for case in cases]
    return _marked(rows, [place % step == first % step for place in range(len(rows))])


def thinned(step: int, *arguments: Iterable[Any]) -> list[Any]:
    """The product of arguments. By default one in so many rows, and each value of every argument in one row at least."""
    rows = list(product(*arguments))
    chosen = [place % step == 0 for place in range(len(rows))]
    for column in zip(*rows, strict=True):
        seen = {str(value) for value, taken in zip(column, chosen, strict=True) if taken}
        for place, value in enumerate(map(str, column)):
            if value not in seen:
                seen.add(value)
                chosen[place] = True
    return _marked(rows, chosen)


def _marked(rows: list[tuple[Any, ...]], chosen: list[bool]) -> list[Any]:
    return [
        pytest.param(*row, marks=[] if taken else pytest.mark.whole) for row, taken in zip(rows, chosen, strict=True)
    ]
