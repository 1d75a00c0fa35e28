"""The report of a run: the numbers of the results in three forms, sections where they say something, written whole."""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import re
import subprocess
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.pages import HOSTILE, METRIC, STEPS, VALUES, assert_sound, page, result, sample, shape

import vembed
from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.errors import MachineError
from vembed.evaluation.judge import Comparison, SetOutcome, Verdict, compare, mean_interval, verdict
from vembed.evaluation.report import TAKEN_NAMES, changes, run_report
from vembed.evaluation.report.comparison import (
    best_dev_step,
    forward_comparisons,
    sets_table,
    systems_note,
    verdict_decimals,
)
from vembed.evaluation.report.curves import run_curves
from vembed.evaluation.report.examples import choose_examples
from vembed.evaluation.report.inputs import Finding, Reverse
from vembed.evaluation.report.run_report import build_page, write_report
from vembed.evaluation.results import EvaluationResult
from vembed.pages.html import render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.page import Cell, Code, Figure, Section, Table
from vembed.pages.terminal import render_terminal
from vembed.pages.text import MINUS
from vembed.pages.write import render_json, write_page
from vembed.registry import Registry

if TYPE_CHECKING:
    from vembed.evaluation.report.inputs import RunReport

pytestmark = pytest.mark.usefixtures("drawn_once")

FILES = ["report.html", "report.json", "report.md"]
METRICS = (METRIC, "recall@1", "hit@1", "hit@5", "hit@10")


def document(report: RunReport) -> dict[str, Any]:
    """Return the JSON of a report, which holds neither NaN nor infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    content: dict[str, Any] = json.loads(render_json(build_page(report)), parse_constant=refuse)
    return content


def markdown(report: RunReport) -> str:
    return render_markdown(build_page(report))


def scored(system: str, task: RetrievalData, level: float) -> EvaluationResult:
    """A system whose values differ by metric and by query, the higher the level the better."""
    draw = np.random.default_rng(int(1000 * level))
    per_query = {
        name: {query: float(np.clip(draw.normal(level, 0.05), 0, 1)) for query in task.queries} for name in METRICS
    }
    means = {name: float(np.mean(list(values.values()))) for name, values in per_query.items()}
    run = dict.fromkeys(task.queries, tuple((name, 0.9 - place / 10) for place, name in enumerate(task.documents)))
    return EvaluationResult(task.name, system, means, per_query, run, len(task.queries), len(task.documents))


@cache
def both_directions() -> RunReport:
    """A report of captions and pictures in both directions, whose kept checkpoint isn't the last."""
    numbers = range(8)
    task = RetrievalData(
        "toy/test",
        {f"q{n}": f"caption {n}" for n in numbers},
        {f"d{n}": Image(f"d{n}.png", b"no picture") for n in numbers},
        {f"q{n}": {f"d{n}": 1} for n in numbers},
    )
    turned = task.reversed()
    before, last, after = (scored("tiny", task, level) for level in (0.1, 0.5, 0.7))
    before_r, last_r, after_r = (scored("tiny", turned, level) for level in (0.15, 0.55, 0.75))
    judged = verdict(before_r, after_r, METRIC)
    return sample(
        task=task, baseline=before, final=after, last=last, bm25=None, verdict=verdict(before, after, METRIC),
        reverse=Reverse(task=turned, verdict=judged, baseline=before_r, final=after_r, last=last_r),
        evaluations=[(10, {METRIC: 0.7}), (20, {METRIC: 0.6})], dev_task="toy/dev", kept_step=10, last_step=20,
        steps=[{**row, "masked_negatives": row["step"] % 3, "tokens_per_second": 5e3} for row in STEPS],
    )  # fmt: skip


# --- numbers


def test_all_numbers_of_the_json_equal_the_results_given() -> None:
    report = sample()
    data = document(report)
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
    evaluations = [(row["step"], row["metrics"]) for row in data["evaluations"]]
    assert evaluations == [(0, report.baseline.metrics), *report.evaluations]
    for key in ("plan", "config", "environment", "command"):
        assert data[key] == getattr(report, key), key
    assert data["data_facts"] == [list(fact) for fact in report.data_facts]
    assert data["queries"]["examples"]["improved"] == ["q1", "q4"]
    assert data["reverse"] is None


