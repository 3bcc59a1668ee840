"""A Hub on the loopback, as far as pushes need one: repositories, branches, commits, large files, tokens, trouble."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from hftrain.core.extras import is_available
from hftrain.extras.hub.uploads import REQUIREMENT

LARGE = (".safetensors", ".bin", ".pt", ".pth")


@dataclass
class Commit:
    """One commit: what it says, where it went, which files it added and deleted, and who made it."""

    message: str
    branch: str
    added: list[str]
    deleted: list[str]
    token: str


@dataclass
class Repo:
    """A repository: the files of each branch, and the commits."""

    settings: dict[str, Any]
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[Commit] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]


class HubServer:
    """The state of a Hub.

    Attributes:
        url: Its address.
        users: The name of each token's user; organisations that every user may write to are in `organizations`.
        repos: By full name.
        pages: The metadata of other models' pages, by full name.
        failing: The status with which what matches the pattern is answered: ``{"/commit/": 500}``.
        gate: Commits wait until it is set.
    """

    def __init__(self) -> None:
        self.url = ""
        self.users = {"hf_alice": "alice", "hf_bob": "bob"}
        self.organizations = {"lab"}
        self.repos: dict[str, Repo] = {}
        self.pages: dict[str, dict[str, Any]] = {}
        self.failing: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []

    @property
    def messages(self) -> list[str]:
        """What the commits of the only repository say, in order."""
        return [commit.message for commit in self.repo.commits]

    @property
    def repo(self) -> Repo:
        (found,) = self.repos.values()
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Answer any request."""
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, status in self.hub.failing.items():
            if re.search(pattern, path):
                return self._answer(status, {"error": "out of order"})
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return self._route(path, body, token)

    do_GET = do_PUT = do_HEAD = do_POST

    def _route(self, path: str, body: bytes, token: str) -> None:
        hub = self.hub
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path.startswith("/large/"):
            hub.large[path.removeprefix("/large/")] = body
            return self._answer(200, {})
        if path == "/verify":
            return self._answer(200, {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self._page(found[1])
        if token not in hub.users:
            return self._answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            return self._create(json.loads(body), hub.users[token])
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            slots = [self._slot(wanted) for wanted in json.loads(body)["objects"]]
            return self._answer(200, {"transfer": "basic", "objects": slots})
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path)) and found[1] in hub.repos:
            return getattr(self, f"_{found[2]}")(hub.repos[found[1]], found[3], body, token)
        return self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def _page(self, name: str) -> None:
        if name not in self.hub.pages and name not in self.hub.repos:
            return self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        page = self.hub.pages.get(name, {})
        return self._answer(200, {"id": name, "sha": "a" * 40, "siblings": [], "tags": [], "cardData": page})

    def _create(self, asked: dict[str, Any], user: str) -> None:
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user and owner not in self.hub.organizations:
            return self._answer(403, {"error": f"You may not create repositories of {owner}"})
        is_new = name not in self.hub.repos
        if is_new:
            self.hub.repos[name] = Repo(asked)
        return self._answer(200 if is_new else 409, {"url": f"{self.hub.url}/{name}", "name": name})

    def _branch(self, repo: Repo, name: str, body: bytes, token: str) -> None:
        if name in repo.branches:
            return self._answer(409, {"error": "it exists"})
        repo.branches[name] = dict(repo.files)
        return self._answer(200, {})

    def _preupload(self, repo: Repo, branch: str, body: bytes, token: str) -> None:
        if branch not in repo.branches:
            return self._answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        names = [each["path"] for each in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
        files = [{"path": name, "uploadMode": modes[name], "shouldIgnore": False, "oid": None} for name in names]
        return self._answer(200, {"files": files})

    def _slot(self, wanted: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] in self.hub.large:
            return known
        upload = {"href": f"{self.hub.url}/large/{wanted['oid']}", "header": {}}
        return {**known, "actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/verify", "header": {}}}}

    def _tree(self, repo: Repo, branch: str, body: bytes, token: str) -> None:
        files = repo.branches[branch]
        return self._answer(
            200, [{"type": "file", "path": name, "size": len(files[name]), "oid": "a" * 40} for name in files]
        )

    def _commit(self, repo: Repo, branch: str, body: bytes, token: str) -> None:
        self.hub.arrived.release()
        assert self.hub.gate.wait(30)
        files = repo.branches[branch]
        commit = Commit("", branch, [], [], token)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                commit.message = value["summary"]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
                commit.deleted.append(value["path"])
            else:
                is_large = item["key"] == "lfsFile"
                content = self.hub.large[value["oid"]] if is_large else base64.b64decode(value["content"])
                files[value["path"]] = content
                commit.added.append(value["path"])
        repo.commits.append(commit)
        name = next(name for name, each in self.hub.repos.items() if each is repo)
        url = f"{self.hub.url}/{name}/commit/{len(repo.commits):040d}"
        self._answer(200, {"success": True, "commitOid": f"{len(repo.commits):040d}", "commitUrl": url})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        text = b"" if self.command == "HEAD" else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[HubServer]:
    """Run a Hub; with `monkeypatch`, huggingface_hub in this process uses it as alice, in place of the real one."""
    if not is_available(REQUIREMENT):
        pytest.skip(f"{REQUIREMENT} is not installed")
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        if monkeypatch is not None:
            from huggingface_hub import constants

            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            # Its own protocol for large files cannot be answered here.
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            monkeypatch.setenv("HF_TOKEN", "hf_alice")
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
