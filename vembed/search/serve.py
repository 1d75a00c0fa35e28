"""A search page on this machine: one address, for this machine's browsers only.

The server listens on 127.0.0.1, answers GET and HEAD of `/`, and serves nothing from the disk. A request under another
host's name is refused: a web page elsewhere could have pointed that name here to read the corpus.
"""

from __future__ import annotations

import logging
import time
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from vembed.errors import MachineError, VembedError
from vembed.search.page import COUNTS, MAX_QUERY_CHARACTERS, POLICY, Answer, PageFacts, render

if TYPE_CHECKING:
    from vembed.search.index import Searcher

_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
OWN_NAMES = frozenset({ADDRESS, "localhost"})
IDLE_SECONDS = 30
"""A connection that says nothing for so long is closed."""

MAX_FIELDS = 16
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SearchServer(ThreadingHTTPServer):
    """The server; a thread for each connection, searches one after the other.

    Args:
        searcher: What is asked.
        facts: What the page says about it.
        port: 0 takes a free one.

    Raises:
        MachineError: The port is taken or not allowed.
    """

    daemon_threads = True  # an open connection must not hold up the end

    def __init__(self, searcher: Searcher, facts: PageFacts, *, port: int) -> None:
        self.searcher = searcher
        self.facts = facts
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise MachineError(f"port {port} can't be used: {error.strerror}; choose another with --port") from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - http.server's signature
        """Log a connection that broke off; nobody is there to be told."""
        _log.debug("a connection broke off\n%s", traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer
    server_version = "vembed"
    sys_version = ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the page."""
        self._answer(with_body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what http.server itself refuses, with the page's own headers."""
        self.close_connection = True
        self._send(HTTPStatus(code), Answer(problem=message or HTTPStatus(code).phrase), with_body=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Keep what people search for out of every log."""

    def _answer(self, *, with_body: bool) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in OWN_NAMES:
            self._send(HTTPStatus.FORBIDDEN, Answer(problem=f"This page is at {self.server.url} only."), with_body=True)
            return
        parts = urlsplit(self.path)
        if parts.path != "/":
            self._send(HTTPStatus.NOT_FOUND, Answer(problem="There is one page here, at /."), with_body=with_body)
            return
        try:
            fields = parse_qs(parts.query, max_num_fields=MAX_FIELDS, errors="replace")
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, Answer(problem="Too many fields."), with_body=with_body)
            return
        status, answer = self._search(fields.get("q", [""])[-1].strip(), fields.get("k", ["10"])[-1])
        self._send(status, answer, with_body=with_body)

    def _search(self, query: str, count: str) -> tuple[HTTPStatus, Answer]:
        if not (count.isascii() and count.isdigit() and len(count) < 10 and 1 <= int(count) <= COUNTS[-1]):
            return HTTPStatus.BAD_REQUEST, Answer(query, problem=f"k is a whole number from 1 to {COUNTS[-1]}.")
        k = int(count)
        if len(query) > MAX_QUERY_CHARACTERS:
            problem = f"The query has {len(query):,} characters; at most {MAX_QUERY_CHARACTERS:,} are taken."
            return HTTPStatus.BAD_REQUEST, Answer(query[:MAX_QUERY_CHARACTERS], k, problem=problem)
        if not query:
            return HTTPStatus.OK, Answer(k=k)
        started = time.perf_counter()
        try:
            (hits,) = self.server.searcher.search([query], k)
        except VembedError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, Answer(query, k, problem=str(error))
        except Exception:  # noqa: BLE001 - the server goes on; the log has the traceback
            _log.error("a search failed\n%s", traceback.format_exc())
            return HTTPStatus.INTERNAL_SERVER_ERROR, Answer(query, k, problem="The search failed; see the terminal.")
        return HTTPStatus.OK, Answer(query, k, hits, 1000 * (time.perf_counter() - started))

    def _send(self, status: HTTPStatus, answer: Answer, *, with_body: bool) -> None:
        content = render(self.server.facts, answer).encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)