def test_every_system_has_a_mean_and_an_interval_in_each_direction_and_form() -> None:
    report = both_directions()
    reverse = report.reverse
    assert reverse is not None
    data, text, source = document(report), markdown(report), page(report).source
    for part, given in ((data["metrics"], report), (data["reverse"]["metrics"], reverse)):
        for key in ("baseline", "last", "final"):
            for name in METRICS:
                low, high = mean_interval([getattr(given, key)], name)
                assert part[key]["intervals"][name] == pytest.approx([low, high])
                assert f"{getattr(given, key).metrics[name]:.3f} ({low:.3f} to {high:.3f})" in text, (key, name)
                assert f">{low:.3f} to {high:.3f}<" in source, (key, name)
    assert data["metrics"]["bm25"] is None
    total = 100 * sum(each.metrics[f"hit@{k}"] for each in (report.final, reverse.final) for k in (1, 5, 10))
    assert data["reverse"]["rsum"]["final"]["value"] == pytest.approx(total)
    assert f"{total:.1f} (" in text
    assert f"{total:.1f}" in source
    for form in (text, source):
        assert reverse.verdict.sentence in form.replace("&gt;", ">"), "beside the verdict"


def test_each_metric_has_its_own_paired_interval_and_the_verdict_row_comes_first() -> None:
    report, other = sample(), {"q1": 0.0, "q2": 1.0, "q3": 1.0, "q4": 0.0}

    def more(given: EvaluationResult, values: dict[str, float], **metrics: float) -> EvaluationResult:
        further = dict.fromkeys(("mrr@10", "hit@3"), values)
        return replace(given, metrics=given.metrics | metrics, per_query=given.per_query | further)

    final = more(report.final, other, **{"hit@3": 0.5, "mrr@10": 0.5, "alone@1": 0.1})
    baseline = more(report.baseline, VALUES["base"], **{"hit@3": 0.25, "mrr@10": 0.25})
    rows = forward_comparisons(replace(report, final=final, baseline=baseline)).rows
    assert [(row.name, row.is_headline) for row in rows] == [
        (METRIC, True), ("mrr@10", True), ("hit@3", False), ("alone@1", False)
    ]  # fmt: skip
    assert rows[0].verdict == report.verdict
    assert rows[1].verdict is not None
    assert rows[1].verdict.comparison == compare(baseline, final, "mrr@10")
    assert rows[1].intervals["final"] == mean_interval([final], "mrr@10")
    assert (rows[3].verdict, rows[3].values, rows[3].intervals) == (None, {"final": 0.1}, {})


def test_a_bound_that_decides_never_reads_as_zero() -> None:
    comparison = Comparison(METRIC, 0.5, 0.51, 0.01, 0.00004, 0.02, 100, 0.95)
    assert verdict_decimals(Verdict("improved", comparison, "")) == 5
    assert verdict_decimals(Verdict("within noise", comparison, "")) == 3
    assert verdict_decimals(Verdict("improved", replace(comparison, low=0.004), "")) == 3


def test_what_is_not_finite_is_null_for_programs_and_not_available_for_readers() -> None:
    steps = [{"step": 1, "loss": math.nan, "grad_norm": math.inf}, {"step": 2, "loss": 2.0, "grad_norm": math.inf}]
    config = {"a": math.inf, "b": np.float32("nan"), "c": Path("x/y"), "d": np.int64(3)}
    final = result("b", {**VALUES["final"], "q2": math.nan})
    judged = sample().verdict
    judged = replace(judged, comparison=replace(judged.comparison, low=math.nan, high=math.nan, difference=math.nan))
    report = sample(
        bm25=None, evaluations=[(1, {METRIC: math.nan}), (2, {METRIC: 0.5})], config=config,
        title="lone \ud800 surrogate",        steps=steps, final=final, verdict=judged,
    )  # fmt: skip
    data = document(report)
    assert data["verdict"]["comparison"]["low"] is None
    assert data["evaluations"][1]["metrics"] == {METRIC: None}
    assert data["config"] == {"a": None, "b": None, "c": "x/y", "d": 3}
    for text in (markdown(report), page(report).text):
        assert "n/a to n/a" in text
        assert "1 value NaN or infinite" in text
        assert not re.search(r"\b(nan|inf)\b", text)


