"""The page of the local search: one HTML file without scripts, its style and pictures inside, every text escaped."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from vembed.data.images import FORMATS
from vembed.pages.html import environment
from vembed.text import visible
from vembed.workflows.search.thumbnails import thumbnail_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.workflows.search.index import Hit
    from vembed.workflows.search.searcher import Searcher

MAX_QUERY_CHARACTERS = 2_000
COUNTS = (5, 10, 20, 50, 100)  # of hits in the form; an address may name any number up to the last
SHORT_CHARACTERS = 360  # of a longer text the beginning is shown, and the rest behind a click
PICTURE_FIELD = "picture"

_ENVIRONMENT = environment(Path(__file__).parent / "templates")
_STYLE = _ENVIRONMENT.get_template("search.css.jinja").render()

POLICY = (
    "default-src 'none'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)
"""The Content-Security-Policy: this style, pictures inside the page, and nothing else; no script from anywhere."""


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A small picture of the page."""

    copy: bytes  # WebP
    name: str
    row: int | None = None  # the document that it is of; None of a picture that was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the page shows in answer to one request."""

    query: str = ""
    picture: ShownPicture | None = None  # that was asked with
    k: int = 10
    hits: Sequence[Hit] | None = None  # best first; None when nothing was asked
    copies: Mapping[int, bytes] | None = None  # row of each hit with a picture -> its small copy
    milliseconds: float = 0.0
    problem: str = ""  # why there are no hits


class SearchPage:
    """The page over one index."""

    def __init__(self, searcher: Searcher) -> None:
        index, meta = searcher.index, searcher.index.meta
        rows = searcher.example_rows()
        template = _ENVIRONMENT.get_template("search.html.jinja")
        self._render = partial(
            template.render,
            style=Markup(_STYLE),  # noqa: S704  # a file of ours
            corpus=Path(meta.source).name or meta.source,
            model=meta.model.name,
            num_documents=len(searcher),
            num_pictures=meta.num_pictures,
            noun="pictures" if meta.num_pictures == len(searcher) else "documents",
            similarity="cosine similarities" if meta.model.similarity == "cosine" else "dot products",
            takes=searcher.takes,
            example_queries=searcher.example_queries(),
            example_pictures=[
                ShownPicture(copy, index.document(row).id, row) for row in rows if (copy := index.thumbnail(row))
            ],
            accepted=",".join(f"image/{name.lower()}" for name in FORMATS),
            picture_field=PICTURE_FIELD,
            counts=COUNTS,
            max_characters=MAX_QUERY_CHARACTERS,
            short_characters=SHORT_CHARACTERS,
        )

    def render(self, answer: Answer) -> str:
        """Return the page."""
        return self._render(answer=answer)


def _webp_uri(copy: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(copy).decode('ascii')}"


def _cut(text: str, characters: int) -> str:
    """Cut a text at a word's end; an ellipsis says that something is missing."""
    if len(text) <= characters:
        return text
    return f"{text[:characters].rpartition(' ')[0] or text[:characters]} …"


_ENVIRONMENT.filters |= {"cut": _cut, "thumbnail_size": thumbnail_size, "visible": visible, "webp_uri": _webp_uri}
