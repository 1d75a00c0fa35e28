"""The page of the local search: one HTML file without scripts, its style inside, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.report.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.search.index import Hit

MAX_QUERY_CHARACTERS = 2_000
COUNTS = (5, 10, 20, 50, 100)
"""How many hits the form offers; an address may name any number up to the last."""

SHORT_CHARACTERS = 360
"""Of a longer text the beginning is shown, and the rest behind a click."""

STYLE = Html("""
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2126; --muted: #59616b; --line: #d5d9dd; --accent: #2f62b5;
  --on-accent: #ffffff; --warn: #a8401a; --warn-soft: #faeae3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f23; --ink: #e4e7ea; --muted: #a0a8b1; --line: #3a4149; --accent: #86b2f2;
    --on-accent: #10151c; --warn: #f0966f; --warn-soft: #40261b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 48rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  overflow-wrap: anywhere;
}
h1 { font-size: 1.35rem; line-height: 1.25; margin: 0; letter-spacing: -0.01em; }
.facts { margin: 0.2rem 0 1.25rem; }
.facts, .count, .meta, footer { color: var(--muted); font-size: 0.875rem; }
form { display: flex; flex-wrap: wrap; gap: 0.6rem; align-items: stretch; }
input, select, button {
  font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.6rem 0.8rem; min-height: 2.9rem;
}
input { flex: 1 1 18rem; min-width: 0; }
button {
  background: var(--accent); color: var(--on-accent); border-color: transparent; font-weight: 600; cursor: pointer;
}
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.count { margin: 1.4rem 0 0.7rem; }
.problem {
  margin: 1.4rem 0; padding: 0.75rem 1rem; border-radius: 8px; color: var(--warn); background: var(--warn-soft);
}
ol { list-style: none; margin: 0; padding: 0; }
li {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.85rem 1.1rem; margin-bottom: 0.7rem;
}
.meta { display: flex; gap: 0.9rem; margin: 0 0 0.3rem; font-variant-numeric: tabular-nums; }
.meta .id { flex: 1 1 auto; min-width: 0; color: var(--ink); font-weight: 600; }
.meta .score { flex: none; }
.text { margin: 0; white-space: pre-wrap; }
summary { cursor: pointer; list-style: none; }
summary::-webkit-details-marker { display: none; }
.short { display: block; }
details[open] .short { display: none; }
.more { color: var(--accent); font-size: 0.875rem; }
.more::after { content: "Show the whole text"; }
details[open] .more::after { content: "Show less"; }
footer { margin-top: 2rem; }
@media (max-width: 36rem) {
  body { padding: 1.1rem 0.9rem 3rem; }
  input { flex-basis: 100%; }
  button { flex: 1 1 auto; }
}
""")

POLICY = (
    "default-src 'none'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
"""The Content-Security-Policy: this style and nothing else, no script, no resource from anywhere."""


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What stands above and below the results.

    Attributes:
        corpus: Name of the corpus.
        model: Name of the model.
        num_documents: Documents searched.
        similarity: What a score is.
    """

    corpus: str
    model: str
    num_documents: int
    similarity: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to.

    Attributes:
        query: As it was asked.
        k: Hits asked for.
        hits: Best first; None when nothing was asked.
        milliseconds: For the search.
        problem: Why there are no hits, or "".
    """

    query: str = ""
    k: int = 10
    hits: Sequence[Hit] | None = None
    milliseconds: float = 0.0
    problem: str = ""


def render(facts: PageFacts, answer: Answer) -> str:
    """Return the page.

    Args:
        facts: What is searched.
        answer: What came of the request.
    """
    title = f"{answer.query[:60]} - vembed search" if answer.query else "vembed search"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", STYLE),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", "vembed search"),
            element("p", f"{facts.num_documents:,} documents of {facts.corpus}", class_="facts"),
        ),
        element("main", _form(answer, facts), _outcome(answer, facts)),
        element("footer", f"Model {facts.model}. Scores are {facts.similarity} of query and document."),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _form(answer: Answer, facts: PageFacts) -> Html:
    counts = sorted({*COUNTS, answer.k})
    options = [element("option", f"{count} results", value=count, selected=count == answer.k) for count in counts]
    return element(
        "form",
        element("label", "Query", for_="q", class_="hidden"),
        element(
            "input",
            type="search",
            id="q",
            name="q",
            value=answer.query,
            placeholder=f"Search {facts.num_documents:,} documents",
            maxlength=MAX_QUERY_CHARACTERS,
            autocomplete="off",
            autofocus=answer.hits is None,
        ),
        element("label", "How many", for_="k", class_="hidden"),
        element("select", *options, id="k", name="k"),
        element("button", "Search", type="submit"),
        method="get",
        action="/",
        role="search",
    )


def _outcome(answer: Answer, facts: PageFacts) -> Html:
    if answer.problem:
        return element("p", answer.problem, class_="problem", role="alert")
    if answer.hits is None:
        return Html("")
    if not answer.hits:
        return element("p", "The index found no document.", class_="count")
    clipped = f"; all there are, of {answer.k} asked for" if answer.k > facts.num_documents else ""
    noun = "document" if len(answer.hits) == 1 else "documents"
    count = f"{len(answer.hits)} nearest {noun} in {answer.milliseconds:.0f} ms{clipped}"
    return join(
        [element("p", count, class_="count"), element("ol", *(_hit(hit) for hit in answer.hits), class_="hits")]
    )


def _hit(hit: Hit) -> Html:
    # auto: a right-to-left text gets its direction, and none can reorder its neighbours.
    meta = element(
        "p",
        element("span", str(hit.rank)),
        element("span", hit.id, class_="id", dir="auto"),
        element("span", f"score {hit.score:.4f}", class_="score"),
        class_="meta",
    )
    text = visible(hit.text)
    if len(text) <= SHORT_CHARACTERS:
        return element("li", meta, element("p", text or "(no text)", class_="text", dir="auto"))
    short = text[:SHORT_CHARACTERS].rpartition(" ")[0] or text[:SHORT_CHARACTERS]
    summary = element(
        "summary", element("span", f"{short} …", class_="text short", dir="auto"), element("span", class_="more")
    )
    return element("li", meta, element("details", summary, element("p", text, class_="text", dir="auto")))
