"""The report of a study that goes on: written anew again and again, as a page that reloads itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoreError

PATIENCE = 4.0  # a page is made again after this many times the seconds that making it took
SHORTEST, LONGEST = 2.0, 20.0  # seconds


def follow(path: Path, stop: threading.Event | None = None) -> Path:
    """Write report.html of the folder at `path` again and again, until the study has ended; returns the page's path.

    Args:
      stop: ends it earlier.

    Raises:
      StoreError: there is no study to begin with.
    """
    stop = stop or threading.Event()
    page = path / "report.html"
    start = time.monotonic()
    going = _write(path, page)
    while going and not stop.wait(min(LONGEST, max(SHORTEST, PATIENCE * (time.monotonic() - start)))):
        start = time.monotonic()
        # A file may be half there for a moment: the last good page stays, and the next look tries again.
        with contextlib.suppress(StoreError, OSError):
            going = _write(path, page)
    return page


def _write(path: Path, page: Path) -> bool:
    """Write the page; whether the study still goes on."""
    # scipy takes a second to import, which the workers of a study need not wait for
    from kourkoutas.lab.judging.analysis import analyse
    from kourkoutas.lab.showing import report

    analysis = analyse(Snapshot.read(path), resamples=0)
    going = not analysis.finished
    report.write(analysis, page, live=going)
    return going


@contextlib.contextmanager
def following(path: Path) -> Iterator[Path]:
    """Follow a study beside other work, in a thread; gives where the page is. The folder need not be there yet."""
    stop = threading.Event()

    def work() -> None:
        while not (path / "study.json").exists():
            if stop.wait(0.5):
                return
        with contextlib.suppress(StoreError, OSError):
            follow(path, stop)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield path / "report.html"
    finally:
        stop.set()
        thread.join()
