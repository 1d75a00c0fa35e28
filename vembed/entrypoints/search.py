"""`vembed search INDEX "query"` or `--image PATH`: the nearest documents, in the terminal, as JSON, or on a page."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.batch import Composed, Image, modality_words
from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.model_arguments import add_model_arguments, add_picture_argument, load_options
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from vembed.batch import Modality
    from vembed.evaluation.benchmark.searchers import Timing
    from vembed.search.index import Hit
    from vembed.search.searcher import Searcher

DESCRIPTION = "Search what vembed encode wrote. Without QUERY, queries are read from standard input, one per line."
PROMPT = "query> "
FALLBACK_WIDTH = 100
"""Columns where there is no terminal to ask."""


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a search."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument(
        "index", type=Path, metavar="INDEX", help="what vembed encode wrote: a folder, FILE.parquet or a LanceDB folder"
    )
    parser.add_argument("query", nargs="?", metavar="QUERY", help="what to search for")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        metavar="PATH",
        help="picture to search with; QUERY then says what should differ; repeat it for several pictures",
    )
    parser.add_argument("-k", type=int, default=10, metavar="N", help="documents per query; default: 10")
    parser.add_argument(
        "--rescore",
        type=int,
        metavar="N",
        help="rank N candidates per hit by their full vectors; default: 4 for an int8 or binary index, else 0",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="encode queries with this model; default: the one that the index names"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    parser.add_argument("--latency", action="store_true", help="time the index with these queries: p50, p95, p99")
    parser.add_argument("--serve", action="store_true", help="open a search page on this machine")
    parser.add_argument("--port", type=int, metavar="N", help="port of the page; default: 8000; 0 takes a free one")
    add_model_arguments(parser)
    add_picture_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Search an index, in the terminal or on a local page."""
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed), log_to_stderr=True)


def _run(parsed: argparse.Namespace) -> int:
    _refuse_contradictions(parsed)
    from vembed.search.format import read_meta
    from vembed.search.tables import is_table

    if not is_table(home_path(parsed.index)):
        read_meta(home_path(parsed.index))  # a missing index is said before a model is loaded
    from vembed.api.retrieval import open_for_queries

    quiet_libraries()
    searcher = open_for_queries(home_path(parsed.index), parsed.model, parsed.rescore, **load_options(parsed))
    if parsed.serve:
        return _serve(searcher, 8000 if parsed.port is None else parsed.port)
    _refuse_without_tower(searcher, parsed)
    if parsed.k > len(searcher):
        print(f"k = {parsed.k} is over the size of the index: {len(searcher)} documents are ranked.", file=sys.stderr)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    _answer_all(searcher, parsed)
    return ExitCode.OK


def _refuse_contradictions(parsed: argparse.Namespace) -> None:
    if parsed.k < 1:
        raise ConfigError(f"-k must be at least 1, got {parsed.k}")
    if parsed.rescore is not None and parsed.rescore < 0:
        raise ConfigError(f"--rescore must be at least 0, got {parsed.rescore}")
    if parsed.query is not None and not parsed.query.strip():
        raise ConfigError("the query is empty; write what to search for, in quotes")
    if parsed.serve and (parsed.query is not None or parsed.image is not None or parsed.json):
        raise ConfigError("--serve takes its queries from the page; leave out the query, --image and --json")
    if parsed.serve and parsed.latency:
        raise ConfigError("--latency times the queries of a command, and a page has none yet; leave out one of the two")
    if parsed.port is not None and not parsed.serve:
        raise ConfigError("--port is of the page; add --serve")
    if parsed.port is not None and not 0 <= parsed.port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {parsed.port}")


def _refuse_without_tower(searcher: Searcher, parsed: argparse.Namespace) -> None:
    """Refuse a query that the model can't encode."""
    asked: Modality = "text" if parsed.image is None else "image" if parsed.query is None else "image+text"
    if asked in searcher.takes:
        return
    fix = {
        "text": "search it with --image PATH",
        "image": "search it with a text, or encode the corpus with a model for both",
        "image+text": "give the picture or the text alone",
    }[asked]
    raise ConfigError(f"the model of {parsed.index} takes {modality_words(searcher.takes)}: {fix}")


def _answer_all(searcher: Searcher, parsed: argparse.Namespace) -> None:
    named = parsed.image is None and parsed.query is None and not sys.stdin.isatty()
    timed: list[str | Image | Composed] = []
    for asked, item in _asked(parsed):
        (hits,) = searcher.search([item], parsed.k)
        _print_hits(asked, hits, as_json=parsed.json, named=named)
        if parsed.latency:
            timed.append(item)
    if timed:
        _print_latency(searcher.latency(timed, parsed.k), as_json=parsed.json)


def _asked(parsed: argparse.Namespace) -> Iterator[tuple[Mapping[str, object], str | Image | Composed]]:
    """Yield each query: as its JSON object names it, and as the model takes it."""
    if parsed.image is not None:
        images = tuple(Image(str(home_path(path))) for path in parsed.image)
        alone = len(images) == 1 and parsed.query is None
        text = {} if parsed.query is None else {"query": parsed.query}
        paths = [str(path) for path in parsed.image]
        pictures = {"query_image": paths[0] if len(paths) == 1 else paths}
        yield {**text, **pictures}, images[0] if alone else Composed(images, parsed.query or "")
        return
    for query in _queries() if parsed.query is None else [parsed.query]:
        yield {"query": query}, query


def _queries() -> Iterator[str]:
    """Yield the lines of the input that hold a query; ask for them where somebody sits there."""
    while True:
        if sys.stdin.isatty():
            print(PROMPT, end="", file=sys.stderr, flush=True)  # not on the output, which may go to a file
        line = sys.stdin.readline()
        if not line:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        if line.strip():
            yield line.strip()


def _print_hits(asked: Mapping[str, object], hits: Sequence[Hit], *, as_json: bool, named: bool = False) -> None:
    if as_json:  # escaped to ASCII: no text can steer a terminal
        names = ("rank", "id", "score", "text", "image")
        print(json.dumps({**asked, "hits": [{name: getattr(hit, name) for name in names} for hit in hits]}), flush=True)
        return
    from vembed.pages.text import one_line
    from vembed.search.terminal import clip_to_width, hit_lines

    width = max(20, shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns)
    if named:
        print(clip_to_width(f"{PROMPT}{one_line(str(asked['query']))}", width))
    print("\n".join(hit_lines(hits, width=width) or ["no document found"]), end="\n\n" if named else "\n", flush=True)


def _print_latency(found: Timing, *, as_json: bool) -> None:
    if as_json:
        names = ("milliseconds_per_query", "milliseconds_p95", "milliseconds_p99", "num_timed")  # as vembed evaluate
        print(json.dumps({"latency": dict(zip(names, found, strict=True))}), flush=True)
        return
    from vembed.pages.text import milliseconds_text

    p50, p95, p99 = map(milliseconds_text, found[:3])
    print(
        f"latency: p50 {p50} ms, p95 {p95} ms, p99 {p99} ms; {found.num_timed} searches of one query, without encoding"
    )


def _serve(searcher: Searcher, port: int) -> int:
    """Serve the page until a signal ends it."""
    from vembed.search.serve import SearchServer

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature that signal calls
        raise KeyboardInterrupt

    # Set here and not left to Python: a process that a script starts in the background ignores SIGINT otherwise.
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(KeyboardInterrupt), SearchServer(searcher, port=port) as server:
            print(f"searching {len(searcher):,} documents at {server.url} (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        print("ended")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ExitCode.OK
