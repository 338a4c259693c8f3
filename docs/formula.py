"""Formulas of docstrings as LaTeX, for the site: `S_t = e^{g_t} S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t`.

Docstrings are read in terminals too, so their formulas are plain text. A name of one letter, or of a Greek one, is a variable; a longer
one is upright, as prose is; `_` and `^` put below and above; `*` multiplies elementwise, `.` is an inner product, `<-` overwrites; `x~`
is x with a tilde. In documents the letters and signs may be Unicode's: `β`, `Σ_(j≤t)`, `∘`, `k²`.
"""

from __future__ import annotations

import contextlib
import re

UNICODE = {
    "β": "beta",
    "γ": "gamma",
    "η": "eta",
    "θ": "theta",
    "λ": "lambda",
    "μ": "mu",
    "ν": "nu",
    "σ": "sigma",
    "τ": "tau",
    "φ": "phi",
    "Λ": "Lambda",
    "Σ": "sum",
}
PLAIN = {"∘": "*", "·": ".", "≤": "<=", "≥": ">=", "…": "...", "²": "^2"}
GREEK = {"beta", "gamma", "eta", "theta", "lambda", "Lambda", "mu", "nu", "pi", "sigma", "tau", "phi"}
OPERATORS = {"sum", "log", "ln", "exp", "max", "min", "tanh", "cos", "sin"}
LONGER_INDICES = {"tj", "ij", "target"}
SIGNS = {
    "+=": r"\text{+=}",
    "-=": r"\text{−=}",
    "<=": r"\le",
    ">=": r"\ge",
    "<-": r"\leftarrow",
    "...": r"\dots",
    "..": r"\dots",
    "*": r"\odot",
    ".": r"\cdot",
}
PAIRS = {"(": ")", "[": "]", "{": "}"}
TOKEN = re.compile(
    r"(?P<space> +)|(?P<word>`\w+`|\"\w+\"|[a-z]{2,}-[a-z]{2,}(?:'s)?|[a-z]{2,}'s)|(?P<name>[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*)"
    r"|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<mark>[_^~'])|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<sign>[-+]=|<=|>=|<-|\.\.\.?|(?<!\w)\.(?!\w)|[-*<>=+/|,;:])"
)


def displayed(docstring: str) -> str:
    """A docstring with its formulas, indented paragraphs outside of its sections, between double dollars; what is no formula stays code."""
    text, section = "", False
    for paragraph in re.split(r"(\n{2,})", docstring):
        indented = all(not line or line.startswith("    ") for line in paragraph.splitlines())
        if indented and paragraph.strip() and not section:
            with contextlib.suppress(ValueError):
                paragraph = "\n\n".join(f"$$\n{statement}\n$$" for statement in statements(paragraph))
        elif not indented:
            section = re.search(r"^[A-Z][a-z]+:$", paragraph, flags=re.MULTILINE) is not None
        text += paragraph
    return text


def statements(block: str) -> list[str]:
    """What a block states, in LaTeX: a line, or more where `;` and two spaces part them. Raises ValueError: it is no formula."""
    lines = (part for line in block.splitlines() for part in re.split(r";  +", line) if part.strip())
    return [r" \quad ".join(latex(column) for column in re.split(r"(?<! )  +(?![ =])", line.strip())) for line in lines]


def latex(formula: str) -> str:
    """A formula in LaTeX. Raises ValueError for text that is none."""
    for letter, name in UNICODE.items():
        formula = re.sub(rf"{letter}(?=[A-Za-z])", rf"{name} ", formula).replace(letter, name)
    for sign, plain in PLAIN.items():
        formula = formula.replace(sign, plain)
    return Reader(formula).until("")


def in_tables(markdown: str, column: str) -> str:
    """A document with the code in the cells below the heading `column` of its tables between dollars, where it is a formula."""
    lines, place = markdown.split("\n"), -1
    for number, line in enumerate(lines):
        cells = line.split(" | ") if line.startswith("| ") else []
        if not line.startswith("|"):
            place = -1
        elif column in cells:
            place = cells.index(column)
        elif 0 <= place < len(cells):
            cells[place] = re.sub(r"`([^`]+)`", between_dollars, cells[place])
            lines[number] = " | ".join(cells)
    return "\n".join(lines)


