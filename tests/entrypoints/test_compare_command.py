"""`vembed compare` and `vembed.compare` on runs that were trained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kit.runs import Outcome, Site, run_keys, word_pairs

import vembed
from vembed.entrypoints import compare

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.slow  # three runs


@pytest.fixture(scope="module")
def other(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A short run at another learning rate."""
    return run_keys(tmp_path_factory.mktemp("other"), site.keys(max_steps=4, learning_rate=1e-4, eval_steps=2))


def test_two_runs_are_compared_on_their_test_set_with_its_texts(
    finished: Outcome, other: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(finished.folder), str(other.folder), "--output", str(tmp_path / "report")]
    assert compare.main(words, program="vembed compare") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "test.jsonl (test set)" in out
    assert " 20 queries" in out
    assert "no hashes" not in out
    document = json.loads((tmp_path / "report" / "compare.json").read_text("utf-8"))
    reports = [json.loads((run.folder / "report/report.json").read_text("utf-8")) for run in (finished, other)]
    assert reports[0]["data_hashes"] == reports[1]["data_hashes"]
    assert document["sets"][0]["content"] == reports[0]["data_hashes"]["test"]
    finals = [report["verdict"]["comparison"]["candidate"] for report in reports]
    lines = document["sets"][0]["metrics"]["ndcg@10"]
    assert [line["value"] for line in lines[1:]] == pytest.approx(finals)
    assert lines[2]["against_baseline"]["difference"] == pytest.approx(finals[1] - finals[0])
    assert document["differences"]["settings"].keys() >= {"learning_rate", "steps"}
    assert document["queries"][0]["num_queries"] == 20
    page = (tmp_path / "report" / "compare.html").read_text("utf-8")
    shown = [row for row in word_pairs() if row["query"] in page and row["positive"] in page]
    assert shown, "the page shows queries with their texts"
    assert "texts aren't shown" not in page


def test_python_compares_what_train_returned(finished: Outcome, other: Outcome) -> None:
    found = vembed.compare([other.folder, finished.folder], metric="mrr@10")
    assert isinstance(found, vembed.RunComparison)
    assert found.verdicts[0].sentence in repr(found)
    assert "mrr@10" in found.verdicts[0].sentence
    assert found._repr_html_().startswith("<iframe sandbox")


def test_one_run_is_answered_with_its_report(
    finished: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compare.main([str(finished.folder), "--output", str(tmp_path / "report")], program="vembed compare")
    assert code == 2
    assert "comparing takes at least two runs, and there is one" in capsys.readouterr().err
    assert not (tmp_path / "report" / "compare.html").exists()


def test_a_run_that_is_compared_is_no_place_for_the_comparison(
    finished: Outcome, other: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(other.folder.iterdir())
    folders = [str(finished.folder), str(other.folder)]
    assert compare.main([*folders, "--output", f"{other.folder}/report/.."], program="vembed compare") == 2
    assert "is a run that is compared; choose another folder" in capsys.readouterr().err
    assert sorted(other.folder.iterdir()) == before
    assert compare.main([*folders, "--output", str(other.folder / "report")], program="vembed compare") == 0


def test_a_set_that_changed_since_is_compared_without_its_texts(finished: Outcome, other: Outcome, site: Site) -> None:
    rows = [json.loads(line) for line in site.test.read_text("utf-8").splitlines()]
    before = site.test.read_bytes()
    site.test.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]), "utf-8")
    try:
        found = vembed.compare([finished.folder, other.folder])
    finally:
        site.test.write_bytes(before)
    assert found.task is None
    assert found.changes_note == "The texts aren't shown: the set has changed since the run."
    assert found.verdicts[0].p_value is not None
