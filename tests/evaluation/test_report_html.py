"""The HTML page: nothing that a user wrote becomes markup, the page stands alone, and everyone can read it."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from test_report_samples import METRIC, STEPS, STYLE, VALUES, Page, page, result, sample

from vembed.data.judged import RetrievalData
from vembed.evaluation.judge import Verdict, verdict
from vembed.evaluation.report.run_report import build_page
from vembed.pages.html import render_html
from vembed.pages.text import MINUS

pytestmark = pytest.mark.usefixtures("drawn_once")

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="',
    "' onfocus='alert(1)' autofocus",
    "</style></title></textarea><iframe src=//evil.example>",
    "<svg/onload=alert(1)>",
    "<!-- <b> --><![CDATA[ ]]>",
    "&lt;b&gt; &amp; &#60;",
    "$\\frac{1}{2}$ and $_^$",
    "javascript:alert(1)",
    "`ls` | [a](javascript:alert(1))",
)
OUR_NAMES = """
    html head meta title style body header main footer section nav article p h1 h2 h3 h4 h5 a span strong div dl dt dd
    ul ol li q table caption thead tbody tr th td details summary pre code figure figcaption
    svg g path defs use text clippath rect line circle
"""
OURS = set(OUR_NAMES.split())


@cache
def plain_page() -> Page:
    return page(sample(steps=STEPS))


def hostile_report(text: str):
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
    decided = verdict(base, final, metric)
    return sample(
        title=f"title {text}",
        verdict=replace(decided, sentence=f"sentence {text}"),
        task=task,
        baseline=base,
        final=final,
        bm25=replace(base, system=f"bm {text}"),
        evaluations=[(1, {metric: 0.5}), (2, {metric: 0.6, f"other {text}": 0.1})],
        plan={
            "strategy": text,
            "reasons": [f"reason {text}"],
            f"key {text}": text,
            "rows": [{"strategy": text, text: 1}],
        },
        config={f"config {text}": {text: [text]}, "list": [text]},
        environment={f"environment {text}": text},
        data_facts=[(f"fact {text}", text)],
        command=f"command {text}",
        dev_task=f"dev {text}",
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_users_is_shown_literally_and_never_becomes_markup(text: str) -> None:
    shown = page(hostile_report(text))
    assert {tag for tag, _, _ in shown.elements} <= OURS
    for tag, attributes, _ in shown.elements:
        assert not [name for name in attributes if name.startswith("on") or name in {"src", "autofocus"}], tag
    line = " ".join(text.split())
    for place in ("title", "sentence", "task", "query q1", "document", "reason", "config", "fact", "note", "command"):
        assert f"{place} {line}" in shown.text, place
    for place in ("environment", "key", "lost", "m", "dev"):
        assert f"{place} {line}" in shown.text, place
    assert f"d1{line}" in shown.text


def test_the_parser_of_these_tests_would_see_an_injected_element() -> None:
    shown = Page("<p>" + HOSTILE[1] + "</p>")
    assert shown.named("img") == [{"src": "x", "onerror": "alert(1)"}]


def test_control_characters_reordering_marks_and_lone_surrogates_are_shown_as_escapes() -> None:
    report = sample(title="a\x00b\x1b[31m\u202ec\ud800d", command="run\x07\n  --next\r\tx")
    source = render_html(build_page(report))
    shown = Page(source)
    assert "a\\x00b\\x1b[31m\\u202ec\\ud800d" in shown.text
    assert "run\\x07\n  --next\\x0d\tx" in shown.text
    source.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", source)


def test_joiners_that_emoji_and_scripts_need_stay() -> None:
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"
    assert family in page(sample(title=family)).text


def test_the_page_loads_nothing_from_anywhere() -> None:
    shown = plain_page()
    assert "http:" not in shown.source
    assert "https:" not in shown.source
    for tag, attributes, _ in shown.elements:
        assert not {"src", "srcset", "data", "action", "poster"} & attributes.keys(), tag
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), tag
    assert set(re.findall(r"url\((.)", shown.source)) <= {"#"}
    assert "@import" not in shown.source
    assert [meta for meta in shown.named("meta") if "default-src 'none'" in (meta.get("content") or "")]
    assert not shown.named("script")
    assert not shown.named("link")


def test_the_page_has_one_title_headings_in_order_and_named_tables_and_figures() -> None:
    shown = plain_page()
    assert shown.named("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _, _ in shown.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    num_tables, num_figures = len(shown.named("table")), len(shown.named("figure"))
    assert num_tables >= 6
    assert num_figures == 10
    assert len(shown.named("caption")) == num_tables
    assert len(shown.named("figcaption")) == num_figures
    assert all(cell.get("scope") in {"col", "row"} for cell in shown.named("th"))
    for drawing in shown.named("svg"):
        assert drawing.get("aria-hidden") == "true" or (drawing.get("role") == "img" and drawing.get("aria-label"))
    ids = [attributes["id"] for _, attributes, _ in shown.elements if attributes.get("id")]
    assert len(ids) == len(set(ids)), "an id stands twice"
    links = {link["href"] for link in shown.named("a")}
    assert links
    assert links <= {f"#{name}" for name in ids}


def test_each_curve_is_put_into_words() -> None:
    text = plain_page().text
    assert "From 3 at step 1 to 0.1 at step 30; lowest 0.1 at step 30, highest 3 at step 1." in text
    assert f"2e{MINUS}4 throughout." in text
    assert "5.68 GiB throughout." in text
    assert "Dev ndcg@10" in text


@pytest.mark.parametrize(("word", "symbol"), [("improved", "▲"), ("within noise", "≈"), ("worse", "▼")])
def test_the_verdict_is_told_by_word_and_symbol_and_not_by_colour_alone(word: str, symbol: str) -> None:
    report = sample()
    shown = page(replace(report, verdict=Verdict(word, report.verdict.comparison, f"{word}: because")))
    badge = [text for text, path in shown.texts if f"{symbol} {word}" in text and path[-2:] == ("h2", "span")]
    assert badge == [f"{symbol} {word}"]
    assert f"{word}: because" in shown.text


def test_results_are_marked_right_and_wrong_in_words_and_missed_ones_are_shown() -> None:
    text = plain_page().text
    assert "✓ right" in text
    assert "✗ wrong" in text
    assert "○ missed" in text
    assert "Fish swim." in text, "relevant for q3 and q4, retrieved for neither"
    assert "where is the cat" in text


def test_a_long_text_is_clipped_with_an_ellipsis_and_whole_in_details() -> None:
    words = " ".join(f"word{number}" for number in range(200))
    task = replace(sample().task, documents={"d1": words, "d2": "short", "d3": "x", "d4": "y"})
    shown = page(sample(task=task))
    inside = [text for text, path in shown.texts if "details" in path and words in text]
    outside = [text for text, path in shown.texts if path[-2:] == ("div", "span") and text.startswith("word0 ")]
    assert inside
    assert outside
    assert all(text.endswith("…") and len(text) < 250 for text in outside)


def test_a_huge_text_says_how_much_is_left_out() -> None:
    task = replace(sample().task, documents={"d1": "x" * 10_000, "d2": "short", "d3": "x", "d4": "y"})
    text = page(sample(task=task)).text
    assert "… (7,000 more characters)" in text
    assert "x" * 3_000 in text
    assert "x" * 3_001 not in text


def test_numbers_that_are_not_finite_read_as_not_available() -> None:
    steps = [{"step": 1, "loss": math.nan, "grad_norm": math.inf}, {"step": 2, "loss": 2.0, "grad_norm": math.inf}]
    evaluations = [(1, {METRIC: math.nan}), (2, {METRIC: 0.5})]
    baseline = replace(sample().baseline, metrics={METRIC: math.nan})
    text = page(sample(steps=steps, evaluations=evaluations, baseline=baseline, config={"temperature": math.nan})).text
    assert "n/a" in text
    assert "1 value NaN or infinite, left out." in text
    assert "Not logged: Learning rate, Gradient norm, Samples per second, Tokens per second, Peak memory." in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_a_run_without_steps_evaluations_bm25_plan_or_facts_still_has_a_page() -> None:
    shown = page(sample(steps=[], evaluations=[], bm25=None, plan={}, config={}, environment={}, data_facts=[]))
    assert "BM25" not in shown.text
    assert (
        "Not logged: Training loss, Learning rate, Gradient norm, Samples per second, Tokens per second, "
        "Peak memory, Dev metrics." in shown.text
    )
    assert "BM25" in plain_page().text


def test_one_query_without_results_or_texts_has_a_page() -> None:
    base, final = (result(name, {"q1": value}, run={}) for name, value in (("a", 0.0), ("b", 0.0)))
    task = RetrievalData("empty", {}, {}, {"q1": {"lost": 1}})
    report = sample(baseline=base, final=final, bm25=None, task=task, verdict=verdict(base, final, METRIC))
    text = page(report).text
    assert "none with 1 query" in text
    assert "Nothing was retrieved." in text
    assert "(the set has no text for this id)" in text
    assert "not retrieved" in text


def test_one_step_and_one_evaluation_are_drawn() -> None:
    steps = [{"step": 1, "loss": 0.0, "grad_norm": -1.0}]
    text = page(sample(steps=steps, evaluations=[(7, {METRIC: 0.5})], dev_task="toy/dev")).text
    assert "0 at step 1, the only point." in text
    assert "0.500 at step 7, the only point. On toy/dev; no step 0 was given." in text


def test_drawings_take_their_colours_from_the_page() -> None:
    drawings = re.findall(r"<svg.*?</svg>", plain_page().source, flags=re.DOTALL)
    assert len(drawings) >= 8
    for drawing in drawings:
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!-)", re.sub(r'(href="|url\()#[^")]+', "", drawing))
        assert "<style" not in drawing, "it would match the whole page"
    assert "var(--series)" in "".join(drawings)
    assert "currentColor" in "".join(drawings)


def _variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_is_legible_in_light_and_in_dark() -> None:
    light, dark = (_variables(block) for block in STYLE.split("@media (prefers-color-scheme: dark)", 1))
    dark = {name: dark[name] for name in light}
    assert light["page"] != _variables(STYLE.split("prefers-color-scheme: dark")[1].split("}")[0])["page"]
    for theme in (light, _variables(STYLE.split("prefers-color-scheme: dark")[1].split("}")[0])):
        pairs = [(ink, ground) for ink in ("ink", "muted", "series") for ground in ("page", "card", "soft")]
        pairs += [(tone, ground) for tone in ("better", "worse", "even") for ground in ("card", f"{tone}-soft")]
        for ink, ground in pairs:
            bright, dim = sorted((_luminance(theme[ink]), _luminance(theme[ground])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (ink, ground)
    assert "@media print" in STYLE


@pytest.mark.slow
def test_the_page_stays_small_with_many_queries_steps_and_long_texts() -> None:
    rng = random.Random(0)
    ids = [f"q{number}" for number in range(2_400)]
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
    decided = verdict(base, final, METRIC)
    report = sample(
        baseline=base, final=final, bm25=None, task=task, steps=steps, evaluations=evaluations, verdict=decided
    )
    shown = page(report)
    assert len(shown.source.encode()) < 2_000_000
    assert "Thinned to at most 500 of 5,000 points" in shown.text
    assert "Of 2,400 queries" in shown.text
