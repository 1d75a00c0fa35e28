"""The page of the local search: one HTML file without scripts, its style and pictures inside, every text escaped."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from vembed.data.images import FORMATS
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.text import one_line, visible
from vembed.search.page_style import STYLE
from vembed.search.thumbnails import thumbnail_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.batch import Modality
    from vembed.search.index import Hit
    from vembed.search.searcher import Searcher

MAX_QUERY_CHARACTERS = 2_000
COUNTS = (5, 10, 20, 50, 100)
"""How many hits the form offers; an address may name any number up to the last."""

SHORT_CHARACTERS = 360
"""Of a longer text the beginning is shown, and the rest behind a click."""

CAPTION_CHARACTERS = 160
PICTURE_FIELD = "picture"
ACCEPTED = ",".join(f"image/{name.lower()}" for name in FORMATS)


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A small picture of the page.

    Attributes:
        copy: WebP bytes.
        name: What it is called.
        row: The document that it is of; None of a picture that was given.
    """

    copy: bytes
    name: str
    row: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What stands above and below the results.

    Attributes:
        corpus: Name of the corpus.
        model: Name of the model.
        num_documents: Documents searched.
        num_pictures: Of them, those with a picture.
        similarity: What a score is.
        takes: What may be searched with.
        example_queries: Queries to begin with.
        example_pictures: Documents to begin with.
    """

    corpus: str
    model: str
    num_documents: int
    num_pictures: int
    similarity: str
    takes: frozenset[Modality]
    example_queries: Sequence[str] = ()
    example_pictures: Sequence[ShownPicture] = ()

    @property
    def noun(self) -> str:
        """What the documents are called."""
        return "pictures" if self.num_pictures == self.num_documents else "documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request came to.

    Attributes:
        query: Text that was asked.
        picture: Picture that was asked.
        k: Hits asked for.
        hits: Best first; None when nothing was asked.
        copies: Row of each hit with a picture -> its small copy.
        milliseconds: For the search.
        problem: Why there are no hits, or "".
    """

    query: str = ""
    picture: ShownPicture | None = None
    k: int = 10
    hits: Sequence[Hit] | None = None
    copies: dict[int, bytes] | None = None
    milliseconds: float = 0.0
    problem: str = ""


def page_facts(searcher: Searcher) -> PageFacts:
    """Return what the page says about an index.

    Args:
        searcher: What is asked.
    """
    index = searcher.index
    meta = index.meta
    rows = searcher.example_rows()
    shown = [ShownPicture(copy, index.document(row).id, row) for row in rows if (copy := index.thumbnail(row))]
    return PageFacts(
        corpus=Path(meta.source).name or meta.source,
        model=meta.model.name,
        num_documents=len(searcher),
        num_pictures=meta.num_pictures,
        similarity="cosine similarities" if meta.model.similarity == "cosine" else "dot products",
        takes=searcher.takes,
        example_queries=searcher.example_queries(),
        example_pictures=shown,
    )


def render(facts: PageFacts, answer: Answer) -> str:
    """Return the page.

    Args:
        facts: What is searched.
        answer: What came of the request.
    """
    asked = answer.query or (answer.picture.name if answer.picture else "")
    title = f"{asked[:60]} - vembed search" if asked else "vembed search"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", STYLE),
    )
    forms = [_text_form(answer, facts)] * ("text" in facts.takes) + [_picture_form(answer, facts)] * (
        "image" in facts.takes
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", "vembed search"),
            element("p", f"{facts.num_documents:,} {facts.noun} of {facts.corpus}", class_="facts"),
        ),
        element("main", element("div", *forms, role="search"), _outcome(answer, facts)),
        element("footer", f"Model {facts.model}. Scores are {facts.similarity} of query and document."),
        class_="pictures" if facts.num_pictures else None,
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _text_form(answer: Answer, facts: PageFacts) -> Html:
    return element(
        "form",
        element("label", "Query", for_="q", class_="hidden"),
        element(
            "input",
            type="search",
            id="q",
            name="q",
            value="" if answer.picture else answer.query,
            placeholder=f"Search {facts.num_documents:,} {facts.noun}",
            maxlength=MAX_QUERY_CHARACTERS,
            autocomplete="off",
            autofocus=answer.hits is None,
        ),
        _count_choice(answer),
        element("button", "Search", type="submit"),
        method="get",
        action="/",
    )


def _picture_form(answer: Answer, facts: PageFacts) -> Html:
    """Return the form of a picture; a file that is dropped onto the field is chosen, without a script."""
    count = (
        element("input", type="hidden", name="k", value=answer.k) if "text" in facts.takes else _count_choice(answer)
    )
    return element(
        "form",
        element(
            "div",
            element("label", "By picture", for_="p", class_="title"),
            element("input", type="file", id="p", name=PICTURE_FIELD, accept=ACCEPTED, required=True),
            element("span", "or drop one here", class_="hint"),
            class_="drop",
        ),
        _difference(answer) if "image+text" in facts.takes else "",
        count,
        element("button", "Search by picture", type="submit"),
        method="post",
        action="/",
        enctype="multipart/form-data",
        class_="by-picture",
    )


