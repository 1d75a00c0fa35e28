"""A stand-in for the hub's HTTP interface: what huggingface_hub asks of it for an upload, and what arrived."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "hf_standin0123456789abcdef"


@dataclass
class Hub:
    """What the stand-in knows.

    Attributes:
        private: Repository -> whether it is private.
        branches: (repository, branch) -> path -> bytes that were committed.
        blobs: Large files by their SHA-256, committed or not.
        ignored: Names of files that the repositories' .gitignore keeps out of a commit.
        refusals: "METHOD /beginning/of/path" -> status of the answer; 0 closes the connection.
        stops_at: "METHOD /beginning/of/path" of a request that a Ctrl-C comes with; empty for none.
        requests: "METHOD path" of everything that was asked.
    """

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    branches: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=dict)
    stops_at: str = ""
    requests: list[str] = field(default_factory=list)
    taken: int = 0  # large files that came over the wire

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        """Take in what a commit holds."""
        files = self.branches.setdefault((repo, branch), {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *words: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = self.path.partition("?")[0]
        asked = f"{self.command} {path}"
        self.hub.requests.append(asked)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.hub.stops_at and asked.startswith(self.hub.stops_at):
            os.kill(os.getpid(), signal.SIGINT)
        refused = next((code for begin, code in self.hub.refusals.items() if asked.startswith(begin)), None)
        if refused == 0:
            self.close_connection = True
            return
        if refused is not None:
            self._answer(refused, {"error": f"refused with {refused}"})
            return
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        self._answer(*self._found(asked, body))

    def _found(self, asked: str, body: bytes) -> tuple[int, Any]:
        hub = self.hub
        if asked == "POST /api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            if repo in hub.private:
                return 409, {"error": "You already created this model repo"}
            hub.private[repo] = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            return 200, {"url": f"{hub.url}/{repo}"}
        if asked == "POST /api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if found := re.fullmatch(r"GET /api/models/([^/]+/[^/]+)", asked):
            if found[1] not in hub.private:
                return 404, {"error": "Repository not found"}
            return 200, {"id": found[1], "private": hub.private[found[1]], "sha": "0" * 40, "siblings": []}
        if found := re.fullmatch(r"POST /api/models/([^/]+/[^/]+)/branch/(.+)", asked):
            hub.branches.setdefault((found[1], found[2]), {})
            return 200, {}
        if found := re.fullmatch(r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)", asked):
            kinds = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            large = (".safetensors", ".onnx")
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": kinds[each["path"].endswith(large)],
                    "shouldIgnore": each["path"] in hub.ignored,
                }
                for each in files
            ]
            return 200, {"files": modes}
        if asked.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._action(each) for each in json.loads(body)["objects"]]}
        if found := re.fullmatch(r"PUT /lfs/([0-9a-f]{64})", asked):
            assert hashlib.sha256(body).hexdigest() == found[1]
            hub.blobs[found[1]] = body
            hub.taken += 1
            return 200, {}
        if found := re.fullmatch(r"POST /api/models/([^/]+/[^/]+)/commit/(.+)", asked):
            hub.commit(found[1], found[2], [json.loads(line) for line in body.splitlines()])
            oid = hashlib.sha1(found[2].encode()).hexdigest()  # one for each branch
            return 200, {"success": True, "commitUrl": f"{hub.url}/{found[1]}/commit/1", "commitOid": oid}
        if found := re.fullmatch(r"GET /api/models/([^/]+/[^/]+)/tree/([0-9a-f]{40})", asked):
            branches = [
                files
                for (repo, branch), files in hub.branches.items()
                if repo == found[1] and hashlib.sha1(branch.encode()).hexdigest() == found[2]
            ]
            return 200, [
                {"type": "file", "path": name, "oid": "2" * 40, "size": len(content)}
                for files in branches
                for name, content in files.items()
            ]
        return 404, {"error": f"the stand-in doesn't know {asked}"}

    def _action(self, each: dict[str, Any]) -> dict[str, Any]:
        if each["oid"] in self.hub.blobs:
            return {"oid": each["oid"], "size": each["size"]}
        return {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}

    def _answer(self, code: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        if code == 404 and "Repository" in content.get("error", ""):
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Start the stand-in on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