def between_dollars(code: re.Match[str]) -> str:
    """A formula in dollars; a name, a shape or an option stays code."""
    if re.fullmatch(r"\w{2,}|\[.*\]|\w+=\w*", code[1]):
        return code[0]
    try:
        return "$" + latex(code[1]).replace("|", r"\vert ").replace("\n", " ") + "$"  # a bar ends a cell
    except ValueError:
        return code[0]


def named(name: str) -> tuple[str, str]:
    """A name in LaTeX, and its index."""
    *first, last = name.split("_")
    base = "_".join(first)
    if not first or not (len(last) == 1 or last in LONGER_INDICES):
        base, last = name, ""
    if base in GREEK | OPERATORS:
        base = f"\\{base}"
    elif base == "eps":
        base = r"\varepsilon"
    elif len(base) > 1:
        base = upright(base)
    return base, upright(last) if last == "target" else last


def upright(text: str) -> str:
    return r"\text{" + text.strip("`") + "}"  # with `_` as it is, which the converter to MathML does not read there


class Reader:
    """What is left of a formula."""

    def __init__(self, formula: str):
        self.formula, self.place = formula, 0

    def next(self) -> tuple[str, str]:
        """The kind and the text of the next token, which stays there; empty ones at the end."""
        if self.place == len(self.formula):
            return "", ""
        found = TOKEN.match(self.formula, self.place)
        if found is None or found.lastgroup is None:
            raise self.error()
        return found.lastgroup, found[0]

    def take(self) -> str:
        text = self.next()[1]
        self.place += len(text)
        return text

    def error(self) -> ValueError:
        return ValueError(f"no formula: {self.formula!r}, from {self.formula[self.place :]!r} on")

    def until(self, end: str) -> str:
        """All up to `end`, which is taken too."""
        parts: list[str] = []
        while self.next()[1] != end:
            kind = self.next()[0]
            if kind == "space":
                self.take()
                parts.append(self.space(parts[-1] if parts else ""))
            elif kind == "sign" and self.next()[1] != "|":
                sign = self.take()
                parts.append(f"{SIGNS[sign]} " if sign in SIGNS else sign)
            else:
                parts.append(self.factor())
        self.take()
        return "".join(parts)

    def space(self, before: str) -> str:
        """A space: wide beside a word, thin in a product, none that is to be seen beside a sign."""
        kind, text = self.next()
        if (kind == "sign" and text != "|") or not before or before.strip() in {*SIGNS.values(), *"-<>=+/"}:
            return " "
        word = kind == "word" or (kind == "name" and named(text)[0].startswith(r"\text"))
        return r"\ " if word or before.startswith(r"\text") else " " if before in (",", ";", ":") else r"\, "

    def factor(self) -> str:
        """A name, a number or a group with what is above and below it."""
        kind, text = self.next()
        below, above = "", ""
        if kind == "name":
            self.take()
            base, below = named(text)
            if text == "sqrt" and self.next()[1] == "(":
                self.take()
                base = r"\sqrt{" + self.until(")") + "}"
        elif kind == "open" and text != "{":
            self.take()
            base = text + self.until(PAIRS[text]) + PAIRS[text]
        elif kind == "word":
            base = upright(self.take())
        elif kind in ("number", "sign"):
            base = self.take()
        else:
            raise self.error()
        while self.next()[0] == "mark":
            mark = self.take()
            if mark == "~":
                base = rf"\tilde{{{base}}}"
            elif mark == "'":
                above += r"\prime "
            elif mark == "_":
                below += self.script()
            elif above.strip(r"\prime "):  # a second exponent
                base, below, above = "{" + scripts(base, below, above) + "}", "", self.script()
            else:
                above += self.script()
        return scripts(base, below, above)

    def script(self) -> str:
        """What stands behind `_` or `^`: a group, or a sign, if there is one, and a name or a number."""
        kind, text = self.next()
        if kind == "open":
            self.take()
            return self.until(PAIRS[text])
        sign = self.take() if text == "-" else ""
        kind, text = self.next()
        if kind not in ("name", "number"):
            raise self.error()
        self.take()
        return sign + (r"\top" if text == "T" else scripts(*named(text), "") if kind == "name" else text)


def scripts(base: str, below: str, above: str) -> str:
    return base + (f"_{{{below}}}" if below else "") + (f"^{{{above.strip()}}}" if above else "")
