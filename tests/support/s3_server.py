"""A real S3 server on the loopback (moto's) that fails on request; run as a script, or started by `S3Server`.

A share of the requests, chosen by a seeded generator, is answered by an error 500, by an error after the request was
done, late, or not at all: the connection is dropped before or in the middle of the answer.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

BUCKET = "bucket"
KINDS = ("error", "late_error", "slow", "drop", "cut")
_CONTROL = "/__faults__"


class S3Server:
    """The server, in a process of its own; a context manager."""

    def __enter__(self) -> S3Server:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def env(self) -> dict[str, str]:
        """What a process must have in its environment to find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fail(self, share: float, *, kinds: tuple[str, ...] = KINDS, seed: int = 0) -> None:
        """From now on let a share of the requests fail, in one of these ways each."""
        self._tell({"share": share, "kinds": kinds, "seed": seed})

    def num_failed(self) -> dict[str, int]:
        """Return how many requests have failed since the start, by kind."""
        return dict(self._tell({}))

    def _tell(self, wishes: Mapping[str, Any]) -> dict[str, int]:
        request = urllib.request.Request(self.endpoint + _CONTROL, data=json.dumps(wishes).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, int] = json.load(answer)
            return found


class Faulty:
    """A WSGI application that hands on to another, unless the request is to fail."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.share, self.kinds, self.random = 0.0, KINDS, random.Random(0)
        self.counts = dict.fromkeys(KINDS, 0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request."""
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, start_response)
        if self.random.random() >= self.share:
            return self.app(environ, start_response)
        kind = self.random.choice(self.kinds)
        self.counts[kind] += 1
        if kind == "drop":
            return _hang_up(environ)
        if kind in ("error", "late_error"):
            if kind == "late_error":
                list(self.app(environ, lambda *_: lambda _: None))
            start_response("500 Internal Server Error", [("Content-Length", "0"), ("Connection", "close")])
            return []
        if kind == "slow":
            time.sleep(self.random.uniform(0.1, 0.5))
            return self.app(environ, start_response)
        return self._cut(environ, start_response)

    def _cut(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        body = b"".join(self.app(environ, start_response))
        yield body[: len(body) // 2]
        _hang_up(environ)

    def _control(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        wishes = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        self.share = wishes.get("share", self.share)
        self.kinds = tuple(wishes.get("kinds", self.kinds))
        if "seed" in wishes:
            self.random = random.Random(wishes["seed"])
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(self.counts).encode()]


def _hang_up(environ: dict[str, Any]) -> list[bytes]:
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


def _make_bucket() -> None:
    from moto.s3.models import s3_backends

    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")


def serve() -> None:
    """Serve until standard input ends, which it does when the parent is gone; print the port first."""
    import logging
    import os
    import threading

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    _make_bucket()
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
