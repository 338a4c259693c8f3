"""The table of what flashmix.compat has, name by name."""

from __future__ import annotations

from flashmix.compat.causal_conv1d import CONV
from flashmix.compat.fla import FLA
from flashmix.compat.flash_attn import FLASH
from flashmix.compat.flash_attn_interface import FLASH_3
from flashmix.compat.mamba_ssm import MAMBA
from flashmix.compat.surface import Surface

SURFACES: tuple[Surface, ...] = (FLA, FLASH, FLASH_3, MAMBA, CONV)


def table() -> str:
    """Markdown: each library with its names, there or not, and for what each raises."""
    lines = []
    for surface in SURFACES:
        rows = surface.rows()
        lines += [f"## flashmix.compat.{surface.library}: {len(surface.names)} of {len(rows)} names", ""]
        lines += ["| name | here |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows), ""]
    return "\n".join(lines)
