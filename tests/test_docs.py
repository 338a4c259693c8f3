"""The documentation site, without its generator: every page is in its navigation, and every plot has its numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    marks = [
        re.findall(r"<!-- names: ([\w.]+) -->", page.read_text()) for page in sorted((DOCS / "reference").glob("*.md"))
    ]
    assert sorted(marks) == [["flashmix"], ["flashmix.layers"], ["flashmix.models"], ["flashmix.modules"]]


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
