"""The documentation site, without its generator: every page is in its navigation, and every plot has its numbers."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_api import MODULES

import flashmix
from flashmix import layers, models, modules

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def load(path: Path) -> ModuleType:
    """A program under a name of its own, where its dataclasses find it."""
    spec = importlib.util.spec_from_file_location(f"documents_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load(ROOT / "benchmarks" / "plots.py")


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ +- [^:]+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    made = set(
        re.findall(r'"\w+\.md": "(\w+\.md)"', (DOCS / "site_build.py").read_text())
    )  # of README and its siblings
    assert set(navigation) == written | made and len(navigation) == len(set(navigation)) and len(made) == 3


def test_every_plot_has_its_results(plots: ModuleType) -> None:
    for name, plot in plots.PLOTS.items():
        assert plot.files and plot.caption
        for file in plot.files:
            assert (plots.RESULTS / file).is_file(), f"the plot {name} is of {file}"


def test_pages_show_plots_that_there_are(plots: ModuleType) -> None:
    marks = {mark for page in DOCS.rglob("*.md") for mark in re.findall(r"<!-- plot: (\w+) -->", page.read_text())}
    assert marks == set(plots.PLOTS)


def test_the_plots_of_the_readme_are_of_the_results_that_are_named(plots: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    for name in plots.README:
        described = re.search(r"<dc:description>(.*?)</dc:description>", (plots.COMMITTED / f"{name}.svg").read_text())
        assert described is not None and described[1] == plots.PLOTS[name].sources, "run python benchmarks/plots.py"
        assert f"](docs/plots/{name}.svg)" in readme and all(file in readme for file in plots.PLOTS[name].files)


def test_the_picture_is_as_its_program_draws_it() -> None:
    picture = load(DOCS / "picture.py")
    assert picture.TARGET.read_text() == picture.picture()


def test_reference_pages_take_every_public_module() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"<!-- names: ([\w.]+) -->", pages)) == sorted(
        MODULES
    )  # what CONTRIBUTING.md calls public
    assert "<!-- commands -->" in (DOCS / "reference" / "commands.md").read_text()


@pytest.fixture(scope="module")
def formula() -> ModuleType:
    return load(DOCS / "formula.py")


@pytest.mark.parametrize(
    "text, latex",
    [
        ("S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T", r"S_{t} = \text{diag}(e^{g_{t}})\, S_{t-1} + k_{t}\, v_{t}^{\top}"),
        ("S' = S - gamma_t (S'^T e_t)^T", r"S^{\prime} = S - \gamma_{t}\, (S^{\prime \top}\, e_{t})^{\top}"),
        (
            "K~_t = sum_{j <= t} k_j e^{s_j - z_t}^T",
            r"\tilde{K}_{t} = \sum_{j \le  t}\, k_{j}\, {e^{s_{j} - z_{t}}}^{\top}",
        ),
        ("y = x / sqrt(sum(x^2) + eps) * weight", r"y = x / \sqrt{\sum(x^{2}) + \varepsilon} \odot  \text{weight}"),
        ("h <- e^(l_t - old_t) |h|^2 ... h_0", r"h \leftarrow  e^{l_{t} - \text{old}_{t}}\, |h|^{2} \dots  h_{0}"),
        (
            "beta = 2 sigmoid(A_log) where `it` may",
            r"\beta = 2\ \text{sigmoid}(\text{A_log})\ \text{where}\ \text{it}\ \text{may}",
        ),
    ],
)
def test_formulas_of_docstrings_are_set(formula: ModuleType, text: str, latex: str) -> None:
    assert formula.latex(text) == latex


def test_formulas_of_tables_are_set_in_their_column_alone(formula: ModuleType) -> None:
    table = "| call | step | rule |\n|---|---|---|\n| `x^2` | `S += β_t k/|k|`, `reset` | `T` |\n\nText.\n\n| a | b |\n| `c` | `d` |\n"
    wanted = table.replace("`S += β_t k/|k|`", r"$S \text{+=}  \beta_{t}\, k/\vert k\vert $")
    assert formula.in_tables(table, "step") == wanted


def test_all_formulas_of_the_mechanisms_are_set(formula: ModuleType) -> None:
    page = formula.in_tables((DOCS / "mechanisms.md").read_text(), "step")
    tables = [table for table in re.split(r"\n\n+", page) if re.match(r"\| paper \| call \| step \|", table)]
    rows = [line.split(" | ") for table in tables for line in table.splitlines()[2:]]
    left = {code for cells in rows for code in re.findall(r"`([^`]+)`", cells[2])}
    assert (
        left == {"[D, S]", "[H, P]", "coupling=", "eps", "masked=False", "reset", "selective_scan"} and len(rows) > 40
    )


def test_statements_are_lines_and_columns(formula: ModuleType) -> None:
    assert formula.statements("    a  = b;  c = d    (e)\n    f = g; h") == ["a = b", r"c = d \quad (e)", "f = g; h"]


@pytest.mark.parametrize("text", ["torch.exp(x)", "d = {}", "x = (y", "x = y)", "x_", "x ^^ 2", "a % b", "e^"])
def test_what_is_no_formula_is_refused(formula: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="no formula"):
        formula.latex(text)


def test_docstrings_keep_all_but_their_formulas(formula: ModuleType) -> None:
    docstring = "One sentence.\n\n    y = x^2\n    z = y\n\nArgs:\n    x: `[B]`.\n\n        more\n\nText.\n\n    import torch.nn\n"
    assert formula.displayed(docstring) == docstring.replace(
        "    y = x^2\n    z = y", "$$\ny = x^{2}\n$$\n\n$$\nz = y\n$$"
    )


def test_all_formulas_of_the_reference_are_set(formula: ModuleType) -> None:
    """What stays code in the docstrings of public functions and classes is code."""
    kept, found = [], 0
    for module in (flashmix, layers, modules, models):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                text = re.split(r"^Examples?:$", formula.displayed(inspect.getdoc(thing) or ""), flags=re.MULTILINE)[0]
                found += text.count("$$") // 2
                kept += [name for paragraph in re.split(r"\n{2,}", text) if re.match(r" {4}", paragraph)]
    assert kept == ["accelerate"] and found > 200


KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def misshapen(changelog: str) -> list[str]:
    """What of a changelog is not in the form of Keep a Changelog."""
    wrong, version, kinds, numbers = [], "", [], []
    for line in changelog.splitlines():
        if line.startswith("## "):
            released = re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", line)
            if released is not None:
                numbers.append(tuple(map(int, released.groups())))
            elif line != "## [Unreleased]" or version:
                wrong.append(line)
            version, kinds = line, []
        elif line.startswith("### "):
            if line[4:] not in KINDS or line in kinds or not version:
                wrong.append(f"{version}: {line}")
            kinds.append(line)
        elif line.startswith("#### ") and (line != "#### Numerics" or kinds[-1:] != ["### Changed"]):
            wrong.append(f"{version}: {line}")
    return wrong + ([] if numbers == sorted(set(numbers), reverse=True) else ["versions: newest first, each once"])


def test_the_changelog_has_the_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert misshapen(text) == [] and text.startswith("# Changelog\n") and "## [Unreleased]" in text


@pytest.mark.parametrize(
    "text",
    [
        "## Unreleased\n",
        "## [0.2.0]\n",
        "## [0.2.0] - 2026-11-23\n## [Unreleased]\n",
        "## [0.1.0] - 2026-11-23\n## [0.2.0] - 2026-11-22\n",
        "## [Unreleased]\n### Training\n",
        "## [Unreleased]\n### Added\n### Fixed\n### Added\n",
        "## [Unreleased]\n### Fixed\n#### Numerics\n",
        "### Added\n",
    ],
)
def test_a_changelog_of_another_form_is_seen(text: str) -> None:
    assert len(misshapen(text)) == 1
