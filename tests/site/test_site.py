"""The documents as a site: it builds without a warning, has every page, and fetches nothing when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml
from document_blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
BESIDE = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/RESULTS.md"}
NOTEBOOKS = {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in ROOT.glob("docs/*/*.ipynb")}


def pages_of(entry: object) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [page for each in inside for page in pages_of(each)]  # type: ignore[attr-defined]


def test_the_navigation_names_no_page_twice_and_none_that_is_missing() -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = pages_of(yaml.safe_load(settings)["nav"])
    assert len(named) == len(set(named)) > 30
    assert set(named) <= {*PAGES, *NOTEBOOKS, *BESIDE}
    parts = [title for entry in yaml.safe_load(settings)["nav"] for title in entry]
    assert parts == ["Start", "Guides", "Topics", "Reference", "For developers"]


def test_the_navigation_has_every_generated_page() -> None:
    named = set(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert {page for page in PAGES if page.startswith("reference/")} <= named


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra docs isn't installed: pip install 'vembed[docs]'")
    pytest.importorskip("mkdocstrings", reason="the extra docs isn't installed: pip install 'vembed[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text("utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", text)
        assert [address for address in fetched if address.startswith(("http:", "https:", "//"))] == [], page.name
    reference = (tmp_path / "site" / "api.html").read_text("utf-8")
    assert "Load a model" in reference or "vembed.load" in reference
    keys = (tmp_path / "site" / "reference" / "keys-loss.html").read_text("utf-8")
    assert 'id="temperature"' in keys, "each key has a place that other pages link to"
    results = (tmp_path / "site" / "benchmarks" / "RESULTS.html").read_text("utf-8")
    assert 'id="loss-stage"' in results, "each record has one as well"
    notebook = (tmp_path / "site" / "notebooks" / "first_model.html").read_text("utf-8")
    assert "runs/first_model" in notebook
    assert "data:image/png" in notebook, "with what its cells showed"
