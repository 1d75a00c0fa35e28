"""A search in the terminal: queries from the command line or the standard input, hits as lines or as JSON.

No line is wider than the terminal, and nothing in it can steer the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

from vembed.batch import Composed, Image, modality_words
from vembed.errors import ConfigError
from vembed.files import home_path
from vembed.pages.text import columns_of, milliseconds_text, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Modality
    from vembed.workflows.search.index import Hit, Searcher

PROMPT = "query> "
FALLBACK_WIDTH = 100
"""Columns where there is no terminal to ask."""

JSON_FIELDS = ("rank", "id", "score", "text", "image")
JSON_TIMES = ("milliseconds_per_query", "milliseconds_p95", "milliseconds_p99", "num_timed")
"""Names of the times, as `vembed evaluate` writes them."""

INDENT = 4
ELLIPSIS = "…"


def refuse_without_tower(searcher: Searcher, query: str | None, images: Sequence[Path] | None, *, name: str) -> None:
    """Refuse a query that the model can't encode.

    Args:
        name: The index, as the user named it.

    Raises:
        ConfigError: The model has no tower for it.
    """
    asked: Modality = "text" if images is None else "image" if query is None else "image+text"
    if asked in searcher.takes:
        return
    fix = {
        "text": "search it with --image PATH",
        "image": "search it with a text, or encode the corpus with a model for both",
        "image+text": "give the picture or the text alone",
    }[asked]
    raise ConfigError(f"the model of {name} takes {modality_words(searcher.takes)}: {fix}")


def answer(
    searcher: Searcher, query: str | None, images: Sequence[Path] | None, k: int, *, as_json: bool, is_timed: bool
) -> None:
    """Print the k nearest documents of a query; without one, of each line of the standard input.

    Args:
        query: Text; beside pictures it says what should differ.
        is_timed: Whether the searches are timed again at the end, one query at a time, without their encoding.
    """
    repeats_query = images is None and query is None and not sys.stdin.isatty()
    items: list[str | Image | Composed] = []
    for fields, item in _queries(query, images):
        (hits,) = searcher.search([item], k)
        if as_json:  # escaped to ASCII: no text can steer a terminal
            shown = [{name: getattr(hit, name) for name in JSON_FIELDS} for hit in hits]
            print(json.dumps({**fields, "hits": shown}), flush=True)
        else:
            width = max(20, shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns)
            if repeats_query:
                print(clip_to_width(f"{PROMPT}{one_line(str(fields['query']))}", width))
            lines = hit_lines(hits, width=width) or ["no document found"]
            print("\n".join(lines), end="\n\n" if repeats_query else "\n", flush=True)
        if is_timed:
            items.append(item)
    if not items:
        return
    timing = searcher.latency(items, k)
    if as_json:
        print(json.dumps({"latency": dict(zip(JSON_TIMES, timing, strict=True))}), flush=True)
    else:
        p50, p95, p99 = map(milliseconds_text, timing[:3])
        times = f"p50 {p50} ms, p95 {p95} ms, p99 {p99} ms"
        print(f"latency: {times}; {timing.num_timed} searches of one query, without encoding")


def _queries(
    query: str | None, images: Sequence[Path] | None
) -> Iterator[tuple[Mapping[str, object], str | Image | Composed]]:
    """Yield each query: the fields that its JSON object begins with, and the item that the model encodes."""
    if images is not None:
        pictures = tuple(Image(str(home_path(path))) for path in images)
        is_alone = len(pictures) == 1 and query is None
        paths = [str(path) for path in images]
        fields: dict[str, object] = {} if query is None else {"query": query}
        fields |= {"query_image": paths[0] if len(paths) == 1 else paths}
        yield fields, pictures[0] if is_alone else Composed(pictures, query or "")
        return
    if query is not None:
        yield {"query": query}, query
        return
    while True:
        if sys.stdin.isatty():
            print(PROMPT, end="", file=sys.stderr, flush=True)  # not on the output, which may go to a file
        line = sys.stdin.readline()
        if not line:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        if line.strip():
            yield {"query": line.strip()}, line.strip()


def hit_lines(hits: Sequence[Hit], *, width: int) -> list[str]:
    """Return two lines for each hit: rank, score and id; and the beginning of its text, or a picture's path."""
    lines = []
    for hit in hits:
        lines.append(clip_to_width(f"{hit.rank:>{INDENT - 2}}  {hit.score:7.4f}  {one_line(hit.id)}", width))
        # Far fewer characters than this fit: a text of megabytes need not be looked at whole.
        text = one_line(hit.text[: 8 * width])
        if hit.image is not None:
            path = "" if hit.image == hit.id else one_line(hit.image)
            text = ": ".join(part for part in (path, text) if part) or "(picture)"
        lines.append(f"{' ' * INDENT}{clip_to_width(text, width - INDENT) or '(no text)'}")
    return lines


def clip_to_width(text: str, width: int) -> str:
    """Cut a line to a number of terminal columns; an ellipsis says that something is missing.

    Args:
        width: Columns, at least 1; characters of East Asian scripts take two, combining marks none.
    """
    columns = 0
    fits = 0
    for number, character in enumerate(text):
        columns += columns_of(character)
        if columns > width:
            return text[:fits].rstrip() + ELLIPSIS
        if columns <= width - 1:
            fits = number + 1
    return text
