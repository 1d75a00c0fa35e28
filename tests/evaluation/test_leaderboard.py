"""The leaderboard: order, means, tests against the best, and a page that tells the same in every form."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kit.pages import HOSTILE, Page, assert_sound, shape

from vembed.evaluation.benchmark.run import Entry, VariantResult
from vembed.evaluation.benchmark.stored import Cost
from vembed.evaluation.benchmark.variants import REFERENCE, Variant
from vembed.evaluation.judge import holm, mean_interval, paired_p_value
from vembed.evaluation.leaderboard import build_board
from vembed.evaluation.leaderboard_page import board_page, frontier, headline
from vembed.evaluation.results import EvaluationResult
from vembed.pages.html import render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.page import Figure, SideBySide
from vembed.pages.terminal import render_terminal
from vembed.pages.write import write_page

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.evaluation.leaderboard import Board


METRIC = "ndcg@10"


def result(system: str, task: str, values: list[float], *, notes: tuple[str, ...] = ()) -> EvaluationResult:
    by_query = {f"q{row}": float(value) for row, value in enumerate(values)}
    means = {METRIC: fmean(by_query.values()), "recall@100": fmean(by_query.values())}
    return EvaluationResult(task, system, means, {METRIC: by_query}, {}, len(values), 50, notes)


def draws(mean: float, seed: int, count: int = 60) -> list[float]:
    return np.clip(np.random.default_rng(seed).normal(mean, 0.2, size=count), 0, 1).round(3).tolist()


def entry(system: str, task: str, values: list[float], *, forms: tuple[Variant, ...] = ()) -> Entry:
    """Return an entry whose forms lose 0.02 each."""
    first = result(system, task, values)
    variants = tuple(
        VariantResult(
            form,
            result(system, task, [max(0.0, value - 0.02 * place) for value in values]),
            Cost(16, 64.0 / (place + 1), 0.5 / (place + 1), 0.6, 0.9, 60, rescoring_bytes=32.0 * (place == 1)),
            f"{system}/{place}",
        )
        for place, form in enumerate(forms)
    )
    return Entry(system, task, first, f"{system}/{task}", variants)


FORMS = (REFERENCE, Variant("int8", "int8", precision="int8"), Variant("HNSW32", "HNSW32", index="HNSW32"))


@cache
def board() -> Board:
    entries = [
        entry("weak", "one", draws(0.3, 1), forms=FORMS),
        entry("weak", "two", draws(0.3, 2), forms=FORMS),
        entry("strong", "one", draws(0.6, 3), forms=FORMS),
        entry("strong", "two", draws(0.6, 4), forms=FORMS),
        entry("BM25", "one", draws(0.59, 3)),
        entry("BM25", "two", draws(0.4, 6)),
    ]
    return build_board(entries, METRIC, facts=[("torch", "2")], command="vembed evaluate ...")


def test_systems_stand_by_the_mean_over_sets_and_each_set_counts_the_same() -> None:
    uneven = [
        entry("a", "large", [0.0] * 300),
        entry("a", "small", [1.0] * 3),
        entry("b", "large", [0.4] * 300),
        entry("b", "small", [0.4] * 3),
    ]
    found = build_board(uneven, METRIC)
    assert [(row.system, row.mean) for row in found.rows] == [("a", 0.5), ("b", pytest.approx(0.4))]
    assert [row.system for row in board().rows] == ["strong", "BM25", "weak"]


def test_each_system_is_tested_against_the_best_of_each_set() -> None:
    found = board()
    for task in ("one", "two"):
        pairs = found.cells_of(task)
        assert [cell.p_value is None for _, cell in pairs] == [True, False, False]
        assert pairs[0][1].difference == 0.0
    best, weak = draws(0.6, 3), draws(0.3, 1)
    (cell,) = [cell for row, cell in found.cells_of("one") if row.system == "weak"]
    assert cell.p_value == paired_p_value([(result("b", "one", best), result("a", "one", weak))], METRIC)
    assert cell.difference == pytest.approx(fmean(weak) - fmean(best))
    assert (cell.low, cell.high) == mean_interval([result("a", "one", weak)], METRIC)
    assert cell.is_behind


def test_p_values_are_corrected_over_all_systems_and_sets_and_the_forms_apart_from_them() -> None:
    found = board()
    cells = [cell for row in found.rows for cell in row.cells if cell.p_value is not None]
    forms = [row for row in found.variants if row.p_value is not None]
    assert (len(cells), len(forms)) == (4, 8)
    for rows in (cells, forms):
        assert [row.p_value_corrected for row in rows] == holm([row.p_value or 0.0 for row in rows])
    uncorrected = [cell for cell in cells if (cell.p_value or 0.0) < 0.05]
    assert all(cell.is_behind == ((cell.p_value_corrected or 0.0) < 0.05) for cell in uncorrected)


def test_of_many_equal_systems_one_is_not_called_behind_by_luck() -> None:
    rng = np.random.default_rng(8)
    base = rng.uniform(0, 1, 40)
    entries = [entry(f"s{n}", "one", np.clip(base + rng.normal(0, 0.1, 40), 0, 1).tolist()) for n in range(20)]
    cells = [cell for _, cell in build_board(entries, METRIC).cells_of("one")]
    assert any(cell.p_value is not None and cell.p_value < 0.05 for cell in cells)  # the best is best by luck
    assert not any(cell.is_behind for cell in cells)
    for count in (20, 2):
        text = render_terminal(board_page(build_board(entries[:count], METRIC)))
        assert ("p (Holm)" in text) == (count > 2)


def test_the_best_may_differ_from_set_to_set() -> None:
    entries = [
        entry("a", "one", [0.9] * 20),
        entry("a", "two", [0.1] * 20),
        entry("b", "one", [0.2] * 20),
        entry("b", "two", [0.3] * 20),
    ]
    found = build_board(entries, METRIC)
    assert [found.cells_of(task)[0][0].system for task in ("one", "two")] == ["a", "b"]
    alone = build_board(entries[:2], METRIC)
    assert headline(alone) != headline(found)
    assert alone.rows[0].cells[0].p_value is None


def test_forms_are_compared_with_exact_search_of_the_same_model() -> None:
    rows = board().variants_of("one")
    assert [row.number for row in rows] == list(range(1, 7))
    assert {row.system for row in rows} == {"strong", "weak"}  # word matching has no vectors
    exact, int8, _ = rows[:3]
    assert (exact.p_value, exact.difference) == (None, 0.0)
    assert int8.p_value is not None
    assert int8.p_value < 0.05
    assert int8.difference == pytest.approx(-0.02, abs=0.002)
    assert build_board([entry("a", "one", [0.5] * 3, forms=(REFERENCE,))], METRIC).variants == ()


def test_the_frontier_holds_what_nothing_beats_in_both() -> None:
    points = [(4.0, 0.5), (1.0, 0.2), (2.0, 0.6), (2.0, 0.4), (8.0, 0.7), (9.0, 0.7)]
    kept = frontier(points)
    assert kept == [(1.0, 0.2), (2.0, 0.6), (8.0, 0.7)]
    for cost, quality in points:
        assert any(c <= cost and q >= quality for c, q in kept)
    assert frontier([(1.0, 0.0)]) == [(1.0, 0.0)]


def test_the_numbers_of_every_form_are_those_of_the_board(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_page(tmp_path / name, board_page(board()), name="leaderboard")
    names = ["leaderboard.html", "leaderboard.json", "leaderboard.md"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    html, data, markdown = ((tmp_path / "a" / name).read_text("utf-8") for name in names)
    assert [html, data, markdown] == [(tmp_path / "b" / name).read_text("utf-8") for name in names]
    content, terminal = json.loads(data), render_terminal(board_page(board()))
    assert [row["system"] for row in content["systems"]] == ["strong", "BM25", "weak"]
    assert content["systems"][0]["mean"] == board().rows[0].mean
    assert content["systems"][2]["sets"][0]["p_value"] == board().rows[2].cells[0].p_value
    assert content["variants"][0]["cost"]["bytes_per_document"] == 64.0
    marks = {span["aria-label"] for span in Page(html).named("span") if span.get("role") == "img"}
    for row in board().rows:
        assert f"{row.mean:.3f}" in html
        for text in (markdown, terminal):
            assert f"{row.mean:.3f} ({row.low:.3f} to {row.high:.3f})" in text
        for cell in row.cells:
            assert f"{cell.value:.3f} {cell.mark}, {cell.reading}" in marks, "said to whoever doesn't see the mark"
            for text in (markdown, terminal):
                assert f"{cell.value:.3f} ({cell.low:.3f} to {cell.high:.3f})" in text
    for text in (markdown, terminal):
        assert "0.5 (p95 0.6, p99 0.9)" in text
        assert "32 + 32" in text, "bytes of int8, and of the vectors that rescoring reads"


def test_the_page_stands_alone_and_the_words_of_a_figure_name_its_line() -> None:
    shown = assert_sound(render_html(board_page(board())))
    assert (len(shown.named("table")), len(shown.named("figure"))) == (1 + 2 + 2 + 1, 4)
    assert len(shown.named("svg")) == 4 + 3, "drawings of both sets, and an interval for each system"
    blocks = [
        block for section in board_page(board()).sections for block in section.blocks if isinstance(block, SideBySide)
    ]
    for figure in (figure for row in blocks for figure in row.blocks):
        assert isinstance(figure, Figure)
        assert figure.series == ["strong", "weak"]
        # Each form of the sample loses quality and takes less: nothing beats any of them.
        assert "strong 3, 2, 1; weak 6, 5, 4." in figure.caption


@cache
def hostile_board(text: str) -> Board:
    """A board with the text in every place that a user can fill."""
    forms = (REFERENCE, Variant(f"IVF {text}", "x", index=f"IVF {text}"))
    entries = [entry(f"model {name} {text}", f"set {text}", draws(0.5, 1), forms=forms) for name in "ab"]
    noted = result("c", "set", draws(0.4, 2), notes=(f"note {text}",))
    entries.append(Entry(f"model c {text}", f"set {text}", noted, f"folder {text}"))
    return build_board(entries, METRIC, facts=[(f"fact {text}", text)], command=f"vembed {text}")


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_user_named_becomes_markup_in_the_page_or_in_its_drawings(text: str) -> None:
    shown = assert_sound(render_html(board_page(hostile_board(text))))
    assert not shown.named("img")
    line = " ".join(text.split())
    for place in ("model a", "model c", "set", "note", "fact", "vembed", "IVF"):
        assert f"{place} {line}" in shown.text, place
    harmless = board_page(hostile_board("harmless"))
    assert shape(render_markdown(board_page(hostile_board(text)))) == shape(render_markdown(harmless))
