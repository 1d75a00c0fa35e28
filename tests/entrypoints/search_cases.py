"""What the tests of encoding and searching share: four documents, what a command printed, a page that is asked."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kit.runs import environment
from kit.warm import WarmProcess

import vembed
from vembed.workflows.search.serve import SearchServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DOCUMENTS = {
    "d1": "red apples grow on trees",
    "d2": "the train leaves at noon",
    "d3": "a recipe for apple pie",
    "d4": "hostile <script>alert(1)</script> & \x1b[31m \u202e text",
}
FILES = {"vectors.npy", "ids.jsonl", "index.faiss", "meta.json", "checksums.json"}
PICTURE_FILES = FILES | {"thumbnails.bin", "thumbnails.npy", "probe.npy"}


def write_corpus(path: Path, documents: Mapping[str, str] = DOCUMENTS) -> Path:
    path.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in documents.items()))
    return path


def meta_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    return content


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "ids.jsonl").read_text("utf-8").splitlines()]


@dataclass(frozen=True)
class Page:
    """A server, asked as a browser or any other program would."""

    url: str

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def get(self, path: str = "", **headers: str) -> tuple[int, str, Any]:
        try:
            with urlopen(Request(self.url + path, headers=headers), timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def post(
        self, content: bytes, *, name: str = "x.png", headers: Mapping[str, str] | None = None, **fields: object
    ) -> tuple[int, str]:
        """Send a picture as a browser's form does."""
        parts = [f'name="{key}"\r\n\r\n{value}'.encode() for key, value in fields.items()]
        head = f'name="picture"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        parts.append(head.encode() + content)
        body = (
            b"".join(b"--limit\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
            + b"--limit--\r\n"
        )
        return self.send(body, {"Content-Type": "multipart/form-data; boundary=limit", **(headers or {})})

    def send(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        try:
            with urlopen(Request(self.url, data=body, headers=dict(headers), method="POST"), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


@dataclass(frozen=True)
class StartedPage(Page):
    """A server in a process of its own."""

    process: WarmProcess
    output: Path

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.unlink()


@contextmanager
def served_here(index: Path) -> Iterator[Page]:
    """Serve an index in this process."""
    searcher = vembed.open_index(index)
    with SearchServer(searcher, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Page(server.url)
        finally:
            server.shutdown()
            thread.join()


def start_page(index: Path) -> StartedPage:
    number, name = tempfile.mkstemp(prefix="page-")
    os.close(number)
    output = Path(name)
    words = ["-m", "vembed", "search", str(index), "--serve", "--port", "0"]
    process = WarmProcess(words, cwd=index.parent, env=environment(), output=output)
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/", output.read_text())):
        assert process.poll() is None, output.read_text()
        time.sleep(0.02)
    return StartedPage(found.group(), process, output)
