"""What a report chooses and computes: curves that keep their spikes, telling queries, honest rows."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from test_report_samples import METRIC, STEPS, VALUES, page, result, sample

from vembed.evaluation.judge import Comparison, Verdict, compare, mean_interval, verdict
from vembed.evaluation.report.comparison import forward_comparisons, verdict_decimals
from vembed.evaluation.report.curves import (
    MAX_EVALUATION_ROWS,
    MAX_POINTS,
    STEP_CURVES,
    curve_of,
    evaluations_table,
    run_curves,
    sparkline,
    step_curve,
    thinned_rows,
)
from vembed.evaluation.report.examples import choose_examples
from vembed.evaluation.report.run_report import build_page, changes_section
from vembed.pages.page import Row, Shares
from vembed.pages.text import MINUS, bytes_text, clip, number_text, plain, signed_text, value_text

LOSS = STEP_CURVES[0]


@pytest.mark.parametrize("count", [1, 2, 499, 500, 501, 1_000, 5_000, 12_345])
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3], values[count // 2] = 99.0, -99.0
    rows = thinned_rows(values, MAX_POINTS)
    assert len(rows) <= MAX_POINTS
    assert (len(rows) == count) == (count <= MAX_POINTS)
    assert (rows[0], rows[-1]) == (0, count - 1)
    assert list(rows) == sorted(set(rows.tolist()))
    assert values[rows].min() == values.min()
    assert values[rows].max() == values.max()


def test_a_spike_of_one_step_is_drawn_and_named() -> None:
    curve = curve_of([(step, 50.0 if step == 2_345 else 1.0) for step in range(5_000)], LOSS)
    assert curve is not None
    assert 2_345 in curve.steps_N
    assert "highest 50 at step 2,345" in curve.summary


def test_missing_keys_and_values_that_are_not_finite_are_counted_not_drawn() -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2}, {"step": 3, "loss": math.nan}, {"step": 4, "loss": None}]
    curve = step_curve(rows, LOSS)
    assert curve is not None
    assert (curve.num_points, curve.num_non_finite) == (1, 2)
    assert step_curve(rows[1:], LOSS) is None
    assert step_curve([], LOSS) is None


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    curve = curve_of([(step, float(step)) for step in range(8)], LOSS)
    assert curve is not None
    assert sparkline(curve) == "▁▂▃▄▅▆▇█"


def test_queries_are_chosen_by_value_then_id_and_stand_once() -> None:
    before = {f"q{number:02}": 0.5 for number in range(20)}
    after = before | {"q03": 0.9, "q07": 0.8, "q01": 0.8, "q10": 0.1, "q11": 0.2, "q12": 0.0, "q13": math.nan}
    report = sample()
    for order in (list(before), list(reversed(before))):
        base = result("a", {query: before[query] for query in order})
        final = result("b", {query: after[query] for query in order})
        groups = choose_examples(report.task, base, final, METRIC)
        assert [group.kind for group in groups] == ["improved", "worse", "lowest"]
        assert [[example.query_id for example in group.examples] for group in groups] == [
            ["q03", "q01", "q07"],
            ["q12", "q10", "q11"],
            ["q00", "q02", "q04", "q05", "q06"],
        ]
        assert [group.num_queries for group in groups] == [3, 3, 13]


def test_an_example_tells_right_wrong_ranks_and_what_was_missed() -> None:
    baseline = result("a", VALUES["base"], run={"q3": [("d2", 0.9), ("d3", 0.8)]})
    final = result("b", VALUES["final"], run={"q3": [(f"x{n}", 1.0 - n / 10) for n in range(5)] + [("d3", 0.1)]})
    groups = choose_examples(sample().task, baseline, final, METRIC)
    example = groups[1].examples[0]
    assert (example.query_id, example.baseline, example.final) == ("q3", 0.9, 0.4)
    assert [(hit.rank, hit.is_relevant, hit.item) for hit in example.hits] == [(n, False, None) for n in range(1, 6)]
    assert [(hit.document_id, hit.rank, hit.baseline_rank) for hit in example.missed] == [
        ("d3", 6, 2),
        ("d4", None, None),
    ]
    assert [hit.item for hit in example.missed] == ["Birds fly.", "Fish swim."]


def test_a_document_judged_not_relevant_is_wrong() -> None:
    groups = choose_examples(sample().task, sample().baseline, sample().final, METRIC)
    shown = {example.query_id: example for group in groups for example in group.examples}
    assert {hit.document_id: hit.is_relevant for hit in shown["q4"].hits} == {"d1": False, "d2": False, "d3": False}
    assert {hit.document_id: hit.is_relevant for hit in shown["q1"].hits} == {"d1": True, "d2": False, "d3": False}


def test_each_metric_has_its_own_paired_interval_and_the_verdict_row_comes_first() -> None:
    report = sample()
    other = {"q1": 0.0, "q2": 1.0, "q3": 1.0, "q4": 0.0}
    more = {"mrr@10": other, "hit@3": other}
    final = replace(
        report.final,
        metrics={**report.final.metrics, "hit@3": 0.5, "mrr@10": 0.5, "alone@1": 0.1},
        per_query={**report.final.per_query, **more},
    )
    baseline = replace(
        report.baseline,
        metrics={**report.baseline.metrics, "hit@3": 0.25, "mrr@10": 0.25},
        per_query={**report.baseline.per_query, **dict.fromkeys(more, VALUES["base"])},
    )
    rows = forward_comparisons(replace(report, final=final, baseline=baseline)).rows
    assert [row.name for row in rows] == [METRIC, "mrr@10", "hit@3", "alone@1"]
    assert [row.is_headline for row in rows] == [True, True, False, False]
    assert rows[0].verdict == report.verdict
    assert rows[1].verdict is not None
    assert rows[1].verdict.comparison == compare(baseline, final, "mrr@10")
    assert (rows[3].verdict, rows[3].values) == (None, {"final": 0.1})
    assert rows[1].intervals["final"] == mean_interval([final], "mrr@10")
    assert "alone@1" not in final.per_query
    assert rows[3].intervals == {}


def test_a_bound_that_decides_never_reads_as_zero() -> None:
    comparison = Comparison(METRIC, 0.5, 0.51, 0.01, 0.00004, 0.02, 100, 0.95)
    assert verdict_decimals(Verdict("improved", comparison, "")) == 5
    assert verdict_decimals(Verdict("within noise", comparison, "")) == 3
    assert verdict_decimals(Verdict("improved", replace(comparison, low=0.004), "")) == 3


def test_the_baseline_is_step_0_only_where_it_is_on_the_dev_set() -> None:
    report = sample()
    assert run_curves(report).evaluations[0] == (0, report.baseline.metrics)
    assert run_curves(replace(report, dev_task="toy/dev")).evaluations == tuple(report.evaluations)
    given = [(0, {METRIC: 0.3}), *report.evaluations]
    assert run_curves(replace(report, evaluations=given)).evaluations == tuple(given)
    assert run_curves(replace(report, evaluations=[])).evaluations == ()


def test_dev_metrics_of_another_name_are_drawn_instead() -> None:
    report = sample(evaluations=[(5, {"loss": 0.4}), (9, {"loss": 0.3, "x": 1.0})])
    curves = run_curves(report)
    assert curves.dev_metric == "loss"
    assert curves.dev is not None
    assert curves.dev.steps_N.tolist() == [5, 9]
    assert evaluations_table(report, curves).heads == ["Step", "loss", "x"]


def test_a_long_table_of_evaluations_keeps_first_and_last() -> None:
    report = sample(evaluations=[(step, {METRIC: 0.5}) for step in range(0, 501, 5)])
    rows = evaluations_table(report, run_curves(report)).rows
    assert len(rows) == MAX_EVALUATION_ROWS
    assert (rows[0][0], rows[-1][0]) == ("0", "500")


def test_a_verdict_on_a_metric_that_no_query_has_is_refused() -> None:
    report = sample()
    odd = replace(report.verdict, comparison=replace(report.verdict.comparison, metric="odd@1"))
    with pytest.raises(ValueError, match=r"odd@1.*it has: ndcg@10"):
        replace(report, verdict=odd)


def test_baseline_and_final_over_other_queries_are_refused() -> None:
    final = result("b", {"q1": 1.0})
    final = replace(final, per_query={**final.per_query, "mrr@10": {"q1": 1.0}})
    baseline = sample().baseline
    baseline = replace(baseline, per_query={**baseline.per_query, "mrr@10": VALUES["base"]})
    report = sample(baseline=baseline, final=replace(final, metrics={METRIC: 1.0, "mrr@10": 1.0}))
    with pytest.raises(ValueError, match="different queries"):
        build_page(report)


def test_changes_are_counted_by_direction() -> None:
    queries = build_page(sample()).document["queries"]
    assert isinstance(queries, dict)
    assert {name: queries[name] for name in ("improved", "unchanged", "worse")} == {
        "improved": 2,
        "unchanged": 1,
        "worse": 1,
    }
    (row,) = changes_section(sample(), [0.8, 0.0, -0.5, 0.5]).blocks
    assert isinstance(row, Row)
    shares = row.blocks[1]
    assert isinstance(shares, Shares)
    assert shares.sentence.startswith("Of 4 queries, 2 improved, 1 stayed the same and 1 got worse in ndcg@10.")
    same = sample()
    same = replace(same, final=same.baseline, verdict=verdict(same.baseline, same.baseline, METRIC))
    assert build_page(same).document["queries"]["unchanged"] == 4


@pytest.mark.slow
def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    before = dict(mpl.rcParams)
    first = page(sample(steps=STEPS[:2])).source
    assert dict(mpl.rcParams) == before
    with mpl.rc_context({"axes.linewidth": 9.0, "xtick.major.pad": 30.0, "axes.facecolor": "pink", "font.size": 30.0}):
        assert page(sample(steps=STEPS[:2])).source == first


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2e-5, f"2e{MINUS}5"),
        (1.95e-4, f"1.95e{MINUS}4"),
        (0.0125, "0.0125"),
        (-3.0, f"{MINUS}3"),
        (1234.4, "1,234"),
        (1e9, "1e9"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert number_text(value) == text


def test_other_values_read_well() -> None:
    assert [bytes_text(value) for value in (0, 999, 1.5e9, 2.1e7, math.nan)] == [
        "0 B",
        "999 B",
        "1.4 GiB",
        "20 MiB",
        "n/a",
    ]
    assert [signed_text(value) for value in (0.1, -0.1, 0.0001, -0.0, math.inf)] == [
        "+0.100",
        f"{MINUS}0.100",
        "0.000",
        "0.000",
        "n/a",
    ]
    assert value_text("peak_bytes", 2_000_000_000) == "1.86 GiB"
    assert [value_text("x", value) for value in (True, None, math.nan, 2e-4, [1, 2], {"a": [1]})] == [
        *("true", "none", "n/a", "0.0002", "1, 2"),
        '{"a": [1]}',
    ]
    assert plain({1: np.float32(0.5), "a": (np.int64(3), math.inf), "b": {2, 1}}) == {
        "1": 0.5,
        "a": [3, None],
        "b": [1, 2],
    }


def test_clipping_ends_at_a_word_and_says_so() -> None:
    assert clip("short", 10) == clip("short", 5)
    assert clip("short", 10).full is None
    parts = clip("one two three four five", 15)
    assert (parts.short, parts.full) == ("one two three…", "one two three four five")
    assert clip("x" * 20, 15).short == "x" * 15 + "…"
