"""The page of a comparison, its Markdown and its JSON: escaped, small, the same facts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from run_cases import METRIC, values_of, write_run

from vembed.workflows.comparison.compare import compare_runs

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<script>alert(1)</script> & \"x\" 'y' </li>"
LIMIT = 2_000_000


def test_the_three_files_tell_the_same(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / name, values_of(seed)) for name, seed in (("a", 1), ("b", 2))]
    found = compare_runs(runs, tmp_path / "report", command="vembed compare a b --output report")
    document = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert document["schema_version"] == 1
    assert document["baseline"] == "a"
    assert document["verdicts"][0]["sentence"] == found.verdicts[0].sentence
    assert document["verdicts"][0]["p_value"] == found.verdicts[0].p_value
    lines = document["sets"][0]["metrics"][METRIC]
    assert [line["run"] for line in lines] == ["untrained model", "a", "b"]
    assert lines[2]["against_baseline"]["difference"] == found.verdicts[0].verdict.comparison.difference
    for name in ("compare.md", "compare.html"):
        text = (tmp_path / "report" / name).read_text()
        assert "No difference between b and a can be told" in text
        assert "vembed compare a b --output report" in text
    page = (tmp_path / "report" / "compare.html").read_text()
    assert page.count("<svg") > 6  # three curves over steps and over seconds, and the intervals
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_hostile_names_and_texts_are_only_shown(tmp_path: Path) -> None:
    test = tmp_path / "test.jsonl"
    rows = [{"query": f"{HOSTILE} {n}", "positive": f"{HOSTILE} answer {n}"} for n in range(40)]
    test.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    config = {"test_data_path": str(test), "query_prompt": HOSTILE}
    name = HOSTILE.replace("/", "")
    first = write_run(tmp_path / name, values_of(1), task=HOSTILE, config=config, hashes={})
    other = write_run(tmp_path / "b", values_of(2), task=HOSTILE, hashes={})
    found = compare_runs([first, other], tmp_path / "report", command=HOSTILE)
    page = (tmp_path / "report" / "compare.html").read_text()
    assert "alert(1)" in page
    assert "<script" not in page.lower()
    assert "</li> " not in page
    markdown = (tmp_path / "report" / "compare.md").read_text().partition("```")[0]
    assert "<script" not in markdown
    notebook = found._repr_html_()
    assert notebook.count("<iframe") == 1
    assert "<script" not in notebook


@pytest.mark.slow
def test_the_curves_of_a_run_have_its_mark_in_every_form(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / f"run{n}", values_of(n)) for n in range(5)]
    for count, shapes in ((2, 3), (5, 0)):  # more curves than four are no rows of characters that can be told apart
        compare_runs(runs[:count], tmp_path / "report")
        page, text = ((tmp_path / "report" / f"compare.{form}").read_text() for form in ("html", "md"))
        assert '<strong class="series-1">● </strong>run0' in page
        assert '<strong class="series-2">■ </strong>run1' in page
        assert "- **●** run0\n- **■** run1" in text
        assert sum("● " in line and " ■ " in line for line in text.splitlines() if "over steps" in line) == shapes


def test_each_query_is_shown_with_what_both_models_put_first(tmp_path: Path) -> None:
    """The set is gone, so that only its ids can be shown, and nobody knows which documents are right."""
    runs = [write_run(tmp_path / "runs" / name, values_of(seed)) for name, seed in (("a", 1), ("b", 2))]
    changes = compare_runs(runs, tmp_path / "report").changes[0]
    page, text = ((tmp_path / "report" / f"compare.{form}").read_text() for form in ("html", "md"))
    shown = len(changes.won) + len(changes.lost)
    assert shown == 10
    for form in (page, text):
        assert form.count("a put first") == form.count("b put first") == shown
        assert all(change.run.query_id in form for change in (*changes.won, *changes.lost))
        assert "✗" not in form
        assert "not retrieved" not in form


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_page_of_many_runs_stays_small(tmp_path: Path, count: int) -> None:
    runs = [write_run(tmp_path / f"run{n:02}", values_of(n, count=200), steps=600) for n in range(count)]
    compare_runs(runs, tmp_path / "report")
    assert (tmp_path / "report" / "compare.html").stat().st_size < LIMIT