def test_queries_that_differ_and_a_metric_that_is_not_there_are_refused() -> None:
    report = sample()
    odd = replace(report.verdict, comparison=replace(report.verdict.comparison, metric="odd@1"))
    with pytest.raises(ValueError, match=r"odd@1.* ndcg@10"):
        replace(report, verdict=odd)
    base = replace(report.baseline, per_query={**report.baseline.per_query, "mrr@10": VALUES["base"]})
    final = replace(result("b", {"q1": 1.0}), metrics={METRIC: 1.0, "mrr@10": 1.0})
    final = replace(final, per_query={**final.per_query, "mrr@10": {"q1": 1.0}})
    with pytest.raises(ValueError, match="different queries"):
        build_page(replace(report, baseline=base, final=final))


# --- queries


def test_queries_are_chosen_by_value_then_id_and_stand_once() -> None:
    before = {f"q{number:02}": 0.5 for number in range(20)}
    after = before | {"q03": 0.9, "q07": 0.8, "q01": 0.8, "q10": 0.1, "q11": 0.2, "q12": 0.0, "q13": math.nan}
    for order in (list(before), list(reversed(before))):
        base, final = (
            result(name, {query: each[query] for query in order}) for name, each in (("a", before), ("b", after))
        )
        groups = choose_examples(sample().task, base, final, METRIC)
        assert {group.kind: [example.query_id for example in group.examples] for group in groups} == {
            "improved": ["q03", "q01", "q07"],
            "worse": ["q12", "q10", "q11"],
            "lowest": ["q00", "q02", "q04", "q05", "q06"],
        }
        assert [group.num_queries for group in groups] == [3, 3, 13]


def test_an_example_tells_right_wrong_ranks_and_what_was_missed() -> None:
    baseline = result("a", VALUES["base"], run={"q3": [("d2", 0.9), ("d3", 0.8)]})
    final = result("b", VALUES["final"], run={"q3": [(f"x{n}", 1.0 - n / 10) for n in range(5)] + [("d3", 0.1)]})
    example = choose_examples(sample().task, baseline, final, METRIC)[1].examples[0]
    assert (example.query_id, example.baseline, example.final) == ("q3", 0.9, 0.4)
    assert [(hit.rank, hit.is_relevant, hit.item) for hit in example.hits] == [(n, False, None) for n in range(1, 6)]
    assert [(hit.document_id, hit.rank, hit.baseline_rank, hit.item) for hit in example.missed] == [
        ("d3", 6, 2, "Birds fly."),
        ("d4", None, None, "Fish swim."),
    ]
    groups = choose_examples(sample().task, sample().baseline, sample().final, METRIC)
    shown = {example.query_id: example for group in groups for example in group.examples}
    assert [hit.is_relevant for hit in shown["q1"].hits] == [True, False, False]
    assert [hit.is_relevant for hit in shown["q4"].hits] == [False] * 3, "a judgement of 0 is one against it"


def test_changes_are_counted_by_direction() -> None:
    same = replace(sample(), final=sample().baseline, verdict=verdict(sample().baseline, sample().baseline, METRIC))
    for report, counts in ((sample(), (2, 1, 1)), (same, (0, 4, 0))):
        queries = document(report)["queries"]
        assert tuple(queries[name] for name in ("improved", "unchanged", "worse")) == counts
    assert "Of 4 queries, 2 improved, 1 stayed the same and 1 got worse" in markdown(sample())


