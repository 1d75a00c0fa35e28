"""What a report computes of its numbers: curves that keep their spikes, times of a step, ranks, a map, the plan."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import PIL.Image
import pytest
from kit.pages import METRIC, STEPS, Page, page, result, sample

from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.evaluation.evaluate import EncodedTask, RunBuilder
from vembed.evaluation.metrics import score_run
from vembed.evaluation.report import speed
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
from vembed.evaluation.report.inputs import Finding
from vembed.evaluation.report.plan import plan_parts, plan_section
from vembed.evaluation.report.ranks import recalls_by_depth, split_scores
from vembed.evaluation.report.run_report import build_page
from vembed.evaluation.report.speed import MAX_STRETCHES, percent_text, seconds_text, split_time
from vembed.evaluation.report.vectors import (
    MAP_DOCUMENTS,
    MAP_QUERIES,
    NEAR_COSINE,
    Geometry,
    build_geometry,
    near_pairs,
    project,
)
from vembed.pages.html import render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.page import Table
from vembed.pages.write import render_json

if TYPE_CHECKING:
    from pathlib import Path

LOSS = STEP_CURVES[0]

# --- curves


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
    rising = curve_of([(step, float(step)) for step in range(8)], LOSS)
    assert rising is not None
    assert sparkline(rising) == "▁▂▃▄▅▆▇█"


def test_one_huge_value_moves_the_running_mean_only_around_it() -> None:
    curve = curve_of([(step, 1e20 if step == 50 else 1.0) for step in range(200)], LOSS)
    assert curve is not None
    assert curve.mean_N is not None
    assert curve.mean_N[[40, 60, 199]].tolist() == [1.0, 1.0, 1.0]
    assert curve.mean_N[50] > 1e18


def test_missing_keys_and_values_that_are_not_finite_are_counted_not_drawn() -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2}, {"step": 3, "loss": math.nan}, {"step": 4, "loss": None}]
    curve = step_curve(rows, LOSS)
    assert curve is not None
    assert (curve.num_points, curve.num_non_finite) == (1, 2)
    assert step_curve(rows[1:], LOSS) is None
    assert step_curve([], LOSS) is None


def test_the_baseline_is_step_0_only_where_it_is_on_the_dev_set() -> None:
    report = sample()
    assert run_curves(report).evaluations[0] == (0, report.baseline.metrics)
    assert run_curves(replace(report, dev_task="toy/dev")).evaluations == tuple(report.evaluations)
    given = [(0, {METRIC: 0.3}), *report.evaluations]
    assert run_curves(replace(report, evaluations=given)).evaluations == tuple(given)
    assert run_curves(replace(report, evaluations=[])).evaluations == ()


def test_dev_metrics_of_another_name_are_drawn_instead_and_a_long_table_keeps_first_and_last() -> None:
    report = sample(evaluations=[(5, {"loss": 0.4}), (9, {"loss": 0.3, "x": 1.0})])
    curves = run_curves(report)
    assert curves.dev_metric == "loss"
    assert curves.dev is not None
    assert curves.dev.steps_N.tolist() == [5, 9]
    assert evaluations_table(report, curves).heads == ["Step", "loss", "x"]
    report = sample(evaluations=[(step, {METRIC: 0.5}) for step in range(0, 501, 5)])
    rows = evaluations_table(report, run_curves(report)).rows
    assert (len(rows), rows[0][0], rows[-1][0]) == (MAX_EVALUATION_ROWS, "0", "500")


def test_the_kept_step_is_in_a_long_table_once_and_in_its_place() -> None:
    report = sample(evaluations=[(step, {METRIC: 0.5}) for step in range(0, 501, 5)])
    for kept in range(0, 501, 5):
        rows = evaluations_table(replace(report, kept_step=kept), run_curves(report)).rows
        steps = [int(str(row[0]).strip("✓ (kept)")) for row in rows]
        assert steps == sorted({*steps, 0, kept, 500})
        assert len(steps) == MAX_EVALUATION_ROWS
        assert [row[0] for row in rows if "kept" in str(row[0])] == [f"✓ {kept} (kept)"]


def test_a_long_table_says_that_the_kept_step_was_added_only_where_it_was() -> None:
    report = sample(evaluations=[(step, {METRIC: 0.5}) for step in range(0, 501, 5)])
    for kept, told in ((None, False), (7, False), (0, False), (10, True)):
        caption = evaluations_table(replace(report, kept_step=kept), run_curves(report)).caption
        assert ("with the kept one" in caption) == told


@pytest.mark.slow
def test_drawing_leaves_the_settings_of_matplotlib_alone_and_heeds_none() -> None:
    before, report = dict(mpl.rcParams), sample(steps=STEPS[:2])
    first = page(report).source
    assert dict(mpl.rcParams) == before
    with mpl.rc_context({"axes.linewidth": 9.0, "axes.facecolor": "pink", "font.size": 30.0}):
        assert page(report).source == first


# --- times of a step

TIMES = {"step_seconds": 1.0, "data_seconds": 0.25, "encode_seconds": 0.5, "loss_seconds": 0.125}


def timed(count: int, **changes: float) -> list[dict[str, float]]:
    return [{"step": step, **TIMES, **changes} for step in range(1, count + 1)]


def test_shares_are_of_the_step_and_what_no_part_has_is_everything_else() -> None:
    split = split_time(timed(10))
    assert split is not None
    assert {part.key: part.share for part in split.parts} == pytest.approx(
        {"data_seconds": 0.25, "encode_seconds": 0.5, "loss_seconds": 0.125, "": 0.125}
    )
    assert split_time(STEPS) is None, "rows of an older run have no times"
    assert split_time([]) is None


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    slow = timed(10)
    slow[0] |= {"step_seconds": 500.0, "encode_seconds": 499.0}
    split, alone = split_time(slow), split_time(slow[:1])
    assert split is not None
    assert alone is not None
    assert (split.step_seconds, split.num_steps, alone.step_seconds) == (1.0, 9, 500.0)


@pytest.mark.parametrize(("count", "means"), [(1, 1), (2, 2), (3, 2), (10, 9)])
def test_the_caption_says_that_the_first_step_is_left_out_only_where_it_is(count: int, means: int) -> None:
    (line,) = re.findall(r"Means over .*", render_markdown(build_page(sample(steps=timed(count)))))
    assert line.startswith(f"Means over {means} step")
    assert ("the first one, which also warms everything up, is left out" in line) == (means < count)


@pytest.mark.parametrize("count", [2, 3, 62, 101])
def test_the_bars_of_a_steps_time_touch_and_do_not_overlap(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(speed, "inline_svg", lambda figure, **_: drawn.append(figure))
    split = split_time(timed(count))
    assert split is not None
    speed.draw_time_split(split, name="times", label="")
    bars = drawn[0].axes[0].containers[0]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
    assert [end for _, end in ends[:-1]] == pytest.approx([start for start, _ in ends[1:]])
    assert all(start < step < end for (start, end), step in zip(ends, split.steps_N.tolist(), strict=True))


def test_what_was_logged_and_never_finite_is_not_called_missing() -> None:
    steps = [{"step": number, "loss": math.nan, "grad_norm": 1.0 / number} for number in (1, 2, 3)]
    curves = run_curves(sample(steps=steps))
    assert "Training loss" in curves.not_finite
    assert "Training loss" not in curves.not_logged
    assert "Logged, but never finite: Training loss." in render_markdown(build_page(sample(steps=steps)))


def test_the_sentence_names_the_largest_part_and_its_key() -> None:
    for rows, words in (
        (timed(5), ("50% of it encoding", "retain")),
        (timed(5, data_seconds=0.4, encode_seconds=0.3), ("40% of it waiting for data", "num_workers")),
    ):
        split = split_time(rows)
        assert split is not None
        assert all(word in split.sentence for word in words)


def test_long_runs_are_drawn_in_stretches_that_keep_the_mean() -> None:
    many = timed(500) + timed(500, step_seconds=2.0, encode_seconds=1.5)
    split = split_time(many)
    assert split is not None
    encode = next(part for part in split.parts if part.key == "encode_seconds")
    assert len(encode.course_N) == len(split.steps_N) == MAX_STRETCHES
    assert (encode.course_N[0], encode.course_N[-1]) == (0.5, 1.5)
    assert encode.seconds == pytest.approx(1.0, abs=0.01)


def test_all_forms_show_the_split_the_findings_and_the_performance() -> None:
    performance = {"model": "<b>tiny</b>", "peak_memory_bytes": 61_000_000_000, "tokens_per_second": 812.5}
    finding = Finding("padding", "1.42 tokens for <each> real | one.", "Lower gradient_cache_chunk_tokens.")
    content = build_page(sample(steps=timed(4), findings=(finding,), performance=performance))
    found = re.search(r'<section id="speed".*?</section>', render_html(content), re.DOTALL)
    assert found is not None
    shown, text, data = Page(found.group()), render_markdown(content), json.loads(render_json(content))
    for form in (shown.text, text):
        assert [word for word in ("Waiting for data", "250 ms", "Padding.", "56.8 GiB") if word not in form] == []
    assert data["findings"] == [{"cause": finding.cause, "sentence": finding.sentence, "advice": finding.advice}]
    assert data["performance"] == performance
    assert data["time_of_a_step"] == pytest.approx({"num_steps": 3, **TIMES, "other_seconds": 0.125})
    assert "50% of it encoding" in (shown.named("svg")[0]["aria-label"] or "")


def test_durations_have_three_digits_and_a_small_share_is_never_nothing() -> None:
    shown = {0.0000123: "0.0123 ms", 0.0421: "42.1 ms", 1.2345: "1.23 s", 125.4: "125 s"}
    assert {seconds: seconds_text(seconds) for seconds in shown} == shown
    assert [percent_text(share) for share in (0.004, 0.0, 0.126)] == ["under 1%", "0%", "13%"]
    assert [percent_text(share) for share in (0.99, 0.999, 1.0)] == ["99%", "over 99%", "100%"]


def test_bytes_that_were_averaged_are_shown_with_their_unit() -> None:
    content = build_page(sample(performance={"peak_memory_bytes": 1.2e10}))
    assert "| peak memory | 11.2 GiB |" in render_markdown(content)


# --- ranks and scores


def random_case() -> tuple[RetrievalData, dict[str, list[tuple[str, float]]]]:
    rng, documents = random.Random(0), [f"d{number}" for number in range(150)]
    run, qrels = {}, {}
    for query in (f"q{number}" for number in range(30)):
        run[query] = [(name, 1.0 - place / 200) for place, name in enumerate(rng.sample(documents, 100))]
        qrels[query] = {name: rng.choice([0, 1, 2]) for name in rng.sample(documents, 12)} | {"lost": 1}
    run["q0"] = []
    return RetrievalData("random", dict.fromkeys(run, "x"), dict.fromkeys(documents, "y"), qrels), run


def test_recall_at_every_cut_equals_trec_evals_and_queries_without_a_judgement_dont_count() -> None:
    task, run = random_case()
    cuts = [1, 2, 3, 7, 10, 50, 99, 100]
    expected = {name: np.mean(list(values.values())) for name, values in score_run(run, task.qrels, cuts).items()}
    for given in (run, {**run, "unjudged": run["q1"]}):
        final = result("final", dict.fromkeys(given, 0.5), run=given)
        recall_K = recalls_by_depth(task, final, final, None)["final"]
        assert 0 < recall_K[9] < recall_K[99] < 1
        assert [recall_K[cut - 1] for cut in cuts] == pytest.approx(
            [expected[f"recall@{cut}"] for cut in cuts], abs=1e-12
        )


def test_scores_are_split_by_judgement_and_those_that_are_not_finite_are_counted() -> None:
    run = {"q1": [("d1", 0.9), ("d2", 0.5)], "q4": [("d1", 0.4), ("d4", math.nan), ("d3", math.inf)]}
    final = result("final", {"q1": 1.0, "q4": 0.0}, run=run)
    split = split_scores(sample().task, final, final)[1]
    assert split.relevant.tolist() == [0.9]
    assert split.others.tolist() == [0.5, 0.4], "d1 is judged for q4, with grade 0"
    assert split.num_non_finite == 2
    for number in ("1 relevant document", "0.900", "2 others", "0.450", "2 scores NaN"):
        assert number in split.summary


def test_all_three_forms_show_recall_and_scores() -> None:
    content = build_page(sample())
    text, data = render_markdown(content), json.loads(render_json(content))
    assert "| System | recall@1 | recall@3 |" in text
    assert "Scores after training" in text
    assert list(data["recall_at_k"]) == ["baseline", "final", "BM25"]
    assert data["recall_at_k"]["final"] == pytest.approx([0.25, 0.5, 0.625])
    for score in (0.5, math.nan):
        base, final = (result(name, {"q1": 1.0}, run={"q1": [("d1", score)]}) for name in ("a", "b"))
        shown = page(sample(baseline=base, final=final, bm25=None)).text
        assert "Recall at k = 1 to 1" in shown
        assert ("Scores after training" in shown) == math.isfinite(score)


# --- the map of vectors


def encoded(task: RetrievalData, documents: np.ndarray, queries: np.ndarray) -> EncodedTask:
    builder = RunBuilder(task, ks=(1, 10), depth=10)
    return EncodedTask(task, builder, documents.astype(np.float32), queries.astype(np.float32), 0.0)


def test_the_map_shows_the_two_directions_of_largest_variance() -> None:
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(50, 2)) * [5.0, 1.0]
    turn, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    rows = np.concatenate([flat, 0.001 * rng.normal(size=(50, 6))], axis=1) @ turn
    places, share = project(rows)
    assert share > 0.999
    assert (places.min(axis=0), places.max(axis=0)) == (pytest.approx([0, 0]), pytest.approx([1, 1]))
    for axis in (0, 1):
        assert abs(np.corrcoef(places[:, axis], flat[:, axis])[0, 1]) > 0.97
    assert project(np.ones((4, 3)))[1] == 0.0, "equal rows have no direction"


def test_equal_rows_are_one_dot_whatever_rounding_makes_of_their_mean() -> None:
    row = np.random.default_rng(0).normal(size=8)
    places, share = project(np.tile(row / np.linalg.norm(row), (20, 1)))
    assert share == 0.0
    assert len(np.unique(places, axis=0)) == 1


def test_a_relevant_document_that_the_corpus_lacks_hides_no_other() -> None:
    qrels = {"q0": {"a-lost-one": 1, "d2": 1}}
    task = RetrievalData("toy", {"q0": "x"}, {f"d{number}": "y" for number in range(900)}, qrels)
    rng = np.random.default_rng(4)
    made = build_geometry(encoded(task, rng.normal(size=(900, 16)), rng.normal(size=(1, 16))))
    assert made is not None
    assert "d2" in {identifier for kind, identifier, *_ in made.points if kind == "document"}


def test_pairs_over_the_threshold_are_counted_and_the_closest_are_named() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(1200, 32))
    rows[1100], rows[700] = rows[3], rows[600] + 0.01 * rng.normal(size=32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = np.argwhere(np.triu(unit @ unit.T > NEAR_COSINE, k=1))
    pairs, count = near_pairs(unit, [f"d{number}" for number in range(1200)])
    assert count == len(expected) == 2
    assert [pair[:2] for pair in pairs] == [("d3", "d1100"), ("d600", "d700")]
    assert pairs[0][2] == pytest.approx(1.0)


def test_a_large_set_is_sampled_with_what_is_relevant_to_its_queries() -> None:
    def task_of(num_queries: int, num_documents: int) -> RetrievalData:
        queries, documents = range(num_queries), range(num_documents)
        qrels = {f"q{number}": {f"d{num_documents - 1 - number}": 1} for number in queries}
        return RetrievalData(
            "toy", {f"q{n}": f"query {n}" for n in queries}, {f"d{n}": f"text {n}" for n in documents}, qrels
        )

    rng, task = np.random.default_rng(2), task_of(300, 900)
    made = build_geometry(encoded(task, rng.normal(size=(900, 16)), rng.normal(size=(300, 16))))
    assert made is not None
    documents, queries = (
        {identifier for kind, identifier, *_ in made.points if kind == side} for side in ("document", "query")
    )
    assert (len(documents), len(queries)) == (MAP_DOCUMENTS, MAP_QUERIES)
    assert all(name in documents for query in queries for name in task.qrels[query])
    assert build_geometry(encoded(task_of(1, 1), np.ones((1, 4)), np.ones((1, 4)))) is None


def test_documents_of_the_map_are_spread_over_the_whole_set_beside_the_relevant_ones() -> None:
    queries = {f"q{number}": {f"d{number}": 1} for number in range(100)}
    task = RetrievalData("toy", dict.fromkeys(queries, "x"), {f"d{n}": "y" for n in range(1_000)}, queries)
    rng = np.random.default_rng(4)
    made = build_geometry(encoded(task, rng.normal(size=(1_000, 16)), rng.normal(size=(100, 16))))
    assert made is not None
    shown = {int(identifier[1:]) for kind, identifier, *_ in made.points if kind == "document"}
    assert len(shown) == MAP_DOCUMENTS
    assert shown >= set(range(100)), "relevant to the queries of the map"
    assert sum(number >= 550 for number in shown) == 50, "half of the rest is from the rear half of the rest"


@pytest.mark.slow
def test_the_page_names_each_point_on_hover_and_stays_small_with_a_map_of_pictures(tmp_path: Path) -> None:
    report, rng = sample(), np.random.default_rng(3)
    rows = np.eye(4, 8)
    rows[1] = rows[0]
    made = build_geometry(encoded(report.task, rows, np.eye(4, 8)))
    assert made is not None
    shown = page(replace(report, geometry=made))
    titles = [text for text, path in shown.texts if path[-1:] == ("title",) and "svg" in path]
    assert len(titles) == len(made.points)
    assert any(title.startswith("query: ") for title in titles)
    assert "1 pair of documents is nearly the same" in shown.text
    assert "Embedding map" not in page(report).text
    pictures = {f"d{number}": Image(str(tmp_path / f"{number}.png")) for number in range(260)}
    for picture in pictures.values():
        PIL.Image.fromarray(rng.integers(0, 255, (200, 200, 3), dtype=np.uint8)).save(picture.path)
    task = replace(report.task, documents={**report.task.documents, **pictures})
    made = build_geometry(encoded(task, rng.normal(size=(len(task.documents), 16)), rng.normal(size=(4, 16))))
    assert isinstance(made, Geometry)
    source = page(replace(report, task=task, geometry=made)).source
    assert source.count("<image ") > 50
    assert len(source.encode()) < 2_000_000


# --- the plan


def candidate(*, recommended: bool, apart: int = 0) -> dict[str, object]:
    sizes = {"parameters": 3 << 20, "activations": 2 << 20, "apart": apart, "total": (5 << 20) + apart}
    return {"strategy": "ddp", "bytes_per_device": sizes, "recommended": recommended}


def test_lists_of_texts_and_of_candidates_are_tables_and_other_settings_are_not() -> None:
    reasons, settings, tables = plan_parts(
        {"strategy": "ddp", "reasons": ["fits"], "oom_ladder": ["1. less", "2. more"], "zero_stages": [],
         "candidates": [{"strategy": "ddp", "bytes_per_device": {"total": 2**30}, "fits": True}]}
    )  # fmt: skip
    assert (reasons, [key for key, _ in settings]) == (["fits"], ["strategy", "zero_stages"])
    assert tables == [
        ("oom_ladder", [{"oom_ladder": "1. less"}, {"oom_ladder": "2. more"}]),
        ("candidates", [{"strategy": "ddp", "total": "1 GiB", "fits": "yes"}]),
    ]


def test_only_the_chosen_way_is_marked_and_bytes_that_are_never_there_at_once_are_a_size() -> None:
    ways = [candidate(recommended=recommended, apart=-(512 << 10)) for recommended in (False, True, False)]
    (table,) = plan_section({"reasons": [], "candidates": ways}).blocks
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["ddp", "✓ ddp (chosen)", "ddp"]
    assert table.tones == {1: "chosen"}
    cells = dict(zip(table.heads, table.rows[0], strict=True))
    assert (cells["never at once"], cells["total"]) == ("512 KiB", "4.5 MiB")
    assert not any("-" in str(cell) for cell in cells.values())
    assert table.caption
    (plain,) = plan_section({"oom_ladder": ["1. less"]}).blocks
    assert isinstance(plain, Table)
    assert plain.caption == ""
