"""A search page on this machine: one address, for this machine's browsers only.

The server listens on 127.0.0.1, answers GET and HEAD of `/` and takes a picture by POST, and serves nothing from the
disk. A request under another host's name is refused: a web page elsewhere could have pointed that name here to read the
corpus. So is a picture that another site's page sends. A picture is received into a temporary file, for FORM_SECONDS at
most, so that slow senders hold up nobody; then few at a time are held in memory, and one is decoded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from markupsafe import Markup
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, abort
from werkzeug.formparser import parse_form_data
from werkzeug.sansio.utils import host_is_trusted
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.wrappers import Request, Response

from vembed.batch import MODALITY_WORDS, Composed, Image, modality_words
from vembed.data.images import FORMATS, ImageError
from vembed.errors import MachineError, VembedError
from vembed.pages.html import environment
from vembed.text import visible
from vembed.workflows.search.thumbnails import make_thumbnail, thumbnail_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from werkzeug.datastructures import MultiDict

    from vembed.batch import Modality
    from vembed.workflows.search.index import Hit, Searcher


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


_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
OWN_NAMES = (ADDRESS, "localhost")
METHODS = ("GET", "HEAD", "POST")
IDLE_SECONDS = 30  # a connection that says nothing for so long is closed
MAX_FIELDS = 16  # of an address
MAX_PARTS = 8  # of a form
MAX_NAME_CHARACTERS = 200
FORM_TYPE = "multipart/form-data"
FORM_BYTES = 65_536  # what a form may take beside its picture
FORM_SECONDS = 30  # in which a form must have arrived
UPLOADS_AT_ONCE = 64  # forms that are received; further senders are refused
FORMS_AT_ONCE = 4  # pictures that are held in memory; further ones wait on the disk
SPOOLED_BYTES = 1 << 20  # of a form that is received: what is more goes to the disk
DRAINED_BYTES = 1 << 28
BLOCK_BYTES = 1 << 16
OWN_SITES = (None, "same-origin", "none")  # what a browser says of who sent a form: this page, or nobody but its user

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


# The page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A small picture of the page."""

    copy: bytes  # WebP
    name: str
    row: int | None = None  # the document that it is of; None of a picture that was sent


def page_of(searcher: Searcher) -> Callable[..., str]:
    """Return what renders the page over one index; its keyword arguments are those of one request."""
    index, meta = searcher.index, searcher.index.meta
    rows = searcher.example_rows()
    return partial(
        _ENVIRONMENT.get_template("search.html.jinja").render,
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
        # Of one request:
        query="",
        k=10,
        picture=None,  # ShownPicture that was asked with
        hits=None,  # best first; None when nothing was asked
        copies=None,  # row of each hit with a picture -> its small copy
        milliseconds=0.0,
        problem="",  # why there are no hits
    )


def _cut(text: str, characters: int) -> str:
    """Cut a text at a word's end; an ellipsis says that something is missing."""
    if len(text) <= characters:
        return text
    return f"{text[:characters].rpartition(' ')[0] or text[:characters]} …"


_ENVIRONMENT.filters |= {
    "cut": _cut,
    "thumbnail_size": thumbnail_size,
    "visible": visible,
    "webp_uri": lambda copy: f"data:image/webp;base64,{base64.b64encode(copy).decode('ascii')}",
}


# The server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    query: str = ""
    k: int = 10
    like: int | None = None  # number of a document
    picture: Image | None = None  # one that was sent


