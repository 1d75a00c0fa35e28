"""`vembed search INDEX "query"` or `--image PATH`: the nearest documents, in the terminal, as JSON, or on a page."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.options import ModelOptions, PictureOptions, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path
from vembed.section import LARGEST_COUNT, Count, option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

DEFAULT_PORT = 8000


class SearchOptions(ModelOptions, PictureOptions):
    """Search what vembed encode wrote. Without QUERY, queries are read from standard input, one per line."""

    index: Path = word("INDEX", "what vembed encode wrote: a folder, FILE.parquet or a LanceDB folder")
    query: str | None = word("QUERY", "what to search for", None)
    image: list[Path] | None = option(
        None,
        "picture to search with; QUERY then says what should differ; repeat it for several pictures",
        metavar="PATH",
        one_word=True,
    )
    k: Count = option(10, "documents per query; default: 10", metavar="N", spellings=["-k"])
    rescore: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = option(
        None,
        "rank N candidates per hit by their full vectors; default: 4 for an int8 or binary index, else 0",
        metavar="N",
    )
    model: str | None = option(
        None, "encode queries with this model; default: the one that the index names", metavar="MODEL"
    )
    as_json: bool = option(False, "print one JSON object per query", spellings=["--json"])
    latency: bool = option(False, "time the index with these queries: p50, p95, p99")
    serve: bool = option(False, "open a search page on this machine")
    port: Annotated[int, Field(ge=0, le=65535)] | None = option(
        None, f"port of the page; default: {DEFAULT_PORT}; 0 takes a free one", metavar="N"
    )


OPTIONS = SearchOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Search an index, in the terminal or on a local page."""
    given = parse_words(SearchOptions, arguments, program=program)
    return run_command(lambda: _run(given), log_to_stderr=True)


def _run(given: Mapping[str, Any]) -> int:
    options = check(SearchOptions, given)
    if options.query is not None and not options.query.strip():
        raise ConfigError("the query is empty; write what to search for, in quotes")
    if options.serve and (options.query is not None or options.image is not None or options.as_json):
        raise ConfigError("--serve takes its queries from the page; leave out the query, --image and --json")
    if options.serve and options.latency:
        raise ConfigError("--latency times the queries of this command, and --serve has none; leave one of them out")
    if options.port is not None and not options.serve:
        raise ConfigError("--port sets the port of the search page; add --serve")
    from vembed.data.check import encoding_fault
    from vembed.workflows.search.format import read_meta
    from vembed.workflows.search.output import table_format

    if options.query is not None and (fault := encoding_fault(options.query)):
        raise ConfigError(f"the query: {fault}")
    index = home_path(options.index)
    if table_format(index) is None:
        read_meta(index)  # a missing index is said before a model is loaded
    from vembed.api.retrieval import open_for_queries
    from vembed.workflows.search.serve import serve_until_signal
    from vembed.workflows.search.terminal import answer, refuse_without_tower

    quiet_libraries()
    searcher = open_for_queries(index, options.model, options.rescore, **options.load_options())
    if options.serve:
        serve_until_signal(searcher, DEFAULT_PORT if options.port is None else options.port)
        return ExitCode.OK
    refuse_without_tower(searcher, options.query, options.image, name=str(options.index))
    if options.k > len(searcher):
        print(f"k = {options.k} is over the size of the index: {len(searcher)} documents are ranked.", file=sys.stderr)
    # A corpus may hold any bytes: a terminal that can't show one gets an escape and not an error.
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    answer(searcher, options.query, options.image, options.k, as_json=options.as_json, is_timed=options.latency)
    return ExitCode.OK
