"""The picture of the architecture, `docs/plots/architecture.svg`: `python docs/picture.py` draws it again."""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "plots" / "architecture.svg"
WIDTH = 760
FONT = "Verdana, DejaVu Sans, Arial, sans-serif"
# Layers from top to bottom: the name of each, its fill, and its boxes as (first line, second line).
LAYERS = [
    (
        "what you call",
        "#eaf1fb",
        [
            ("flashmix train", "generate, eval, doctor"),
            ("models", "Decoder, presets"),
            ("hf", "accelerate"),
            ("compat", "names of FLA, …"),
        ],
    ),
    (
        "layers and modules",
        "#d3e3f6",
        [("mechanisms", "one file a paper"), ("layer", "base, caches"), ("modules", "norms, MLP, decays")],
    ),
    (
        "ops",
        "#b3cfee",
        [
            ("recurrence", "delta rules, SSMs"),
            ("attention", "and its cache"),
            ("scan", "elementwise"),
            ("row-wise", "norms, conv, losses"),
        ],
    ),
    (
        "contract of an op",
        "#fbe7cf",
        [("call → op → implementation", "checks, autograd, torch.compile, packing, impl = “auto”")],
    ),
    (
        "implementations",
        "#f5d2a4",
        [
            ("portable", "PyTorch, anywhere"),
            ("native", "C, CPU"),
            ("triton_gpu", "NVIDIA GPUs"),
            ("gluon_hopper", "H100, H200"),
        ],
    ),
]


def text(x: float, y: float, words: str, size: int, *, bold: bool = False, anchor: str = "middle") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def picture() -> str:
    """A row of boxes for each layer of the package; each uses those below it."""
    parts, y, left, gap, high = [], 40, 136, 10, 56
    parts.append(text(WIDTH / 2, 24, "flashmix: each row uses the rows below it", 14, bold=True))
    for index, (layer, fill, boxes) in enumerate(LAYERS):
        wide = (WIDTH - left - 12 - gap * (len(boxes) - 1)) / len(boxes)
        parts.append(text(12, y + high / 2 + 4, layer, 11, anchor="start"))
        for place, (name, words) in enumerate(boxes):
            x = left + place * (wide + gap)
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{wide:g}" height="{high}" rx="5" fill="{fill}" stroke="#33475b"/>'
            )
            parts.append(text(x + wide / 2, y + 24, name, 12, bold=True))
            parts.append(text(x + wide / 2, y + 42, words, 10))
        y += high
        if index + 1 < len(LAYERS):
            middle = left + (WIDTH - left - 12) / 2
            parts.append(
                f'<path d="M {middle:g} {y + 3} v 14 m -5 -6 l 5 6 l 5 -6" fill="none" stroke="#33475b" stroke-width="1.5"/>'
            )
        y += 20
    words = "definition.py of each op (float64) is what every implementation is tested against, within one error budget"
    parts.append(text(WIDTH / 2, y + 8, words, 11))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" font-family="{FONT}" fill="#16202b">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 24}" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(picture())