@pytest.mark.parametrize("largest", [0.004, 0.012, 0.06, 0.3])
def test_ticks_of_changes_have_labels_of_their_own_that_say_where_they_are(
    largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(changes, "inline_svg", lambda figure, **_: drawn.append(figure))
    changes.draw_gains([largest, -largest / 2], name="changes", label="")
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len({*labels}) == len(labels) >= 3
    assert [float(label.replace(MINUS, "-")) for label in labels] == pytest.approx(axes.get_xticks(), abs=1e-9)


def test_a_long_text_is_cut_and_whole_in_details_and_of_a_huge_one_it_says_how_much_is_left_out() -> None:
    words = " ".join(f"word{number}" for number in range(200))
    shown = page(sample(task=replace(sample().task, documents={"d1": words, "d2": "x" * 10_000, "d3": "x", "d4": "y"})))
    assert [text for text, path in shown.texts if "details" in path and words in text]
    outside = [text for text, path in shown.texts if path[-2:] == ("div", "span") and text.startswith("word0 ")]
    assert outside
    assert all(text.endswith("…") and len(text) < 250 for text in outside)
    assert "7,000 more characters" in shown.text
    assert "x" * 3_000 in shown.text
    assert "x" * 3_001 not in shown.text


# --- checkpoints


def test_columns_name_the_checkpoints_and_a_sentence_tells_them_apart() -> None:
    report = both_directions()
    assert list(forward_comparisons(report).heads.values())[:3] == ["Baseline", "Last, step 20", "Final, step 10"]
    one = replace(report, last=None, kept_step=20, evaluations=[(10, {METRIC: 0.5}), (20, {METRIC: 0.6})])
    lost = replace(one, evaluations=[(0, {METRIC: 0.7}), *one.evaluations])
    assert list(forward_comparisons(one).results) == ["baseline", "final"]
    assert "step 10, the best on the dev set" in systems_note(report)
    assert "the last and also the best" in systems_note(one)
    assert "where the untrained model did better" in systems_note(lost)
    assert "best" not in systems_note(replace(one, evaluations=[]))
    assert systems_note(sample()) == ""
    unseen = systems_note(replace(report, last=None))
    assert "There is no result of the model after step 20" in unseen
    assert "the last and" not in unseen
    rest = replace(report, last=None, kept_step=20, evaluations=[(10, {METRIC: 0.7}), (20, {METRIC: 0.5})])
    assert "the last, kept because that of step 10, the best on the dev set, isn't whole" in systems_note(rest)
    for told, given in ((True, lost), (False, one), (False, replace(lost, dev_task=""))):
        assert ("worse than the untrained one" in markdown(given)) == told


def test_what_stands_in_for_a_broken_best_checkpoint_is_not_called_the_best() -> None:
    rows = [(5, {METRIC: 0.7}), (10, {METRIC: 0.6}), (20, {METRIC: 0.5})]
    note = systems_note(replace(both_directions(), evaluations=rows))
    assert "step 10, kept because that of step 5, the best on the dev set, isn't whole; model/ holds it" in note
    assert note.count("best") == 1


def test_checkpoints_are_told_apart_by_the_metric_that_chose_them() -> None:
    judged = [result(name, VALUES[name], metric="map@10") for name in ("base", "final")]
    rows = [(step, {"mrr@10": 1.0, METRIC: value}) for step, value in ((0, 0.7), (10, 0.5))]
    report = sample(
        baseline=judged[0], final=judged[1], bm25=None, verdict=verdict(*judged, "map@10"),
        evaluations=rows, dev_task="toy/dev", dev_metric=METRIC, kept_step=10,
    )  # fmt: skip
    assert f"worse than the untrained one: {METRIC} 0.5000 at step 10, 0.7000" in markdown(report).replace("\\", "")
    assert "the best trained one on the dev set, where the untrained model did better" in systems_note(report)
    assert best_dev_step(report) == 10
    assert run_curves(report).dev_metric == METRIC


def test_the_best_dev_step_is_the_earliest_of_the_highest_and_never_the_untrained_one() -> None:
    rows = [(0, {METRIC: 0.9}), (5, {METRIC: 0.4}), (9, {METRIC: 0.6}), (12, {METRIC: 0.6})]
    assert best_dev_step(replace(both_directions(), evaluations=rows)) == 9
    assert best_dev_step(replace(both_directions(), evaluations=rows[:1])) is None


def test_the_kept_checkpoint_is_marked_in_the_curve_in_words_and_in_the_table() -> None:
    report = both_directions()
    for kept, marked in ((10, 10), (7, None), (None, 10)):
        assert run_curves(replace(report, kept_step=kept)).marked_step == marked
    assert "| ✓ 10 (kept) |" in markdown(report)
    assert any(
        "step 10, the checkpoint that was kept" in (svg.get("aria-label") or "") for svg in page(report).named("svg")
    )


# --- sets and notes


def test_a_set_of_one_query_has_no_interval_among_all_sets() -> None:
    report = sample()
    first = SetOutcome.of("test", report.baseline, report.final, METRIC)
    single = SetOutcome.of("guard", result("a", {"q1": 0.25}), result("b", {"q1": 0.5}), METRIC)
    table = sets_table(replace(report, sets=(first, single)))
    bounds = [[cell.bounds for cell in row if isinstance(cell, Cell)][:3] for row in table.rows]
    assert all(bounds[0])
    assert bounds[1] == ["", "", "none with 1 query"]


def test_notes_of_every_evaluation_stand_on_the_page_once() -> None:
    def noted(given: EvaluationResult | None, note: str) -> EvaluationResult:
        assert given is not None
        return replace(given, notes=("Left out of all.", note))

    report, reverse = both_directions(), both_directions().reverse
    assert reverse is not None
    first = SetOutcome.of("test", report.baseline, report.final, METRIC)
    guard = [replace(each, task="old/test") for each in (report.baseline, report.final)]
    before, after = noted(guard[0], "Cut before."), noted(guard[1], "Cut after.")
    sets = (first, SetOutcome.of("guard", before, after, METRIC))
    reverse = replace(reverse, last=noted(reverse.last, "Cut in reverse."))
    text = markdown(replace(report, last=noted(report.last, "Cut at last."), sets=sets, reverse=reverse))
    notes = ("Left out of all.", "Cut at last.", "Reversed: Left out of all.", "Reversed: Cut in reverse.",
             "old/test: Left out of all.", "old/test: Cut before.", "old/test: Cut after.")  # fmt: skip
    assert [text.count(f"- {note}\n") for note in notes] == [1] * len(notes)


# --- the page

EVERY = ["metrics", "queries", "changes", "curves", "ranks", "data", "plan", "reproduce"]


def test_the_names_that_no_plugin_may_take_are_the_ids_of_the_page() -> None:
    report = sample(performance={"peak_memory_bytes": 1.2e10})  # which has its section `speed`
    page_ids = {section.name for section in run_report.build_page(report).sections} | {"verdict", "main"}
    assert "speed" in page_ids
    assert page_ids <= {*TAKEN_NAMES}
    html = render_html(run_report.build_page(report))
    assert all(f'id="{name}"' in html for name in page_ids)


NOTHING: dict[str, Any] = {
    "steps": [], "evaluations": [], "bm25": None, "plan": {}, "config": {}, "environment": {}, "data_facts": []
}  # fmt: skip
UNRANKED = {name: replace(getattr(sample(), name), run={}) for name in ("baseline", "final")} | {"bm25": None}


def masked(every: int) -> dict[str, Any]:
    return {"steps": [{**row, "masked_negatives": row["step"] % every} for row in STEPS]}


@pytest.mark.parametrize(
    ("changes", "names", "said", "unsaid"),
    [
        ({}, EVERY, ["BM25"], ["Temperature", "False negatives", "Reversed", "small copies"]),
        (NOTHING, EVERY, ["Not logged: Training loss", "No plan was given"], ["BM25"]),
        ({"findings": ()}, [*EVERY[:5], "speed", *EVERY[5:]], ["Nothing stands out"], []),
        ({"findings": (Finding("padding", "1.42 tokens", "Lower it."),)}, [*EVERY[:5], "speed", *EVERY[5:]],
         ["1.42 tokens", "Lower it."], ["Nothing stands out"]),
        (UNRANKED, [each for each in EVERY if each != "ranks"], ["Nothing was retrieved."], ["BM25"]),
        (masked(2), EVERY, ["False negatives masked"], []),
        (masked(1), EVERY, [], ["False negatives"]),
    ],
    ids=["plain", "nothing given", "looked at and well", "a finding", "nothing retrieved", "masked", "none masked"],
)  # fmt: skip
def test_sections_and_curves_stand_where_they_have_something_to_say(
    changes: dict[str, Any], names: list[str], said: list[str], unsaid: list[str]
) -> None:
    report = sample(**changes)
    assert [section.name for section in build_page(report).sections] == names
    text = markdown(report)
    assert {word: word in text for word in (*said, *unsaid)} == dict.fromkeys(said, True) | dict.fromkeys(unsaid, False)


def test_one_query_without_results_or_texts_and_one_step_have_a_page() -> None:
    base, final = (result(name, {"q1": 0.0}, run={}) for name in ("a", "b"))
    text = page(
        sample(
            baseline=base, final=final, bm25=None, task=RetrievalData("empty", {}, {}, {"q1": {"lost": 1}}),
            verdict=verdict(base, final, METRIC), steps=[{"step": 1, "loss": 0.0, "grad_norm": -1.0}],
            evaluations=[(7, {METRIC: 0.5})], dev_task="toy/dev",
        )
    ).text  # fmt: skip
    for words in (
        "none with 1 query",
        "no text for this id",
        "0 at step 1, the only point",
        "0.500 at step 7, the only",
    ):
        assert words in text


def test_the_page_stands_alone_and_everyone_can_read_it() -> None:
    plain, both = (assert_sound(render_html(build_page(each))) for each in (sample(steps=STEPS), both_directions()))
    assert len(plain.named("figure")) == 10
    assert len(plain.named("table")) >= 6
    assert {link["href"] for link in plain.named("a")} >= {"#main", "#ranks", "#queries"}
    assert next(text for text, path in both.texts if "h2" in path) == "Verdict: "
    assert "From 3 at step 1 to 0.1 at step 30; lowest 0.1 at step 30, highest 3 at step 1." in plain.text


def test_drawings_take_their_colours_from_the_page() -> None:
    drawings = re.findall(r"<svg.*?</svg>", page(sample(steps=STEPS)).source, flags=re.DOTALL)
    assert len(drawings) >= 8
    for drawing in drawings:
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!-)", re.sub(r'(href="|url\()#[^")]+', "", drawing))
        assert "<style" not in drawing, "it would match the whole page"
    assert "var(--series)" in "".join(drawings)
    assert "currentColor" in "".join(drawings)


