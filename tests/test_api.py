"""The public names and their signatures, beside the recorded ones: a change of either is seen, and then written to CHANGELOG.

`python tests/test_api.py` records them anew in tests/api.txt.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from pathlib import Path

RECORD = Path(__file__).with_name("api.txt")
MODULES = ("flashmix", "flashmix.layers", "flashmix.modules", "flashmix.models")


def described(name: str, value: object) -> str:
    """A line: the name, and how it is called; a class by its constructor."""
    try:
        signature = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{name}: {type(value).__name__}"
    return f"{name}{re.sub(r' at 0x[0-9a-f]+', '', signature)}"


def public_api() -> list[str]:
    lines = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines += [described(f"{module_name}.{name}", getattr(module, name)) for name in sorted(module.__all__)]
    return lines


def test_the_public_names_are_the_recorded_ones() -> None:
    changed = list(
        difflib.unified_diff(RECORD.read_text().splitlines(), public_api(), "recorded", "now", n=0, lineterm="")
    )
    assert not changed, "say it in CHANGELOG.md, then python tests/test_api.py:\n" + "\n".join(changed)


if __name__ == "__main__":
    RECORD.write_text("\n".join(public_api()) + "\n")
