"""What the tests of pages share: a small report, hostile texts, a page taken apart, and what is true of every page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from vembed.data.judged import RetrievalData
from vembed.evaluation.judge import verdict
from vembed.evaluation.report.inputs import RunReport
from vembed.evaluation.report.run_report import build_page
from vembed.evaluation.results import EvaluationResult
from vembed.pages.html import render_html

METRIC = "ndcg@10"
VALUES = {
    "base": {"q1": 0.1, "q2": 0.5, "q3": 0.9, "q4": 0.25},
    "final": {"q1": 0.9, "q2": 0.5, "q3": 0.4, "q4": 0.75},
}
STEPS = [
    {
        "step": step,
        "loss": 3.0 / step,
        "learning_rate": 2e-4,
        "grad_norm": 1.0 + 1 / step,
        "samples_per_second": 400.0 + step,
        "peak_memory_bytes": 6.1e9,
    }
    for step in range(1, 31)
]
"""Logged rows; not in the sample by default, since each curve takes time to draw."""

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
MARKUP = (
    *HOSTILE,
    "[link](https://evil.example) ![image](x.png) <https://evil.example>",
    "a | b | c",
    "``` ```` `code` ~~~",
    "# heading\n\n- item\n\n1. one\n\n> quote\n\n---\n\n    code",
    "**bold** _soft_ ~~gone~~ \\*escaped\\*",
    "https://evil.example www.evil.example me@evil.example @everyone #12",
    "\\| \\\\| \\`",
    "<details><summary>x</summary>",
    "[ref]: https://evil.example",
)
OUR_NAMES = """
    html head meta title style body header main footer section nav article p h1 h2 h3 h4 h5 a span strong div dl dt dd
    ul ol li q table caption thead tbody tr th td details summary pre code figure figcaption img
    svg g path defs use text clippath rect line circle
"""
OURS = frozenset(OUR_NAMES.split())
"""Tags that a page may have."""

VOID = {"meta", "br", "hr", "img"}


def result(system: str, values: dict[str, float], run: dict | None = None, metric: str = METRIC) -> EvaluationResult:
    run = run if run is not None else {query: [("d1", 0.9), ("d2", 0.5), ("d3", 0.1)] for query in values}
    means = {metric: sum(values.values()) / len(values)} if values else {}
    return EvaluationResult("toy/test", system, means, {metric: values}, run, len(values), 4)


def sample(**changes: object) -> RunReport:
    baseline, final = result("tiny", VALUES["base"]), result("tiny-trained", VALUES["final"])
    report = RunReport(
        title="toy run",
        verdict=verdict(baseline, final, METRIC),
        task=RetrievalData(
            name="toy/test",
            queries={"q1": "where is the cat", "q2": "a fast dog", "q3": "two birds", "q4": "one fish"},
            documents={"d1": "The cat sat.", "d2": "A dog ran fast.", "d3": "Birds fly.", "d4": "Fish swim."},
            qrels={"q1": {"d1": 1}, "q2": {"d2": 2}, "q3": {"d3": 1, "d4": 1}, "q4": {"d4": 1, "d1": 0}},
        ),
        baseline=baseline,
        final=final,
        bm25=result("BM25", VALUES["base"]),
        steps=[],
        evaluations=[(10, {METRIC: 0.55}), (20, {METRIC: 0.61})],
        plan={
            "strategy": "ddp_gradcache",
            "reasons": ["The batch does not fit as one chunk.", "In chunks of 32 it does."],
            "retain": 0.5,
            "candidates": [
                {"strategy": "single", "bytes_per_device": {"activations": 9_700_000_000}, "fits": False},
                {"strategy": "ddp_gradcache", "bytes_per_device": {"activations": 2_000_000_000}, "fits": True},
            ],
        },
        config={"batch_size": 256, "mrl_dims": [256, 64], "bf16": True, "query_prompt": None},
        environment={"Python": "3.11.7", "Device": "cpu"},
        data_facts=[("Records", "8,219"), ("Records skipped", "0")],
        command="python run.py toy.yaml --config_override batch_size=256",
    )
    return replace(report, **changes)


def page(report: RunReport) -> Page:
    return Page(render_html(build_page(report)))


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes and ancestors, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: list[tuple[str, tuple[str, ...]]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((data, tuple(self._open)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "".join(text for text, path in self.texts if "style" not in path)


def assert_sound(source: str) -> Page:
    """Fail unless a page stands alone, is told by its headings and names each table and drawing; return its parts."""
    shown = Page(source)
    assert {tag for tag, _, _ in shown.elements} <= OURS
    for tag, attributes, _ in shown.elements:
        loaded = {"srcset", "data", "action", "poster", "autofocus"} & attributes.keys()
        assert not loaded | {name for name in attributes if name.startswith("on")}, tag
        assert (attributes.get("src") or "data:image/webp;base64,").startswith("data:image/webp;base64,"), tag
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), tag
    assert "@import" not in source
    assert {*re.findall(r"url\((.)", source)} <= {"#"}
    (policy,) = [meta["content"] for meta in shown.named("meta") if "default-src" in (meta.get("content") or "")]
    assert "default-src 'none'" in (policy or "")

    assert shown.named("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _, _ in shown.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 == levels[0]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    names = [tag for tag, _, _ in shown.elements]
    assert [names.count(landmark) for landmark in ("header", "main", "footer")] == [1, 1, 1]
    skip = next(attributes for _, attributes, path in shown.elements if path[-1:] == ("body",))
    assert (skip["class"], skip["href"], shown.named("main")[0]["id"]) == ("skip", "#main", "main")

    ids = [attributes["id"] for _, attributes, _ in shown.elements if attributes.get("id")]
    assert len(ids) == len(set(ids)), "an id stands twice"
    assert {link["href"] for link in shown.named("a")} <= {f"#{name}" for name in ids}
    regions = [attributes["aria-label"] for _, attributes, _ in shown.elements if attributes.get("role") == "region"]
    assert len(regions) == len(set(regions)), "two tables have one name"
    assert len(shown.named("caption")) == len(shown.named("table"))
    assert len(shown.named("figcaption")) == len(shown.named("figure"))
    assert all(cell.get("scope") in {"col", "row"} for cell in shown.named("th"))
    assert all(table["role"] == "table" for table in shown.named("table") if table.get("class") == "stack")
    assert all(cell["role"] == "cell" for cell in shown.named("td") if cell.get("data-label"))
    for drawing in shown.named("svg"):
        assert drawing.get("aria-hidden") == "true" or (drawing.get("role") == "img" and drawing.get("aria-label"))
    return shown


def shape(markdown: str) -> list[tuple[str, str | None]]:
    """Return the kinds of nodes of a Markdown text, and the addresses of its links."""
    parser = pytest.importorskip("markdown_it", reason="markdown-it-py isn't installed").MarkdownIt("commonmark")
    tokens = parser.enable(["table", "strikethrough"]).parse(markdown)
    children = [child for token in tokens for child in token.children or [] if child.content != "<!-- -->"]
    inline = [("inline", child.type) for child in children if child.type != "text"]
    links: list[Any] = [("link", child.attrs["href"]) for child in children if child.type == "link_open"]
    return [*((token.type, token.tag) for token in tokens), *inline, *links]
