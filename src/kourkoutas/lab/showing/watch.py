"""A page that follows a study, served to this machine alone.

The server only reads: it opens the results folder, renders the same page as `kbeta report`, and never takes the
folder's lock, so that a study notices neither its start nor its end.

    /        the page
    /state   {"page": a number that changes with the page, "wait": milliseconds until it is worth asking again}

NOTE: a name that leads to 127.0.0.1 could let another site read the page through a visitor's browser; a request that
names any other host is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kourkoutas.lab.results.store import StoreError, Study

ADDRESS = "127.0.0.1"
RESAMPLES = 1000  # of a page that is made again and again; the report itself takes more
PATIENCE = 4.0  # a page is made again at most after this many times the seconds that making it took
SHORTEST, LONGEST = 2.0, 20.0  # seconds

Render = Callable[[Study], str]


def rendered(study: Study) -> str:
    """The page of a study that may be going on."""
    from kourkoutas.lab.showing import report  # scipy and matplotlib take seconds, which an address need not wait for

    return report.render(report.page_of(study, live=True, resamples=RESAMPLES))


class Follower:
    """The newest page of a folder, made again when the folder has changed, but not too often."""

    def __init__(self, path: Path, render: Render = rendered) -> None:
        self._path, self._render = path, render
        self._lock = threading.Lock()
        self._seen: object = None
        self._made, self._cost = -1e9, 0.0
        self._page, self._number = "", 0

    def page(self) -> tuple[str, int]:
        """(the page, its number)."""
        with self._lock:
            if not self._page or time.monotonic() - self._made >= self.wait:
                self._refresh()
            return self._page, self._number

    @property
    def wait(self) -> float:
        return max(SHORTEST, min(LONGEST, PATIENCE * self._cost))

    def _refresh(self) -> None:
        seen = fingerprint(self._path)
        if seen == self._seen:
            return
        start = time.monotonic()
        try:
            page = self._render(Study.open(self._path))
        except (StoreError, OSError) as error:
            # A file may be half there for a moment; the last good page stays, and the next question tries again.
            if not self._page:
                raise StoreError(str(error)) from None
            return
        self._seen, self._cost, self._made = seen, time.monotonic() - start, time.monotonic()
        self._number += page != self._page
        self._page = page


def fingerprint(path: Path) -> object:
    """Changes when a run begins, logs or ends, when runs are planned, and when the process that makes them does."""
    marks: list[tuple[str, int, int]] = []
    for folder in (path, *_folders(path / "runs")):
        for name in ("study.json", ".lock", "spec.json", "metrics.jsonl", "output.txt", "result.json"):
            with contextlib.suppress(OSError):
                stat = (folder / name).stat()
                marks.append((f"{folder.name}/{name}", stat.st_mtime_ns, stat.st_size))
    holder = Study.open(path).holder()
    return (tuple(marks), holder)


def _folders(path: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    return []


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host", "") not in hosts:
            self._send(403, "text/plain", "this page is served to this machine alone\n")
        elif self.path.partition("?")[0] not in ("/", "/state"):
            self._send(404, "text/plain", "not found\n")
        else:
            try:
                page, number = self.server.follower.page()
            except Exception as error:  # a bug in the page must not end the server
                self._send(500, "text/plain", f"{error}\n")
                return
            if self.path.startswith("/state"):
                state = {"page": number, "wait": round(1000 * self.server.follower.wait)}
                self._send(200, "application/json", json.dumps(state))
            else:
                self._send(200, "text/html", page)

    do_HEAD = do_GET

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to the study."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, follower: Follower, port: int) -> None:
        self.follower = follower
        super().__init__((ADDRESS, port), _Handler)


def serve(path: Path, port: int = 0, *, ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve the page of the folder `path` until interrupted; `ready` is told its address.

    Args:
      port: 0 for any free one.
    """
    Study.open(path)  # an error now instead of in the browser
    with _bound(path, port) as server:
        ready(address_of(server))
        server.serve_forever(poll_interval=0.2)


@contextlib.contextmanager
def serving(path: Path, port: int = 0) -> Iterator[str]:
    """Serve the page beside other work, in a thread; gives its address. The folder need not be there yet."""
    with _bound(path, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            yield address_of(server)
        finally:
            server.shutdown()
            thread.join()


def address_of(server: _Server) -> str:
    return f"http://{ADDRESS}:{server.server_port}/"


def _bound(path: Path, port: int) -> _Server:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, 0 for any free one; got {port}")
    try:
        return _Server(Follower(path), port)
    except OSError as error:
        raise ValueError(
            f"--port {port} cannot be used ({error.strerror}): choose another, or 0 for a free one"
        ) from None
