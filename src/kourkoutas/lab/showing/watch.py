"""The report of a study that goes on: written anew when the folder has changed, as a page that reloads itself."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoreError

RESAMPLES = 1000  # of a page that is made again and again; the report itself takes more
PATIENCE = 4.0  # a page is made again at most after this many times the seconds that making it took
SHORTEST, LONGEST = 2.0, 20.0  # seconds


def follow(path: Path, stop: threading.Event | None = None) -> Path:
    """Write report.html of the folder at `path` again and again, until the study has ended; returns the page's path.

    Args:
      stop: ends it earlier.

    Raises:
      StoreError: there is no study to begin with.
    """
    stop = stop or threading.Event()
    page, seen = path / "report.html", fingerprint(path)
    going = _write(path, page)
    while going and not stop.wait(SHORTEST):
        start = time.monotonic()
        # A file may be half there for a moment: the last good page stays, and the next look tries again.
        with contextlib.suppress(StoreError, OSError):
            now = fingerprint(path)
            if now != seen:
                going, seen = _write(path, page), now
        stop.wait(min(LONGEST, PATIENCE * (time.monotonic() - start)))
    return page


def _write(path: Path, page: Path) -> bool:
    """Write the page; whether the study still goes on."""
    from kourkoutas.lab.judging.analysis import (
        analyse,
    )  # scipy and matplotlib take seconds, which a study need not wait
    from kourkoutas.lab.showing import report

    analysis = analyse(Snapshot.read(path), resamples=RESAMPLES)
    going = not analysis.finished
    report.write(analysis, page, live=going)
    return going


def fingerprint(path: Path) -> object:
    """Changes when a run begins, logs or ends, when runs are planned, and when the process that makes them does."""
    marks: list[tuple[str, int, int]] = []
    for folder in (path, *_folders(path / "runs")):
        for name in ("study.json", ".lock", "spec.json", "metrics.jsonl", "output.txt", "result.json"):
            with contextlib.suppress(OSError):
                stat = (folder / name).stat()
                marks.append((f"{folder.name}/{name}", stat.st_mtime_ns, stat.st_size))
    return tuple(marks)


def _folders(path: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    return []


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
