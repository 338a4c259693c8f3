"""The hooks of the documentation site (mkdocs.yml): pages made of other files, plots, formulas, and the public names.

- README, CONTRIBUTING and CHANGELOG become the pages start, contributing and changes; links between them and `docs/` are followed, and
  a link whose text is a file's name has the page's name in the navigation.
- A line `<!-- plot: NAME -->` becomes that plot of `benchmarks/plots.py` with its caption and sources.
- A line `<!-- example: NAME -->` becomes the source of that program of `examples/`.
- A line `<!-- names: MODULE -->` becomes the reference of every public name of the module, in the order of `NAMES`.
- A line `<!-- commands -->` becomes the help of every command of `flashmix`.
- Formulas between dollars become MathML, which browsers draw without a script; those of docstrings and of the table of mechanisms, which
  are plain text, do by way of `docs/formula.py`.
"""

from __future__ import annotations

import argparse
import functools
import html
import importlib
import inspect
import logging
import os
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import formula  # mkdocs looks into this folder while it loads the hooks
import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
ASSETS = {"LICENSE": "LICENSE.txt"}
# Headings of the reference of `flashmix`, and which modules of the package belong below each; the last takes the rest.
NAMES = {
    "Mechanisms": ("flashmix.mechanisms.",),
    "Recurrence": ("flashmix.ops.recurrence", "flashmix.ops.delta_net_step"),
    "Attention": ("flashmix.ops.attention",),
    "Scans": ("flashmix.ops.scan",),
    "Row-wise ops and losses": ("flashmix.ops.",),
    "Adapters": ("flashmix.hf", "flashmix.checkpoints"),
    "Calls": ("",),
}


