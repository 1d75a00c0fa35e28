"""A small report that the other report tests start from; no tests here."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from vembed.data.judged import RetrievalData
from vembed.evaluation.judge import verdict
from vembed.evaluation.report.run_report import RunReport, build_page
from vembed.evaluation.results import EvaluationResult
from vembed.pages.html import environment, render_html

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

STYLE = environment().get_template("page.css.jinja").render()
"""The style sheet of the page."""

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
