"""The three files: whole or not at all, the same bytes each time, and every number as it was given."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_report_samples import METRIC, STEPS, VALUES, result, sample

import vembed
from vembed.batch import Image
from vembed.errors import MachineError
from vembed.evaluation.judge import mean_interval
from vembed.evaluation.report import run_report
from vembed.evaluation.report.run_report import write_report
from vembed.pages.terminal import render_terminal
from vembed.pages.write import write_page
from vembed.registry import Registry

pytestmark = pytest.mark.usefixtures("drawn_once")

FILES = ["report.html", "report.json", "report.md"]


def strict(text: str) -> dict:
    """Read JSON that holds neither NaN nor infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_three_files_are_written_into_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "report"
    write_report(folder, sample())
    assert sorted(path.name for path in folder.iterdir()) == FILES


@pytest.mark.slow
def test_the_same_report_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    write_report(tmp_path / "here", sample(steps=STEPS))
    code = (
        "import sys; from pathlib import Path; from test_report_samples import STEPS, sample; "
        "from vembed.evaluation.report.run_report import write_report; "
        "write_report(Path(sys.argv[1]), sample(steps=STEPS))"
    )
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parent)]),
        "TZ": "Asia/Tokyo",
    }
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=environment, cwd=tmp_path)
    for name in FILES:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
    write_report(tmp_path / "there", sample(title="another"))
    assert (tmp_path / "here" / FILES[0]).read_bytes() != (tmp_path / "there" / FILES[0]).read_bytes()


def test_a_report_that_cant_be_rendered_leaves_the_older_one(tmp_path: Path) -> None:
    write_report(tmp_path, sample())
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    report = sample(steps=[{"step": "no number", "loss": 1.0}])
    with pytest.raises(ValueError, match="no number"):
        write_report(tmp_path, report)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write_report(tmp_path, sample())
    before = {name: (tmp_path / name).read_bytes() for name in FILES}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(MachineError, match="No space left"):
        write_report(tmp_path, sample(title="another"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_all_numbers_of_the_json_equal_the_results_given(tmp_path: Path) -> None:
    report = sample()
    write_report(tmp_path, report)
    data = strict((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["schema_version"] == 1
    for name, given in (("baseline", report.baseline), ("final", report.final), ("bm25", report.bm25)):
        assert given is not None
        assert data["metrics"][name]["values"] == given.metrics
        assert data["metrics"][name]["num_queries"] == given.num_queries
        assert data["metrics"][name]["system"] == given.system
        assert tuple(data["metrics"][name]["intervals"][METRIC]) == mean_interval([given], METRIC)
    comparison = report.verdict.comparison
    for shown in (data["verdict"], data["metrics"]["differences"][METRIC]):
        assert (shown["word"], shown["sentence"]) == (report.verdict.word, report.verdict.sentence)
        assert shown["comparison"]["difference"] == comparison.difference
        assert (shown["comparison"]["low"], shown["comparison"]["high"]) == (comparison.low, comparison.high)
    assert [(row["step"], row["metrics"]) for row in data["evaluations"]] == [
        (0, report.baseline.metrics),
        *report.evaluations,
    ]
    assert data["plan"] == report.plan
    assert data["config"] == report.config
    assert data["environment"] == report.environment
    assert data["command"] == report.command
    assert data["data_facts"] == [list(fact) for fact in report.data_facts]
    assert data["queries"]["examples"]["improved"] == ["q1", "q4"]


def test_the_json_has_null_for_what_isnt_finite_or_isnt_there(tmp_path: Path) -> None:
    report = sample(
        bm25=None,
        evaluations=[(1, {METRIC: math.nan})],
        config={"a": math.inf, "b": np.float32("nan"), "c": Path("x/y"), "d": np.int64(3)},
        title="lone \ud800 surrogate",
    )
    write_report(tmp_path, report)
    data = strict((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["metrics"]["bm25"] is None
    assert data["evaluations"][1]["metrics"] == {METRIC: None}
    assert data["config"] == {"a": None, "b": None, "c": "x/y", "d": 3}


def test_a_section_of_a_plugin_that_fails_costs_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vembed.evaluation.report.SECTIONS", Registry("report section", {}))
    before = [section.name for section in run_report.build_page(sample()).sections]

    @vembed.register_section
    def broken_section(report: object) -> None:
        raise KeyError("no such number")

    @vembed.register_section
    def nothing(report: object) -> None:
        return None

    assert [section.name for section in run_report.build_page(sample()).sections] == before
    assert "the report has no section broken-section: KeyError: 'no such number'" in caplog.text


def test_a_result_with_nan_for_a_query_still_gives_a_report(tmp_path: Path) -> None:
    final = result("b", {**VALUES["final"], "q2": math.nan})
    comparison = replace(sample().verdict.comparison, low=math.nan, high=math.nan, difference=math.nan)
    write_report(tmp_path, replace(sample(), final=final, verdict=replace(sample().verdict, comparison=comparison)))
    data = strict((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["verdict"]["comparison"]["low"] is None
    assert "n/a to n/a" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_section_is_one_function_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of CONTRIBUTING.md, in a copy of the module: its code, and its line in `build_page`."""
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (recipe,) = re.findall(r"```python\n(# length_section\.py\n.*?)```", page, re.DOTALL)
    assert "`length_section(report),`" in page
    registered = Registry("report section", {})
    with monkeypatch.context() as patch:
        patch.setattr("vembed.evaluation.report.SECTIONS", registered)
        exec(recipe, {"__name__": "length_section"})
        by_plugin = [section.name for section in run_report.build_page(sample()).sections]
        assert registered.plugins() == {"length-section": "length_section"}
    assert by_plugin.index("lengths") == by_plugin.index("data") + 1
    monkeypatch.setattr("vembed.evaluation.report.SECTIONS", Registry("report section", {}))
    source = inspect.getsource(run_report)
    neighbour = "        changes_section(report, numbers.gains),\n"
    assert source.count(neighbour) == 1
    copied = types.ModuleType("copied_run_report")
    monkeypatch.setitem(sys.modules, copied.__name__, copied)  # its dataclasses look their module up
    exec(recipe.replace("@vembed.register_section\n", ""), copied.__dict__)
    exec(source.replace(neighbour, f"{neighbour}        length_section(report),\n"), copied.__dict__)
    built = copied.build_page(sample())
    names = [section.name for section in built.sections]
    assert names.index("lengths") == names.index("changes") + 1
    assert [name for name in names if name != "lengths"] == [
        section.name for section in run_report.build_page(sample()).sections
    ]
    write_page(tmp_path, built)
    assert "Mean characters" in (tmp_path / "report.html").read_text()
    assert "## Lengths" in (tmp_path / "report.md").read_text()
    assert "Lengths" in render_terminal(built)
    of_pictures = replace(sample().task, documents={"d": Image("x.png", b"")})
    assert "lengths" not in [section.name for section in copied.build_page(sample(task=of_pictures)).sections]