def _difference(answer: Answer) -> Html:
    """Return the field of a text that goes with a picture."""
    field = element(
        "input",
        type="text",
        id="t",
        name="q",
        value=answer.query if answer.picture else "",
        placeholder="… but different: how?",
        maxlength=MAX_QUERY_CHARACTERS,
        autocomplete="off",
    )
    return join([element("label", "What should differ", for_="t", class_="hidden"), field])


def _count_choice(answer: Answer) -> Html:
    counts = sorted({*COUNTS, answer.k})
    options = [element("option", f"{count} results", value=count, selected=count == answer.k) for count in counts]
    label = element("label", "How many", for_="k", class_="hidden")
    return join([label, element("select", *options, id="k", name="k")])


def _outcome(answer: Answer, facts: PageFacts) -> Html:
    if answer.problem:
        return element("p", answer.problem, class_="problem", role="alert")
    if answer.hits is None:
        return _examples(answer, facts)
    if not answer.hits:
        return element("p", "The index found no document.", class_="count")
    copies = answer.copies or {}
    hits = [_picture_hit(hit, copies[hit.row], answer.k) if hit.row in copies else _hit(hit) for hit in answer.hits]
    return join([_heading(answer, facts), element("ol", *hits, class_="grid" if copies else "hits")])


def _heading(answer: Answer, facts: PageFacts) -> Html:
    """Return how many were found and, where a picture was asked, the picture."""
    assert answer.hits
    clipped = f"; all there are, of {answer.k} asked for" if answer.k > facts.num_documents else ""
    noun = facts.noun if len(answer.hits) > 1 else facts.noun.removesuffix("s")
    count = f"{len(answer.hits)} nearest {noun} in {answer.milliseconds:.0f} ms{clipped}"
    line = element("p", count, class_="count")
    if answer.picture is None:
        return line
    named = element("p", "Nearest to ", element("strong", one_line(answer.picture.name), dir="auto"))
    text = element("p", f"and “{answer.query}”", dir="auto") if answer.query else Html("")
    picture = _image(answer.picture.copy, "The picture that was asked with") if answer.picture.copy else Html("")
    return element("div", picture, element("div", named, text, line), class_="asked")


def _examples(answer: Answer, facts: PageFacts) -> Html:
    """Return queries to begin with, as links."""
    parts = []
    if facts.example_queries:
        links = [_link({"q": query, "k": answer.k}, query, "chip") for query in facts.example_queries]
        parts += [element("h2", "Try a query" if len(links) == 1 else "Try one of these"), element("div", *links)]
    if facts.example_pictures:
        links = [
            _link({"like": shown.row or 0, "k": answer.k}, _image(shown.copy, f"Like {shown.name}"), "tile")
            for shown in facts.example_pictures
        ]
        title = "Or find what is like one of these" if parts else "Find what is like one of these"
        parts += [element("h2", title), element("div", *links)]
    return element("section", *parts, class_="examples", aria_label="Examples") if parts else Html("")


def _link(fields: dict[str, str | int], content: str, kind: str) -> Html:
    return element("a", content, href=f"/?{urlencode(fields)}", class_=kind, dir="auto")


def _image(copy: bytes, alt: str) -> Html:
    width, height = thumbnail_size(copy)
    uri = f"data:image/webp;base64,{base64.b64encode(copy).decode('ascii')}"
    return element("img", src=uri, alt=alt, width=width, height=height)


def _picture_hit(hit: Hit, copy: bytes, k: int) -> Html:
    """Return a card; the picture leads to what is like it."""
    caption = _cut(one_line(hit.text), CAPTION_CHARACTERS)
    name = one_line(hit.id)
    path = one_line(hit.image or "")
    names = [element("p", element("span", name, class_="id", dir="auto"), class_="name")]
    if path and path != name:
        names.append(element("p", element("span", path, class_="path", dir="auto"), class_="name"))
    image = _image(copy, caption or f"Picture {path or name}")
    about = element(
        "div",
        element(
            "p",
            element("span", str(hit.rank), class_="rank"),
            element("span", f"score {hit.score:.4f}", class_="score"),
            class_="meta",
        ),
        element("p", caption, class_="caption", dir="auto") if caption else Html(""),
        *names,
        class_="about",
    )
    link = element(
        "a", image, href=f"/?{urlencode({'like': hit.row, 'k': k})}", class_="thumb", title="Find what is like this"
    )
    return element("li", link, about, class_="picture")


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
    short = _cut(text, SHORT_CHARACTERS)
    summary = element(
        "summary", element("span", short, class_="text short", dir="auto"), element("span", class_="more")
    )
    return element("li", meta, element("details", summary, element("p", text, class_="text", dir="auto")))


def _cut(text: str, characters: int) -> str:
    """Cut a text at a word's end; an ellipsis says that something is missing."""
    if len(text) <= characters:
        return text
    return f"{text[:characters].rpartition(' ')[0] or text[:characters]} …"
