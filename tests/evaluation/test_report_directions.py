"""A report of both directions and of two checkpoints: every number in all three forms, and for every reader."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kit.balls import ball
from test_report_html import _luminance
from test_report_samples import METRIC, STEPS, Page, page, sample

from vembed.batch import Composed, Image
from vembed.data.judged import RetrievalData
from vembed.evaluation.judge import mean_interval, verdict
from vembed.evaluation.report.comparison import best_dev_step, forward_comparisons, systems_note
from vembed.evaluation.report.curves import run_curves
from vembed.evaluation.report.run_report import Reverse, build_page
from vembed.evaluation.results import EvaluationResult
from vembed.pages.html import environment, render_html
from vembed.pages.markdown import render_markdown
from vembed.pages.write import render_json

if TYPE_CHECKING:
    from vembed.evaluation.report.run_report import RunReport

pytestmark = pytest.mark.usefixtures("drawn_once")

METRICS = (METRIC, "recall@1", "hit@1", "hit@5", "hit@10")


def scored(system: str, task: RetrievalData, level: float) -> EvaluationResult:
    """A system whose values differ by metric and by query, the higher the level the better."""
    draw = np.random.default_rng(int(1000 * level))
    per_query = {
        name: {query: float(np.clip(draw.normal(level, 0.05), 0, 1)) for query in task.queries} for name in METRICS
    }
    means = {name: float(np.mean(list(values.values()))) for name, values in per_query.items()}
    ranked = tuple((name, 0.9 - place / 10) for place, name in enumerate(task.documents))
    run = dict.fromkeys(task.queries, ranked)
    return EvaluationResult(task.name, system, means, per_query, run, len(task.queries), len(task.documents))


@cache
def report() -> RunReport:
    task = RetrievalData(
        "toy/test",
        {f"q{n}": f"caption {n}" for n in range(8)},
        {f"d{n}": Image(f"d{n}.png", b"no picture") for n in range(8)},
        {f"q{n}": {f"d{n}": 1} for n in range(8)},
    )
    turned = task.reversed()
    before, last, after = (scored("tiny", task, level) for level in (0.1, 0.5, 0.7))
    before_r, last_r, after_r = (scored("tiny", turned, level) for level in (0.15, 0.55, 0.75))
    return sample(
        task=task,
        baseline=before,
        final=after,
        last=last,
        bm25=None,
        verdict=verdict(before, after, METRIC),
        reverse=Reverse(
            task=turned, verdict=verdict(before_r, after_r, METRIC), baseline=before_r, final=after_r, last=last_r
        ),
        evaluations=[(10, {METRIC: 0.7}), (20, {METRIC: 0.6})],
        dev_task="toy/dev",
        kept_step=10,
        last_step=20,
        steps=[{**row, "masked_negatives": row["step"] % 3, "tokens_per_second": 5e3} for row in STEPS],
    )


@cache
def shown() -> Page:
    return page(report())


@pytest.mark.slow
def test_the_block_of_the_verdict_has_a_plain_line_on_the_other_direction() -> None:
    reverse = report().reverse
    assert reverse is not None
    block = shown().source.split('id="verdict"')[1].split("</section>")[0]
    assert f"Reversed, pictures search texts: {reverse.verdict.sentence}".replace(">", "&gt;") in block
    assert "rsum" in block
    assert "Reversed" not in page(sample()).text


@pytest.mark.slow
def test_every_system_has_a_mean_and_an_interval_in_each_direction() -> None:
    given = report()
    reverse = given.reverse
    assert reverse is not None
    data = json.loads(render_json(build_page(given)))
    markdown = render_markdown(build_page(given))
    results = {"baseline": given.baseline, "last": given.last, "final": given.final}
    turned = {"baseline": reverse.baseline, "last": reverse.last, "final": reverse.final}
    for part, systems in ((data["metrics"], results), (data["reverse"]["metrics"], turned)):
        for key, result in systems.items():
            assert result is not None
            for name in METRICS:
                low, high = mean_interval([result], name)
                assert part[key]["intervals"][name] == pytest.approx([low, high])
                cell = f"{result.metrics[name]:.3f} ({low:.3f} to {high:.3f})"
                assert cell in markdown, (key, name)
                assert f">{low:.3f} to {high:.3f}<" in shown().source, (key, name)
    assert data["metrics"]["bm25"] is None


def test_columns_name_the_checkpoints_and_a_sentence_tells_them_apart() -> None:
    heads = [text for text, path in shown().texts if path[-1:] == ("th",) and "thead" in path]
    assert heads[:6] == ["Metric", "Baseline", "Last, step 20", "Final, step 10", "Difference", "Reading"]
    assert "Final is the checkpoint of step 10, the best on the dev set" in shown().text
    one = replace(report(), last=None, kept_step=20, evaluations=[(10, {METRIC: 0.5}), (20, {METRIC: 0.6})])
    assert list(forward_comparisons(one).results) == ["baseline", "final"]
    assert "the last and also the best" in systems_note(one)
    assert "best" not in systems_note(replace(one, evaluations=[]))
    assert systems_note(sample()) == ""


def test_a_model_that_the_dev_set_likes_less_than_the_untrained_one_is_not_called_the_best() -> None:
    rows = [(0, {METRIC: 0.7}), (10, {METRIC: 0.5}), (20, {METRIC: 0.6})]
    lost = replace(report(), last=None, kept_step=20, evaluations=rows, dev_task="dev.jsonl")
    assert "the best trained one on the dev set, where the untrained model did better" in systems_note(lost)
    text = page(lost).text
    assert f"worse than the untrained one: {METRIC} 0.6000 at step 20, 0.7000 before training" in text
    assert "worse than the untrained one" not in page(replace(lost, evaluations=rows[1:])).text
    assert "worse than the untrained one" not in page(replace(lost, dev_task="")).text, "the verdict itself says so"


def test_the_best_dev_step_is_the_earliest_of_the_highest_and_never_the_untrained_one() -> None:
    rows = [(0, {METRIC: 0.9}), (5, {METRIC: 0.4}), (9, {METRIC: 0.6}), (12, {METRIC: 0.6})]
    assert best_dev_step(replace(report(), evaluations=rows)) == 9
    assert best_dev_step(replace(report(), evaluations=rows[:1])) is None


def test_the_kept_checkpoint_is_marked_in_the_curve_in_words_and_in_the_table() -> None:
    assert run_curves(report()).marked_step == 10
    assert "The large dot is step 10, the checkpoint that was kept." in shown().text
    drawing = next(svg for svg in shown().named("svg") if (svg.get("aria-label") or "").startswith("Dev ndcg@10"))
    assert "step 10, the checkpoint that was kept" in (drawing["aria-label"] or "")
    assert "✓ 10 (kept)" in shown().text
    assert "| ✓ 10 (kept) |" in render_markdown(build_page(report()))
    assert run_curves(replace(report(), kept_step=7)).marked_step is None
    assert run_curves(replace(report(), kept_step=None)).marked_step == 10, "the highest"


def test_the_sum_of_recalls_is_that_of_both_directions() -> None:
    given = report()
    assert given.reverse is not None
    total = 100 * sum(r.metrics[f"hit@{k}"] for r in (given.final, given.reverse.final) for k in (1, 5, 10))
    data = json.loads(render_json(build_page(given)))
    assert data["reverse"]["rsum"]["final"]["value"] == pytest.approx(total)
    assert f"{total:.1f}" in shown().text
    assert f"{total:.1f} (" in render_markdown(build_page(given))
    assert json.loads(render_json(build_page(sample())))["reverse"] is None


def test_optional_curves_are_drawn_where_they_move_and_never_missed() -> None:
    assert "False negatives masked, per step" in shown().text
    flat = [{**row, "masked_negatives": 0.0} for row in STEPS[:3]]
    text = page(sample(steps=flat)).text
    assert "False negatives" not in text
    assert "Temperature" not in text


def test_the_page_has_landmarks_and_a_way_past_the_top() -> None:
    names = [tag for tag, _, _ in shown().elements]
    for landmark in ("header", "main", "footer", "nav"):
        assert names.count(landmark) == 1, landmark
    first = next(attributes for tag, attributes, path in shown().elements if path[-1:] == ("body",))
    assert (first["class"], first["href"]) == ("skip", "#main")
    (main,) = shown().named("main")
    assert main["id"] == "main"
    headings = [text for text, path in shown().texts if "h2" in path]
    assert headings[0] == "Verdict: "


def test_tables_that_a_narrow_screen_takes_apart_stay_tables_for_screen_readers() -> None:
    stacked = [attributes for attributes in shown().named("table") if attributes.get("class") == "stack"]
    assert len(stacked) >= 4
    assert all(table["role"] == "table" for table in stacked)
    inside = [(tag, attributes) for tag, attributes, path in shown().elements if tag == "td"]
    labelled = [attributes for _, attributes in inside if attributes.get("data-label")]
    assert labelled
    assert all(cell["role"] == "cell" for cell in labelled)
    assert "attr(data-label)" in shown().source


def test_every_region_has_a_name_of_its_own() -> None:
    labels = [attributes["aria-label"] for _, attributes, _ in shown().elements if attributes.get("role") == "region"]
    assert len(labels) == len(set(labels)) > 8
    assert {"Recall by k", "Recall by k, reversed"} <= set(labels)
    captions = [text for text, path in shown().texts if "caption" in path]
    assert captions.count("Mean recall over the queries.") == captions.count("The same, reversed.") == 1


def test_a_composed_query_shows_its_picture_and_its_text() -> None:
    given = report()
    queries = {name: Composed((Image("shirt.png", b"none"),), f"in red {name}") for name in given.task.queries}
    content = build_page(replace(given, task=replace(given.task, queries=queries), reverse=None))
    text = Page(render_html(content)).text
    assert "Query picture, with: " in text
    assert "in red q" in text
    assert "picture shirt.png, with: in red q" in render_markdown(content)


def test_all_pictures_of_an_item_are_shown() -> None:
    given = report()
    pages = tuple(Image(f"{number}.png", ball(colour)) for number, colour in enumerate(("red", "blue")))
    queries = {name: Composed(pages, "") for name in given.task.queries}
    content = build_page(replace(given, task=replace(given.task, queries=queries), reverse=None))
    shown = Page(render_html(content))
    assert "Query picture" in shown.text
    copies = [content.copies[page].uri for page in pages]
    found = [attributes["src"] for attributes in shown.named("img")]
    assert [uri for uri in found if uri in copies][:2] == copies
    assert "picture 0.png + picture 1.png" in render_markdown(content)


def _sheet() -> str:
    """The style of all pages."""
    return environment().get_template("page.css.jinja").render()


def _themes() -> list[dict[str, str]]:
    """The colours of light and of dark on a screen, later definitions winning."""
    style = _sheet().split("@media print")[0]
    blocks = re.findall(r"(@media \(prefers-color-scheme: dark\) \{ )?:root \{([^}]*)\}", style)
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for is_dark, block in blocks:
        (dark if is_dark else light).update(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
    return [light, {**light, **dark}]


def test_every_text_colour_of_the_pages_is_legible_in_both_themes() -> None:
    themes = _themes()
    assert themes[0]["page"] != themes[1]["page"]
    assert themes[0]["series-2"] != themes[1]["series-2"]
    texts = {
        "ink": ("page", "card", "soft", "better-soft"),
        "muted": ("page", "card", "soft", "better-soft"),
        "series": ("page", "card", "soft"),
        "better": ("page", "card", "soft", "better-soft"),
        "worse": ("page", "card", "soft", "worse-soft"),
        "even": ("page", "card", "soft", "even-soft"),
        "series-2": ("card", "page"),
        "series-3": ("card", "page"),
        "series-4": ("card", "page"),
    }
    used = set(re.findall(r"(?<![-a-z])color: var\(--([a-z0-9-]+)\)", _sheet()))
    assert used - {"tone"} <= texts.keys(), "a colour of a text that this test doesn't look at"
    for theme in themes:
        for text, grounds in texts.items():
            for ground in grounds:
                bright, dim = sorted((_luminance(theme[text]), _luminance(theme[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)