def hostile_report(text: str) -> RunReport:
    """The sample with the text in every place that a user can fill."""
    metric = f"m {text}"
    base, final = (result(f"{name} {text}", VALUES[name], metric=metric) for name in ("base", "final"))
    run = {query: [(f"d1{text}", 0.9), ("d2", 0.5)] for query in VALUES["final"]}
    base, final = replace(base, run=run, notes=(f"note {text}",)), replace(final, run=run)
    task = RetrievalData(
        name=f"task {text}",
        queries={query: f"query {query} {text}" for query in VALUES["final"]},
        documents={f"d1{text}": f"document {text}", "d2": f"long {text} " * 60, "d3": f"lost {text}"},
        qrels={query: {"d3": 1} for query in VALUES["final"]},
    )
    plan = {"strategy": text, "reasons": [f"reason {text}"], f"key {text}": text, "rows": [{"strategy": text, text: 1}]}
    return sample(
        title=f"title {text}", verdict=replace(verdict(base, final, metric), sentence=f"sentence {text}"), task=task,
        baseline=base, final=final, bm25=replace(base, system=f"bm {text}"), plan=plan, command=f"command {text}",
        evaluations=[(1, {metric: 0.5}), (2, {metric: 0.6, f"other {text}": 0.1})], dev_task=f"dev {text}",
        config={f"config {text}": {text: [text]}, "list": [text]}, environment={f"environment {text}": text},
        data_facts=[(f"fact {text}", text)],
    )  # fmt: skip


