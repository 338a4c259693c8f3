"""The sample of a product that runs by default; the rest of it runs with `-m whole`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All cases of one argument, those that are not chosen with the mark `whole`; every one that is chosen is a case."""
    return sample_of_rows([(case,) for case in cases], [(case,) for case in chosen])


def sample_of_rows(rows: Iterable[tuple[Any, ...]], chosen: Collection[tuple[Any, ...]]) -> list[Any]:
    """The same of cases of several arguments."""
    rows = list(rows)
    assert chosen and all(row in rows for row in chosen), [row for row in chosen if row not in rows]
    return [pytest.param(*row, marks=[] if row in chosen else pytest.mark.whole) for row in rows]