def on_config(config: Any) -> Any:
    """This checkout's package, and the plots (a path that is added while the hooks are loaded is forgotten)."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are other files, and the plots."""
    import plots

    for source, page in (PAGES | ASSETS).items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for name in plots.PLOTS:
            committed = files.get_file_from_path(f"plots/{name}.svg")
            if committed is not None:
                files.remove(committed)
            drawn = plots.save(name, Path(folder)).read_text()
            files.append(File.generated(config, f"plots/{name}.svg", content=drawn))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between the repository's files become links between pages; the marks of plots and names become what they stand for."""
    path = page.file.src_uri
    source = next((name for name, target in PAGES.items() if target == path), f"docs/{path}")
    markdown = re.sub(r"(\]\()([^)#\s:]+)", lambda link: link[1] + moved(link[2], source, path), markdown)
    titles = dict(pages_of(config.nav))
    markdown = re.sub(r"\[(?:docs/)?\w+\.md\]\(([\w./]+\.md)", lambda link: titled(link, path, titles), markdown)
    markdown = re.sub(r"^<!-- plot: (\w+) -->$", lambda found: plot(found[1], path), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- example: (\w+) -->$", lambda found: example(found[1]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- commands -->$", lambda _: commands(), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- names: ([\w.]+) -->$", lambda found: names(found[1]), markdown, flags=re.MULTILINE)
    return formula.in_tables(markdown, "step") if path == "mechanisms.md" else markdown


def moved(target: str, source: str, page: str) -> str:
    """A link of a file of the repository as one between pages of the site."""
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if whole in PAGES | ASSETS:
        whole = (PAGES | ASSETS)[whole]
    elif whole.startswith("docs/"):
        whole = whole.removeprefix("docs/")
    else:
        return target
    return posixpath.relpath(whole, posixpath.dirname(page) or ".")


def pages_of(navigation: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each page of the navigation with its name there."""
    for entry in navigation:
        for name, inside in entry.items():
            yield from [(inside, name)] if isinstance(inside, str) else pages_of(inside)


def titled(link: re.Match[str], page: str, titles: dict[str, str]) -> str:
    """A link to a page under its name in the navigation, in place of the file's."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
    return f"[{titles[target]}]({link[1]}" if target in titles else link[0]


def plot(name: str, page: str) -> str:
    """A plot with its caption, which names the files of its numbers."""
    import plots

    shown = plots.PLOTS[name]
    where = posixpath.relpath(f"plots/{name}.svg", posixpath.dirname(page) or ".")
    caption = html.escape(f"{shown.caption} Numbers: {shown.sources}.")
    return f'<figure class="plot" markdown="span">![{name.replace("_", " ")}]({where})<figcaption>{caption}</figcaption></figure>'


def example(name: str) -> str:
    """The source of a program, under its name."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    return f'```python title="examples/{name}.py"\n{source}```'


def names(module: str) -> str:
    """The reference of each public name of a module, in groups and by name."""
    found = importlib.import_module(module)
    later = getattr(found, "_LATER", {})  # what would import transformers
    left = {
        name: f"{module}.{later[name]}.{name}" if name in later else place(getattr(found, name), f"{module}.{name}")
        for name in found.__all__
    }
    text = []
    for heading, prefixes in NAMES.items() if module == "flashmix" else [("", ("",))]:
        group = sorted((name for name, where in left.items() if where.startswith(prefixes)), key=str.lower)
        text += [f"## {heading}"] if heading else []
        text += [f"::: {left.pop(name)}" for name in group]
    return "\n\n".join(text)


def commands() -> str:
    """The help of each command, as it is in a terminal of 88 columns."""
    from flashmix.train.cli import make_parser

    with mock.patch.dict(os.environ, COLUMNS="88"):
        parsers = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
        helps = {name: parser.format_help() for name, parser in parsers.choices.items()}
    return "\n\n".join(f"## flashmix {name}\n\n```text\n{text}```" for name, text in helps.items())


def place(thing: Any, name: str) -> str:
    """Where a public name is written."""
    return f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else name


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML."""

    def mathml(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        display = "block" if latex.startswith("\\[") else "inline"
        drawn = convert(latex[2:-2].strip(), display=display)
        return f'<div class="formula">{drawn}</div>' if display == "block" else str(drawn)

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', mathml, content, flags=re.DOTALL)


class Runtime(griffe.Extension):  # type: ignore[misc]
    """Signatures as they are when the package runs, with the options that a function hands on; examples and sources as sections."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        shown = running().get(func.path.removesuffix(".__init__"))
        if shown is not None and any(p.kind is griffe.ParameterKind.var_keyword for p in func.parameters):
            method = func.name == "__init__"
            signature = inspect.signature(shown.__init__ if method else shown)
            func.parameters = griffe.Parameters(*(parameter(p) for p in placed(signature)))
        rewrite(func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        rewrite(cls)


@functools.cache
def running() -> dict[str, Any]:
    """The public functions and classes by where they are written."""
    modules = [
        importlib.import_module(name)
        for name in ("flashmix", *(f"flashmix.{n}" for n in ("layers", "modules", "models", "hf", "checkpoints")))
    ]
    things = [
        (f"{m.__name__}.{name}", getattr(m, name))
        for m in modules
        for name in m.__all__
        if name not in getattr(m, "_LATER", ())
    ]
    return {place(thing, name): thing for name, thing in things}


def placed(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """The parameters, `device` and `dtype` for `**placement`."""
    for p in signature.parameters.values():
        if p.name == "placement":
            yield from (
                p.replace(name=name, kind=p.KEYWORD_ONLY, default=None, annotation=p.empty)
                for name in ("device", "dtype")
            )
        else:
            yield p


def parameter(p: inspect.Parameter) -> griffe.Parameter:
    annotation = None if p.annotation is p.empty else str(p.annotation)
    default = None if p.default is p.empty else repr(p.default)
    return griffe.Parameter(
        p.name, annotation=annotation, kind=griffe.ParameterKind[p.kind.name.lower()], default=default
    )


def rewrite(thing: griffe.Object) -> None:
    """`Example:` is the section that shows prompts as code; a source is a paragraph; formulas are set."""
    if thing.docstring is None:
        return
    text = re.sub(r"^Example:$", "Examples:", thing.docstring.value, flags=re.MULTILINE)
    text = re.sub(
        r"^Source:\n((?: {4}.*\n?)+)", lambda lines: f"Source: {inspect.cleandoc(lines[1])}\n", text, flags=re.MULTILINE
    )
    text = re.sub(r"^ {4}((?:\w+, )+\w+): (.*\n?(?: {8}.*\n?)*)", one_each, text, flags=re.MULTILINE)
    text = re.sub(r"^Args: (.*)\n((?: {4}.*\n?)+)", r"**Args:** \1\n\nArgs:\n\2", text, flags=re.MULTILINE)
    text = re.sub(r"^(Source|Args): (?=\S)", r"**\1:** ", text, flags=re.MULTILINE)
    thing.docstring.value = formula.displayed(text)


def one_each(found: re.Match[str]) -> str:
    """`q, k: text` as a line for each of the arguments."""
    return "".join(f"    {name}: {found[2].rstrip()}\n" for name in found[1].split(", "))