PLACES = (
    "title", "sentence", "task", "query q1", "document", "reason", "config", "fact", "note", "command", "environment",
    "key", "lost", "m", "dev",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_user_becomes_markup_in_the_page_or_in_its_drawings(text: str) -> None:
    shown = assert_sound(render_html(build_page(hostile_report(text))))
    assert not shown.named("img")
    line = " ".join(text.split())
    assert [place for place in PLACES if f"{place} {line}" not in shown.text] == []
    assert f"d1{line}" in shown.text
    assert shape(markdown(hostile_report(text))) == shape(markdown(hostile_report("harmless")))


@pytest.mark.slow
def test_the_page_stays_small_with_many_queries_steps_and_long_texts() -> None:
    rng, ids = random.Random(0), [f"q{number}" for number in range(2_400)]
    run = {query: [(f"d{rng.randrange(50)}", 0.5) for _ in range(10)] for query in ids}
    base, final = (result(name, {query: rng.random() for query in ids}, run=run) for name in ("a", "b"))
    task = RetrievalData(
        name="big",
        queries=dict.fromkeys(ids, "\N{CAT FACE}<" * 5_000),
        documents={f"d{number}": "\N{CAT FACE}&" * 50_000 for number in range(50)},
        qrels={query: {f"d{number}": 1 for number in range(50)} for query in ids},
    )
    steps = [{"step": step, "loss": rng.random(), "grad_norm": rng.random()} for step in range(1, 5_001)]
    evaluations = [(step, {METRIC: rng.random()}) for step in range(0, 5_001, 5)]
    judged = verdict(base, final, METRIC)
    shown = page(sample(
        baseline=base, final=final, bm25=None, task=task, steps=steps, evaluations=evaluations, verdict=judged
    ))  # fmt: skip
    assert len(shown.source.encode()) < 2_000_000
    assert "Thinned to at most 500 of 5,000 points" in shown.text
    assert "Of 2,400 queries" in shown.text


# --- its files


@pytest.mark.slow
def test_the_same_report_gives_the_same_bytes_in_another_process_and_under_other_settings(tmp_path: Path) -> None:
    write_report(tmp_path / "here", sample(steps=STEPS))
    code = (
        "import sys; from pathlib import Path; from kit.pages import STEPS, sample; "
        "from vembed.evaluation.report.run_report import write_report; "
        "write_report(Path(sys.argv[1]), sample(steps=STEPS))"
    )
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": paths, "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=environment, cwd=tmp_path)
    for name in FILES:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
    write_report(tmp_path / "there", sample(title="another"))
    assert (tmp_path / "here" / FILES[0]).read_bytes() != (tmp_path / "there" / FILES[0]).read_bytes()