class SearchServer(ThreadedWSGIServer):
    """The server; a thread for each connection, searches one after the other.

    Args:
        port: 0 takes a free one.

    Raises:
        MachineError: The port is taken or not allowed.
    """

    def __init__(self, searcher: Searcher, *, port: int) -> None:
        self._searcher = searcher
        self._page = page_of(searcher)
        self._uploads = threading.BoundedSemaphore(UPLOADS_AT_ONCE)
        self._forms = threading.BoundedSemaphore(FORMS_AT_ONCE)
        self._decoding = threading.Lock()  # two pictures at the limit of pixels would take twice the memory
        try:
            listener = socket.create_server((ADDRESS, port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise MachineError(f"port {port} can't be used: {reason}; choose another with --port") from error
        with listener:  # werkzeug itself would print and exit where a port is taken
            super().__init__(ADDRESS, port, Request.application(self._answer), _Handler, fd=listener.fileno())

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.port}/"

    def response(self, status: int, **shown: object) -> Response:
        """Return the page with its headers; `shown` are the template's names of one request (`page_of`)."""
        return Response(self._page(**shown), status, HEADERS, mimetype="text/html")

    def _answer(self, request: Request) -> Response:
        question = _Question()
        try:
            if request.method not in METHODS:
                abort(HTTPStatus.NOT_IMPLEMENTED, f"Unsupported method ({request.method!r})")
            # Against DNS rebinding: a foreign name that was pointed at this address still stands in the Host header.
            if not host_is_trusted(request.headers.get("Host"), OWN_NAMES):
                abort(HTTPStatus.FORBIDDEN, f"This page is at {self.url} only.")
            if request.path != "/":
                abort(HTTPStatus.NOT_FOUND, "There is one page here, at /.")
            if len(list(request.args.items(multi=True))) > MAX_FIELDS:
                abort(HTTPStatus.BAD_REQUEST, "Too many fields.")
            if request.method == "POST":
                # Received first, with no slot held: a slow sender must not keep others from being searched.
                with self._received(request) as form, self._forms:
                    question = self._sent_form(request, form)
                    return self._found(question)
            question = _question(request.args)
            return self._found(question)
        except HTTPException as refusal:
            status = refusal.code or HTTPStatus.INTERNAL_SERVER_ERROR
            problem = refusal.description or refusal.name
            return self.response(status, query=question.query, k=question.k, problem=problem)

    @contextmanager
    def _received(self, request: Request) -> Iterator[IO[bytes]]:
        """Receive the form of a picture into a file, which is gone with the block."""
        if request.headers.get("Sec-Fetch-Site") not in OWN_SITES:
            abort(HTTPStatus.FORBIDDEN, "Another site's page can't search here.")
        if request.content_length is None or not request.headers["Content-Length"].isdigit():
            abort(HTTPStatus.LENGTH_REQUIRED, "A form says how long it is.")
        limit = self._searcher.limits.max_bytes
        if request.content_length > limit + FORM_BYTES:
            # Read and dropped: a browser shows no answer before it has sent everything.
            for _ in range(DRAINED_BYTES // BLOCK_BYTES):
                if not request.stream.read(BLOCK_BYTES):
                    break
            abort(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The picture is over the limit of {limit:,} bytes.")
        if request.mimetype != FORM_TYPE:
            abort(HTTPStatus.BAD_REQUEST, f"A picture is sent as {FORM_TYPE}.")
        if not self._uploads.acquire(blocking=False):
            abort(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pictures are being sent; try again in a minute.")
        try:
            with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as form:
                until, left = time.monotonic() + FORM_SECONDS, request.content_length
                # read1 returns what has come: read would wait for a whole block from a sender of single bytes
                while left and (block := request.environ["wsgi.input"].read1(min(left, BLOCK_BYTES))):
                    if time.monotonic() > until:
                        abort(HTTPStatus.REQUEST_TIMEOUT, f"The form took more than {FORM_SECONDS} seconds to arrive.")
                    form.write(block)
                    left -= len(block)
                form.seek(0)
                yield cast("IO[bytes]", form)
        finally:
            self._uploads.release()

    def _sent_form(self, request: Request, form: IO[bytes]) -> _Question:
        """Read a form that was received."""
        try:
            _, fields, files = parse_form_data(
                {**request.environ, "wsgi.input": form},
                lambda *_, **__: io.BytesIO(),
                max_form_memory_size=8 * FORM_BYTES,  # it also bounds the blocks of a file, and must hold two
                max_form_parts=MAX_PARTS,
                silent=False,
            )
        except RequestEntityTooLarge:
            abort(HTTPStatus.BAD_REQUEST, f"The form has more than {MAX_PARTS} parts, or a part that is too long.")
        except ValueError:
            abort(HTTPStatus.BAD_REQUEST, "The form is broken.")
        sent = files.get(PICTURE_FIELD)
        content = sent.read() if sent is not None else b""
        if sent is None or not (sent.filename or content):  # a browser sends neither where nothing was chosen
            abort(HTTPStatus.BAD_REQUEST, "No picture was chosen.")
        # Browsers of old send the whole path; shown is the last part, of either kind of system.
        name = re.split(r"[/\\]", " ".join((sent.filename or "").splitlines()))[-1][:MAX_NAME_CHARACTERS] or "picture"
        return _question(fields, Image(name, content))

    def _found(self, question: _Question) -> Response:
        """Search; what can't be searched for is an HTTPException."""
        started = time.perf_counter()
        try:
            picture, hits = self._search(question)
            copies = {hit.row: copy for hit in hits or () if (copy := self._searcher.index.thumbnail(hit.row))}
        except HTTPException:
            raise
        except ImageError as error:
            abort(HTTPStatus.BAD_REQUEST, f"{error.path}: {error.reason}")
        except VembedError as error:
            abort(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except Exception:  # noqa: BLE001 - whatever it is, the server lives on; the log has the traceback
            _log.error("a search failed\n%s", traceback.format_exc())
            abort(HTTPStatus.INTERNAL_SERVER_ERROR, "The search failed; see the terminal.")
        milliseconds = 1000 * (time.perf_counter() - started)
        return self.response(
            HTTPStatus.OK,
            query=question.query,
            k=question.k,
            picture=picture,
            hits=hits,
            copies=copies,
            milliseconds=milliseconds,
        )

    def _search(self, question: _Question) -> tuple[ShownPicture | None, list[Hit] | None]:
        """Return the picture that was asked with, and the hits."""
        searcher, query, image = self._searcher, question.query, question.picture
        if image is not None:
            self._require("image+text" if query else "image")
            with self._decoding:
                copy = make_thumbnail((image,), searcher.limits)
                (hits,) = searcher.search([Composed((image,), query) if query else image], question.k)
            return ShownPicture(copy, image.path), hits
        if question.like is not None:
            if question.like >= len(searcher):
                abort(HTTPStatus.BAD_REQUEST, f"There are {len(searcher):,} documents, counted from 0.")
            document = searcher.index.document(question.like)
            copy = searcher.index.thumbnail(question.like)
            return ShownPicture(copy, document.id, question.like), searcher.like(question.like, question.k)
        if not query:
            return None, None
        self._require("text")
        (hits,) = searcher.search([query], question.k)
        return None, hits

    def _require(self, modality: Modality) -> None:
        if modality not in self._searcher.takes:
            taken = modality_words(self._searcher.takes)
            abort(HTTPStatus.BAD_REQUEST, f"This index's model takes {taken}, but no {MODALITY_WORDS[modality][1]}.")


class _Handler(WSGIRequestHandler):
    server: SearchServer
    protocol_version = "HTTP/1.0"
    timeout = IDLE_SECONDS

    def version_string(self) -> str:
        """Return the Server header, without versions."""
        return "vembed"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what http.server itself refuses, with the page's own headers."""
        self.close_connection = True
        response = self.server.response(code, problem=message or HTTPStatus(code).phrase)
        self.send_response(code)
        for name, value in response.headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.data)

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's signature
        """Keep what people search for out of every log."""


def _question(fields: MultiDict[str, str], picture: Image | None = None) -> _Question:
    """Check the fields of an address or a form; of one that comes twice the last counts, an empty one doesn't."""
    given = {name: values[-1] for name, values in fields.lists() if values[-1]}
    count, like, query = given.get("k", "10"), given.get("like"), given.get("q", "").strip()
    if not (_is_number(count) and 1 <= int(count) <= COUNTS[-1]):
        abort(HTTPStatus.BAD_REQUEST, f"k is a whole number from 1 to {COUNTS[-1]}.")
    if like is not None and not _is_number(like):
        abort(HTTPStatus.BAD_REQUEST, "like is the number of a document, counted from 0.")
    if len(query) > MAX_QUERY_CHARACTERS:
        length = f"{len(query):,} characters; at most {MAX_QUERY_CHARACTERS:,} are taken"
        abort(HTTPStatus.BAD_REQUEST, f"The query has {length}.")
    return _Question(query, int(count), None if like is None else int(like), picture)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def serve_until_signal(searcher: Searcher, port: int) -> None:
    """Serve the page until Ctrl-C or a SIGTERM ends it.

    Args:
        port: 0 takes a free one.

    Raises:
        MachineError: The port is taken or not allowed.
    """

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
