"""A search page on this machine: one address, for this machine's browsers only.

The server listens on 127.0.0.1, answers GET and HEAD of `/` and takes a picture by POST, and serves nothing from the
disk. A request under another host's name is refused: a web page elsewhere could have pointed that name here to read the
corpus. So is a picture that another site's page sends. A picture is read whole, up to the limit of bytes, and decoded
one at a time.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from vembed.batch import MODALITY_WORDS, Composed, Image, modality_words
from vembed.data.images import ImageError
from vembed.errors import MachineError, VembedError
from vembed.search.page import COUNTS, MAX_QUERY_CHARACTERS, PICTURE_FIELD, Answer, PageFacts, ShownPicture, render
from vembed.search.page_style import POLICY
from vembed.search.thumbnails import make_thumbnail
from vembed.search.upload import Upload, UploadError, boundary_of, read_form

if TYPE_CHECKING:
    from vembed.batch import Modality
    from vembed.search.index import Hit
    from vembed.search.searcher import Searcher

_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
OWN_NAMES = frozenset({ADDRESS, "localhost"})
IDLE_SECONDS = 30
"""A connection that says nothing for so long is closed."""

MAX_FIELDS = 16
FORM_BYTES = 65_536
"""What a form may take beside its picture."""

FORMS_AT_ONCE = 4
"""Pictures that are held in memory; further senders wait."""

DRAINED_BYTES = 1 << 28
"""Of a form that is refused so much is read and dropped: a browser shows no answer before it has sent everything."""

BLOCK_BYTES = 1 << 16
OWN_SITES = frozenset({None, "same-origin", "none"})
"""What a browser says of who sent the form: this page, or nobody but its user."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _Refusal(Exception):  # noqa: N818 - an answer, and no error of ours
    """Why a request gets no hits."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a request asks for."""

    query: str = ""
    k: int = 10
    like: int | None = None
    upload: Upload | None = None


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
        self.forms = threading.BoundedSemaphore(FORMS_AT_ONCE)
        self.decoding = threading.Lock()  # two pictures at the limit of pixels would take twice the memory
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


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer
    server_version = "vembed"
    sys_version = ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer without the page."""
        self._answer()

    def do_POST(self) -> None:
        """Answer with the page for a picture."""
        with self.server.forms:
            self._answer()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what http.server itself refuses, with the page's own headers."""
        self.close_connection = True
        self._send(HTTPStatus(code), Answer(problem=message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Keep what people search for out of every log."""

    def _answer(self) -> None:
        asked = _Asked()
        try:
            parts = urlsplit(self.path)
            self._check_address(parts.path)
            asked = self._form() if self.command == "POST" else _asked_by(_fields(parts.query))
            answer = self._found(asked)
        except _Refusal as refusal:
            self._send(refusal.status, Answer(query=asked.query, k=asked.k, problem=refusal.problem))
            return
        self._send(HTTPStatus.OK, answer)

    def _check_address(self, path: str) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in OWN_NAMES:
            raise _Refusal(HTTPStatus.FORBIDDEN, f"This page is at {self.server.url} only.")
        if path != "/":
            raise _Refusal(HTTPStatus.NOT_FOUND, "There is one page here, at /.")

    def _form(self) -> _Asked:
        """Read the form of a picture."""
        if self.headers.get("Sec-Fetch-Site") not in OWN_SITES:
            raise _Refusal(HTTPStatus.FORBIDDEN, "Another site's page can't search here.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "A form says how long it is.")
        limit = self.server.searcher.limits.max_bytes
        if int(length) > limit + FORM_BYTES:
            self._drain(int(length))
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The picture is over the limit of {limit:,} bytes.")
        body = self.rfile.read(int(length))
        try:
            form = read_form(body, boundary_of(self.headers.get("Content-Type")))
        except UploadError as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        if PICTURE_FIELD not in form.files:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "No picture was chosen.")
        asked = _asked_by(form.fields)
        return _Asked(query=asked.query, k=asked.k, upload=form.files[PICTURE_FIELD])

    def _drain(self, length: int) -> None:
        remaining = min(length, DRAINED_BYTES)
        while remaining > 0 and (block := self.rfile.read(min(BLOCK_BYTES, remaining))):
            remaining -= len(block)

    def _found(self, asked: _Asked) -> Answer:
        """Search.

        Raises:
            _Refusal: What was asked can't be searched for.
        """
        started = time.perf_counter()
        try:
            picture, hits = self._search(asked)
            copies = {hit.row: copy for hit in hits or () if (copy := self.server.searcher.index.thumbnail(hit.row))}
        except ImageError as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, f"{error.path}: {error.reason}") from error
        except VembedError as error:
            raise _Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        except _Refusal:
            raise
        except Exception as error:
            _log.error("a search failed\n%s", traceback.format_exc())
            raise _Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "The search failed; see the terminal.") from error
        milliseconds = 1000 * (time.perf_counter() - started)
        return Answer(
            query=asked.query, picture=picture, k=asked.k, hits=hits, copies=copies, milliseconds=milliseconds
        )

    def _search(self, asked: _Asked) -> tuple[ShownPicture | None, list[Hit] | None]:
        """Return the picture that was asked with, and the hits."""
        searcher = self.server.searcher
        if asked.upload is not None:
            _require("image+text" if asked.query else "image", searcher)
            with self.server.decoding:
                image = Image(asked.upload.name, asked.upload.content)
                copy = make_thumbnail(image, searcher.limits)
                (hits,) = searcher.search([Composed(image, asked.query) if asked.query else image], asked.k)
            return ShownPicture(copy, asked.upload.name), hits
        if asked.like is not None:
            if asked.like >= len(searcher):
                raise _Refusal(HTTPStatus.BAD_REQUEST, f"There are {len(searcher):,} documents, counted from 0.")
            document = searcher.index.document(asked.like)
            copy = searcher.index.thumbnail(asked.like)
            return ShownPicture(copy, document.id, asked.like), searcher.like(asked.like, asked.k)
        if not asked.query:
            return None, None
        _require("text", searcher)
        (hits,) = searcher.search([asked.query], asked.k)
        return None, hits

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        content = render(self.server.facts, answer).encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _fields(query: str) -> dict[str, str]:
    """Return the fields of an address; of one that stands twice the last."""
    try:
        fields = parse_qs(query, max_num_fields=MAX_FIELDS, errors="replace")
    except ValueError as error:
        raise _Refusal(HTTPStatus.BAD_REQUEST, "Too many fields.") from error
    return {name: values[-1] for name, values in fields.items()}


def _asked_by(fields: dict[str, str]) -> _Asked:
    """Check the fields of a request."""
    count, like, query = fields.get("k", "10"), fields.get("like"), fields.get("q", "").strip()
    if not (_is_number(count) and 1 <= int(count) <= COUNTS[-1]):
        raise _Refusal(HTTPStatus.BAD_REQUEST, f"k is a whole number from 1 to {COUNTS[-1]}.")
    if like is not None and not _is_number(like):
        raise _Refusal(HTTPStatus.BAD_REQUEST, "like is the number of a document, counted from 0.")
    if len(query) > MAX_QUERY_CHARACTERS:
        problem = f"The query has {len(query):,} characters; at most {MAX_QUERY_CHARACTERS:,} are taken."
        raise _Refusal(HTTPStatus.BAD_REQUEST, problem)
    return _Asked(query=query, k=int(count), like=None if like is None else int(like))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _require(modality: Modality, searcher: Searcher) -> None:
    if modality not in searcher.takes:
        name = MODALITY_WORDS[modality][1]
        taken = modality_words(searcher.takes)
        raise _Refusal(HTTPStatus.BAD_REQUEST, f"This index's model takes {taken}, but no {name}.")