@pytest.mark.parametrize("failing", ["rendering", "fsync", "replace"])
def test_a_report_that_fails_leaves_the_older_one_and_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    folder = tmp_path / "a" / "report"
    write_report(folder, sample())
    before = {name: (folder / name).read_bytes() for name in FILES}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "rendering":
        with pytest.raises(ValueError, match="no number"):
            write_report(folder, sample(steps=[{"step": "no number", "loss": 1.0}]))
    else:
        monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
        with pytest.raises(MachineError, match="No space left"):
            write_report(folder, sample(title="another"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def fail_to_draw(**_: str) -> Any:
    raise RuntimeError("no ink")


def test_a_section_of_a_plugin_that_fails_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = Registry("report section", {})
    monkeypatch.setattr("vembed.evaluation.report.SECTIONS", registered)
    before = [section.name for section in run_report.build_page(sample()).sections]

    @vembed.register_section
    def broken_section(report: object) -> None:
        raise KeyError("no such number")

    @vembed.register_section
    def nothing(report: object) -> None:
        return None

    rendered = {  # sections that fail only where they are rendered
        "a-float": (Table(["a", "b"], [["x", 0.5]], title="t"), "UndefinedError"),
        "a-drawing": (Figure("t", fail_to_draw), "RuntimeError: no ink"),
        "markdown": (Code(3, "t"), "TypeError"),
        "a-path": (Table(["a"], [[Cell("x", pictures=["x.png"])]], title="t"), "TypeError"),
    }
    for name, (block, _) in rendered.items():
        registered.register(name, lambda _, block=block: Section("s", "T", [block]), module=__name__)
    rendered["taken"] = (Code("x", "t"), "ValueError: the page has a section 'data' already")
    registered.register("taken", lambda _: Section("data", "T", []), module=__name__)

    assert [section.name for section in run_report.build_page(sample()).sections] == before
    assert "the report has no section broken-section: KeyError: 'no such number'" in caplog.text
    for name, (_, error) in rendered.items():
        assert f"the report has no section {name}: {error}" in caplog.text
    write_report(tmp_path, sample())
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_a_section_is_one_function_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of CONTRIBUTING.md, in a copy of the module: its code, and its line in `build_page`."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (recipe,) = re.findall(r"```python\n(# length_section\.py\n.*?)```", text, re.DOTALL)
    assert "`length_section(report),`" in text
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
    assert [section.name for section in built.sections] == [*EVERY[:3], "lengths", *EVERY[3:]]
    write_page(tmp_path, built)
    assert "Mean characters" in (tmp_path / "report.html").read_text()
    assert "## Lengths" in (tmp_path / "report.md").read_text()
    assert "Lengths" in render_terminal(built)
    of_pictures = replace(sample().task, documents={"d": Image("x.png", b"")})
    assert "lengths" not in [section.name for section in copied.build_page(sample(task=of_pictures)).sections]
