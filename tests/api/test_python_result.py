"""The result of a run: a line, a notebook cell, a plot, the model."""

import builtins
import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vembed
from vembed.training.finish import RunResult as FinishedRun

WORDS = ("red", "blue", "green", "white", "black", "fox", "tree", "car")
ROWS = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in WORDS for two in WORDS]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> vembed.RunResult:
    folder = tmp_path_factory.mktemp("run") / "out"
    keys: dict[str, Any] = {"output_dir": folder, "batch_size": 16, "max_steps": 4, "bm25": False, "report_to": "none"}
    return vembed.train(model="builtin:ngram-bag", data=ROWS[:48], test_data=ROWS[48:], learning_rate=1e-2, **keys)


@pytest.mark.slow
def test_a_result_says_its_verdict_in_one_line(result: vembed.RunResult) -> None:
    assert isinstance(result, FinishedRun)
    assert repr(result) == f"<RunResult {result.output}: {result.verdict.sentence}>"
    assert len(repr(result.final)) < 2_000
    assert "per_query" not in repr(result.final)


@pytest.mark.slow
def test_its_model_is_the_trained_one(result: vembed.RunResult) -> None:
    queries = result.model.encode(["a red fox"], side="query")
    assert (queries == vembed.load(result.output).encode(["a red fox"], side="query")).all()
    assert result.model is result.model


@pytest.mark.slow
def test_a_notebook_shows_verdict_curves_and_examples_of_the_report(result: vembed.RunResult) -> None:
    shown = result._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe sandbox ")
    frames: list[dict[str, str | None]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: frames.append(dict(attributes))  # type: ignore[method-assign]
    parser.feed(shown)
    (frame,) = frames
    inner = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])  # type: ignore[index]
    assert frame["srcdoc"] == inner
    assert re.findall(r'<section [^>]*id="(\w+)"', inner) == ["verdict", "curves", "queries"]
    assert inner.count("<section") == inner.count("</section>") == 3
    assert "<style>" in inner
    assert "<svg" in inner
    assert html.escape(result.verdict.word) in inner
    assert len(shown) < 2**20


@pytest.mark.slow
def test_the_plot_draws_every_curve_and_needs_matplotlib(
    result: vembed.RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = result.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "learning rate", "dev ndcg@10"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 4
    figure.savefig(tmp_path / "plot.png")
    assert figure._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"
    before = builtins.__import__

    def without(name: str, *arguments: Any, **keys: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return before(name, *arguments, **keys)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(vembed.MachineError, match="needs matplotlib; install it with"):
        result.plot()


def test_a_run_without_a_step_has_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    unread: Any = None
    values = {field.name: unread for field in dataclasses.fields(vembed.RunResult)}
    judged: Any = SimpleNamespace(comparison=SimpleNamespace(metric="ndcg@10"), sentence="")
    result = vembed.RunResult(**values | {"output": tmp_path, "verdict": judged})
    with pytest.raises(vembed.DataError, match=r"has nothing to draw: its metrics\.jsonl has no steps"):
        result.plot()


@pytest.mark.slow
def test_the_dev_curve_of_a_run_with_several_test_sets_is_drawn(tmp_path: Path) -> None:
    sets = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for number, path in enumerate(sets):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[number::2][:16]), "utf-8")
    keys: dict[str, Any] = {"output_dir": tmp_path / "out", "batch_size": 16, "max_steps": 2, "bm25": False}
    names = [str(path) for path in sets]
    result = vembed.train(model="builtin:ngram-bag", data=ROWS[:48], test_data_path=names, report_to="none", **keys)
    assert len(result.sets) == 2
    assert [axes.get_ylabel() for axes in result.plot().axes] == ["loss", "learning rate", "dev ndcg@10"]


@pytest.mark.slow
def test_a_run_without_a_report_is_shown_by_its_line(result: vembed.RunResult) -> None:
    hidden = result.report.rename(result.report.with_suffix(".gone"))
    try:
        assert result._repr_html_() is None
    finally:
        hidden.rename(result.report)
